"""`Extents`: a best-fit allocator for a range of bytes."""

from __future__ import annotations

import operator
from bisect import bisect_left, insort

from ..errors import UsageError


class Extents:
    """Best-fit allocation of extents in a range of bytes; adjacent free extents are merged.

    Extents start at a multiple of the granule and are whole granules. Best fit suits the tensors of
    a model: they have a few sizes, and a freed extent is reused by the next tensor of its size. Not
    thread-safe.

    Parameters
    ----------
    nbytes : int
        Size of the range in bytes, a multiple of *granule*.
    granule : int
        Allocation unit in bytes.

    Attributes
    ----------
    nbytes : int
        As given.
    """

    def __init__(self, nbytes: int, granule: int = 4096) -> None:
        self.nbytes = nbytes
        self._granule = granule
        self._used: dict[int, int] = {}  # offset -> bytes
        # Each free extent is in both lists: neighbours and best fit are a bisection each.
        self._by_offset: list[tuple[int, int]] = []  # (offset, bytes)
        self._by_size: list[tuple[int, int]] = []  # (bytes, offset)
        if nbytes:
            self._insert_free(0, nbytes)

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest free extent in bytes: the most that `allocate` can return now."""
        return self._by_size[-1][0] if self._by_size else 0

    def rounded(self, nbytes: int) -> int:
        """*nbytes* rounded up to whole granules."""
        return -(-nbytes // self._granule) * self._granule

    def allocate(self, nbytes: int) -> int | None:
        """Allocate *nbytes*, rounded up, from the smallest free extent that is large enough (of
        equals the first); return its offset, or None where there is none.

        Raises: UsageError when *nbytes* is below 1.
        """
        size = self.rounded(operator.index(nbytes))
        if size < 1:
            raise UsageError(f"an extent has at least 1 byte, not {nbytes}")
        place = bisect_left(self._by_size, (size, 0))
        if place == len(self._by_size):
            return None
        free_size, offset = self._by_size[place]
        self._remove_free(offset, free_size)
        if free_size > size:
            self._insert_free(offset + size, free_size - size)
        self._used[offset] = size
        return offset

    def free(self, offset: int) -> None:
        """Free the extent that `allocate` returned at *offset*. Raises: UsageError when none starts
        there, as after an earlier free.
        """
        size = self._used.pop(offset, None)
        if size is None:
            raise UsageError(
                f"no extent starts at {offset}: it was freed before, or never allocated"
            )
        place = bisect_left(self._by_offset, (offset, 0))
        before, after = (
            self._by_offset[max(place - 1, 0) : place],
            self._by_offset[place : place + 1],
        )
        for neighbour_offset, neighbour in before + after:
            if neighbour_offset + neighbour == offset or neighbour_offset == offset + size:
                self._remove_free(neighbour_offset, neighbour)
                offset = min(offset, neighbour_offset)
                size += neighbour
        self._insert_free(offset, size)

    def _insert_free(self, offset: int, size: int) -> None:
        insort(self._by_offset, (offset, size))
        insort(self._by_size, (size, offset))

    def _remove_free(self, offset: int, size: int) -> None:
        del self._by_offset[bisect_left(self._by_offset, (offset, size))]
        del self._by_size[bisect_left(self._by_size, (size, offset))]
