from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvme_offload.errors import CorruptionError, UnsupportedError
from sweeps.peers import fio
from sweeps.peers.buffers import Shared, fill, require_read, spoil
from sweeps.peers.job import Job

MIB = 1 << 20


def job(direction: str, **changes: Any) -> Job:
    settings = {
        "backend": "libaio",
        "block_size": 128 << 10,
        "queue_depth": 8,
        "thread_count": 1,
        "memory": "huge",
    }
    sizes = {"request_bytes": 4 * MIB, "requests": 1}
    return Job(**{"direction": direction, **settings, **sizes, **changes})


def fio_output(job_: Job, milliseconds: dict[str, int], nbytes: int) -> dict[str, Any]:
    entries = [
        {
            "jobname": name,
            name: {"io_bytes": nbytes, "runtime": took},
        }
        for name, took in milliseconds.items()
    ]
    return {"jobs": entries}


def test_fio_jobs_at_once_take_as_long_as_the_longest() -> None:
    found = fio.parse(fio_output(job("mixed"), {"read": 200, "write": 500}, 4 * MIB), job("mixed"))
    assert found == pytest.approx((8 * MIB, 0.5))


def test_fio_that_moved_too_little_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="moved 4096 of 4194304 bytes"):
        fio.parse(fio_output(job("read"), {"read": 200}, 4096), job("read"))


@pytest.mark.parametrize(
    ("asked", "jobs", "threads", "depth"),
    [
        (job("read"), 1, 1, 8),
        (job("read", thread_count=4), 1, 4, 8),
        (job("mixed"), 2, 1, 4),
        (job("mixed", thread_count=4), 2, 2, 8),
    ],
)
def test_fio_has_as_many_threads_and_blocks_in_flight(
    tmp_path: Path, asked: Job, jobs: int, threads: int, depth: int
) -> None:
    place: Any = Shared(tmp_path, direct=True)
    command = fio.command(place, asked)
    assert (f"--numjobs={threads}" in command, f"--iodepth={depth}" in command) == (True, True)
    assert sum(word.startswith("--name=") for word in command) == jobs
    assert f"--size={4 * MIB // threads}" in command


def test_a_page_that_was_not_read_is_noticed() -> None:
    buffer = np.zeros(MIB, np.uint8)
    fill(buffer, 0)
    require_read(buffer, "other")
    buffer.view(np.uint64)[512 * 7] = 7
    with pytest.raises(CorruptionError, match="28 KiB"):
        require_read(buffer, "a side")
    spoil(buffer)
    with pytest.raises(CorruptionError, match="0 bytes"):
        require_read(buffer, "a side")
