"""Models by name or by a Hugging Face config.json: all their tensors, in order, and modules that
train. Nothing is downloaded.

A narrow form of a model has every tensor of it, under the same name, and fits two cores. It keeps
the costs that grow with the number of tensors.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from nvme_offload.errors import UsageError

from .plan import read

# The parts of the models' config.json that determine tensors.
CONFIGS: dict[str, dict[str, Any]] = read(Path(__file__).parent / "plans" / "models.toml", dict)

_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head")
_WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "n_inner",
    "ffn_dim",
)
# keys of a config.json that are not passed to `AutoConfig.for_model`
_NO_SHAPE = (
    "model_type",
    "architectures",
    "auto_map",
    "torch_dtype",
    "dtype",
    "quantization_config",
)
_HEAD_WIDTH = 8  # of a narrow form, at least
_SMALLEST_VOCABULARY = 64


class Tensor(NamedTuple):
    """A parameter of a model."""

    name: str
    shape: tuple[int, ...]
    elements: int


class Expert(NamedTuple):
    """The expert that a tensor belongs to: its layer and its number."""

    layer: str
    number: int


def config_of(name: str, width: int | None = None) -> dict[str, Any]:
    """The configuration of the model *name*, or of a config.json, or directory with one, at that
    path; of its narrow form with *width*.

    Raises: UsageError for an unknown model, and where it has no narrow form.
    """
    config = CONFIGS.get(name)
    if config is None:
        path = Path(name)
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{name!r} is none of {', '.join(CONFIGS)}, and no config.json: {error}"
            ) from None
        if not isinstance(config, dict) or "model_type" not in config:
            raise UsageError(f'{path} has no "model_type": it is not a Hugging Face model config')
    return dict(config) if width is None else narrowed(config, width)


def narrowed(config: dict[str, Any], width: int) -> dict[str, Any]:
    """The narrow form of *config*: as many layers, experts and tensors, with hidden size *width*
    and the rest in proportion.

    Raises: UsageError where the hidden size is unknown, or *width* is not a multiple of the least
    head size.
    """
    hidden = next((key for key in _HIDDEN if key in config), None)
    if hidden is None or width < _HEAD_WIDTH or width % _HEAD_WIDTH or width > config[hidden]:
        raise UsageError(
            f"this model cannot be narrowed to a width of {width}: give a multiple of {_HEAD_WIDTH}, at most its own width"
        )
    share = width / config[hidden]
    small = {
        **config,
        hidden: width,
        "vocab_size": max(int(config["vocab_size"] * share), _SMALLEST_VOCABULARY),
    }
    heads_key = next(key for key in _HEADS if key in config)
    heads = next(
        count
        for count in range(min(config[heads_key], width // _HEAD_WIDTH), 0, -1)
        if width % (count * 2) == 0
    )
    small[heads_key] = heads
    if "num_key_value_heads" in config:
        groups = max(config[heads_key] // config["num_key_value_heads"], 1)
        small["num_key_value_heads"] = next(
            count for count in range(max(heads // groups, 1), 0, -1) if heads % count == 0
        )
    if "head_dim" in config:
        small["head_dim"] = width // heads
    for key in _WIDTHS:
        if config.get(key):
            small[key] = max(int(config[key] * share) // _HEAD_WIDTH, 1) * _HEAD_WIDTH
    return small


def build(config: dict[str, Any]) -> nn.Module:
    """The causal language model of *config*, with random weights on the current default device."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    described = {key: value for key, value in config.items() if key not in _NO_SHAPE}
    try:
        made = transformers.AutoConfig.for_model(config["model_type"], **described)
        made.use_cache = False
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"this transformers has no causal language model of the family {config['model_type']!r}: {error}"
        ) from None
    return model


def tensors(config: dict[str, Any]) -> list[Tensor]:
    """Every parameter of the model in order, shared ones once. The model is made on the meta device
    and takes no memory.
    """
    with torch.device("meta"):
        model = build(config)
    return [
        Tensor(name, tuple(parameter.shape), parameter.numel())
        for name, parameter in model.named_parameters()
    ]


def split_experts(found: list[Tensor], experts: int) -> Iterator[tuple[Tensor, Expert | None]]:
    """Split the tensors of *found* that hold all *experts* of a layer, one tensor per expert; with
    the expert of each.

    A layer that uses eight of 128 experts need not read the others if each is a separate value.
    """
    for tensor in found:
        if experts > 1 and ".experts." in tensor.name and tensor.shape[0] == experts:
            layer = tensor.name.partition(".experts.")[0]
            for number in range(experts):
                yield (
                    Tensor(
                        f"{tensor.name}[{number}]", tensor.shape[1:], tensor.elements // experts
                    ),
                    Expert(layer, number),
                )
        else:
            yield tensor, None
