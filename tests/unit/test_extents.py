"""Where best fit places ranges, and which arguments are refused."""

from __future__ import annotations

import pytest

from nvme_offload.errors import UsageError
from nvme_offload.io.extents import Extents


def test_space_is_rounded_up_to_granules():
    extents = Extents(4 * 4096)
    assert [extents.allocate(nbytes) for nbytes in (1, 4096, 4097)] == [0, 4096, 8192]
    assert extents.largest_free_bytes == 0
    assert extents.allocate(1) is None


def test_the_smallest_hole_that_fits_is_taken_and_the_first_of_equals():
    extents = Extents(100, granule=1)
    for nbytes in (30, 1, 10, 1, 20, 1, 10, 1):
        extents.allocate(nbytes)
    for offset in (0, 31, 42, 63):  # holes of 30, 10, 20 and 10, and one of 26 at the end
        extents.free(offset)
    assert extents.largest_free_bytes == 30
    assert [extents.allocate(nbytes) for nbytes in (10, 9, 20, 26, 27, 27)] == [
        31,
        63,
        42,
        74,
        0,
        None,
    ]


def test_a_freed_extent_joins_the_holes_on_both_sides():
    extents = Extents(5, granule=1)
    for _ in range(5):
        extents.allocate(1)
    for offset in (1, 3, 2):
        extents.free(offset)
    assert extents.largest_free_bytes == 3
    assert extents.allocate(3) == 1


def test_an_empty_range_has_no_extents():
    extents = Extents(0)
    assert (extents.nbytes, extents.allocate(1), extents.largest_free_bytes) == (0, None, 0)


@pytest.mark.parametrize("offset", [0, 4096, 1, -4096])
def test_freeing_what_is_not_taken_changes_nothing(offset):
    extents = Extents(4 * 4096)
    extents.allocate(8192)
    extents.allocate(4096)
    extents.free(0)
    with pytest.raises(UsageError, match=f"no extent starts at {offset}"):
        extents.free(offset)
    assert extents.largest_free_bytes == 8192
    assert [extents.allocate(nbytes) for nbytes in (8192, 4096, 1)] == [0, 12288, None]


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_extent_of_nothing_is_refused(nbytes):
    extents = Extents(4096)
    with pytest.raises(UsageError, match="at least 1 byte"):
        extents.allocate(nbytes)
    assert extents.largest_free_bytes == 4096
