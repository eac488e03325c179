"""`Extents`: the free ranges of a space, searched by best fit."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from ..errors import InvariantError


class Extents:
    """Free ranges of bytes. Adjacent ranges are merged, unless they meet at *barrier*. Ranges that
    start below and above the barrier are searched separately. Not thread-safe. An operation costs
    O(log n).
    """

    def __init__(self, barrier: int = 0) -> None:
        self.nbytes = 0  # free
        self._barrier = barrier
        self._starts: list[int] = []  # sorted
        self._ends: dict[int, int] = {}  # start -> end
        # (bytes, start), sorted, of the ranges below and above the barrier
        self._sizes: tuple[list[tuple[int, int]], list[tuple[int, int]]] = [], []

    @property
    def largest_bytes(self) -> int:
        """Size of the largest range above the barrier in bytes."""
        return self._sizes[True][-1][0] if self._sizes[True] else 0

    def best_fit(self, nbytes: int, above: bool = True) -> int | None:
        """The start of the smallest range of at least *nbytes* that starts *above* the barrier, or
        below it; the lowest of equal ones. None if there is none.
        """
        sizes = self._sizes[above]
        index = bisect_left(sizes, (nbytes, 0))
        return sizes[index][1] if index < len(sizes) else None

    def containing(self, position: int) -> tuple[int, int] | None:
        """Start and end of the range that contains *position*, if there is one."""
        index = bisect_right(self._starts, position)
        if index == 0:
            return None
        start = self._starts[index - 1]
        end = self._ends[start]
        return (start, end) if position < end else None

    def add(self, start: int, end: int) -> None:
        """Free the bytes from *start* to *end*. Raises: InvariantError if a byte is free already."""
        starts = self._starts
        index = bisect_left(starts, start)
        before = self._ends[starts[index - 1]] if index else start
        after = starts[index] if index < len(starts) else end
        if before > start or after < end:
            raise InvariantError(f"the bytes {start} to {end} are free already")
        self.nbytes += end - start
        if index < len(starts) and after == end != self._barrier:
            end = self._remove(index)
        if index and before == start != self._barrier:
            index -= 1
            start = starts[index]
            self._remove(index)
        self._insert(index, start, end)

    def remove(self, start: int, end: int) -> None:
        """Take the bytes from *start* to *end*. Raises: InvariantError if they are not free."""
        index = bisect_right(self._starts, start) - 1
        first = self._starts[index] if index >= 0 else start
        if end > self._ends.get(first, start):
            raise InvariantError(f"the bytes {start} to {end} are not free")
        self.nbytes -= end - start
        last = self._remove(index)
        if first < start:
            self._insert(index, first, start)
            index += 1
        if end < last:
            self._insert(index, end, last)

    def _insert(self, index: int, start: int, end: int) -> None:
        self._starts.insert(index, start)
        self._ends[start] = end
        insort(self._sizes[start >= self._barrier], (end - start, start))

    def _remove(self, index: int) -> int:
        """Remove a range. Returns: its end."""
        start = self._starts.pop(index)
        end = self._ends.pop(start)
        sizes = self._sizes[start >= self._barrier]
        del sizes[bisect_left(sizes, (end - start, start))]
        return end
