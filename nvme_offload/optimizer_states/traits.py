"""`examine` finds out which states an optimizer keeps for a parameter, and whether parameters, and
elements of one parameter, can be updated separately.

The classes of torch and DeepSpeed are known. Any other class is tried: the same steps are made with
all parameters together, one by one, and in parts like the buckets of `NVMeOptimizer`. Only
divisions with equal bits at every step are used.

The trial uses the user's own arguments, a varying learning rate, and the same random numbers each
time. It runs longer than the usual warm-ups, and its samples are larger than the usual minimum
sizes.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedError
from .generators import next_numbers, same_numbers
from .tree import Key, content, is_for_each, tensors, top, travelling, travels

# Elements. Parameters are cut at multiples of this, in the trial and in training, because
# vectorized code rounds the last elements of a tensor differently.
UNIT = 1024

# Longer than RAdam's warm-up, the periods of Lookahead and SOAP, and AdaShift's history.
_STEPS = 40
# The first steps descend a slope: optimizers that estimate the distance (D-Adaptation, Prodigy)
# react only to a slope. Later steps vary.
_DESCENT = 16
_FEWEST_STEPS = 12  # minimum for a trial that ends early because weights are not finite
_KNOWN_STEPS = 3  # steps of a known class, only to learn its states
_RATE = 1e-3  # replaces a learning rate of zero, which would show nothing
_RATES = (1.0, 0.5, 2.0, 1.0, 0.1)
_SCALES = (1.0, 1e-3, 10.0, 1e-6, 0.1)

# Classes whose source was read, by the place of their definition: whether each element is updated
# independently of other elements.
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
    # row and column statistics, and the root mean square of each parameter
    "torch.optim.Adafactor": False,
    "torch.optim.Muon": False,  # orthogonalizes each matrix
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": True,
    "deepspeed.ops.adam.fused_adam.FusedAdam": True,
    "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad": True,
    "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion": True,
    "deepspeed.ops.lion.fused_lion.FusedLion": True,
}

Make = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]
_Part = tuple[int, int, int]  # sample, start, stop


class Form(NamedTuple):
    """The form of a state. *sizes*: for each of its dimensions, the dimensions of the parameter
    that may determine its size, and the least size; None if the sizes follow no known rule: then
    the state has a *share* of the parameter's elements.
    """

    dtype: torch.dtype
    sizes: tuple[tuple[Sequence[int], int], ...] | None
    share: float

    def of(self, shape: Sequence[int]) -> torch.Tensor:
        """The state of a parameter of this *shape*, without its contents."""
        if self.sizes is None:
            sizes = [math.ceil(math.prod(shape) * self.share) + 1]
        else:
            sizes = [
                max([least, *(shape[dimension] for dimension in dimensions)])
                for dimensions, least in self.sizes
            ]
        return torch.empty(sizes, dtype=self.dtype, device="meta")


class Traits(NamedTuple):
    """The results of `examine`.

    *states*: the dtypes of the elementwise states, by key. *eager*: there are states before the
    first step. *separable*: no parameter's update depends on another parameter; *elementwise*: and
    no element's on another element. *why*: "known", "declared" or "tried". *rest*: least bytes for
    each element of the states that are not elementwise. *undoable*: as far as the trial has shown,
    restoring parameters, states and options undoes a step. *forms*: of all states, by key, for each
    number of dimensions.
    """

    states: Mapping[Key, torch.dtype]
    eager: bool
    separable: bool
    elementwise: bool
    why: str
    rest: float = 0.0
    undoable: bool = True
    forms: Mapping[int, Mapping[Key, Form]] = MappingProxyType({})

    def foreseen(self, shape: torch.Size) -> dict[Key, torch.Tensor]:
        """The offloaded states that a parameter of this *shape* will have, without their contents."""
        sizes = shape or torch.Size([1])
        # The form for a part of a parameter, which the trial does not cover.
        unknown = {"rest": Form(torch.uint8, None, self.rest)}
        made = {key: form.of(sizes) for key, form in self.forms.get(len(sizes), unknown).items()}
        return {key: value for key, value in made.items() if travels(key, value, shape)}


def known(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether the class of *optimizer* is known to be elementwise; None for an unknown class, as a
    subclass.
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
    """Find out how the optimizers that *make* makes treat parameters with these numbers of
    *dimensions*. *declared*: the caller asserts that they are elementwise. Raises:
    UnsupportedError, which has the *name*, if they cannot step from gradients alone, or keep states
    that cannot be offloaded.
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
    # Parameters with states that are not elementwise will not be cut, so samples need not be large.
    shapes = moderate if _has_rest(first) else large
    samples = [_sample(shape, dtype, device, number) for number, shape in enumerate(shapes)]
    fresh = make([torch.nn.Parameter(sample.clone()) for sample in samples])
    if len(fresh.param_groups) != 1:
        raise UnsupportedError(
            f"{name} cannot be used with NVMeOptimizer: it turns one parameter group into {len(fresh.param_groups)}, so a learning rate that is set later "
            "would not reach them"
        )
    eager = any(isinstance(state, dict) and len(state) > 0 for state in fresh.state.values())
    elementwise = True if declared else known(fresh)
    together = _recorded(name, make, samples, _KNOWN_STEPS if elementwise is not None else _STEPS)
    if together.shared:
        raise UnsupportedError(
            f"{name} cannot be used with NVMeOptimizer: its state has {together.shared!r}, which belongs to no parameter, so torch checkpoints lack it"
        )
    if together.outside:
        raise UnsupportedError(
            f"{name} cannot be used with NVMeOptimizer: it keeps {together.outside}, outside of its state, which would be neither offloaded nor saved"
        )
    why, separable = "declared" if declared else "known", True
    if elementwise is None:
        why = "tried"
        separable = together.same(
            [[(index, 0, sample.numel())] for index, sample in enumerate(samples)]
        )
        parts = [_parts(index, sample.numel()) for index, sample in enumerate(samples)]
        # A checkpoint could not assemble states of other shapes.
        elementwise = (
            separable
            and not together.rest
            and together.same([[part] for part in itertools.chain.from_iterable(parts)])
        )
    return Traits(
        together.states,
        eager,
        separable,
        elementwise,
        why,
        together.rest,
        not together.changes_outside,
        together.forms,
    )


@torch.no_grad()
def lasting_keys(
    make: Make, dimensions: int, dtype: torch.dtype, device: torch.device
) -> frozenset[Key]:
    """The keys that the state of a parameter has after the first steps. An optimizer cannot
    continue without them. Empty for unknown classes, which may choose the keys by the size.
    """
    found: list[set[Key]] = []
    samples = [_sample(shape, dtype, device, 0) for shape in _shapes(dimensions, moderate=True)]
    if known(make(samples)) is None:
        return frozenset()
    for steps in (1, _KNOWN_STEPS):
        states = _first_states(make, [sample.clone() for sample in samples], steps)
        found += [set(state) for state in states.values()]
    return frozenset(set.intersection(*found) if found else ())


def alike(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Make:
    """A factory of optimizers like *optimizer*, without its states: with its attributes, and the
    options of *group*. If it has states, or parameters or large tensors among its attributes, its
    class is called with the options that its constructor accepts.
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
    """`step` of *optimizer* without torch's hooks, which are for the user's steps."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def _recorded(name: str, make: Make, samples: Sequence[torch.Tensor], steps: int) -> _Trial:
    for with_missing in (True, False):  # some optimizers require all gradients
        trial = _Trial(make, samples, steps, with_missing=with_missing)
        try:
            trial.record()
            break
        except Exception as error:  # they may raise anything
            if not with_missing:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise UnsupportedError(
                    f"{name} cannot be used with NVMeOptimizer: a step over dense gradients fails: {reason}"
                ) from error
    return trial


class _Trial:
    """*steps* steps over *samples*: recorded with one optimizer for all samples, then repeated with
    several and compared. *with_missing*: in some steps a sample has no gradient.
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
        # Tensors without memory: the largest that each state has been, by sample.
        self._largest: dict[Key, dict[int, torch.Tensor]] = {}
        self._not_elementwise: set[Key] = set()  # at some time
        self.shared: str = ""  # a key of the state that is not a parameter
        self.outside: str = ""  # describes tensors that the optimizer keeps outside of its state
        # Whether a step changes any value outside, however small, or draws random numbers.
        self.changes_outside = False
        # Values outside of the state at the last step: ids and versions of large tensors, and all.
        self._own: dict[Key, tuple[int, int]] = {}
        self._outside: dict[Key, Any] | None = None

    def record(self) -> None:
        whole = [(index, 0, sample.numel()) for index, sample in enumerate(self._samples)]
        device = self._samples[0].device
        with same_numbers(device):
            for weights in self._train([whole]):
                if not all(bool(weight.isfinite().all()) for weight in weights):
                    break
                self._weights.append([weight.clone() for weight in weights])
            drawn = next_numbers(device)
        with same_numbers(device):
            self.changes_outside |= drawn != next_numbers(device)

    @property
    def states(self) -> dict[Key, torch.dtype]:
        return {
            key: next(iter(seen.values())).dtype
            for key, seen in self._largest.items()
            if key not in self._not_elementwise
        }

    @property
    def rest(self) -> float:
        """As in `Traits`: the minimum over samples that have such states."""
        nbytes = [0] * len(self._samples)
        for key in self._not_elementwise:
            for index, value in self._largest[key].items():
                nbytes[index] += value.nbytes
        shares = [each / sample.numel() for each, sample in zip(nbytes, self._samples, strict=True)]
        return min(filter(None, shares), default=0.0)

    @property
    def forms(self) -> dict[int, dict[Key, Form]]:
        """The forms of all states, by the samples' numbers of dimensions and by key."""
        found: dict[int, dict[Key, Form]] = {sample.dim(): {} for sample in self._samples}
        for key, largest in self._largest.items():
            for dimensions, forms in found.items():
                cases = [
                    (self._samples[index].shape, state.shape, state.dtype)
                    for index, state in largest.items()
                    if self._samples[index].dim() == dimensions
                ]
                if cases:
                    forms[key] = _form(cases)
        return found

    def same(self, buckets: Sequence[Sequence[_Part]]) -> bool:
        """Whether the result is the same if each of *buckets* has a separate optimizer."""
        if len(self._weights) < _FEWEST_STEPS:
            return False
        with same_numbers(self._samples[0].device):
            try:
                return all(
                    all(map(_same_bits, weights, expected))
                    for weights, expected in zip(self._train(buckets), self._weights, strict=False)
                )
            except Exception:  # for example from an optimizer that accepts only matrices
                return False

    def _train(self, buckets: Sequence[Sequence[_Part]]) -> Iterator[list[torch.Tensor]]:
        """Yield the weights after each step, which updates one bucket after another."""
        weights = [sample.clone() for sample in self._samples]
        parts = [
            [torch.nn.Parameter(_view(weights[index], *edges)) for index, *edges in bucket]
            for bucket in buckets
        ]
        optimizers = [self._make(bucket) for bucket in parts]
        for optimizer in optimizers:
            _switch(optimizer, "train")
        options = _options(optimizers[-1])
        rate: Any = options.get("lr")
        is_number = isinstance(rate, int | float) or (torch.is_tensor(rate) and rate.numel() == 1)
        for number in range(self._steps):
            # schedule-free optimizers keep separate weights for evaluation
            if number == self._steps // 2:
                for optimizer in optimizers:
                    _switch(optimizer, "eval")
                    _switch(optimizer, "train")
                options = _options(optimizers[-1])
            if is_number:
                moved = (float(rate) or _RATE) * _RATES[number % len(_RATES)]
                options["lr"] = torch.full_like(rate, moved) if torch.is_tensor(rate) else moved
            if len(self._gradients) <= number:
                self._gradients.append(self._gradients_of_step(number, weights))
            stepped = options
            for optimizer, bucket, places in zip(optimizers, parts, buckets, strict=True):
                for part, (index, start, stop) in zip(bucket, places, strict=True):
                    gradient = self._gradients[number][index]
                    part.grad = None if gradient is None else _view(gradient.clone(), start, stop)
                if any(part.grad is not None for part in bucket):
                    optimizer.param_groups[0].update(copy.deepcopy(options))
                    raw_step(optimizer)(optimizer)
                    stepped = _options(optimizer)
            options = dict(stepped)
            if len(buckets) == 1:
                self._record_states(optimizers[0], parts[0])
            yield weights

    def _record_states(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
    ) -> None:
        self.shared = next((str(key) for key in optimizer.state if not torch.is_tensor(key)), "")
        self._find_outside_state(optimizer)
        for index, parameter in enumerate(parameters):
            found = travelling(optimizer.state.get(parameter, {}), parameter.shape, parameter)
            for key, value in found.items():
                if not is_for_each(value, parameter.shape):
                    self._not_elementwise.add(key)
                seen = self._largest.setdefault(key, {})
                if index not in seen or value.numel() >= seen[index].numel():
                    seen[index] = torch.empty_like(value, device="meta")

    def _find_outside_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Tensors that never change, and views of weights, do not count."""
        weights = {_address(one) for group in optimizer.param_groups for one in group["params"]}
        own, outside = {}, {}
        kept = {**vars(optimizer), "state": None, "param_groups": None}
        for path, value in content(kept):
            tensor = isinstance(value, torch.Tensor)
            plain = isinstance(value, int | float | str | bytes | bool | None)
            outside[path] = value if plain else (id(value), value._version if tensor else 0)
            if (
                isinstance(value, torch.optim.Optimizer)
                and value is not optimizer
                and value.state is not optimizer.state
            ):
                self.outside = f"another optimizer, {type(value).__name__}, as {path[0]!r}"
            elif tensor and value.numel() > UNIT and _address(value) not in weights:
                own[path] = id(value), value._version
                if self._own.get(path, own[path]) != own[path]:
                    self.outside = f"tensors as {path[0]!r}"
        self.changes_outside |= self._outside not in (None, outside)
        self._own, self._outside = own, outside

    def _gradients_of_step(
        self, number: int, weights: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
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
                case 1:  # orthogonal to the weights, by row and in total, as after a normalization
                    for shape in ((len(own), -1), (1, -1)):
                        rows, along = own.reshape(shape), direction.reshape(shape)
                        share = (along * rows.conj()).sum(1, keepdim=True) / (
                            rows * rows.conj()
                        ).sum(1, keepdim=True)
                        direction = (along - share * rows).view(weight.shape)
                case 2:  # along the weights
                    direction = own + 0.1 * direction
                case 3:  # large in one part, zero in another
                    flat = direction.view(-1)
                    flat[: flat.numel() // 2] *= 1e3
                    flat[flat.numel() // 4 : flat.numel() // 3] = 0
            gradients.append(
                (direction * _SCALES[(3 * number + index) % len(_SCALES)]).to(weight.dtype)
            )
        return gradients


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _form(cases: Sequence[tuple[torch.Size, torch.Size, torch.dtype]]) -> Form:
    """The form of a state. *cases*: shapes of a parameter and of its state, and the dtype."""
    dtype = max((dtype for _, _, dtype in cases), key=lambda dtype: dtype.itemsize)
    share = max(state.numel() / parameter.numel() for parameter, state, _ in cases)
    if len({len(state) for _, state, _ in cases}) > 1:
        return Form(dtype, None, share)
    sizes: list[tuple[Sequence[int], int]] = []
    for place in range(len(cases[0][1])):
        numbers = {state[place] for _, state, _ in cases}
        same = [
            dimension
            for dimension in range(len(cases[0][0]))
            if all(parameter[dimension] == state[place] for parameter, state, _ in cases)
        ]
        if not same and (len(numbers) > 1 or (len(cases) == 1 and numbers != {1})):
            return Form(dtype, None, share)
        if place in same:
            sizes.append(([place], 0))
        else:  # a size that all samples have in common may be fixed, too
            sizes.append((same, min(numbers) if len(numbers) == 1 else 0))
    return Form(dtype, tuple(sizes), share)


def _shapes(dimensions: int, *, moderate: bool) -> list[tuple[int, ...]]:
    """The shapes of two samples, above and below the sizes from which optimizers factor matrices or
    pack states, and no multiples of `UNIT`; if *moderate*, small enough for the root of a matrix
    for each side.
    """
    if dimensions == 1:
        return [(130,), (67,)] if moderate else [(5003,), (67,)]
    rest = (3, *(2,) * dimensions)[: dimensions - 2]
    return [(20, 22, *rest) if moderate and rest else (130, 132, *rest), (9, 14, *rest)]


def _whole_units(dimensions: int) -> tuple[int, ...]:
    """The shape of a sample of whole blocks, for optimizers that pack states by block."""
    return (64, 128, *(1,) * dimensions)[: max(dimensions, 2)] if dimensions > 1 else (8192,)


def _first_states(
    make: Make, samples: Sequence[torch.Tensor], steps: int = 1
) -> dict[torch.Tensor, Any]:
    """The states after the first *steps*. Empty if a step fails: the trial will report it."""
    with same_numbers(samples[0].device):
        try:
            parameters = [torch.nn.Parameter(sample) for sample in samples]
            optimizer = make(parameters)
            for _ in range(steps):
                for parameter in parameters:
                    parameter.grad = parameter.detach().clone()
                raw_step(optimizer)(optimizer)
        except Exception:
            return {}
        return {parameter: optimizer.state.get(parameter, {}) for parameter in parameters}


def _has_rest(states: Mapping[torch.Tensor, Any]) -> bool:
    return any(
        not is_for_each(value, parameter.shape)
        for parameter, state in states.items()
        for value in travelling(state, parameter.shape, parameter).values()
    )


def _parts(index: int, size: int) -> list[_Part]:
    """Cut a sample where a parameter may be cut."""
    edges = [edge for edge in (0, UNIT, 4 * UNIT) if edge < size] + [size]
    return [(index, start, stop) for start, stop in itertools.pairwise(edges)]


def _sample(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, number: int
) -> torch.Tensor:
    """Weights with the values of a usual initialization."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return (drawn / math.sqrt(shape[-1])).to(dtype).to(device)


def _view(whole: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """A part of *whole* as in a bucket: a leaf, and flat unless it is the whole."""
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
