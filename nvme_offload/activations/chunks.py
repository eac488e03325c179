"""`Chunks`: room in a swapper for what is saved. Small tensors share a value of it, so that its
calls are few however many tensors there are.
"""

from __future__ import annotations

import heapq
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ..errors import OutOfHostMemoryError

if TYPE_CHECKING:
    import torch

    from ..swap.swapper import SwapperStats
    from ..swap.tier import Tier

_CHUNK_BYTES = 4 << 20  # a drive reads that much at full speed
_LARGE = 4  # what takes more than this part of a chunk has one of its own
_PARTS = 8  # of the host memory, of which a chunk takes one at most
_ALIGNED = 64
# chunks that stay in use while their tensors are asked for: those of a node may lie in two
_READING = 2


class Chunk:
    """A value of the swapper. place: its memory while it is in use. filled: bytes given out. saved:
    tensors in it. pins: copies of them under way.
    """

    __slots__ = ("changed", "filled", "name", "nbytes", "number", "pins", "place", "saved")

    def __init__(self, number: int, nbytes: int, place: torch.Tensor) -> None:
        self.number = number
        self.name = f"activation/{number}"
        self.nbytes = nbytes
        self.place: torch.Tensor | None = place
        self.changed = True  # since it was last brought
        self.filled = 0
        self.saved = 0
        self.pins = 0


class Waiting:
    """A context that adds to *seconds* how long its thread stands still: what it computes itself is
    no waiting.
    """

    __slots__ = ("_began", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter() - time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += max(time.perf_counter() - time.thread_time() - self._began, 0.0)


class Chunks:
    """Gives out room in the swapper of *tier*. *end_copy* waits for a copy to or from a chunk and
    unpins it, or is False where none is under way.

    It is a weak reference: its owner holds this.

    A chunk is in use, in the swapper's sense, while it is pinned, filled or read; then it may leave
    for the drive; it goes with the last tensor in it. Which names are used in which order is the
    same in every step that saves the same. Not thread-safe.
    """

    def __init__(self, tier: Tier, end_copy: weakref.WeakMethod[Callable[[], bool]]) -> None:
        self._tier = tier
        self._copies = end_copy
        self._chunk_bytes = min(_CHUNK_BYTES, tier.cap_bytes // _PARTS)
        self._filling: Chunk | None = None
        self._reading: list[Chunk] = []  # the one brought last comes last
        self._free_numbers: list[int] = []
        self._numbers = 0
        self._alive_bytes = 0  # of chunks
        self._asked_bytes = 0  # of the tier
        self.brought = 0  # chunks, so far
        self.room_waits = Waiting()
        self.read_waits = Waiting()

    def reserve(self, nbytes: int) -> tuple[Chunk, int]:
        """Room for a tensor of *nbytes*: a chunk, pinned, and where in it. Waits for the drive.
        Raises: as `TensorSwapper.create`.
        """
        if nbytes * _LARGE > self._chunk_bytes:
            chunk = self._create(nbytes)
        elif self._filling is not None and self._filling.filled + nbytes <= self._chunk_bytes:
            chunk = self._filling
        else:
            full, self._filling = self._filling, None
            if full is not None:
                self._settle(full)
            chunk = self._filling = self._create(self._chunk_bytes)
        begin = chunk.filled
        chunk.filled = begin + -(-nbytes // _ALIGNED) * _ALIGNED
        chunk.saved += 1
        chunk.pins += 1
        return chunk, begin

    def bring(self, chunk: Chunk) -> torch.Tensor:
        """The memory of *chunk*, which is pinned. Waits for the drive. Raises: as
        `TensorSwapper.swap_in`.
        """
        if chunk.place is None:
            with self.read_waits:
                chunk.place = self._with_room(lambda: self._tier.swapper.swap_in(chunk.name))
            chunk.changed = False
            self.brought += 1
            if chunk.saved > 1:
                self._reading.append(chunk)
                if len(self._reading) > _READING:
                    self._settle(self._reading.pop(0))
        chunk.pins += 1
        return chunk.place

    def unpin(self, chunk: Chunk) -> None:
        """A copy to or from *chunk* has ended."""
        chunk.pins -= 1
        self._settle(chunk)

    def forget(self, chunk: Chunk) -> None:
        """One of the tensors in *chunk* is no more."""
        chunk.saved -= 1
        self._settle(chunk)

    def prefetch(self, chunks: Iterable[Chunk]) -> None:
        """*chunks* are asked for next, in this order."""
        self._tier.swapper.prefetch([chunk.name for chunk in chunks if chunk.place is None])

    def begin_step(self) -> bool:
        """Nothing is saved: a step may begin. Whether anything ever was."""
        if not self._asked_bytes:
            return False
        self._tier.swapper.step()
        return True

    def stats(self) -> SwapperStats | None:
        """What was moved; None before anything was saved."""
        return self._tier.swapper.stats() if self._asked_bytes else None

    def _settle(self, chunk: Chunk) -> None:
        """Give back of *chunk* what nobody needs."""
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
        with self.room_waits:
            more = self._alive_bytes + nbytes - self._asked_bytes
            if more > 0:
                self._tier.require(more)
                self._asked_bytes += more
            if self._free_numbers:
                # the lowest: so a step has the names of the one before
                number = heapq.heappop(self._free_numbers)
            else:
                number, self._numbers = self._numbers, self._numbers + 1
            try:
                place = self._with_room(
                    lambda: self._tier.swapper.create(f"activation/{number}", nbytes)
                )
            except BaseException:
                heapq.heappush(self._free_numbers, number)
                raise
        self._alive_bytes += nbytes
        return Chunk(number, nbytes, place)

    def _with_room(self, ask: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What *ask* gets from the swapper, once enough of what is in use was given back."""
        while True:
            try:
                return ask()
            except OutOfHostMemoryError:
                if not (self._let_go() or self._end_copy()):
                    raise

    def _end_copy(self) -> bool:
        end = self._copies()
        return end is not None and end()

    def _let_go(self) -> bool:
        """Keep no chunk in use for those to come; False when none was."""
        kept = self._reading if self._filling is None else [*self._reading, self._filling]
        self._reading, self._filling = [], None
        for chunk in kept:
            self._settle(chunk)
        return bool(kept)
