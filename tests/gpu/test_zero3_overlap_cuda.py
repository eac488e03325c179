"""`"overlap_step"` of ZeRO-3 on GPUs: the bits without it. The cases are shared
with `tests/zero3/test_zero3_overlap.py`, which trains them without a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "zero3"))
from launch import differences, train
from test_zero3_overlap import CASES, ON_TWO_RANKS, overlapped

pytestmark = pytest.mark.deepspeed


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(
    "ranks",
    [
        1,
        pytest.param(
            2,
            marks=pytest.mark.skipif(
                torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"
            ),
        ),
    ],
)
def test_bits_are_those_without(tmp_path_factory, ranks, late):
    cases = CASES if ranks == 1 else {name: CASES[name] for name in ON_TWO_RANKS}
    on, off = tmp_path_factory.mktemp("on"), tmp_path_factory.mktemp("off")
    mine = train(
        list(map(overlapped, cases.values())), on, ranks=ranks, accelerator="cuda", late=late
    )
    reference = train(list(cases.values()), off, ranks=ranks, accelerator="cuda")
    for name, *results in zip(cases, mine, reference, strict=True):
        assert differences(*results) == [], name
        assert results[0]["traffic"]["overlapped"] > 0, name
