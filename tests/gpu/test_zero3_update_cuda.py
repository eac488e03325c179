"""ZeRO-3 with updates on the GPU: the bits of stock DeepSpeed without offload on the same GPUs, of
weights, masters, states, losses, norms and loss scales, wherever parameters and states are.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "zero3"))
from launch import Case, differences, in_groups, train
from test_parity import CASES as ALL_CASES
from test_parity import SMALLEST

pytestmark = pytest.mark.deepspeed

IN_BACKWARD = {"host_memory": "double", "step_in_backward": True}
LAST = {"missing_gradients": "last"}
OF_PARITY = (
    "plain",
    "fp32",
    "fp16-overflow",
    "1000-before-2048x2048",
    "both-on-the-drive",
    "parameters-in-memory",
    "zero-init",
    "persistent-parameters",
    "tied",
    "frozen",
    "checkpointed",
    "momentum",
    "no-states",
    "initialized-states",
    "scalar-states",
    "states-of-every-kind",
    "counts-of-the-optimizer",
    "gradients-in-fp32",
)
CASES = {
    **{name: ALL_CASES[name] for name in OF_PARITY},
    "small-sub-groups": Case(sub_group_size=100, clipping=0.1, section=SMALLEST),
    "amsgrad": Case(optimizer="amsgrad", section=SMALLEST),
    # FusedAdam where it builds, on both sides.
    "configured-adamw": Case(
        optimizer="cpu_adam", model="blocks", clipping=1.0, groups=2, steps=4, section=SMALLEST
    ),
    "torch-fused": Case(optimizer="fused", model="blocks", steps=4, clipping=0.1),
    "resumed": Case(model="blocks", loop="resume", steps=5, clipping=0.5, section=SMALLEST),
    "resumed-fused": Case(optimizer="fused", model="blocks", loop="resume", steps=5),
    "overlapped": Case(
        model="blocks", parameters="nvme", steps=5, section={**SMALLEST, "overlap_step": True}
    ),
    "in-backward": Case(
        model="blocks", sub_group_size=5000, steps=4, groups=2, accumulation=2, section=IN_BACKWARD
    ),
    "in-backward-fused": Case(
        model="wide", optimizer="fused", parameters="cpu", sub_group_size=9000, section=IN_BACKWARD
    ),
    "last-gradients": Case(model="dropped", sub_group_size=9000, steps=8, section=LAST),
    "last-gradients-clipped": Case(
        model="dropped", steps=8, clipping=0.05, accumulation=2, groups=2, section=LAST
    ),
}
ON_TWO_RANKS = {
    "clipped": Case(clipping=0.1, groups=2, accumulation=2),
    "overflow": CASES["fp16-overflow"].but(parameters="nvme"),
    "resumed": CASES["resumed"],
    "in-backward": CASES["in-backward"],
    "configured-adamw": CASES["configured-adamw"],
}


def on_gpu(cases: dict[str, Case]) -> list[Case]:
    """*cases* that fail where updates do not run on the GPU."""
    return [case.but(section={**case.section, "update_device": "gpu"}) for case in cases.values()]


def unlike(cases: dict[str, Case], directory: Path, ranks: int = 1) -> dict[str, list[str]]:
    """The names of the *cases* whose results differ, and where."""
    stock: dict[str, Any] = {"ours": False, "in_gpu_memory": True}
    jobs = [
        (on_gpu(cases), directory / "ours", {}),
        ([*cases.values()], directory / "stock", stock),
    ]
    for _, place, _ in jobs:
        place.mkdir()
    with ThreadPoolExecutor() as pool:
        results = pool.map(
            lambda job: train(job[0], job[1], ranks=ranks, accelerator="cuda", **job[2]), jobs
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


@pytest.mark.parametrize("state_format", ["split", "compact", "compact24"])
def test_bits_do_not_depend_on_host_memory(tmp_path_factory, state_format):
    case = Case(model="wide", optimizer="fused", steps=4, section={"state_format": state_format})
    small = case.but(parameters="nvme", section={**case.section, **SMALLEST})
    results = [
        train(on_gpu({"": each}), tmp_path_factory.mktemp("drive"), accelerator="cuda")[0]
        for each in (case, small)
    ]
    assert differences(*results) == []
