"""Writing without a pause: the size of a drive's cache, and its speed after that."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from nvme_offload.hardware.profile import Setting, Sustained
from nvme_offload.planning.traffic import STEP_BYTES_7B
from nvme_offload.units import format_bytes, format_speed

from . import steady
from .trial import REQUEST_BYTES, Load, Rig

ROUNDS = 32  # into which the given bytes are divided
MOST = 2  # times the given bytes, while the drive is not steady
FALL = 0.75  # of the speed before: below, the cache has ended


def write_on(
    directory: Path,
    setting: Setting,
    total_bytes: int,
    file_bytes: int,
    direct: bool | Literal["auto"],
    report: Callable[[int, float], None],
) -> Sustained:
    """Write *total_bytes* to a file of *file_bytes* in *directory*, and until the drive is steady,
    but at most twice as much. *report* receives the bytes so far and the speed of the last round.
    Raises: as `Rig.run`.
    """
    each = max(total_bytes // ROUNDS, REQUEST_BYTES)
    samples: list[tuple[float, int]] = [(0.0, 0)]
    with (
        Rig(directory, max(file_bytes, REQUEST_BYTES), direct, ways=("write",)) as rig,
        Load(rig, setting, "write") as load,
    ):
        began = time.monotonic()
        while not _enough(samples, total_bytes):
            load.turn()
            point = load.pump(None, 0.0)[1]
            if point.write_bytes >= len(samples) * each:
                samples.append((point.seconds - began, point.write_bytes))
                report(point.write_bytes, speeds(samples)[-1])
        load.finish()
    return judged(samples)


def judged(samples: Sequence[tuple[float, int]]) -> Sustained:
    """The result of *samples*, (seconds, bytes so far) at the end of each round."""
    rounds = speeds(samples)
    end = cache_end(rounds)
    last = rounds[-steady.ROUNDS :]
    return Sustained(
        bytes=samples[-1][1],
        seconds=samples[-1][0],
        samples=tuple(samples),
        first_gb_per_s=statistics.median(rounds[: end if end is not None else steady.ROUNDS]) / 1e9,
        steady_gb_per_s=statistics.fmean(last) / 1e9,
        steady=steady.judge(rounds).steady,
        cache_ends_bytes=None if end is None else samples[end][1],
    )


def speeds(samples: Sequence[tuple[float, int]]) -> list[float]:
    """Bytes per second of each round."""
    pairs = itertools.pairwise(samples)
    return [(bytes_b - bytes_a) / (b - a) for (a, bytes_a), (b, bytes_b) in pairs]


def cache_end(rounds: Sequence[float]) -> int | None:
    """The number of rounds before the speed fell for good; None if it did not: the cut with the
    least scatter on both sides, if the median then falls below three quarters, and no later round
    is as fast as before.
    """
    cuts = range(2, len(rounds) - 1)
    if not cuts:
        return None
    cut = min(cuts, key=lambda at: _scatter(rounds[:at]) + _scatter(rounds[at:]))
    before, after = statistics.median(rounds[:cut]), rounds[cut:]
    late = sorted(after)[round(0.9 * (len(after) - 1))]
    fell = statistics.median(after) < FALL * before and late < before
    return cut if fell else None


def warnings(found: Sustained) -> list[str]:
    """Sentences on the consequences for training."""
    if found.cache_ends_bytes is None:
        return []
    steps = STEP_BYTES_7B / found.cache_ends_bytes
    return [
        f"The drive writes at {format_speed(found.first_gb_per_s)} GB/s until its cache is full, after {format_bytes(found.cache_ends_bytes)}, then at "
        f"{format_speed(found.steady_gb_per_s)} GB/s. One optimizer step of a 7B model writes {STEP_BYTES_7B / 1e9:.0f} GB, {steps:.2g} times that cache: "
        "plan with the lower speed, or with a drive that holds the higher one."
    ]


def _enough(samples: Sequence[tuple[float, int]], total_bytes: int) -> bool:
    done = samples[-1][1]
    if done < total_bytes or len(samples) < 2:
        return False
    return done >= MOST * total_bytes or steady.judge(speeds(samples)).steady


def _scatter(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return sum((value - mean) ** 2 for value in values)
