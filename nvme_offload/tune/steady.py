"""Steadiness and drift of the drive, from repeated runs of the control setting."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

ROUNDS = 5
MOST_RANGE = 0.20
MOST_SLOPE = 0.10
JUMP = 1.25


class Steadiness(NamedTuple):
    """The verdict on a series of speeds; range is a share of the mean of its last `ROUNDS`."""

    steady: bool
    range: float


def judge(speeds: Sequence[float]) -> Steadiness:
    """Whether the last five of *speeds* lie within 20 % of their mean, with a slope of 10 % of it
    at most. Source: the steady state of SNIA's Solid State Storage Performance Test Specification.
    """
    window = speeds[-ROUNDS:]
    if not window:
        return Steadiness(False, math.inf)
    mean = sum(window) / len(window)
    middle = (len(window) - 1) / 2
    rising = sum((index - middle) * speed for index, speed in enumerate(window))
    per_round = rising / (sum((index - middle) ** 2 for index in range(len(window))) or 1)
    value_range = (max(window) - min(window)) / mean
    slope = abs(per_round) * (len(window) - 1) / mean
    steady = len(window) == ROUNDS and value_range <= MOST_RANGE and slope <= MOST_SLOPE
    return Steadiness(steady, value_range)


def control_at(seconds: float, series: Sequence[tuple[float, float]]) -> float:
    """The control's speed at *seconds*, interpolated geometrically in the (seconds, speed) pairs of
    *series*.
    """
    after = bisect.bisect(series, (seconds, math.inf))
    if after == 0 or after == len(series):
        return series[min(after, len(series) - 1)][1]
    (start, first), (end, last) = series[after - 1], series[after]
    share = (seconds - start) / (end - start) if end > start else 0.5
    return math.exp((1 - share) * math.log(first) + share * math.log(last))


def jumped(before: float, after: float) -> bool:
    """Whether trials between two runs of the control with these speeds do not count."""
    return max(before, after) > JUMP * min(before, after)
