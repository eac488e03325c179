"""`Extents`, compared with a list of the owner of every granule; and the calls that are refused."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvme_offload.errors import InvariantError
from nvme_offload.io.extents import Extents

GRANULE = 16

ALLOCATE = st.tuples(st.just("allocate"), st.integers(1, 12 * GRANULE))
FREE = st.tuples(st.just("free"), st.integers(0, 1 << 16))


def holes(owners: list[int | None]) -> list[tuple[int, int]]:
    """(granules, first granule) of every free run."""
    runs, start = [], 0
    for owner, granules in groupby(owners):
        length = len(list(granules))
        if owner is None:
            runs.append((length, start))
        start += length
    return runs


@given(
    start=st.integers(0, 48),
    steps=st.lists(st.one_of(ALLOCATE, FREE), max_size=60),
)
def test_every_answer_is_the_models(start: int, steps: list[tuple[str, int]]) -> None:
    extents = Extents()
    if start:
        extents.add(0, start * GRANULE)
    owners: list[int | None] = [None] * start
    live: list[int] = []  # offsets
    for number, (step, value) in enumerate(steps):
        if step == "allocate":
            granules = -(-value // GRANULE)
            fitting = [hole for hole in holes(owners) if hole[0] >= granules]
            offset = extents.best_fit(granules * GRANULE)
            if not fitting:
                assert offset is None
            else:
                first = min(fitting)[1]
                assert offset == first * GRANULE
                extents.remove(offset, offset + granules * GRANULE)
                owners[first : first + granules] = [number] * granules
                live.append(offset)
        elif live:
            offset = live.pop(value % len(live))
            owner = owners[offset // GRANULE]
            extents.add(offset, offset + owners.count(owner) * GRANULE)
            owners = [None if one == owner else one for one in owners]
        assert (
            extents.largest_bytes
            == max([length for length, _ in holes(owners)], default=0) * GRANULE
        )
        assert extents.nbytes == owners.count(None) * GRANULE
    for offset in live:
        extents.add(offset, offset + owners.count(owners[offset // GRANULE]) * GRANULE)
    assert extents.largest_bytes == extents.nbytes == len(owners) * GRANULE


def free(*ranges: tuple[int, int]) -> Extents:
    extents = Extents()
    for start, end in ranges:
        extents.add(start, end)
    return extents


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
