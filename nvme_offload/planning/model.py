"""`Model`: the sizes of a model, from a count or a module."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from ..errors import UsageError

_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMBT]?)", re.IGNORECASE)
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_USUAL_RATIO = 128  # width over depth of decoders of 1 to 70 billion parameters
_USUAL_VOCABULARY = 32_000


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes in elements. Shared tensors count once.

    Attributes
    ----------
    parameters, largest_layer, largest_parameter : int
        In total; of one module without its submodules, which ZeRO-3 gathers together; of one tensor.
    layers, hidden, vocabulary : int or None
        None if unknown.
    source, assumed : str, bool
        Description of the source; whether everything but the count is assumed.
    idle, trainable : int, int or None
        Parameters of experts that a token does not use; parameters that are trained, None for all.
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
    """Size a decoder of the usual shape by its number of parameters, *text*: "7B", "1.5B", "350M"
    or a number. K, M, B and T are powers of 1000; case does not matter. Raises: UsageError.
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
    """Size *module*, a live torch.nn.Module whose parameters may be anywhere: on the meta device,
    or partitioned by ZeRO-3. The shape is known if it has a Hugging Face config. Raises: UsageError
    if it has no parameters.
    """
    sizes = {id(parameter): _numel(parameter) for parameter in module.parameters()}
    if not sizes:
        raise UsageError(f"{type(module).__name__} has no parameters")
    trained = sum(_numel(parameter) for parameter in module.parameters() if parameter.requires_grad)
    config: Any = getattr(module, "config", None)
    if hasattr(config, "get_text_config"):  # of the language model among several
        config = config.get_text_config(decoder=True)
    named = module.named_parameters()
    experts = [sizes[id(parameter)] for name, parameter in named if "experts" in name.split(".")]
    total = sum(sizes.values())
    return Model(
        total,
        max(sum(map(_numel, each.parameters(recurse=False))) for each in module.modules()),
        max(sizes.values()),
        _first(config, "num_hidden_layers"),
        _first(config, "hidden_size"),
        _first(config, "vocab_size"),
        source=type(module).__name__,
        idle=_idle(config, sum(experts)),
        trainable=trained if trained < total else None,
    )


def _idle(config: Any, experts: int) -> int:
    """The number of the *experts* parameters that a token does not use."""
    used = _first(config, "num_experts_per_tok", "moe_top_k", "top_k", "moe_k")
    of = _first(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if not (used and of) or used >= of:
        return 0
    return experts - experts * used // of


def _first(config: Any, *names: str) -> int | None:
    """The first of the attributes *names* that is a positive whole number."""
    values = (_value(config, name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # transformers' error for an attribute that differs by layer
        return None


def _numel(parameter: Any) -> int:
    # a parameter partitioned by ZeRO-3 is empty
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())
