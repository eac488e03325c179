"""Threads for updates on the CPU under launchers that set OMP_NUM_THREADS=1."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from patience import PATIENCE

SCRIPT = """
import sys, torch
from nvme_offload import NVMeOptimizer
NVMeOptimizer([torch.nn.Parameter(torch.ones(8))], paths=sys.argv[1], host_memory="1MB")
print(torch.get_num_threads())
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("set_by", "threads", "share"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, "1", True),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, "1", True),
        ({}, "1", False),  # the user's own
        ({"TORCHELASTIC_RUN_ID": "none"}, "2", False),
    ],
)
def test_one_thread_of_a_launcher_becomes_the_share(tmp_path, set_by, threads, share):
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION", "WORLD_SIZE")
    }
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={**kept, **set_by, "OMP_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ran.returncode == 0, ran.stderr
    cores = len(os.sched_getaffinity(0))
    assert int(ran.stdout) == (cores if share else int(threads))
