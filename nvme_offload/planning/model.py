"""`Model`: the sizes of a model, from a count, a Hugging Face config.json or a module. Nothing is
downloaded, and no weights are read.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import UsageError

_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMBT]?)", re.IGNORECASE)
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_USUAL_RATIO = 128  # width over depth of decoders of 1 to 70 billion parameters
_USUAL_VOCABULARY = 32_000

# Alternative keys of configs.
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
}

_SIZES = {
    *(name for names in _NAMES.values() for name in names),
    *("intermediate_size", "num_key_value_heads", "head_dim", "num_local_experts"),
    *("n_inner", "ffn_dim", "n_positions", "max_position_embeddings", "word_embed_proj_dim"),
}

Tensors = tuple[int, ...]  # sizes of the tensors of one module, without its submodules


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes in elements. Shared tensors count once.

    Attributes
    ----------
    parameters : int
        Total.
    largest_layer : int
        Parameters of one module without its submodules, which ZeRO-3 gathers together.
    largest_parameter : int
        Of one tensor.
    layers, hidden, vocabulary : int or None
        None if unknown.
    source : str
        Description of the source.
    assumed : bool
        Whether everything but the count is assumed.
    idle : int
        Parameters of experts that a token does not use.
    trainable : int or None
        Parameters that are trained; None for all.
    """

    parameters: int
    largest_layer: int
    largest_parameter: int
    layers: int | None = None
    hidden: int | None = None
    vocabulary: int | None = None
    source: str = ""
    assumed: bool = False
    idle: int = 0
    trainable: int | None = None

    @property
    def active(self) -> int:
        """Parameters that compute for a token."""
        return self.parameters - self.idle

    @property
    def trained(self) -> int:
        """Parameters with gradients and optimizer states."""
        return self.parameters if self.trainable is None else self.trainable

    @property
    def block(self) -> int:
        """Parameters of a layer of the usual decoders, or of the largest module."""
        return max(self.largest_layer, self.parameters // (self.layers or 1))


def of_count(text: str | int) -> Model:
    """Size a decoder of the usual shape by its number of parameters.

    Parameters
    ----------
    text : str or int
        "7B", "1.5B", "350M" or a number. K, M, B and T are powers of 1000; case does not matter.

    Returns
    -------
    Model
        With *assumed* set.

    Raises
    ------
    UsageError
        *text* is not a number of parameters, or below 1.
    """
    match = _COUNT.fullmatch(str(text).strip())
    count = round(float(match[1]) * _FACTORS[match[2].upper()]) if match else 0
    if count < 1:
        raise UsageError(
            f"{text!r} is not a number of parameters; write for example 7B, 350M or 1300000000"
        )
    hidden = max(round((count * _USUAL_RATIO / 12) ** (1 / 3)), 1)  # layers of 12 hidden**2
    largest = min(count, max(4 * hidden**2, _USUAL_VOCABULARY * hidden))
    layers = max(hidden // _USUAL_RATIO, 1)
    shape = layers, hidden, _USUAL_VOCABULARY
    return Model(count, largest, largest, *shape, f"{text} parameters", assumed=True)


def of_module(module: Any) -> Model:
    """Size a live module.

    Parameters
    ----------
    module : torch.nn.Module
        Its parameters may be anywhere: on the meta device, or partitioned by ZeRO-3.

    Returns
    -------
    Model
        The shape is known where the module has a Hugging Face config.

    Raises
    ------
    UsageError
        *module* has no parameters.
    """
    sizes = {id(parameter): _numel(parameter) for parameter in module.parameters()}
    if not sizes:
        raise UsageError(f"{type(module).__name__} has no parameters")
    trained = sum(_numel(parameter) for parameter in module.parameters() if parameter.requires_grad)
    config: Any = getattr(module, "config", None)
    described = config.to_dict() if hasattr(config, "to_dict") else {}
    described = described if isinstance(described, dict) else {}
    named = module.named_parameters()
    experts = [sizes[id(parameter)] for name, parameter in named if "experts" in name.split(".")]
    total = sum(sizes.values())
    return Model(
        total,
        max(sum(map(_numel, each.parameters(recurse=False))) for each in module.modules()),
        max(sizes.values()),
        *_shape(described),
        source=type(module).__name__,
        idle=_idle(described, sum(experts)),
        trainable=trained if trained < total else None,
    )


def of_config(path: str | Path, build: Callable[[Path, str], Any] | None = None) -> Model:
    """Size the model that a Hugging Face config.json describes.

    The usual families are counted by their formulas.

    Parameters
    ----------
    path : str or Path
        The file, or the directory with it.
    build : callable, optional
        Makes a module of another family, from the path of the file and the name of the family. Its
        exceptions are passed on.

    Returns
    -------
    Model
        With the path as its *source*.

    Raises
    ------
    UsageError
        The file does not exist, it is not a model config, or its family is unknown and *build* is
        missing.
    OSError
        The file cannot be read.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{path} does not exist; give a Hugging Face config.json, or the number of parameters"
        ) from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise UsageError(f"{path} is not JSON: it is nested too deeply") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UsageError(
            f'{path} has no "model_type": it is not a Hugging Face model config; give the number of parameters instead'
        )
    family = _FAMILIES.get(config["model_type"]) if _has_usual_head(config) else None
    if family is None:
        if build is None:
            raise UsageError(
                f"{path} is of the family {config['model_type']!r}, whose size is not known here: give the number of parameters, or the module. "
                f"Known are causal language models of {', '.join(sorted(_FAMILIES))}"
            )
        return dataclasses.replace(of_module(build(path, config["model_type"])), source=str(path))
    for name in sorted(_SIZES & config.keys()):
        if config[name] is not None and (type(config[name]) is not int or config[name] < 1):
            raise UsageError(f"{path}: {name} is {config[name]!r}; it is a whole number above 0")
    try:
        modules = list(family(config))
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise UsageError(f"{path} lacks a key of {config['model_type']} models: {error}") from None
    # a layer's experts are one module of two tensors
    experts = {each for _, each in modules if config["model_type"] == "mixtral" and len(each) == 2}
    return Model(
        sum(count * sum(tensors) for count, tensors in modules),
        max(sum(tensors) for _, tensors in modules),
        max(max(tensors) for _, tensors in modules),
        *_shape(config),
        source=str(path),
        idle=_idle(config, sum(count * sum(each) for count, each in modules if each in experts)),
    )


def _has_usual_head(config: Mapping[str, Any]) -> bool:
    """Whether the config is of a decoder with the head of a language model, as the formulas assume."""
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else "CausalLM"
    return name.endswith(("CausalLM", "LMHeadModel"))


def _idle(config: Mapping[str, Any], experts: int) -> int:
    """The number of the *experts* parameters that a token does not use."""
    config = _text_part(config)
    used = _first(config, "num_experts_per_tok", "moe_top_k", "top_k", "moe_k")
    of = _first(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if config.get("model_type") == "mixtral":
        used, of = used or 2, of or 8
    if not (used and of) or used >= of:
        return 0
    return experts - experts * used // of


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    """The first positive whole number in *config* under *names*."""
    return next(
        (config[name] for name in names if type(config.get(name)) is int and config[name] > 0), None
    )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """*config*, or its language model's part if it describes several models."""
    for name in ("text_config", "llm_config", "language_config", "decoder"):
        part = config.get(name)
        if isinstance(part, Mapping) and _get(config, "hidden", None) is None:
            return part
    return config


def _numel(parameter: Any) -> int:
    # a parameter partitioned by ZeRO-3 is empty
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def _shape(config: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    config = _text_part(config)
    layers, hidden, vocabulary = (
        _first(config, *_NAMES[key]) for key in ("layers", "hidden", "vocabulary")
    )
    return layers, hidden, vocabulary


def _get(config: Mapping[str, Any], key: str, *default: Any) -> Any:
    for name in _NAMES[key]:
        if config.get(name) is not None:
            return config[name]
    if default:
        return default[0]
    raise KeyError(_NAMES[key][0])


# Families: (how many, tensors) of each kind of module.


def _linear(inputs: int, outputs: int, bias: bool = False) -> Tensors:
    return (inputs * outputs, outputs) if bias else (inputs * outputs,)


def _llama(config: Mapping[str, Any]) -> Iterator[tuple[int, Tensors]]:
    """Decoders with gated layers: RMS norms, bias only in the attention of some, and shared keys and
    values for groups of heads.
    """
    kind = config["model_type"]
    hidden, layers, heads, vocabulary = (
        _get(config, key) for key in ("hidden", "layers", "heads", "vocabulary")
    )
    kv_heads = config.get("num_key_value_heads") or (8 if kind in ("mistral", "mixtral") else heads)
    head = config.get("head_dim") or (256 if kind == "gemma" else hidden // heads)
    if head < 1:
        raise KeyError("a num_attention_heads of at most hidden_size")
    bias = bool(config.get("attention_bias", kind == "qwen2"))
    output_bias = bias and kind != "qwen2"
    inner = config["intermediate_size"]
    tied = config.get("tie_word_embeddings", kind == "gemma")
    yield (1 if tied else 2), _linear(vocabulary, hidden)
    if kind == "phi3":  # the same tensors in larger ones
        yield layers, _linear(hidden, (heads + 2 * kv_heads) * head)
        yield layers, _linear(hidden, 2 * inner)
    else:
        yield layers, _linear(hidden, heads * head, bias)
        yield 2 * layers, _linear(hidden, kv_heads * head, bias)
        if kind != "mixtral":
            yield 2 * layers, _linear(hidden, inner, bool(config.get("mlp_bias")))
    yield layers, _linear(heads * head, hidden, output_bias)
    yield 2 * layers + 1, (hidden,)
    if kind == "mixtral":  # the experts of a layer are gathered together
        experts = config.get("num_local_experts", 8)
        yield layers, (experts * 2 * inner * hidden, experts * inner * hidden)
        yield layers, _linear(hidden, experts)
    else:
        yield layers, _linear(inner, hidden, bool(config.get("mlp_bias")))
    if kind == "qwen3":
        yield 2 * layers, (head,)


def _gpt(config: Mapping[str, Any]) -> Iterator[tuple[int, Tensors]]:
    """Decoders like GPT-2: biases and layer norms everywhere, an inner width of usually four times the
    outer one.
    """
    kind = config["model_type"]
    hidden, layers, vocabulary = (_get(config, key) for key in ("hidden", "layers", "vocabulary"))
    inner = config.get("n_inner") or config.get("ffn_dim") or config.get("intermediate_size")
    inner = inner or 4 * hidden
    positions = 0
    if kind == "gpt2":
        positions = config.get("n_positions", 1024)
    elif kind == "opt":
        positions = config.get("max_position_embeddings", 2048) + 2
    if kind == "opt" and config.get("word_embed_proj_dim", hidden) != hidden:
        raise KeyError("word_embed_proj_dim other than hidden_size, which is not known here")
    tied = config.get("tie_word_embeddings", kind != "gpt_neox")
    yield (1 if tied else 2), _linear(vocabulary, hidden)
    if positions:
        yield 1, _linear(positions, hidden)
    yield layers, _linear(hidden, hidden, bias=True)
    if kind == "opt":
        yield 3 * layers, _linear(hidden, hidden, bias=True)
    else:
        yield layers, _linear(hidden, 3 * hidden, bias=True)
    yield layers, _linear(hidden, inner, bias=True)
    yield layers, _linear(inner, hidden, bias=True)
    yield 2 * layers + (2 if kind == "bloom" else 1), (hidden, hidden)


_FAMILIES: dict[str, Callable[[Mapping[str, Any]], Iterator[tuple[int, Tensors]]]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "phi3"), _llama),
    **dict.fromkeys(("gpt2", "opt", "gpt_neox", "bloom"), _gpt),
}
