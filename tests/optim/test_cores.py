"""Threads for updates on the CPU under launchers that set OMP_NUM_THREADS=1."""

from __future__ import annotations

import json
import os
import sys

import pytest
from processes import finished

SCRIPT = """
import json, os, sys, torch
from nvme_offload import NVMeOptimizer
for variables in json.loads(sys.argv[2]):
    os.environ.update(variables)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # as torch, when it is imported
    NVMeOptimizer([torch.nn.Parameter(torch.ones(8))], paths=sys.argv[1], host_memory="1MB").close()
    print(torch.get_num_threads())
    for name in variables:
        del os.environ[name]
"""
BY_TORCHRUN, BY_ACCELERATE = {"TORCHELASTIC_RUN_ID": "none"}, {"ACCELERATE_MIXED_PRECISION": "no"}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_one_thread_of_a_launcher_becomes_the_share(tmp_path):
    cores = len(os.sched_getaffinity(0))
    one, two = {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}
    scenarios = [
        ({**BY_TORCHRUN, **one}, cores),
        ({**BY_ACCELERATE, **one}, cores),
        (one, 1),  # the user's own
        ({**BY_TORCHRUN, **two}, 2),
    ]
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("OMP_NUM_THREADS", "WORLD_SIZE", *BY_TORCHRUN, *BY_ACCELERATE)
    }
    variables = json.dumps([changes for changes, _ in scenarios])
    ran = finished([sys.executable, "-c", SCRIPT, str(tmp_path), variables], env=kept)
    assert ran.returncode == 0, ran.stderr
    assert [int(line) for line in ran.stdout.split()] == [threads for _, threads in scenarios]
