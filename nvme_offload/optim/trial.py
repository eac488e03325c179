"""`examine`: what an optimizer class keeps for a parameter, and what it looks at, found by a few steps over a few elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedError

_ELEMENTS = 64  # of a sample: whole vectors, also of its halves, since other code rounds the elements behind the last one
_STEPS = 3
_IN_MEMORY = ("step", "master")  # whatever their shapes: the one is a count, and the other is not the optimizer's
_TOLERANCE = 1e-4  # far above rounding, and far below what it does to leave out elements or parameters that are looked at

Make = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]


class Habits(NamedTuple):
    """states: those that have a value for every element, by key. eager: there are such before the first step.

    elementwise: no element's update depends on another one's, so that it does not matter which are in a tensor together.
    """

    states: Mapping[str, torch.dtype]
    eager: bool
    elementwise: bool


def examine(name: str, make: Make, dimensions: int, dtype: torch.dtype, device: torch.device) -> Habits:
    """Learn how the optimizers called *name* that *make* makes treat parameters of so many *dimensions*.

    Raises: UnsupportedError when they cannot step by gradients alone, or when one parameter's update depends on another's gradient.
    """
    samples = [_sample(_shape(dimensions), dtype, device, seed) for seed in (1, 2)]
    fresh = make([sample.clone() for sample in samples])
    eager = any(has_a_value_for_each(key, value, samples[0]) for state in fresh.state.values() for key, value in state.items())
    try:
        (together, state), (again, _) = (_train(make, samples) for _ in range(2))
        apart = [_train(make, [sample])[0][0] for sample in samples]
    except (TypeError, RuntimeError, AttributeError) as error:
        raise UnsupportedError(f"{name} cannot be used with NVMeOptimizer: a step over dense gradients fails: {error}") from error
    random = not _alike(together, again)
    if not random and not _alike(together, apart):
        raise UnsupportedError(f"{name} cannot be used with NVMeOptimizer, which updates parameters one after another: it looks at all of them at once")
    states = {key: value.dtype for key, value in state.items() if has_a_value_for_each(key, value, samples[0])}
    return Habits(states, eager, elementwise=not random and _elementwise(make, samples, together))


def has_a_value_for_each(key: str, value: Any, parameter: torch.Tensor) -> bool:
    """Whether the state *value*, called *key*, has an element for each of *parameter*: such states travel, all others stay in memory."""
    return torch.is_tensor(value) and value.dim() > 0 and value.shape == parameter.shape and value.device == parameter.device and key not in _IN_MEMORY


def raw_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """`step` of *optimizer* without the hooks that torch calls around every optimizer's: those are for the steps that a user makes."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def _elementwise(make: Make, samples: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether the same becomes of *samples* in halves, which are vectors as the pieces of parameters are."""
    try:
        halves, _ = _train(make, [half for sample in samples for half in torch.split(sample.view(-1), _ELEMENTS // 2)])
    except Exception:  # such as those of optimizers that take nothing but matrices
        return False
    return _alike([torch.cat([sample.view(-1) for sample in expected])], [torch.cat(halves)])


def _shape(dimensions: int) -> tuple[int, ...]:
    """Of a sample, with as many elements along each of the *dimensions* as along the others, or twice as many."""
    sizes = [1] * dimensions
    for doubling in range(_ELEMENTS.bit_length() - 1):
        sizes[doubling % dimensions] *= 2
    return tuple(sizes)


def _sample(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Numbers of several magnitudes and both signs."""
    steps = torch.arange(1, _ELEMENTS + 1, dtype=torch.float32) * seed
    return (torch.sin(steps * 1.7) * torch.exp(torch.cos(steps * 0.9) * 3)).view(shape).to(device, dtype)


def _train(make: Make, samples: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Mapping[str, Any]]:
    """Some steps over copies of *samples*: these, and the state of the first."""
    parameters = [sample.clone() for sample in samples]
    optimizer = make(parameters)
    for number in range(_STEPS):
        for parameter, sample in zip(parameters, samples, strict=True):
            parameter.grad = sample.cos() * 10.0 ** (number - 1)
        raw_step(optimizer)(optimizer)
    return parameters, optimizer.state[parameters[0]]


def _alike(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True) for one, other in zip(ones, others, strict=True))
