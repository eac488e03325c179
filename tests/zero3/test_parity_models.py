"""A handful of the programs of `parity_models.py`: models of transformers, at random, give the bits
of stock DeepSpeed with `device: "cpu"`.
"""

from __future__ import annotations

import importlib.util

import pytest
from launch import differences
from parity_models import CASES, pairs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
SLOW = ("t5", "mixtral", "llama, Accelerate")
HANDFUL = {  # and their steps
    "llama": 3,
    "t5": 3,
    "mixtral": 3,
    "llama, activations on the drive, overlap_step": 5,
    "llama, the Trainer, resumed": "4, resumed after 2",
    "llama, Accelerate": 8,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    """The results of those programs that the tests of this run are for."""
    names = [
        item.callspec.params["name"] for item in request.session.items if item.path == request.path
    ]
    return pairs({name: CASES[name] for name in names}, tmp_path_factory.mktemp("drive"))


@pytest.mark.processor
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                pytest.mark.outside(
                    program="DeepSpeed ZeRO-3, {name}",
                    reference='DeepSpeed with `"device": "cpu"`',
                    steps=steps,
                    ranks=1,
                ),
                *([pytest.mark.slow] if name in SLOW else []),
            ],
        )
        for name, steps in HANDFUL.items()
    ],
)
def test_a_model_of_transformers_gives_the_same_bits(results, name):
    mine, reference = results[name]
    assert differences(mine, reference) == []
    assert mine["traffic"]["bytes_read"] > 0 or name == "llama, Accelerate"  # all fits
