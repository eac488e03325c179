"""Steadiness and drift of the drive, from repeated runs of the control setting."""

from __future__ import annotations

import math
import statistics
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
    mean = statistics.fmean(window)
    value_range = (max(window) - min(window)) / mean
    if len(window) < ROUNDS:
        return Steadiness(False, value_range)
    slope = abs(statistics.linear_regression(range(ROUNDS), window).slope) * (ROUNDS - 1) / mean
    return Steadiness(value_range <= MOST_RANGE and slope <= MOST_SLOPE, value_range)


def control_at(seconds: float, series: Sequence[tuple[float, float]]) -> float:
    """The control's speed at *seconds*, interpolated geometrically in the (seconds, speed) pairs of
    *series*.
    """
    import numpy as np  # slow to import, and not needed to parse options

    times, speeds = zip(*series, strict=True)
    return math.exp(np.interp(seconds, times, np.log(speeds)))


def jumped(before: float, after: float) -> bool:
    """Whether trials between two runs of the control with these speeds do not count."""
    return max(before, after) > JUMP * min(before, after)
