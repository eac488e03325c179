"""Training on GPUs with parameters and optimizer states on a drive: the same bits as stock
DeepSpeed with `device: "cpu"` gives on the same GPUs.

The cases are shared with `tests/zero3/test_parity.py`, which trains them without a GPU; two ranks
have a GPU each and use NCCL.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "zero3"))
from launch import differences, train
from test_parity import CASES as ALL_CASES
from test_parity import ON_TWO_RANKS as ALL_ON_TWO_RANKS

pytestmark = pytest.mark.deepspeed


# On a GPU DeepSpeed itself stops at an assertion where "device": "cpu" follows zero.Init without a
# configuration, and in the backward pass after an evaluation in inference mode. With parameters alone
# on the CPU it makes the zeros for a frozen one there, and joins them with gradients on the GPU. So
# these programs have nothing to be compared with.
_STOPS = "moved", "inference-mode", "parameters-alone-dropped"
CASES, ON_TWO_RANKS = (
    {
        name: case.but(section={**case.section, "update_device": "cpu"})
        for name, case in cases.items()
        if not {name, case.program} & {*_STOPS}
    }
    for cases in (ALL_CASES, ALL_ON_TWO_RANKS)
)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    directory = tmp_path_factory.mktemp("drive")
    mine, reference = (
        train(list(CASES.values()), directory, ours=ours, accelerator="cuda")
        for ours in (True, False)
    )
    return dict(zip(CASES, zip(mine, reference, strict=True), strict=True))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("drive")
    mine, reference = (
        train(list(ON_TWO_RANKS.values()), directory, ours=ours, ranks=2, accelerator="cuda")
        for ours in (True, False)
    )
    return dict(zip(ON_TWO_RANKS, zip(mine, reference, strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_one_gpu(one_rank, name):
    assert differences(*one_rank[name]) == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_gpus(two_ranks, name):
    assert differences(*two_ranks[name]) == []
