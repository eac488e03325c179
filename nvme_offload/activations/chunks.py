"""`Chunks`: allocates memory of a swapper for saved tensors. Small tensors share one value, so that
there are few swapper calls however many tensors there are.
"""

from __future__ import annotations

import dataclasses
import heapq
import weakref
from collections.abc import Callable, Iterable

import torch

from ..errors import OutOfHostMemoryError
from ..swap.tier import Tier

_CHUNK_BYTES = 4 << 20  # large enough that a drive reads it at full bandwidth
_LARGE_FRACTION = 4  # tensors larger than a quarter of a chunk get their own
_MEMORY_FRACTION = 8  # a chunk takes at most this fraction of host memory
_ALIGNED = 64
# Chunks that stay in use while their tensors are unpacked: one node's tensors may be in two.
_READ_CHUNKS = 2


@dataclasses.dataclass(eq=False, slots=True)
class Chunk:
    """One value of the swapper."""

    number: int
    name: str
    nbytes: int
    place: torch.Tensor | None  # its memory while it is in use
    changed: bool = True  # since it was last swapped in
    filled: int = 0  # bytes allocated
    saved: int = 0  # tensors in it
    pins: int = 0  # its copies in flight


class Chunks:
    """Allocates chunks in the swapper of *tier*. Not thread-safe.

    *end_copy* waits for one copy to or from a chunk and unpins it, or returns False when none is in
    flight. It is a weak reference, because its owner holds this object.

    A chunk is in use in the swapper while it is pinned, being filled or being read. At other times
    it may be evicted. It is discarded with its last tensor. Steps that save the same tensors use
    the same names in the same order, which the swapper learns.
    """

    def __init__(
        self,
        tier: Tier,
        end_copy: weakref.WeakMethod[Callable[[], bool]],
    ) -> None:
        self._tier = tier
        self._copies = end_copy
        self._chunk_bytes = min(_CHUNK_BYTES, tier.cap_bytes // _MEMORY_FRACTION)
        self._filling: Chunk | None = None
        self._reading: list[Chunk] = []  # the most recently swapped in is last
        self._free_numbers: list[int] = []
        self._numbers = 0
        self._alive_bytes = 0  # of chunks
        self._requested_bytes = 0  # requested from the tier
        self.swapped_in = 0  # chunks swapped in so far

    def reserve(self, nbytes: int) -> tuple[Chunk, int]:
        """Allocate *nbytes*: a chunk, pinned, and the offset in it. May wait for the drive. Raises:
        as `TensorSwapper.create`.
        """
        if nbytes * _LARGE_FRACTION > self._chunk_bytes:
            chunk = self._create(nbytes)
        elif self._filling is not None and self._filling.filled + nbytes <= self._chunk_bytes:
            chunk = self._filling
        else:
            full, self._filling = self._filling, None
            if full is not None:
                self._release_unneeded(full)
            chunk = self._filling = self._create(self._chunk_bytes)
        begin = chunk.filled
        chunk.filled = begin + -(-nbytes // _ALIGNED) * _ALIGNED
        chunk.saved += 1
        chunk.pins += 1
        return chunk, begin

    def swap_in(self, chunk: Chunk) -> torch.Tensor:
        """The memory of *chunk*, pinned. May wait for the drive. Raises: as
        `TensorSwapper.swap_in`.
        """
        if chunk.place is None:
            chunk.place = self._with_room(lambda: self._tier.swapper.swap_in(chunk.name))
            chunk.changed = False
            self.swapped_in += 1
            if chunk.saved > 1:
                self._reading.append(chunk)
                if len(self._reading) > _READ_CHUNKS:
                    self._release_unneeded(self._reading.pop(0))
        chunk.pins += 1
        return chunk.place

    def unpin(self, chunk: Chunk) -> None:
        """A copy to or from *chunk* has ended."""
        chunk.pins -= 1
        self._release_unneeded(chunk)

    def forget(self, chunk: Chunk) -> None:
        """One tensor of *chunk* was dropped."""
        chunk.saved -= 1
        self._release_unneeded(chunk)

    def prefetch(self, chunks: Iterable[Chunk]) -> None:
        """*chunks* are needed next, in this order."""
        self._tier.swapper.prefetch([chunk.name for chunk in chunks if chunk.place is None])

    def begin_step(self) -> bool:
        """A step begins with nothing saved. Returns whether anything ever was."""
        if not self._requested_bytes:
            return False
        self._tier.swapper.step()
        return True

    def abandon(self) -> None:
        """Release the requested memory. The caller may call no other method afterwards."""
        requested, self._requested_bytes = self._requested_bytes, 0
        self._tier.give_back(requested)

    def _release_unneeded(self, chunk: Chunk) -> None:
        if chunk.pins:
            return
        if not chunk.saved:
            if chunk is self._filling:
                self._filling = None
            elif chunk in self._reading:
                self._reading.remove(chunk)
            self._tier.swapper.discard(chunk.name)
            self._alive_bytes -= chunk.nbytes
            heapq.heappush(self._free_numbers, chunk.number)
        elif chunk.place is not None and chunk is not self._filling and chunk not in self._reading:
            chunk.place = None
            self._tier.swapper.release(
                chunk.name,
                changed=chunk.changed,
                nbytes=min(chunk.filled, chunk.nbytes) if chunk.changed else None,
            )

    def _create(self, nbytes: int) -> Chunk:
        more = self._alive_bytes + nbytes - self._requested_bytes
        if more > 0:
            self._tier.require(more)
            self._requested_bytes += more
        if self._free_numbers:
            # The lowest number: so every step uses the same names.
            number = heapq.heappop(self._free_numbers)
        else:
            number, self._numbers = self._numbers, self._numbers + 1
        name = f"activation/{number}"
        try:
            place = self._with_room(lambda: self._tier.swapper.create(name, nbytes))
        except BaseException:
            heapq.heappush(self._free_numbers, number)
            raise
        self._alive_bytes += nbytes
        return Chunk(number, name, nbytes, place)

    def _with_room(self, ask: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call *ask* until the swapper has free memory for it, releasing chunks in use."""
        while True:
            try:
                return ask()
            except OutOfHostMemoryError:
                end_copy = self._copies()
                if not (self._release_kept() or (end_copy is not None and end_copy())):
                    raise

    def _release_kept(self) -> bool:
        """Release the chunks that are kept in use for later calls; False when there are none."""
        kept = self._reading if self._filling is None else [*self._reading, self._filling]
        self._reading, self._filling = [], None
        for chunk in kept:
            self._release_unneeded(chunk)
        return bool(kept)
