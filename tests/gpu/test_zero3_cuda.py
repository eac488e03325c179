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
from launch import differences, in_groups, train
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


def unlike(cases, directory, ranks=1):
    """The names of the *cases* whose results differ, and where."""
    results = (
        train(list(cases.values()), directory, ours=ours, ranks=ranks, accelerator="cuda")
        for ours in (True, False)
    )
    found = {name: differences(*pair) for name, *pair in zip(cases, *results, strict=True)}
    return {name: at for name, at in found.items() if at}


@pytest.mark.parametrize("cases", in_groups(CASES))
def test_one_gpu(tmp_path, cases):
    assert unlike(cases, tmp_path) == {}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("cases", in_groups(ON_TWO_RANKS))
def test_two_gpus(tmp_path, cases):
    assert unlike(cases, tmp_path, ranks=2) == {}
