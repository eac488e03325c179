"""Where best fit finds ranges, how these merge, and which calls are refused."""

from __future__ import annotations

import pytest

from nvme_offload.errors import InvariantError
from nvme_offload.io.extents import Extents


def free(*ranges: tuple[int, int]) -> Extents:
    extents = Extents()
    for start, end in ranges:
        extents.add(start, end)
    return extents


def test_the_smallest_hole_that_fits_is_taken_and_the_first_of_equals():
    extents = free((0, 30), (31, 41), (42, 62), (63, 73), (74, 100))
    assert extents.largest_bytes == 30
    found = []
    for nbytes in (10, 9, 20, 26, 27, 27):
        offset = extents.best_fit(nbytes)
        if offset is not None:
            extents.remove(offset, offset + nbytes)
        found.append(offset)
    assert found == [31, 63, 42, 74, 0, None]


def test_a_freed_extent_joins_the_holes_on_both_sides():
    extents = free((1, 2), (3, 4), (2, 3))
    assert extents.largest_bytes == extents.nbytes == 3
    assert extents.best_fit(3) == 1
    assert extents.containing(2) == (1, 4)
    assert extents.containing(0) is extents.containing(4) is None


def test_an_empty_range_has_no_extents():
    extents = Extents()
    assert (extents.nbytes, extents.best_fit(1), extents.largest_bytes) == (0, None, 0)


@pytest.mark.parametrize(("start", "end"), [(0, 4), (0, 1), (3, 5), (8, 9), (7, 13), (4, 9)])
def test_freeing_what_is_free_changes_nothing(start, end):
    extents = free((0, 4), (8, 12))
    with pytest.raises(InvariantError, match=f"the bytes {start} to {end} are free already"):
        extents.add(start, end)
    assert (extents.nbytes, extents.containing(0), extents.containing(8)) == (8, (0, 4), (8, 12))


@pytest.mark.parametrize(("start", "end"), [(4, 5), (0, 5), (3, 8), (7, 9), (12, 13)])
def test_taking_what_is_not_free_changes_nothing(start, end):
    extents = free((0, 4), (8, 12))
    with pytest.raises(InvariantError, match=f"the bytes {start} to {end} are not free"):
        extents.remove(start, end)
    assert (extents.nbytes, extents.containing(0), extents.containing(8)) == (8, (0, 4), (8, 12))


def test_holes_on_both_sides_of_the_barrier_stay_apart():
    extents = Extents(barrier=10)
    for start, end in ((4, 10), (10, 13), (13, 15)):
        extents.add(start, end)
    assert (extents.containing(5), extents.containing(10)) == ((4, 10), (10, 15))
    assert [extents.best_fit(6, above=above) for above in (False, True)] == [4, None]
    assert [extents.best_fit(5, above=above) for above in (False, True)] == [4, 10]
    extents.remove(4, 10)
    assert [extents.best_fit(1, above=above) for above in (False, True)] == [None, 10]
