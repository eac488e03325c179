"""A comparison interleaved with the engine, A B A B A: each B is judged by the two As around it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from nvme_offload.hardware.profile import Beside


def interleaved(
    one: Callable[[], float], other: Callable[[], float], rounds: int
) -> tuple[list[float], list[float]]:
    """Run *one* before, between and after *rounds* of *other*; returns the results of each."""
    ones, others = [one()], list[float]()
    for _ in range(rounds):
        others.append(other())
        ones.append(one())
    return ones, others


def judged(name: str, phase: str, ones: Sequence[float], others: Sequence[float]) -> Beside:
    """The comparison of *others* with the engine's *ones*, all in bytes per second."""
    around = zip(others, ones[:-1], ones[1:], strict=True)
    found = sorted(value / math.sqrt(before * after) for value, before, after in around)
    cut = len(found) // 20  # of each end: the middle 90 %
    return Beside(
        name=name,
        version="",
        phase=phase,
        gb_per_s=statistics.median(others) / 1e9,
        chosen_gb_per_s=statistics.median(ones) / 1e9,
        relative=statistics.median(found),
        relative_low=found[cut],
        relative_high=found[-1 - cut],
    )
