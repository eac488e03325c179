"""`update_device` where there is no GPU; tests/gpu has the rest."""

from __future__ import annotations

import pytest
import torch
from reference import differing, parameters, train

from nvme_offload.errors import UsageError
from nvme_offload.optim import NVMeOptimizer


def test_another_word_is_refused(tmp_path):
    with pytest.raises(UsageError, match='update_device must be "auto", "gpu" or "cpu"'):
        NVMeOptimizer(parameters(), paths=tmp_path, update_device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match='update_device="gpu" needs a CUDA device'):
        NVMeOptimizer(parameters(), paths=tmp_path, update_device="gpu")


@pytest.mark.parametrize("choice", ["auto", "cpu"])
def test_parameters_on_the_cpu_are_updated_there(tmp_path, choice):
    plain, ours = parameters(), parameters()
    train(plain, torch.optim.AdamW(plain))
    with NVMeOptimizer(ours, paths=tmp_path, update_device=choice) as optimizer:
        train(ours, optimizer)
    assert differing(ours, plain) == []
