"""`Arena`: which bytes of a memory are whose, and which are on offer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Any, Generic, Protocol, TypeVar

Owner = TypeVar("Owner")


class Leaving(Protocol):
    """A write of bytes that lie from *offset* on in *room* bytes, which are not to be touched
    before it has *ended*.
    """

    @property
    def offset(self) -> int:
        """Where they lie."""

    @property
    def room(self) -> int:
        """How many there are."""

    @property
    def ended(self) -> bool:
        """Whether they may be touched."""


class Block(Generic[Owner]):
    """The bytes from *start* to *end*; its neighbours *previous* and *following*.

    owner: whose bytes are there, None where nobody's are. open: on offer, so that somebody else may
    take it. writes: of what was or is there, and may not be touched before they have ended.
    """

    __slots__ = ("end", "following", "open", "owner", "previous", "start", "writes")

    def __init__(
        self, start: int, end: int, owner: Owner | None, previous: Block[Owner] | None
    ) -> None:
        self.start = start
        self.end = end
        self.owner = owner
        self.open = False
        self.writes: tuple[Any, ...] = ()
        self.previous = previous
        self.following: Block[Owner] | None = None


class Arena(Generic[Owner]):
    """*nbytes* of memory, cut into blocks; each byte is in exactly one.

    Neighbours that are on offer are one run, whoever's bytes they have and whatever is written of
    them. Room is given out from the start of the smallest run that has it. No run crosses
    *boundary*: what is below it and what is above are searched apart. All in bytes.

    An operation costs O(log runs), and the blocks that it takes.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.boundary = 0
        self.open_bytes = 0
        self.first: Block[Owner] = Block(0, nbytes, None, None)
        self._starts: list[int] = []  # of all runs
        self._runs: dict[int, tuple[int, Block[Owner]]] = {}  # start -> (end, first block)
        self._run_ends: dict[int, int] = {}  # end -> start
        # (bytes, start), below and above
        self._sizes: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        if nbytes:
            self.open(self.first)

    def grow(self, nbytes: int) -> None:
        """Offer what there is more than before, behind the rest. Costs O(blocks)."""
        if nbytes == self.nbytes:
            return
        last: Block[Owner] = self.first
        while last.following is not None:
            last = last.following
        last.following = Block(self.nbytes, nbytes, None, last)
        self.nbytes = nbytes
        self.open(last.following)

    def set_boundary(self, boundary: int) -> None:
        """No run crosses *boundary* from now on. Costs O(blocks)."""
        self.boundary = boundary
        self._starts, self._runs, self._run_ends, self._sizes = [], {}, {}, ([], [])
        self.open_bytes = 0
        block: Block[Owner] | None = self.first
        while block is not None:
            following = block.following
            if block.open:
                block.open = False
                self.open(block)
            block = following

    def best_fit(self, nbytes: int, above: bool) -> int | None:
        """The start of the smallest run of at least *nbytes* above the boundary or below it, the
        lowest of equals.
        """
        sizes = self._sizes[above]
        index = bisect_left(sizes, (nbytes, 0))
        return sizes[index][1] if index < len(sizes) else None

    def is_open(self, start: int, end: int) -> bool:
        """Whether all from *start* to *end* is in one run."""
        index = bisect_right(self._starts, start)
        return index > 0 and self._runs[self._starts[index - 1]][0] >= end

    def open(self, block: Block[Owner]) -> None:
        """Offer *block*."""
        block.open = True
        self.open_bytes += block.end - block.start
        if block.owner is None and block.start < self.boundary < block.end:
            self._split(block, self.boundary)
            rest = block.following
            assert rest is not None
            rest.open = True
            self._join(rest)
        self._join(block)

    def close(self, block: Block[Owner]) -> None:
        """*block* is not on offer any more."""
        block.open = False
        self.open_bytes -= block.end - block.start
        start = self._starts[bisect_right(self._starts, block.start) - 1]
        end, first = self._runs[start]
        self._remove(start, end)
        if start < block.start:
            self._insert(start, block.start, first)
        if block.end < end:
            assert block.following is not None
            self._insert(block.end, end, block.following)

    def free(self, block: Block[Owner]) -> None:
        """*block* is nobody's any more, and on offer."""
        block.owner = None
        block.writes = _unended(block.writes)
        if block.open:
            return
        previous = block.previous
        if (
            previous is not None
            and previous.open
            and previous.owner is None
            and block.start != self.boundary
            and not block.writes
        ):
            previous.writes = _unended(previous.writes)
            if not previous.writes:
                self.close(previous)
                previous.end = block.end
                self._unlink(block)
                block = previous
        self.open(block)

    def take(self, start: int, nbytes: int, owner: Owner) -> tuple[Block[Owner], list[Owner]]:
        """Give *nbytes* from *start* on, all on offer, to *owner*; the block, and the owners that
        have lost theirs.

        The block's *writes* are those that have to end before its bytes may be touched.
        """
        end = start + nbytes
        run_start = self._starts[bisect_right(self._starts, start) - 1]
        run_end, block = self._runs[run_start]
        run_first = block
        self._remove(run_start, run_end)
        if end > run_end:  # and across the boundary
            assert run_end == self.boundary
            rest_end, _ = self._runs[run_end]
            self._remove(run_end, rest_end)
            run_end = rest_end
        assert end <= run_end
        while block.end <= start:
            assert block.following is not None
            block = block.following
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
                    and start < write.offset + write.room
                ):
                    writes.append(write)
            if covered.end > end:
                tail = self._split(covered, end)
                tail.open = True
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
        self.open_bytes -= nbytes
        if run_start < start:
            self._insert(run_start, start, run_first)
        if end < run_end:
            assert covered is not None
            self._insert(end, run_end, covered)
        return given, lost

    def overlapping(self, start: int, end: int) -> list[Block[Owner]]:
        """Every block with bytes from *start* to *end*. Costs O(blocks): for what happens
        rarely.
        """
        found = []
        block: Block[Owner] | None = self.first
        while block is not None and block.start < end:
            if block.end > start:
                found.append(block)
            block = block.following
        return found

    def _split(self, block: Block[Owner], at: int) -> Block[Owner]:
        """Cut *block*; the second part, which is nobody's."""
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
        """Make *block* part of the runs."""
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


def _unended(writes: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(write for write in writes if not write.ended) if writes else writes
