"""The latencies of blocks: every moved block is timed, and the sum of the times matches the depth of
the queues.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvme_offload.hardware.profile import PHASES, Setting
from nvme_offload.tune.latency import percentiles
from nvme_offload.tune.ranks import Ranks
from nvme_offload.tune.trial import REQUEST_BYTES, Rig

SETTING = Setting(block_size=1 << 20, queue_depth=8, thread_count=2)


@pytest.fixture(scope="module")
def rig(disk: Path) -> Iterator[Rig]:
    with Rig(disk, 2 * REQUEST_BYTES) as made:
        made.fill(SETTING, None, lambda done: None)
        yield made


@pytest.mark.parametrize("phase", PHASES)
def test_the_queue_depth_limits_the_blocks_in_flight(rig: Rig, phase: str) -> None:
    """The times of blocks in the same buffer do not overlap, so for each of sixteen buffers they sum to
    the elapsed time at most.
    """
    began = time.monotonic()
    taken = rig.block_seconds(SETTING, phase, 0.2)
    assert all(seconds > 0 for seconds in taken)
    assert 0 < sum(taken) <= 16 * (time.monotonic() - began)
    assert rig.run(SETTING, "read", 0.05).read_bytes > 0  # the files are as good as before


def test_queues_of_one_block_and_of_many(rig: Rig) -> None:
    assert rig.block_seconds(Setting(8 << 20, 1, 1), "mixed", 0.05)
    assert rig.block_seconds(Setting(128 << 10, 64, 2), "write", 0.05)


def test_ranks_time_theirs_together(disk: Path) -> None:
    with Ranks(2, disk, 2 * REQUEST_BYTES) as made:
        made.fill(SETTING, None, lambda done: None)
        began = time.monotonic()
        taken = made.block_seconds(SETTING, "read", 0.1)
        assert 0 < sum(taken) <= 2 * 16 * (time.monotonic() - began)


def test_percentiles_are_values_that_occurred() -> None:
    found = percentiles(SETTING, "read", [seconds / 1000 for seconds in range(200, 0, -1)])
    assert (found.phase, found.setting, found.blocks) == ("read", SETTING, 200)
    assert (found.p50_ms, found.p95_ms, found.p99_ms, found.max_ms) == (100, 190, 198, 200)
    one = percentiles(SETTING, "read", [0.25])
    assert (one.p50_ms, one.p99_ms, one.max_ms) == (250, 250, 250)
    assert found.p999_ms is None  # of so few blocks it would be the longest
    many = percentiles(SETTING, "read", [seconds / 1000 for seconds in range(1, 2001)])
    assert (many.p99_ms, many.p999_ms, many.max_ms) == (1980, 1998, 2000)
