"""Threads for updates on the CPU under launchers that set OMP_NUM_THREADS=1."""

from __future__ import annotations

import os

import pytest
import torch

from nvme_offload import NVMeOptimizer

BY_TORCHRUN, BY_ACCELERATE = {"TORCHELASTIC_RUN_ID": "none"}, {"ACCELERATE_MIXED_PRECISION": "no"}
CORES = len(os.sched_getaffinity(0))


@pytest.mark.skipif(CORES < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("launcher", "asked", "threads"),
    [
        (BY_TORCHRUN, 1, CORES),
        (BY_ACCELERATE, 1, CORES),
        ({}, 1, 1),  # the user's own
        (BY_TORCHRUN, 2, 2),
    ],
    ids=["torchrun", "accelerate", "none", "torchrun, asked"],
)
def test_one_thread_of_a_launcher_becomes_the_share(
    tmp_path, monkeypatch, launcher, asked, threads
):
    for name in ("WORLD_SIZE", *BY_TORCHRUN, *BY_ACCELERATE):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**launcher, "OMP_NUM_THREADS": str(asked)}.items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(asked)  # as torch, when it is imported
    parameter = torch.nn.Parameter(torch.ones(8))
    NVMeOptimizer([parameter], paths=tmp_path, host_memory="1MB").close()
    assert torch.get_num_threads() == threads
