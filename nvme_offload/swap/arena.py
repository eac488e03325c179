"""`Arena`: the blocks of a memory, their owners, and which of them are reclaimable."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Any, Generic, TypeVar

from ..errors import InvariantError, known

Owner = TypeVar("Owner")


class Block(Generic[Owner]):
    """The bytes from *start* to *end*; linked to its neighbours *previous* and *following*.

    owner: the owner of the contents, or None. reclaimable: whether another owner may get the block.
    writes: the writes from these bytes that must end before the bytes are overwritten.
    """

    __slots__ = ("end", "following", "owner", "previous", "reclaimable", "start", "writes")

    def __init__(
        self, start: int, end: int, owner: Owner | None, previous: Block[Owner] | None
    ) -> None:
        self.start = start
        self.end = end
        self.owner = owner
        self.reclaimable = False
        self.writes: tuple[Any, ...] = ()
        self.previous = previous
        self.following: Block[Owner] | None = None


class Arena(Generic[Owner]):
    """*nbytes* of memory, partitioned into blocks.

    Adjacent reclaimable blocks form a run, regardless of their owners and in-flight writes.
    Allocation is best fit: from the start of the smallest run that is large enough. Runs do not
    cross *boundary*; the parts below and above it are searched separately. All sizes are in bytes.

    An operation costs O(log runs), plus the blocks that it touches.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.boundary = 0
        self.reclaimable_bytes = 0
        self.first: Block[Owner] = Block(0, nbytes, None, None)
        self._starts: list[int] = []  # the starts of all runs, sorted
        self._runs: dict[int, tuple[int, Block[Owner]]] = {}  # start -> (end, first block)
        self._run_ends: dict[int, int] = {}  # end -> start
        # (bytes, start), sorted; below and above the boundary
        self._sizes: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        if nbytes:
            self.offer(self.first)

    def grow(self, nbytes: int) -> None:
        """Add reclaimable memory at the end, up to *nbytes* in total. Costs O(blocks)."""
        if nbytes == self.nbytes:
            return
        last: Block[Owner] = self.first
        while last.following is not None:
            last = last.following
        last.following = Block(self.nbytes, nbytes, None, last)
        self.nbytes = nbytes
        self.offer(last.following)

    def set_boundary(self, boundary: int) -> None:
        """Set the boundary. Costs O(blocks)."""
        self.boundary = boundary
        self._starts, self._runs, self._run_ends, self._sizes = [], {}, {}, ([], [])
        self.reclaimable_bytes = 0
        block: Block[Owner] | None = self.first
        while block is not None:
            following = block.following
            if block.reclaimable:
                block.reclaimable = False
                self.offer(block)
            block = following

    def best_fit(self, nbytes: int, above: bool) -> int | None:
        """The start of the smallest run of at least *nbytes* above or below the boundary; among
        runs of equal size, the lowest.
        """
        sizes = self._sizes[above]
        index = bisect_left(sizes, (nbytes, 0))
        return sizes[index][1] if index < len(sizes) else None

    def is_reclaimable(self, start: int, end: int) -> bool:
        """Whether one run contains *start* to *end*."""
        index = bisect_right(self._starts, start)
        return index > 0 and self._runs[self._starts[index - 1]][0] >= end

    def offer(self, block: Block[Owner]) -> None:
        """Make *block* reclaimable."""
        block.reclaimable = True
        self.reclaimable_bytes += block.end - block.start
        if block.owner is None and block.start < self.boundary < block.end:
            self._split(block, self.boundary)
            rest = known(block.following)
            rest.reclaimable = True
            self._join(rest)
        self._join(block)

    def claim(self, block: Block[Owner]) -> None:
        """Make *block* not reclaimable."""
        block.reclaimable = False
        self.reclaimable_bytes -= block.end - block.start
        start = self._starts[bisect_right(self._starts, block.start) - 1]
        end, first = self._runs[start]
        self._remove(start, end)
        if start < block.start:
            self._insert(start, block.start, first)
        if block.end < end:
            self._insert(block.end, end, known(block.following))

    def free(self, block: Block[Owner]) -> None:
        """Remove the owner of *block*, and make it reclaimable."""
        block.owner = None
        block.writes = _in_flight(block.writes)
        if block.reclaimable:
            return
        previous = block.previous
        if (
            previous is not None
            and previous.reclaimable
            and previous.owner is None
            and block.start != self.boundary
            and not block.writes
        ):
            previous.writes = _in_flight(previous.writes)
            if not previous.writes:
                self.claim(previous)
                previous.end = block.end
                self._unlink(block)
                block = previous
        self.offer(block)

    def take(self, start: int, nbytes: int, owner: Owner) -> tuple[Block[Owner], list[Owner]]:
        """Assign *nbytes* from *start* on, which must be reclaimable, to *owner*. Returns the
        block, and the owners that lost their blocks. The block's *writes* must end before its bytes
        are overwritten.
        """
        end = start + nbytes
        run_start = self._starts[bisect_right(self._starts, start) - 1]
        run_end, block = self._runs[run_start]
        run_first = block
        self._remove(run_start, run_end)
        if end > run_end:  # the block crosses the boundary
            rest_end, _ = self._runs[run_end]
            self._remove(run_end, rest_end)
            run_end = rest_end
        if end > run_end:
            raise InvariantError("a block in use was allocated again")
        while block.end <= start:
            block = known(block.following)
        lost: list[Owner] = []
        writes: list[Any] = []
        if block.start < start:
            if block.owner is not None:
                lost.append(block.owner)
            head = self._split(block, start)
            block.owner = None
        else:
            head = block
        covered: Block[Owner] | None = head
        while covered is not None and covered.start < end:
            if covered.owner is not None:
                lost.append(covered.owner)
            for write in covered.writes:
                if (
                    not write.ended
                    and write not in writes
                    and write.offset < end
                    and start < write.offset + write.block_bytes
                ):
                    writes.append(write)
            if covered.end > end:
                tail = self._split(covered, end)
                tail.reclaimable = True
            following = covered.following
            if covered is not head:
                self._unlink(covered)
            covered = following
        given: Block[Owner] = Block(start, end, owner, head.previous)
        given.following = covered
        given.writes = tuple(writes)
        if head.previous is not None:
            head.previous.following = given
        else:
            self.first = given
        if covered is not None:
            covered.previous = given
        self.reclaimable_bytes -= nbytes
        if run_start < start:
            self._insert(run_start, start, run_first)
        if end < run_end:
            self._insert(end, run_end, known(covered))
        return given, lost

    def overlapping(self, start: int, end: int) -> list[Block[Owner]]:
        """Every block that overlaps *start* to *end*. Costs O(blocks): for rare operations."""
        found = []
        block: Block[Owner] | None = self.first
        while block is not None and block.start < end:
            if block.end > start:
                found.append(block)
            block = block.following
        return found

    def _split(self, block: Block[Owner], at: int) -> Block[Owner]:
        """Split *block* at *at*. Returns the second part, without an owner."""
        rest: Block[Owner] = Block(at, block.end, None, block)
        rest.writes = block.writes
        rest.following = block.following
        if rest.following is not None:
            rest.following.previous = rest
        block.following = rest
        block.end = at
        return rest

    def _unlink(self, block: Block[Owner]) -> None:
        if block.previous is not None:
            block.previous.following = block.following
        if block.following is not None:
            block.following.previous = block.previous

    def _join(self, block: Block[Owner]) -> None:
        """Add *block* to the runs."""
        start, end, first = block.start, block.end, block
        if start != self.boundary:
            before = self._run_ends.get(start)
            if before is not None:
                first = self._runs[before][1]
                self._remove(before, start)
                start = before
        if end != self.boundary:
            after = self._runs.get(end)
            if after is not None:
                self._remove(end, after[0])
                end = after[0]
        self._insert(start, end, first)

    def _insert(self, start: int, end: int, first: Block[Owner]) -> None:
        self._runs[start] = (end, first)
        self._run_ends[end] = start
        insort(self._starts, start)
        insort(self._sizes[start >= self.boundary], (end - start, start))

    def _remove(self, start: int, end: int) -> None:
        del self._runs[start], self._run_ends[end]
        del self._starts[bisect_left(self._starts, start)]
        sizes = self._sizes[start >= self.boundary]
        del sizes[bisect_left(sizes, (end - start, start))]


def _in_flight(writes: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(write for write in writes if not write.ended) if writes else writes
