"""`admit`: which parameters can be taken, and how they are put together into bundles."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import UnsupportedError, UsageError
from ..state_formats import StateFormat
from .budget import Budget, beside_bytes, most_elements
from .bundles import Bundle, Weight, cut, is_distributed, local, master_dtype
from .trial import Habits, examine

_SAMPLE = 1 << 20  # elements, whose bytes tell those of one
_TRIAL_RATE = 0.1  # a learning rate of zero would show nothing


class Admission:
    """Makes bundles of the parameters of groups. *make* makes optimizers, which are called *name*, with options; *prefix* is of the bundles' names.

    Raises: UsageError and UnsupportedError for parameters and optimizers that cannot be taken.
    """

    def __init__(
        self, name: str, make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], state_format: StateFormat, budget: Budget, prefix: str
    ) -> None:
        self._name = name
        self._make = make
        self._format = state_format
        self._budget = budget
        self._prefix = prefix

    def admit(self, index: int, parameters: Sequence[torch.Tensor], options: Mapping[str, Any], number: int) -> tuple[list[Weight], list[Bundle]]:
        """The *parameters* of the group of *index*, and their bundles, numbered from *number* on."""
        if len(set(parameters)) < len(parameters):
            raise UsageError("a parameter is more than once in a group: each may be there once")
        for parameter in parameters:
            _check(parameter)
        weights: list[Weight] = []
        bundles: list[Bundle] = []
        for kind, most in self._kinds(parameters, options):
            tensors = [local(weight.parameter) for weight in kind]
            divisible = [tensor.is_contiguous() and weight.habits.elementwise for tensor, weight in zip(tensors, kind, strict=True)]
            for parts in cut([tensor.numel() for tensor in tensors], most, divisible) if most else ():
                own = number + len(bundles)
                bundle = Bundle(f"{self._prefix}/{own}", own, index, tensors[0].dtype, tensors[0].device, kind[0].habits)
                for which, start, stop in parts:
                    bundle.add(kind[which], start, stop)
                bundles.append(bundle)
            weights += kind
        return weights, bundles

    def required_bytes(self, bundles: Sequence[Bundle]) -> int:
        """Bytes of the values of *bundles*, for which the budget is divided."""
        layouts = [self._format.layout(bundle.numel, bundle.habits.states, bundle.dtype, self._name) for bundle in bundles]
        beside = [bundle.numel * beside_bytes(self._format, bundle.habits, bundle.dtype) for bundle in bundles if bundle.device.type == "cpu"]
        return self._budget.divide([layout.nbytes for layout in layouts], beside)

    def _kinds(self, parameters: Sequence[torch.Tensor], options: Mapping[str, Any]) -> Iterator[tuple[list[Weight], int]]:
        """Consecutive *parameters* of one kind, with the most elements that a bundle of such should have."""
        dimensions = sorted({max(parameter.dim(), 1) for parameter in parameters})
        habits: dict[tuple[torch.dtype, torch.device], Habits] = {}
        for (dtype, device, _), run in itertools.groupby(parameters, lambda parameter: (parameter.dtype, local(parameter).device, parameter.requires_grad)):
            if not dtype.is_floating_point and not dtype.is_complex:  # what is quantized has no gradients, ever
                yield [Weight(parameter, Habits({}, eager=False, elementwise=True)) for parameter in run], 0
                continue
            key = master_dtype(dtype), device
            if key not in habits:
                each = [self._examine(options, number, *key) for number in dimensions]
                states = {name: dtype for one in each for name, dtype in one.states.items()}
                habits[key] = Habits(states, any(one.eager for one in each), all(one.elementwise for one in each))
            found = habits[key]
            weights = [Weight(parameter, found) for parameter in run]
            if not found.elementwise and any(is_cut(weight.parameter) for weight in weights):
                raise UnsupportedError(
                    f"{self._name} looks at whole parameters, and the elements of these are on several ranks, each of which updates its own: "
                    "use an optimizer that treats every element by itself, such as AdamW"
                )
            value_bytes = self._format.layout(_SAMPLE, found.states, dtype, self._name).nbytes / _SAMPLE
            yield weights, most_elements(self._budget.cap_bytes, value_bytes, beside_bytes(self._format, found, dtype))

    def _examine(self, options: Mapping[str, Any], dimensions: int, dtype: torch.dtype, device: torch.device) -> Habits:
        tried = dict(options)
        if isinstance(tried.get("lr"), int | float):
            tried["lr"] = _TRIAL_RATE

        def make(samples: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
            return self._make([{**tried, "params": list(samples)}])

        return examine(self._name, make, dimensions, dtype, device)


def is_cut(parameter: torch.Tensor) -> bool:
    """Whether several ranks have elements of *parameter* that others do not have."""
    return is_distributed(parameter) and any(placement.is_shard() for placement in parameter.placements)  # type: ignore[attr-defined]


def _check(parameter: torch.Tensor) -> None:
    device = local(parameter).device
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"parameters must be on the CPU or on a CUDA device, not on {device}: move the model before the optimizer is made")
    if parameter.layout is not torch.strided:
        raise UnsupportedError(f"parameters must be dense, not {parameter.layout}")
