"""PEFT and the Trainer of transformers with streamed parameters give the bits of the run in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from torch import nn

from nvme_offload import Offload
from nvme_offload.errors import UsageError
from nvme_offload.parameters import setup
from nvme_offload.parameters.buckets import Division

Make = Callable[..., Offload]

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns


def _llama() -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    model, inputs = build("llama")
    return model, inputs["input_ids"]


def test_adapters_of_peft_train_over_a_base_that_streams(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(setup, "DIVISION", Division(16 << 10, small_bytes=200))
    base, tokens = _llama()
    model = peft.get_peft_model(base, peft.LoraConfig(r=1, target_modules=["q_proj"]))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    in_memory = copy.deepcopy(model)
    make().parameters(model, "cpu")
    assert _losses(model, tokens) == _losses(in_memory, tokens)
    for one, other in zip(model.parameters(), in_memory.parameters(), strict=True):
        assert torch.equal(one, other)


def test_adapters_of_peft_are_merged_into_a_model_with_tied_weights(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(setup, "DIVISION", Division(16 << 10, small_bytes=200))
    base, tokens = _llama()
    base.lm_head.weight = base.model.embed_tokens.weight
    base.config.tie_word_embeddings = True
    adapters = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, adapters)
    in_memory = copy.deepcopy(model)
    make().parameters(model, "cpu")
    merged, expected = (one.merge_and_unload() for one in (model, in_memory))
    with torch.no_grad():
        assert torch.equal(merged(tokens).logits, expected(tokens).logits)
    for one, other in zip(merged.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def test_adapters_of_peft_train_over_a_base_from_files(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft, accelerate = pytest.importorskip("peft"), pytest.importorskip("accelerate")
    monkeypatch.setattr(setup, "DIVISION", Division(16 << 10, small_bytes=200))
    in_memory, tokens = _llama()
    in_memory.save_pretrained(tmp_path / "base")
    with accelerate.init_empty_weights():
        model = type(in_memory)(in_memory.config)
    adapters = peft.LoraConfig(
        r=1,
        target_modules=["q_proj"],
        modules_to_save=["lm_head"],  # get_peft_model copies the module
        init_lora_weights="gaussian",
    )
    wrapped = peft.get_peft_model(copy.deepcopy(model), adapters)
    with pytest.raises(UsageError, match="call get_peft_model after parameters"):
        make().parameters(wrapped, "cpu", weights=tmp_path / "base")
    make().parameters(model.requires_grad_(False), "cpu", weights=tmp_path / "base")
    trained = []
    for each in (model, in_memory):
        torch.manual_seed(0)
        trained.append(peft.get_peft_model(each, adapters).train())
    assert _losses(trained[0], tokens) == _losses(trained[1], tokens)
    for one, other in zip(*(each.parameters() for each in trained), strict=True):
        assert torch.equal(one, other)


def _losses(model: nn.Module, tokens: torch.Tensor) -> list[float]:
    """Train the adapters of *model* for three steps; returns the losses."""
    trained = [one for one in model.parameters() if one.requires_grad]
    assert all(type(one) is nn.Parameter for one in trained)
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses: list[float] = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_the_trainer_of_transformers_trains_and_saves(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hf = pytest.importorskip("transformers")
    monkeypatch.setattr(setup, "DIVISION", Division(16 << 10, small_bytes=0, trainable_share=0))
    model, tokens = _llama()
    in_memory, offload = copy.deepcopy(model), make("6MB")
    offload.parameters(model, "cpu")
    data: Any = [{"input_ids": one, "labels": one} for one in tokens.repeat(4, 1)]
    for each in (model, in_memory):
        optimizer: torch.optim.Optimizer = (
            offload.optimizer(each.parameters(), lr=1e-2)
            if each is model
            else torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=False)
        )
        settings = hf.TrainingArguments(
            str(tmp_path / "out"),
            per_device_train_batch_size=2,
            max_steps=3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            gradient_checkpointing=True,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        trainer = hf.Trainer(each, settings, train_dataset=data, optimizers=(optimizer, schedule))
        trainer.train()
        if each is model:
            trainer.save_model(str(tmp_path / "saved"))
    saved = type(model).from_pretrained(tmp_path / "saved")
    for one, other, third in zip(
        model.parameters(), in_memory.parameters(), saved.parameters(), strict=True
    ):
        assert torch.equal(one, other)
        assert torch.equal(one, third)
