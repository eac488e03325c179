"""`Residency`: the residents of the learned order, and where each has its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .residents import Chooser
from .values import Value

_TRIES_TO_KEEP = 4  # without some residents, the others may need more memory


class Residency:
    """The values that stay in memory for a whole period.

    They are packed at the low end of the memory, below *boundary*. The other values, the transient
    ones, share the rest.

    Attributes
    ----------
    homes : dict
        Offset and size of each resident, by name.
    everything : bool
        All values fit: they stay where they are, and *homes* is empty.
    boundary : int
        The end of the residents' part.
    transient_bytes : int
        The memory for values that are not resident, used or prefetched.
    stays : bool
        The residents stay, even where others would save more: a full drive has no room to move.
    forced : bool
        A resident had to be evicted in this period.
    """

    def __init__(self) -> None:
        self.homes: dict[str, tuple[int, int]] = {}
        self.everything = False
        self.boundary = 0
        self.transient_bytes = 0
        self.stays = False
        self.forced = False
        self._may_add = True  # residents, of which there had not to be fewer yet

    def home(self, name: str, size: int) -> int | None:
        """The offset of the place for *name*, of *size* bytes; None where it is not a resident."""
        found = self.homes.get(name)
        return None if found is None or found[1] != size else found[0]

    def has(self, value: Value) -> bool:
        """Whether *value* is a resident, and in its place."""
        return self.everything or (
            value.home is not None and value.block is not None and value.block.start == value.home
        )

    def keep_everything(self) -> bool:
        """All values fit, and stay where they are; whether there were residents."""
        self.everything = True
        before, self.homes, self.boundary = self.homes, {}, 0
        return bool(before)

    def choose(
        self, chooser: Chooser, sizes: Mapping[str, int], lowest: int, nbytes: int, packed: bool
    ) -> bool:
        """Choose the residents of the memory from *lowest* to *nbytes*; whether their places are
        others than before. Where they are *packed*, all lie in new places, because of fragmentation.
        """
        fits = sum(sizes.values()) <= nbytes - lowest
        if fits:
            names, transient, saved = [*sizes], 0, 0
        else:
            names, transient, saved = chooser.choose(nbytes - lowest)
        self.everything = False
        if self.homes and self.stays:
            packed, saved = False, 0
        if not packed:
            before = self.homes
            if self._keep(chooser, sizes, saved, nbytes):
                return self.homes is not before
        self.transient_bytes, self._may_add = transient, True
        self.homes, boundary = _laid_out(names, sizes, lowest)
        self.boundary = boundary if self.homes else 0
        return True

    def _keep(self, chooser: Chooser, sizes: Mapping[str, int], saved: int, nbytes: int) -> bool:
        """Keep the residents where they are, with more of them where these have room now, or without
        the last of them where the others need that memory, if that saves about as much as the best
        choice, of *saved* bytes.
        """
        homes, boundary = self.homes, self.boundary
        if any(sizes.get(name, size) != size for name, (_, size) in homes.items()):
            return False
        if self._may_add and homes:
            left = nbytes - chooser.transient(homes).nbytes - boundary
            added, boundary = _laid_out(chooser.more(homes, max(left, 0)), sizes, boundary)
            homes = {**homes, **added}
        for _ in range(_TRIES_TO_KEEP):
            transient = chooser.transient(homes).nbytes
            if not chooser.is_near(homes, saved):
                return False
            if boundary <= nbytes - transient:
                self.transient_bytes = transient
                if len(homes) != len(self.homes):
                    # what comes and goes with the timing of uses would change the order of use
                    self._may_add &= len(homes) > len(self.homes)
                    self.homes, self.boundary = homes, boundary if homes else 0
                return True
            homes = {
                name: (start, size)
                for name, (start, size) in homes.items()
                if start + size <= nbytes - transient
            }
            boundary = max((start + size for start, size in homes.values()), default=0)
        return False


def _laid_out(
    names: Iterable[str], sizes: Mapping[str, int], start: int
) -> tuple[dict[str, tuple[int, int]], int]:
    """Residents one behind the other from *start* on: the offset and size of each, and their end."""
    homes = {}
    for name in names:
        homes[name] = start, sizes[name]
        start += sizes[name]
    return homes, start
