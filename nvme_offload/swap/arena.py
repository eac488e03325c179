"""`Arena`: the blocks of a memory, and which of them are reclaimable."""

from __future__ import annotations

from collections.abc import Iterator

from ..io.extents import Extents
from ..store.transfer import Transfer
from .values import Block, Value


class Arena:
    """*nbytes* of memory, partitioned into blocks.

    Adjacent reclaimable blocks form a run, regardless of their owners and in-flight writes.
    Allocation is best fit: from the start of the smallest run that is large enough. Runs do not
    cross *boundary*; the parts below and above it are searched separately.

    An operation costs O(log runs), plus the blocks that it touches.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = 0
        self.boundary = 0
        self._runs = Extents()
        self._by_start: dict[int, Block] = {}
        self._by_end: dict[int, Block] = {}
        self.grow(nbytes)

    @property
    def reclaimable_bytes(self) -> int:
        """Bytes of all reclaimable blocks."""
        return self._runs.nbytes

    def blocks(self, start: int = 0) -> Iterator[Block]:
        """Every block, in order of address, from the one at *start* on."""
        block = self._by_start.get(start)
        while block is not None:
            yield block
            block = self.following(block)

    def previous(self, block: Block) -> Block | None:
        """The block before *block*."""
        return self._by_end.get(block.start)

    def following(self, block: Block) -> Block | None:
        """The block after *block*."""
        return self._by_start.get(block.end)

    def grow(self, nbytes: int) -> None:
        """Add reclaimable memory at the end, up to *nbytes* in total."""
        if nbytes > self.nbytes:
            added = self._link(Block(self.nbytes, nbytes))
            self.nbytes = nbytes
            self.offer(added)

    def set_boundary(self, boundary: int) -> None:
        """Set the boundary. Costs O(blocks)."""
        self.boundary = boundary
        self._runs = Extents(boundary)
        for block in list(self.blocks()):
            if block.reclaimable:
                self.offer(block)

    def best_fit(self, nbytes: int, above: bool) -> int | None:
        """The start of the smallest run of at least *nbytes* above or below the boundary."""
        return self._runs.best_fit(nbytes, above)

    def is_reclaimable(self, start: int, end: int) -> bool:
        """Whether one run contains *start* to *end*."""
        run = self._runs.containing(start)
        return run is not None and run[1] >= end

    def offer(self, block: Block) -> None:
        """Make *block* reclaimable."""
        block.reclaimable = True
        if block.owner is None and block.start < self.boundary < block.end:
            rest = Block(self.boundary, block.end, writes=block.writes)
            self._unlink(block)
            block.end = self.boundary
            self._link(block)
            self.offer(self._link(rest))
        self._runs.add(block.start, block.end)

    def claim(self, block: Block) -> None:
        """Make *block* not reclaimable."""
        block.reclaimable = False
        self._runs.remove(block.start, block.end)

    def free(self, block: Block) -> None:
        """Remove the owner of *block*, and make it reclaimable."""
        block.owner = None
        block.writes = _in_flight(block.writes)
        if block.reclaimable:
            return
        self.offer(block)
        previous = self.previous(block)
        if (
            previous is not None
            and previous.reclaimable
            and previous.owner is None
            and block.start != self.boundary
            and not block.writes
        ):
            previous.writes = _in_flight(previous.writes)
            if not previous.writes:
                self._unlink(block)
                self._unlink(previous)
                self._link(Block(previous.start, block.end, reclaimable=True))

    def take(self, start: int, nbytes: int, owner: Value) -> tuple[Block, list[Value]]:
        """Assign *nbytes* from *start* on, which must be reclaimable, to *owner*. Returns the
        block, and the owners that lost their blocks. The block's *writes* must end before its bytes
        are overwritten.
        """
        end = start + nbytes
        block, until = self._by_start.get(start), end
        if block is None or start < self.boundary < end:
            first, until = self._runs.containing(start) or (start, end)
            block = next((each for each in self.blocks(first) if each.end > start), None)
        self._runs.remove(start, min(end, until))
        if until < end:
            self._runs.remove(until, end)  # another run, which meets the first at the boundary
        lost: list[Value] = []
        writes: list[Transfer] = []
        while block is not None and block.start < end:
            following = self.following(block)
            self._unlink(block)
            if block.owner is not None:
                lost.append(block.owner)
            for write in block.writes:
                if (
                    not write.ended
                    and write not in writes
                    and write.offset < end
                    and start < write.offset + write.block_bytes
                ):
                    writes.append(write)
            if block.start < start:
                self._link(Block(block.start, start, None, block.writes, True))
            if block.end > end:
                self._link(Block(end, block.end, None, block.writes, True))
            block = following
        return self._link(Block(start, end, owner, tuple(writes))), lost

    def overlapping(self, start: int, end: int) -> list[Block]:
        """Every block that overlaps *start* to *end*. Costs O(blocks): for rare operations."""
        return [block for block in self.blocks() if block.start < end and start < block.end]

    def _link(self, block: Block) -> Block:
        self._by_start[block.start] = self._by_end[block.end] = block
        return block

    def _unlink(self, block: Block) -> None:
        del self._by_start[block.start], self._by_end[block.end]


def _in_flight(writes: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
    return tuple(write for write in writes if not write.ended) if writes else writes
