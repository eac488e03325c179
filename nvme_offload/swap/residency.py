"""`Residency`: the residents of the learned order, and the place of each one."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence

from .residents import Chooser
from .values import Value

_TRIES_TO_KEEP = 4  # if some residents leave, the other values may need more memory


class Residency:
    """The values that stay in memory for a whole period.

    They are packed at the low end of the memory, below *boundary*. The other values, the transient
    ones, share the rest.
    """

    def __init__(self) -> None:
        self.homes: dict[str, tuple[int, int]] = {}  # offset and size of each resident
        self.everything = False  # all values fit: they stay where they are, and homes is empty
        self.boundary = 0
        self.transient_bytes = 0  # for values that are not resident, used or prefetched
        # The residents stay, even if others would save more: values cannot move on a full drive.
        self.stays = False
        self._may_add = True  # no resident had to leave yet, so others may be added

    def home(self, value: Value) -> int | None:
        """The offset of the place for *value*; None if it is not a resident."""
        start, size = self.homes.get(value.name, (None, 0))
        return start if size == value.size else None

    def has(self, value: Value) -> bool:
        """Whether *value* is a resident, and in its place."""
        if self.everything or value.block is None:
            return self.everything
        return value.block.start == self.home(value)

    def keep_everything(self) -> bool:
        """Keep all values where they are, because they fit. Returns: whether there were residents."""
        self.everything = True
        before, self.homes, self.boundary = self.homes, {}, 0
        return bool(before)

    def choose(
        self,
        chooser: Chooser,
        sizes: Mapping[str, int],
        lowest: int,
        nbytes: int,
        present: Mapping[str, int],
    ) -> bool:
        """Choose the residents of the memory from *lowest* to *nbytes*. Returns: whether their
        places differ from before. *present*: the offsets of values that are in memory now.
        """
        names, transient, saved = chooser.choose(nbytes - lowest)
        self.everything = False
        if self.homes and self.stays:
            saved = 0
        before = self.homes
        if self._keep(chooser, sizes, saved, nbytes):
            return self.homes is not before
        self.transient_bytes, self._may_add = transient, True
        self.homes, boundary = _around(names, sizes, lowest, nbytes - transient, present)
        if not chooser.is_near(self.homes, saved):
            self.homes, boundary = _laid_out(names, sizes, lowest)
        self.boundary = boundary if self.homes else 0
        return True

    def _keep(self, chooser: Chooser, sizes: Mapping[str, int], saved: int, nbytes: int) -> bool:
        """Keep the residents where they are, if that saves about as much as the best choice, which
        saves *saved* bytes. Add residents that fit now, or drop the last ones if other values need
        their memory.
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
                    # Residents that come and go with the timing of uses would change the order.
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


def _around(
    names: Sequence[str],
    sizes: Mapping[str, int],
    start: int,
    limit: int,
    present: Mapping[str, int],
) -> tuple[dict[str, tuple[int, int]], int]:
    """As `_laid_out`, but residents that are in memory, within the part of the residents, stay
    where they are: a move goes by way of the drive. Others that fit neither between them, nor behind
    them up to *limit*, are left out.
    """
    end = start + sum(sizes[name] for name in names)
    homes = {
        name: (place, sizes[name])
        for name in names
        if start <= (place := present.get(name, -1)) <= end - sizes[name]
    }
    taken = sorted((place, place + size) for place, size in homes.values())
    edges = [start, *itertools.chain.from_iterable(taken), end]
    gaps = sorted((b - a, a) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)
    others = [name for name in names if name not in homes]
    for name in sorted(others, key=sizes.__getitem__, reverse=True):
        size = sizes[name]
        number = bisect_left(gaps, (size, 0))
        if number < len(gaps):
            free, place = gaps.pop(number)
            homes[name] = place, size
            if free > size:
                insort(gaps, (free - size, place + size))
        elif end + size <= limit:
            homes[name] = end, size
            end += size
    return homes, max((place + size for place, size in homes.values()), default=start)


def _laid_out(
    names: Iterable[str], sizes: Mapping[str, int], start: int
) -> tuple[dict[str, tuple[int, int]], int]:
    """The offset and size of residents laid out from *start* on, and the end."""
    homes = {}
    for name in names:
        homes[name] = start, sizes[name]
        start += sizes[name]
    return homes, start
