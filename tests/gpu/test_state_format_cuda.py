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


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    directory = tmp_path_factory.mktemp("drive")
    # The reference updates on the CPU.
    cases = [
        case.but(section={**case.section, "update_device": "cpu"}) for case in SPLIT_CASES.values()
    ]
    mine, reference = (
        train(cases, directory, ours=ours, accelerator="cuda") for ours in (True, False)
    )
    return dict(zip(SPLIT_CASES, zip(mine, reference, strict=True), strict=True))


@pytest.mark.parametrize("name", SPLIT_CASES)
def test_split_loses_nothing(split, name):
    assert differences(*split[name]) == []


def test_compact_gives_the_same_bits_from_memory_and_from_the_drive(tmp_path):
    case = SPLIT_CASES["streamed"].but(sub_group_size=1, section=COMPACT)
    resident, streamed = train(
        [case, case.but(section={**COMPACT, **SMALLEST})], tmp_path, accelerator="cuda"
    )
    assert differences(streamed, resident) == []
    assert streamed["traffic"]["bytes_read"] > 0
