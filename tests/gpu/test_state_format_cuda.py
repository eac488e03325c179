"""The key "state_format" of ZeRO-3 on GPUs: what `tests/zero3/test_state_format.py` asks for
without one, with parameters and reductions on the GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "zero3"))
from launch import differences, train
from test_state_format import COMPACT, SMALLEST, SPLIT_CASES

pytestmark = pytest.mark.deepspeed


def test_split_loses_nothing(tmp_path):
    # The reference updates on the CPU.
    cases = [
        case.but(section={**case.section, "update_device": "cpu"}) for case in SPLIT_CASES.values()
    ]
    mine, reference = (
        train(cases, tmp_path, ours=ours, accelerator="cuda") for ours in (True, False)
    )
    for name, *results in zip(SPLIT_CASES, mine, reference, strict=True):
        assert differences(*results) == [], name


def test_compact_gives_the_same_bits_from_memory_and_from_the_drive(tmp_path):
    case = SPLIT_CASES["streamed"].but(sub_group_size=1, section=COMPACT)
    resident, streamed = train(
        [case, case.but(section={**COMPACT, **SMALLEST})], tmp_path, accelerator="cuda"
    )
    assert differences(streamed, resident) == []
    assert streamed["traffic"]["bytes_read"] > 0
