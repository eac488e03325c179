"""Writing without a pause: the size of a drive's cache, and its speed after that."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from nvme_offload.errors import OffloadError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.hardware.profile import Setting, Sustained
from nvme_offload.io.engine import Engine, Ticket, allocate
from nvme_offload.planning.traffic import STEP_BYTES_7B
from nvme_offload.units import format_bytes, format_speed

from . import steady
from .trial import REQUEST_BYTES, wait

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
    Raises: IOFailure.
    """
    requests = max(1, file_bytes // REQUEST_BYTES)
    each = max(1, total_bytes // ROUNDS // REQUEST_BYTES)
    source = np.random.default_rng()
    count = -(-setting.bytes_in_flight // REQUEST_BYTES) + 1
    ring = [np.frombuffer(allocate(REQUEST_BYTES), np.uint64) for _ in range(count)]
    for buffer in ring:
        buffer[:] = source.integers(0, 1 << 64, buffer.size, dtype=np.uint64)
    samples: list[tuple[float, int]] = [(0.0, 0)]
    engine = Engine(AioConfig.of(setting, direct=direct))
    try:
        with engine.open_anonymous(directory, requests * REQUEST_BYTES) as file:
            under_way: list[Ticket] = []
            began, index, done = time.monotonic(), 0, 0
            while not _enough(samples, total_bytes):
                for _ in range(each):
                    if len(under_way) == len(ring):
                        done += wait(under_way.pop(0))
                    buffer = ring[index % len(ring)]
                    buffer[::512] += np.uint64(1)  # no page is written twice with the same contents
                    under_way.append(engine.write(buffer, file, index % requests * REQUEST_BYTES))
                    index += 1
                samples.append((time.monotonic() - began, done))
                report(done, speeds(samples)[-1])
            while under_way:
                done += wait(under_way.pop(0))
    finally:
        with contextlib.suppress(OffloadError):  # the first failure is being raised
            engine.close()
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
