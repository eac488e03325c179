"""A handful of the programs of `parity_models.py`: models of transformers, at random, give the bits
of stock DeepSpeed with `device: "cpu"`.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from launch import differences  # where there is transformers
from parity_models import CASES, pairs

HANDFUL = ("llama", "t5", "mixtral", "llama, activations on the drive, overlap_step")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return pairs({name: CASES[name] for name in HANDFUL}, tmp_path_factory.mktemp("drive"))


@pytest.mark.processor
@pytest.mark.parametrize("name", HANDFUL)
def test_a_model_of_transformers_gives_the_same_bits(results, name):
    mine, reference = results[name]
    assert differences(mine, reference) == []
    assert mine["traffic"]["bytes_read"] > 0
