"""Models and loops of others, for `training.py` and `parity_models.py`: transformers' by their
configurations, tiny, at random; PEFT, the Trainer, Accelerate.

A model takes one tensor and returns one, so that the code that trains the models of `models.py` trains these;
what else the model wants is made of that tensor.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

WORDS = 96
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
FEWER_HEADS = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


class Outside(nn.Module):
    """*model*, which *call* calls with the result of `inputs`: *words*, or pictures of so many
    *pixels* to a side.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Callable[[nn.Module, torch.Tensor], torch.Tensor],
        words: int = 8,
        pixels: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self._words, self._pixels = words, pixels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._call(self.model, x)

    def inputs(self, generator: torch.Generator) -> torch.Tensor:
        if self._pixels:
            return torch.randn(2, 3, self._pixels, self._pixels, generator=generator)
        return torch.randint(3, WORDS - 1, (2, self._words), generator=generator)


def _logits(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(input_ids=x, use_cache=False).logits


def _language_model(name: str, **options: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**options, **ENDS)
    return getattr(transformers, f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel")(
        config
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    return Outside(
        T5ForConditionalGeneration(config),
        lambda model, x: model(input_ids=x, decoder_input_ids=x.flip(1), use_cache=False).logits,
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return Outside(
        BertForMaskedLM(BertConfig(**SIZES, max_position_embeddings=64)),
        lambda model, x: model(input_ids=x).logits,
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    config = ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=5)
    return Outside(
        ViTForImageClassification(config), lambda model, x: model(pixel_values=x).logits, pixels=16
    )


def _llava() -> nn.Module:
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    seen = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**seen, image_size=16, patch_size=8),
        text_config=LlamaConfig(**FEWER_HEADS, **ENDS),
        image_token_index=WORDS - 1,
        vision_feature_layer=-1,
    )

    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        words = torch.arange(3, 11).repeat(2, 1)
        words[:, 1:5] = WORDS - 1  # four patches
        return model(input_ids=words.to(x.device), pixel_values=x, use_cache=False).logits

    return Outside(LlavaForConditionalGeneration(config), call, pixels=16)


def _llama() -> nn.Module:
    return Outside(_language_model("Llama", **FEWER_HEADS), _logits)


def _lora() -> nn.Module:
    """Llama that is not trained, with adapters that are."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        _language_model("Llama", **FEWER_HEADS),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0),
    )
    return Outside(model, _logits)


class Distilled(Outside):
    """Llama that learns from another one, whose layers are not trained and part of the model."""

    def __init__(self) -> None:
        super().__init__(_language_model("Llama", **FEWER_HEADS), _logits)
        self.teacher = _language_model("Llama", **FEWER_HEADS).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            reported = _logits(self.teacher, x)
        return super().forward(x) - reported


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "gpt2": lambda: Outside(
        _language_model("GPT2", vocab_size=WORDS, n_embd=32, n_layer=3, n_head=4, n_positions=64),
        _logits,
    ),
    "mixtral": lambda: Outside(_language_model("Mixtral", **FEWER_HEADS, **EXPERTS), _logits),
    "qwen2-moe": lambda: Outside(
        _language_model(
            "Qwen2Moe",
            **FEWER_HEADS,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        _logits,
    ),
    "mamba": lambda: Outside(
        _language_model(
            "Mamba", vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=4
        ),
        _logits,
    ),
    "t5": _t5,
    "bert": _bert,
    "vit": _vit,
    "llava": _llava,
    "lora": _lora,
    "distilled": Distilled,
}


# Loops: each receives the `Training` and the engine after every step, and returns its observations.


def generate(engine: Any, kept: dict[str, Any]) -> list[torch.Tensor]:
    """Words that the model goes on with, as people look at them in mid-training."""
    engine.eval()
    with torch.no_grad():
        found = engine.module.model.generate(
            torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False, synced_gpus=True
        )
    engine.train()
    return [found]


def average(engine: Any, kept: dict[str, Any]) -> list[torch.Tensor]:
    """An exponential moving average of the weights, gathered module by module."""
    from deepspeed import zero

    for name, parameter in engine.module.named_parameters():
        with zero.GatheredParameters([parameter]):
            kept[name] = (
                parameter.data.float().clone()
                if name not in kept
                else kept[name].lerp(parameter.data.float(), 0.1)
            )
    return list(kept.values())


LOOPS = {"generate": generate, "average": average}


# Programs that make their own engine: each is given the configuration, where to write, and its
# rank's number of steps.


def with_trainer(config: dict[str, Any], place: Path) -> dict[str, Any]:
    """The Trainer of transformers, which is made anew after half of the steps and goes on from its
    checkpoint.
    """
    from transformers import Trainer, TrainingArguments

    data = [
        {"input_ids": row, "labels": row}
        for row in (torch.arange(8) + 3 * number for number in range(16))
        for row in [row % 90 + 3]
    ]
    losses = []
    for steps, resumed in ((2, None), (4, str(place / "checkpoint-2"))):
        arguments = TrainingArguments(
            output_dir=str(place),
            deepspeed=copy.deepcopy(config),
            max_steps=steps,
            save_steps=2,
            logging_steps=1,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            bf16=True,
            use_cpu=True,
            report_to=[],
            seed=3,
            disable_tqdm=True,
        )
        torch.manual_seed(0)
        trainer = Trainer(
            model=_language_model("Llama", **FEWER_HEADS), args=arguments, train_dataset=data
        )
        trainer.train(resume_from_checkpoint=resumed)
        losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"engine": trainer.model_wrapped, "losses": losses}


def with_accelerate(config: dict[str, Any], place: Path) -> dict[str, Any]:
    """Accelerate's loop, with its accumulation and clipping."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # of the Trainer that was here before
    # as its launcher says it; without, a processor alone is trained without DeepSpeed
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=copy.deepcopy(config)))
    torch.manual_seed(0)
    model = _language_model("Llama", **FEWER_HEADS)
    loader = torch.utils.data.DataLoader(
        [torch.arange(8) + 3 + number for number in range(16)], batch_size=2
    )
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader
    )
    losses = []
    for words in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=words, labels=words).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return {"engine": model, "losses": losses}


def with_activations_offloaded(config: dict[str, Any], place: Path) -> dict[str, Any]:
    """What forward passes save goes to the same drive, by this package; by stock it stays."""
    import deepspeed

    torch.manual_seed(0)
    model = _language_model("Llama", **FEWER_HEADS)
    offload: Any = contextlib.nullcontext()
    if "nvme_offload" in config:
        from nvme_offload import save_on_nvme

        offload = save_on_nvme(place, min_bytes=64, host_memory=4096)
    engine, *_ = deepspeed.initialize(
        model=model, config=config, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    losses = []
    for step in range(5):
        words = (torch.arange(24).view(2, 12) * (step + 3)) % 90 + 3
        with offload:
            loss = engine(input_ids=words, labels=words).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if "nvme_offload" in config:
        assert offload.stats().bytes_read > 0
        offload.close()
    return {"engine": engine, "losses": losses}


PROGRAMS = {
    "trainer": with_trainer,
    "accelerate": with_accelerate,
    "activations": with_activations_offloaded,
}
