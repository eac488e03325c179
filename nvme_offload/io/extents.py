"""`Extents`: which bytes of a range are taken and which are free."""

from __future__ import annotations

import operator
from bisect import bisect_left, insort

from ..errors import UsageError


class Extents:
    """Places in a range of *nbytes*, each a whole number of granules that starts on a granule: best
    fit, and neighbouring holes are one.

    Best fit, because the tensors of a model come in a few sizes, over and over: a hole that one has
    left is taken by the next of its kind. Not for several threads at once.

    Units: bytes. Raises: UsageError when *nbytes* is not a multiple of *granule*.
    """

    def __init__(self, nbytes: int, granule: int = 4096) -> None:
        if operator.index(granule) < 1:
            raise UsageError(f"a granule must be at least 1 byte, not {granule}")
        self._granule = granule
        self._nbytes = 0
        self._used: dict[int, int] = {}  # offset -> bytes
        self._used_bytes = 0
        # Every hole in both lists, so that its neighbours and the best fit are a bisection each.
        self._by_offset: list[tuple[int, int]] = []  # (offset, bytes)
        self._by_size: list[tuple[int, int]] = []  # (bytes, offset)
        self.grow(nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole range."""
        return self._nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes taken, in whole granules."""
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes free, in however many holes."""
        return self._nbytes - self._used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Bytes of the largest hole: the most that `allocate` can give now."""
        return self._by_size[-1][0] if self._by_size else 0

    def rounded(self, nbytes: int) -> int:
        """*nbytes* rounded up to whole granules: what `allocate` takes for them."""
        return -(-nbytes // self._granule) * self._granule

    def allocate(self, nbytes: int) -> int | None:
        """Take *nbytes*, rounded up, from the smallest hole that has them, the first of equals;
        return their offset, or None when no hole has.

        Raises: UsageError when *nbytes* is below 1.
        """
        size = self.rounded(operator.index(nbytes))
        if size < 1:
            raise UsageError(f"an extent has at least 1 byte, not {nbytes}")
        place = bisect_left(self._by_size, (size, 0))
        if place == len(self._by_size):
            return None
        hole, offset = self._by_size[place]
        self._remove_hole(offset, hole)
        if hole > size:
            self._insert_hole(offset + size, hole - size)
        self._used[offset] = size
        self._used_bytes += size
        return offset

    def free(self, offset: int) -> None:
        """Give back what `allocate` returned *offset* for. Raises: UsageError when nothing is taken
        there, as after an earlier free.
        """
        size = self._used.pop(offset, None)
        if size is None:
            raise UsageError(
                f"no extent starts at {offset}: it was freed before, or never allocated"
            )
        self._used_bytes -= size
        self._add_hole(offset, size)

    def grow(self, nbytes: int) -> None:
        """Make the range *nbytes* long in all; what is new is free. Raises: UsageError when that is
        less than it has, or not whole granules.
        """
        nbytes = operator.index(nbytes)
        if nbytes < self._nbytes or nbytes % self._granule:
            raise UsageError(
                f"a range of {self._nbytes} bytes grows to a multiple of {self._granule} bytes, not to {nbytes}"
            )
        added = nbytes - self._nbytes
        if added:
            self._add_hole(self._nbytes, added)
            self._nbytes = nbytes

    def _add_hole(self, offset: int, size: int) -> None:
        place = bisect_left(self._by_offset, (offset, 0))
        before, after = (
            self._by_offset[max(place - 1, 0) : place],
            self._by_offset[place : place + 1],
        )
        for neighbour_offset, neighbour in before + after:
            if neighbour_offset + neighbour == offset or neighbour_offset == offset + size:
                self._remove_hole(neighbour_offset, neighbour)
                offset = min(offset, neighbour_offset)
                size += neighbour
        self._insert_hole(offset, size)

    def _insert_hole(self, offset: int, size: int) -> None:
        insort(self._by_offset, (offset, size))
        insort(self._by_size, (size, offset))

    def _remove_hole(self, offset: int, size: int) -> None:
        del self._by_offset[bisect_left(self._by_offset, (offset, size))]
        del self._by_size[bisect_left(self._by_size, (size, offset))]
