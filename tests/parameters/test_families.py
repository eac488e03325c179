"""Models of transformers compute the same bits with streamed parameters as in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from covering import covering
from families import FAMILIES, build

from nvme_offload import Offload
from nvme_offload.parameters import setup
from nvme_offload.parameters.buckets import Division

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns


@covering(family=list(FAMILIES), checkpointing=["none", "other", "reentrant"], frozen=[False, True])
def test_losses_and_gradients_equal_those_in_memory(
    make: Callable[..., Offload],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    checkpointing: str,
    frozen: bool,
) -> None:
    """In each of two steps, with about one decoder layer on the device at a time."""
    monkeypatch.setattr(setup, "DIVISION", Division(16 << 10, small_bytes=0, trainable_share=0))
    torch.manual_seed(0)
    model, inputs = build(family)
    model.train()
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("bias" in name or "norm" in name.lower() or "ln" in name)
        if checkpointing == "reentrant" and family not in ("vit", "whisper"):
            model.enable_input_require_grads()
    if checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    in_memory = copy.deepcopy(model)
    make().parameters(model, "cpu")
    for _ in range(2):
        expected, loss = in_memory(**inputs).loss, model(**inputs).loss
        expected.backward()
        loss.backward()
        assert torch.equal(loss, expected)
        for one, other in zip(model.parameters(), in_memory.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad, other.grad)


def test_generation_gives_the_tokens_of_the_model_in_memory(
    make: Callable[..., Offload], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "DIVISION", Division(16 << 10, small_bytes=0, trainable_share=0))
    torch.manual_seed(0)
    model, inputs = build("llama")
    in_memory = copy.deepcopy(model)
    make().parameters(model, "cpu")
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = in_memory.generate(inputs["input_ids"], **settings)
    assert torch.equal(model.generate(inputs["input_ids"], **settings), expected)
