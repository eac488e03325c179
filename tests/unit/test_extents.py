"""Which calls are refused. `property/test_extents_model.py` compares results with a model."""

from __future__ import annotations

import pytest

from nvme_offload.errors import InvariantError
from nvme_offload.io.extents import Extents


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
