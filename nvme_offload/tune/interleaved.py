"""Comparisons interleaved with the engine: A B C A B C A. Each B and C is judged by the two As around
it, because the drive drifts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from nvme_offload.hardware.profile import Beside


def interleaved(
    one: Callable[[], float], others: Sequence[Callable[[], float]], rounds: int
) -> tuple[list[float], list[list[float]]]:
    """Run *one* before, between and after *rounds* of all *others*; returns the results of each."""
    ones: list[float] = [one()]
    found: list[list[float]] = [[] for _ in others]
    for _ in range(rounds):
        for series, other in zip(found, others, strict=True):
            series.append(other())
        ones.append(one())
    return ones, found


def ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Each of *others* over the geometric mean of the two of *ones* around it."""
    return [
        value / math.sqrt(before * after)
        for value, before, after in zip(others, ones[:-1], ones[1:], strict=True)
    ]


def judged(
    name: str, version: str, phase: str, ones: Sequence[float], others: Sequence[float]
) -> Beside:
    """The comparison of *others* with the engine's *ones*, all in bytes per second."""
    found = sorted(ratios(ones, others))
    cut = len(found) // 20  # of each end: the middle 90 %
    return Beside(
        name=name,
        version=version,
        phase=phase,
        gb_per_s=statistics.median(others) / 1e9,
        chosen_gb_per_s=statistics.median(ones) / 1e9,
        relative=statistics.median(found),
        relative_low=found[cut],
        relative_high=found[-1 - cut],
    )
