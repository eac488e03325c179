"""`examine`: what an optimizer keeps for a parameter, and whether its parameters and their elements
may be updated apart.

`NVMeOptimizer` and ZeRO-3 both ask here. torch's and DeepSpeed's own classes are known. Any other
is tried: the same steps are made with all parameters together, one after another, and in parts, as
the buckets of `NVMeOptimizer` are. What is the same to the last bit at every step may be done
apart, and what is not is never done.

The trial has the user's own arguments and a learning rate that moves. Its gradients go down a
slope, are random, orthogonal to the weights and along them, of several scales, and absent at times.
It is long enough for the usual warm-ups, and its samples are large enough for the usual least
sizes. Random numbers are the same each time, so that an optimizer that draws some is judged as any
other.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedError
from .tree import Key, content, is_for_each, tensors, top, travelling

# elements: parameters are cut at multiples of it, in the trial as in training, since vector code
# rounds the last elements otherwise
UNIT = 1024

# more than the warm-up of RAdam, the periods of Lookahead and of SOAP, the history of AdaShift
_STEPS = 40
# of these go down a slope, as only then those that measure the way take notice; the others go all
# ways
_DESCENT = 16
_FEWEST_STEPS = 12  # of a trial that ends early, because weights are no longer finite
_KNOWN_STEPS = 3  # of a class that is known: for its states alone
_RATE = 1e-3  # in place of a learning rate of zero, which would show nothing
_RATES = (1.0, 0.5, 2.0, 1.0, 0.1)
_SCALES = (1.0, 1e-3, 10.0, 1e-6, 0.1)

# Classes whose sources were read, by where they are defined: whether no element's update depends on
# another element.
_KNOWN = {
    "torch.optim.adadelta.Adadelta": True,
    "torch.optim.adagrad.Adagrad": True,
    "torch.optim.adam.Adam": True,
    "torch.optim.adamax.Adamax": True,
    "torch.optim.adamw.AdamW": True,
    "torch.optim.asgd.ASGD": True,
    "torch.optim.nadam.NAdam": True,
    "torch.optim.radam.RAdam": True,
    "torch.optim.rmsprop.RMSprop": True,
    "torch.optim.rprop.Rprop": True,
    "torch.optim.sgd.SGD": True,
    "torch.optim.Adafactor": False,  # rows, columns, and the root mean square of each parameter
    "torch.optim.Muon": False,  # each matrix
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": True,
    "deepspeed.ops.adam.fused_adam.FusedAdam": True,
    "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad": True,
    "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion": True,
    "deepspeed.ops.lion.fused_lion.FusedLion": True,
}

Make = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]
_Part = tuple[int, int, int]  # which sample, start, stop


class Traits(NamedTuple):
    """states: those that have a value for every element, by key. eager: there are such before the
    first step. rest: bytes of others for an element, at least, where there are such.

    separable: no parameter's update depends on another parameter. elementwise: and no element's on
    another element. why: how that is known, for messages.
    """

    states: Mapping[Key, torch.dtype]
    eager: bool
    separable: bool
    elementwise: bool
    why: str
    rest: float = 0.0


def known(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether the class of *optimizer* is known to update every element by itself; None where it is
    not known. A subclass may do anything.
    """
    kind = type(optimizer)
    return _KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")


@torch.no_grad()
def examine(
    name: str,
    make: Make,
    dimensions: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    declared: bool = False,
) -> Traits:
    """Learn how the optimizers called *name* that *make* makes treat parameters of so many
    *dimensions*.

    *declared*: it is the caller's word that every element is updated by itself.
    Raises: UnsupportedError when they cannot step by gradients alone.
    """
    large = [shape for count in dimensions for shape in _shapes(count, moderate=False)]
    moderate = [shape for count in dimensions for shape in _shapes(count, moderate=True)]
    first = _first_states(
        make,
        [_sample(shape, dtype, device, 0) for shape in [*moderate, _whole_units(max(dimensions))]],
    )
    for key, value in itertools.chain.from_iterable(
        tensors(states).items() for states in first.values()
    ):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise UnsupportedError(
                f"{name} cannot be used with NVMeOptimizer: its state {top(key)!r} is of {type(value).__name__}, which is no plain tensor"
            )
    shapes = moderate if _has_rest(first) else large
    samples = [_sample(shape, dtype, device, number) for number, shape in enumerate(shapes)]
    fresh = make([torch.nn.Parameter(sample.clone()) for sample in samples])
    if len(fresh.param_groups) != 1:
        raise UnsupportedError(
            f"{name} cannot be used with NVMeOptimizer: of one group of parameters it makes {len(fresh.param_groups)}, so that a learning rate that is set "
            "would not reach them"
        )
    eager = any(isinstance(state, dict) and len(state) > 0 for state in fresh.state.values())
    elementwise = True if declared else known(fresh)
    together = _recorded(name, make, samples, _KNOWN_STEPS if elementwise is not None else _STEPS)
    if together.shared:
        raise UnsupportedError(
            f"{name} cannot be used with NVMeOptimizer: its state has {together.shared!r}, which is of no parameter, so that no checkpoint of torch has it"
        )
    if together.beside:
        raise UnsupportedError(
            f"{name} cannot be used with NVMeOptimizer: it keeps {together.beside}, outside of its state, which would be neither offloaded nor saved"
        )
    if elementwise is not None:
        return Traits(
            together.states,
            eager,
            True,
            elementwise,
            "declared" if declared else "known",
            together.rest,
        )
    separable = together.same(
        [[(index, 0, sample.numel())] for index, sample in enumerate(samples)]
    )
    # What is not like its parameter could not be put together in a checkpoint.
    elementwise = (
        separable
        and not together.rest
        and together.same(
            [
                [part]
                for index, sample in enumerate(samples)
                for part in _parts(index, sample.numel())
            ]
        )
    )
    return Traits(together.states, eager, separable, elementwise, "tried", together.rest)


def alike(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Make:
    """Makes optimizers over other parameters that are as *optimizer*, which has made no step, is to
    those of its *group*: with its options and attributes.

    Where it has states already, or parameters among its attributes, they are made by its class, of
    those options that this can be given.
    """
    kind: Any = type(optimizer)
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    own = {
        key: value
        for key, value in vars(optimizer).items()
        if key not in ("state", "param_groups", "step")
    }
    parameters = {id(parameter) for each in optimizer.param_groups for parameter in each["params"]}
    held = tensors(own).values()
    if optimizer.state or any(id(value) in parameters or value.numel() > UNIT for value in held):
        accepted = inspect.signature(kind).parameters
        given = {key: value for key, value in options.items() if key in accepted}
        return lambda samples: kind(list(samples), **copy.deepcopy(given))

    def make(samples: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = kind.__new__(kind)
        vars(made).update(copy.deepcopy(own))
        made.state = (
            type(optimizer.state)(dict)
            if isinstance(optimizer.state, defaultdict)
            else type(optimizer.state)()
        )
        made.param_groups = [{**copy.deepcopy(options), "params": list(samples)}]
        return made

    return make


def raw_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """`step` of *optimizer* without the hooks that torch calls around every optimizer's: those are
    for the steps that a user makes.
    """
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def _recorded(name: str, make: Make, samples: Sequence[torch.Tensor], steps: int) -> _Trial:
    try:
        try:
            trial = _Trial(make, samples, steps, with_missing=True)
            trial.record()
        # there are optimizers that want all gradients, and they may raise anything
        except Exception:
            trial = _Trial(make, samples, steps, with_missing=False)
            trial.record()
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedError(
            f"{name} cannot be used with NVMeOptimizer: a step over dense gradients fails: {reason}"
        ) from error
    return trial


class _Trial:
    """Some *steps* over *samples*, made by the optimizers that *make* makes: first together, then
    apart, and compared.

    *with_missing*: some steps leave out the gradient of a sample.
    """

    def __init__(
        self, make: Make, samples: Sequence[torch.Tensor], steps: int, *, with_missing: bool
    ) -> None:
        self._make = make
        self._samples = samples
        self._steps = steps
        self._with_missing = with_missing
        self._gradients: list[list[torch.Tensor | None]] = []
        self._weights: list[list[torch.Tensor]] = []
        self._each: dict[Key, torch.dtype] = {}
        self._uneven: set[Key] = set()
        self._rests: dict[int, float] = {}  # of each sample, bytes for an element
        self.shared: str = ""  # a key of the state that is no parameter
        self.beside: str = ""  # what is kept outside of the state
        # tensors there, and the versions of them at the last step
        self._own: dict[Key, tuple[int, int]] = {}

    def record(self) -> None:
        """Train all samples together."""
        whole = [(index, 0, sample.numel()) for index, sample in enumerate(self._samples)]
        with _same_random_numbers(self._samples[0].device):
            for weights in self._train([whole]):
                if not all(bool(weight.isfinite().all()) for weight in weights):
                    break
                self._weights.append([weight.clone() for weight in weights])

    @property
    def states(self) -> dict[Key, torch.dtype]:
        """Those that have a value for each element of every parameter that has them."""
        return {key: dtype for key, dtype in self._each.items() if key not in self._uneven}

    @property
    def rest(self) -> float:
        """Bytes of states that are not like their parameters for an element: of those samples that
        have such, where it is least.
        """
        return min(filter(None, self._rests.values()), default=0.0)

    def same(self, buckets: Sequence[Sequence[_Part]]) -> bool:
        """Whether the same comes of the samples where each of *buckets* has an optimizer of its
        own.
        """
        if len(self._weights) < _FEWEST_STEPS:
            return False
        with _same_random_numbers(self._samples[0].device):
            try:
                return all(
                    all(map(_same_bits, weights, expected))
                    for weights, expected in zip(self._train(buckets), self._weights, strict=False)
                )
            except Exception:  # such as those of optimizers that take nothing but matrices
                return False

    def _train(self, buckets: Sequence[Sequence[_Part]]) -> Iterator[list[torch.Tensor]]:
        """The weights after each step, in which the buckets are updated one after another, as
        `NVMeOptimizer` does it.
        """
        weights = [sample.clone() for sample in self._samples]
        parts = [
            [
                torch.nn.Parameter(_view(weights[index], start, stop))
                for index, start, stop in bucket
            ]
            for bucket in buckets
        ]
        optimizers = [self._make(bucket) for bucket in parts]
        for optimizer in optimizers:
            _switch(optimizer, "train")
        options = _options(optimizers[-1])
        rate = options.get("lr")
        base = (
            float(rate)
            if isinstance(rate, int | float) or (torch.is_tensor(rate) and rate.numel() == 1)
            else None
        )
        for number in range(self._steps):
            if number == self._steps // 2:  # as those do that keep other weights for evaluation
                for optimizer in optimizers:
                    _switch(optimizer, "eval")
                    _switch(optimizer, "train")
                options = _options(optimizers[-1])
            if base is not None:
                moved = (base or _RATE) * _RATES[number % len(_RATES)]
                options["lr"] = torch.full_like(rate, moved) if torch.is_tensor(rate) else moved
            if len(self._gradients) <= number:
                self._gradients.append(self._directions(number, weights))
            left = options
            for optimizer, bucket, places in zip(optimizers, parts, buckets, strict=True):
                for part, (index, start, stop) in zip(bucket, places, strict=True):
                    gradient = self._gradients[number][index]
                    part.grad = None if gradient is None else _view(gradient.clone(), start, stop)
                if any(part.grad is not None for part in bucket):
                    optimizer.param_groups[0].update(copy.deepcopy(options))
                    raw_step(optimizer)(optimizer)
                    left = _options(optimizer)
            options = dict(left)
            if len(buckets) == 1:
                self._learn(optimizers[0], parts[0])
            yield weights

    def _learn(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        self.shared = next((str(key) for key in optimizer.state if not torch.is_tensor(key)), "")
        self._look_beside(optimizer)
        for index, parameter in enumerate(parameters):
            found = travelling(optimizer.state.get(parameter, {}), parameter.shape, parameter)
            self._uneven |= {
                key for key, value in found.items() if not is_for_each(value, parameter.shape)
            }
            self._each.update({key: value.dtype for key, value in found.items()})
            rest = (
                sum(value.nbytes for key, value in found.items() if key in self._uneven)
                / parameter.numel()
            )
            self._rests[index] = max(rest, self._rests.get(index, 0.0))

    def _look_beside(self, optimizer: torch.optim.Optimizer) -> None:
        """Find what *optimizer* keeps outside of its state, as one that wraps another does: tables
        that stay as they are, and views of weights, are none.
        """
        weights = {
            parameter.untyped_storage().data_ptr()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        own = {}
        for way, value in content(
            {
                key: value
                for key, value in vars(optimizer).items()
                if key not in ("state", "param_groups")
            }
        ):
            if (
                isinstance(value, torch.optim.Optimizer)
                and value is not optimizer
                and value.state is not optimizer.state
            ):
                self.beside = f"another optimizer, {type(value).__name__}, as {way[0]!r}"
            elif (
                isinstance(value, torch.Tensor)
                and value.numel() > UNIT
                and value.untyped_storage().data_ptr() not in weights
            ):
                own[way] = id(value), value._version
                if self._own.get(way, own[way]) != own[way]:
                    self.beside = f"tensors as {way[0]!r}"
        self._own = own

    def _directions(
        self, number: int, weights: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The gradients of step *number*."""
        gradients: list[torch.Tensor | None] = []
        for index, weight in enumerate(weights):
            if self._with_missing and number % 7 == 6 and (number // 7 + index) % len(weights) == 0:
                gradients.append(None)
                continue
            drawn = torch.randn(
                weight.shape,
                generator=torch.Generator().manual_seed(1000 * number + index),
                dtype=torch.float64,
            )
            wide = torch.complex128 if weight.is_complex() else torch.float64
            direction, own = drawn.to(weight.device, wide), weight.to(wide)
            if number < _DESCENT:
                gradients.append((own + 0.1 * direction).to(weight.dtype))
                continue
            match (number + index) % 4:
                case 1:  # orthogonal to the weights, by rows and in all, as behind a normalization
                    for shape in ((len(own), -1), (1, -1)):
                        rows, along = own.reshape(shape), direction.reshape(shape)
                        share = (along * rows.conj()).sum(1, keepdim=True) / (
                            rows * rows.conj()
                        ).sum(1, keepdim=True)
                        direction = (along - share * rows).view(weight.shape)
                case 2:  # along the weights
                    direction = own + 0.1 * direction
                case 3:  # large here, and zero there
                    flat = direction.view(-1)
                    flat[: flat.numel() // 2] *= 1e3
                    flat[flat.numel() // 4 : flat.numel() // 3] = 0
            gradients.append(
                (direction * _SCALES[(3 * number + index) % len(_SCALES)]).to(weight.dtype)
            )
        return gradients


class _same_random_numbers:
    """Let torch, Python and numpy draw the same numbers in each context, and go on behind it as if
    there had been none.
    """

    def __init__(self, device: torch.device) -> None:
        self._fork = torch.random.fork_rng([device] if device.type == "cuda" else [])

    def __enter__(self) -> None:
        import numpy as np

        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._fork.__enter__()
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    def __exit__(self, *error: Any) -> None:
        import numpy as np

        self._fork.__exit__(*error)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def _shapes(dimensions: int, *, moderate: bool) -> list[tuple[int, ...]]:
    """Of two samples: one above the least sizes from which optimizers factor matrices or pack
    states, one below; neither of whole units.

    *moderate*: such that an optimizer may keep a matrix for each side, and find its roots.
    """
    if dimensions == 1:
        return [(130,), (67,)] if moderate else [(5003,), (67,)]
    rest = (3, 2, *(1,) * dimensions)[: dimensions - 2]
    return [(20, 22, *rest) if moderate and rest else (130, 132, *rest), (9, 14, *rest)]


def _whole_units(dimensions: int) -> tuple[int, ...]:
    """Of a sample in whole blocks of those optimizers that pack states by blocks."""
    return (64, 128, *(1,) * dimensions)[: max(dimensions, 2)] if dimensions > 1 else (8192,)


def _first_states(make: Make, samples: Sequence[torch.Tensor]) -> dict[torch.Tensor, Any]:
    """What an optimizer of *samples* keeps for each after one step; nothing where that fails, as
    the trial itself will say.
    """
    with _same_random_numbers(samples[0].device):
        try:
            parameters = [torch.nn.Parameter(sample) for sample in samples]
            optimizer = make(parameters)
            for parameter in parameters:
                parameter.grad = parameter.detach().clone()
            raw_step(optimizer)(optimizer)
        except Exception:
            return {}
        return {parameter: optimizer.state.get(parameter, {}) for parameter in parameters}


def _has_rest(states: Mapping[torch.Tensor, Any]) -> bool:
    """Whether an optimizer that has these *states* keeps what is not like its parameters, which
    will not be cut, and need not be as large as that takes.
    """
    found = {
        parameter: travelling(state, parameter.shape, parameter)
        for parameter, state in states.items()
    }
    return any(
        not is_for_each(value, parameter.shape)
        for parameter, kept in found.items()
        for value in kept.values()
    )


def _parts(index: int, size: int) -> list[_Part]:
    """A sample, cut where a parameter may be."""
    edges = [edge for edge in (0, UNIT, 4 * UNIT) if edge < size] + [size]
    return [(index, start, stop) for start, stop in itertools.pairwise(edges)]


def _sample(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, number: int
) -> torch.Tensor:
    """Weights as they are drawn when a model is made."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return (drawn / math.sqrt(shape[-1])).to(dtype).to(device)


def _view(whole: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """A part of *whole*, which lies as it is in a bucket: flat, unless it is all of it. A leaf, as
    parameters are.
    """
    return whole.detach() if stop - start == whole.numel() else whole.view(-1)[start:stop].detach()


def _options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        key: copy.deepcopy(value)
        for key, value in optimizer.param_groups[0].items()
        if key != "params"
    }


def _switch(optimizer: torch.optim.Optimizer, name: str) -> None:
    method = getattr(optimizer, name, None)
    if callable(method):
        method()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
