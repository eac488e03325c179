from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvme_offload.tune import steady

SPEEDS = st.floats(1e6, 1e11)
TIMES = st.integers(-10_000, 1_010_000).map(lambda milliseconds: milliseconds / 1000)


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([100, 100, 100, 100, 100], True),
        ([100, 100, 100, 100], False),  # too few
        ([], False),
        ([1, 5000, 95, 105, 98, 101, 100], True),  # only the last five count
        ([92, 105, 100, 108, 95], True),
        ([89, 105, 100, 111, 95], False),  # a range of 22 %
        ([94, 97, 100, 103, 106], False),  # a range of 12 %, entirely slope
        ([106, 103, 100, 97, 94], False),
        ([96, 98, 100, 102, 104], True),  # a slope of 8 %
    ],
)
def test_rule(speeds: list[float], expected: bool) -> None:
    assert steady.judge(speeds).steady is expected


def test_control_between_two_runs_changes_at_an_even_rate() -> None:
    series = [(10.0, 1e9), (20.0, 4e9)]
    assert steady.control_at(15, series) == pytest.approx(2e9)
    assert steady.control_at(10, series) == pytest.approx(1e9)
    assert steady.control_at(0, series) == pytest.approx(1e9)
    assert steady.control_at(99, series) == pytest.approx(4e9)
    assert steady.control_at(5, [(7.0, 3e9)]) == pytest.approx(3e9)


@given(st.lists(st.tuples(TIMES, SPEEDS), min_size=1), TIMES)
def test_control_stays_within_its_runs(series: list[tuple[float, float]], seconds: float) -> None:
    series.sort()
    speeds = [speed for _, speed in series]
    assert min(speeds) * 0.999 <= steady.control_at(seconds, series) <= max(speeds) * 1.001


def test_a_jump_is_more_than_a_quarter_either_way() -> None:
    assert steady.jumped(100, 126)
    assert steady.jumped(126, 100)
    assert not steady.jumped(100, 124)
