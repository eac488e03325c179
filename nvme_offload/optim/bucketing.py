"""`Bucketing`: checks which parameters can be offloaded, and groups them into buckets."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..device.room import memory_of
from ..errors import UnsupportedError, UsageError
from ..optimizer_states.formats import StateFormat
from ..optimizer_states.on_gpu import packs_in_one_pass
from ..optimizer_states.rounding import BLOCK
from ..optimizer_states.traits import Traits, examine, lasting_keys, raw_step
from ..optimizer_states.tree import is_for_each, tensors
from ..sizes import GPU_PARTS, LEAST_BUDGET_BYTES
from ..units import format_bytes
from .buckets import SLOT_BYTES, Bucket, Form, Weight, cut, is_distributed, local
from .budget import Budget, beside_bytes, most_elements
from .values import MASTER

# elements, 64 bytes, the alignment of torch's tensors: the rounding of a BLAS dot product depends
# on the alignment of its operands
_ALIGNED = 16

# buckets in flight take one part in so many of a GPU's free memory at most, if they are large
_FREE_PARTS = 8
_MANY = 512  # buckets of a few KB, which take longer than their bytes

_CPU = torch.device("cpu")
_NOTHING = Traits({}, eager=False, separable=True, elementwise=True, why="")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Bucketing:
    """Makes buckets of the parameters of groups. *make* makes optimizers of the class *name* with
    given options. The buckets' names begin with *prefix*. *declared*: the user asserts that every
    element is updated separately. *gradients*: the gradients of a bucket are a value, too.
    *place_updates* returns the device on which a parameter is updated.

    Raises: UsageError and UnsupportedError for parameters and optimizers that cannot be offloaded.
    """

    name: str
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    format: StateFormat
    budget: Budget
    prefix: str
    declared: bool
    gradients: bool
    place_updates: Callable[[torch.Tensor], torch.device]
    # whether the optimizer can update parameters only together
    together: bool = dataclasses.field(default=False, init=False)
    _found: dict[Any, Traits] = dataclasses.field(default_factory=dict, init=False)
    _told: set[str] = dataclasses.field(default_factory=set, init=False)
    # of buckets
    _numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count, init=False)

    def try_out(self, parameters: Sequence[torch.Tensor], options: Mapping[str, Any]) -> None:
        """Examine how the optimizer treats parameters like these, whatever their final device.
        Raises: UnsupportedError if it cannot be offloaded.
        """
        for dtype in {one.dtype for one in parameters if _has_gradients(one.dtype)}:
            self._examine(options, _dimensions(parameters), self.format.update_dtype(dtype), _CPU)

    def admit(
        self,
        index: int,
        parameters: Sequence[torch.Tensor],
        options: Mapping[str, Any],
        before: Mapping[int, Weight],
        updated: Container[Weight],
        elements: int,
    ) -> tuple[list[Weight], list[Bucket]]:
        """Make weights and buckets of the *parameters* of the group with *index*. Parameters that
        were bound *before*, looked up by id, keep their `Weight`. Weights that were *updated* in
        this step do not share a bucket with other weights. *elements*: of all groups.
        """
        for parameter in parameters:
            _check(parameter)
        weights: list[Weight] = []
        buckets: list[Bucket] = []
        kinds = self._kinds(index, parameters, options, before, updated, elements)
        for kind, most in kinds:
            tensors = [local(weight.parameter) for weight in kind]
            divisible = [
                tensor.is_contiguous() and weight.traits.elementwise
                for tensor, weight in zip(tensors, kind, strict=True)
            ]
            unit = BLOCK if self.format.eight_bit else 1 if kind[0].traits.elementwise else _ALIGNED
            for parts in (
                cut([tensor.numel() for tensor in tensors], most, divisible, unit) if most else ()
            ):
                dtype = tensors[0].dtype
                bucket = Bucket(
                    name=f"{self.prefix}/{next(self._numbers)}",
                    dtype=dtype,
                    update_dtype=self.format.update_dtype(dtype),
                    home=tensors[0].device,
                    device=self.place_updates(kind[0].parameter),
                    traits=kind[0].traits,
                    alignment=unit,
                )
                for which, start, stop in parts:
                    bucket.add(kind[which], start, stop)
                buckets.append(bucket)
            weights += kind
        return weights, buckets

    def required_bytes(self, buckets: Sequence[Bucket]) -> int:
        """Divide the budget for *buckets*; return the bytes of their values, of states and
        gradients.
        """
        values, beside = [], []
        for bucket in buckets:
            bucket.room_bytes = self._value_bytes(bucket, self.format)
            values.append(bucket.room_bytes)
            if bucket.device.type == "cpu":
                each = self._beside_bytes(bucket.traits, bucket.dtype, bucket.device)
                beside.append(bucket.numel * each + bucket.foreseen()[1])
        cap = self.budget.cap_bytes
        if cap < LEAST_BUDGET_BYTES and len(buckets) > _MANY and "cap" not in self._told:
            self._told.add("cap")
            _log.warning(
                "%s of host memory cut the states into %d buckets, each of which takes milliseconds of a step: allow it a host_memory of at least %s",
                *(format_bytes(cap), len(buckets), format_bytes(LEAST_BUDGET_BYTES)),
            )
        # a bucket has two values, of which only one at a time is in use
        gradients = [bucket.gradient_bytes if self.gradients else 0 for bucket in buckets]
        most = [*map(self._wide_bytes, buckets), *gradients]
        try:
            return self.budget.divide(values, beside, max(most, default=0)) + sum(gradients)
        except UsageError as error:
            if not self.together:
                raise
            raise UsageError(
                f"{self.name} updates all parameters together, so host_memory has to hold all of its states: {error}"
            ) from None

    def growth_bytes(self, buckets: Sequence[Bucket]) -> int:
        """Bytes by which the values of *buckets* grow if their states turn out to need 16 bits."""
        return sum(max(self._wide_bytes(bucket) - bucket.room_bytes, 0) for bucket in buckets)

    def _wide_bytes(self, bucket: Bucket) -> int:
        """The bytes of the bucket's value if its states turn out to need 16 bits."""
        return self._value_bytes(
            bucket, dataclasses.replace(self.format, wide=self.format.eight_bit)
        )

    def _value_bytes(self, bucket: Bucket, state_format: StateFormat) -> int:
        states, rest_bytes = bucket.foreseen()
        layout = state_format.layout(bucket.numel, states, bucket.dtype, self.name)
        return layout.nbytes + rest_bytes

    def goes_on_with(
        self,
        bucket: Bucket,
        states: Mapping[Weight, Mapping[Any, Any]],
        groups: Sequence[Mapping[str, Any]],
    ) -> bool:
        """Whether the optimizer updates the parameters of *bucket* with *states* of another dtype,
        as some of torch's do after a model was cast. Tries it on a sample.
        """
        if self.format.eight_bit or bucket.dtype != bucket.update_dtype:
            return False
        weights = {fragment.weight: fragment.group for fragment in bucket.fragments}
        found = {
            (group, value.dtype)
            for weight, group in weights.items()
            for value in tensors(states.get(weight, {})).values()
            if value.is_floating_point() and is_for_each(value, weight.parameter.shape)
        }
        return all(
            self._steps_over(groups[group], dtype, bucket.update_dtype)
            for group, dtype in found
            if dtype != bucket.update_dtype
        )

    def _steps_over(self, group: Mapping[str, Any], before: torch.dtype, now: torch.dtype) -> bool:
        sample = torch.nn.Parameter(torch.ones(2, 2, dtype=before))
        with torch.random.fork_rng(devices=()):
            try:
                optimizer = self._maker(group)([sample])
                for dtype in (before, now):
                    sample.grad = None
                    sample.data = sample.data.to(dtype)
                    sample.grad = torch.ones_like(sample)
                    raw_step(optimizer)(optimizer)
            except Exception:
                return False
        return True

    def joined(self, buckets: list[Bucket]) -> list[Bucket]:
        """*buckets*, with the trained ones joined if parameters cannot be updated separately."""
        trained = [bucket for bucket in buckets if bucket.trained]
        if all(bucket.traits.separable for bucket in trained):
            return buckets
        if len({(bucket.dtype, bucket.home, bucket.device) for bucket in trained}) > 1:
            raise UnsupportedError(
                f"{self.name} updates all parameters together: NVMeOptimizer takes it with parameters of one dtype on one device. Use an optimizer that "
                "treats every parameter separately, such as AdamW"
            )
        self.together = True
        first, *others = trained
        for other in others:
            first.join(other)
        return [bucket for bucket in buckets if bucket not in others]

    def check(self, due: Sequence[Bucket]) -> None:
        """Check that the buckets that are *due* can be updated. Raises: UnsupportedError."""
        if self.together and not all(bucket.trained for bucket in due):
            raise UnsupportedError(
                f"{self.name} updates all parameters together, and some that are frozen have gradients: call requires_grad_() on them, or set their gradients "
                "to None"
            )

    def check_keys(
        self, states: Mapping[Weight, Mapping[Any, Any]], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Check that *states* have the keys that the optimizer needs in its next step with the
        options of *groups*. An empty state starts afresh. Raises: UsageError.
        """
        needed: dict[Any, frozenset[Any]] = {}
        for weight, state in states.items():
            if state.keys() <= {MASTER} or not weight.fragments:
                continue
            fragment = weight.fragments[0]
            bucket, group = fragment.bucket, groups[fragment.group]
            kind = fragment.group, max(local(weight.parameter).dim(), 1), bucket.update_dtype
            if kind not in needed:
                device = local(weight.parameter).device
                needed[kind] = lasting_keys(self._maker(group), kind[1], kind[2], device)
            missing, others = needed[kind] - state.keys(), state.keys() - needed[kind]
            if missing:
                raise UsageError(
                    f"the state of a parameter lacks {_listed(missing)}, without which {self.name} cannot go on"
                    f"{f', and has {_listed(others)}' if others else ''}: load states that {self.name} has saved, or rename their keys"
                )

    def _kinds(
        self,
        index: int,
        parameters: Sequence[torch.Tensor],
        options: Mapping[str, Any],
        before: Mapping[int, Weight],
        updated: Container[Weight],
        elements: int,
    ) -> Iterator[tuple[list[Weight], int]]:
        """Yield runs of *parameters* of one kind, each with the most elements for its buckets."""

        def weight(parameter: torch.Tensor, traits: Traits) -> Weight:
            now = traits, Form.of(parameter), index, parameter.requires_grad
            known = before.get(id(parameter))
            if known is None:
                return Weight(parameter, *now)
            known.traits, known.form, known.group, known.trained = now
            return known

        self._check_eps(parameters, options)
        dimensions = _dimensions(parameters)
        # The states of a scalar are not packed, so it would keep others from an update in one pass.
        for (_, dtype, device, place, *_), run in itertools.groupby(
            sorted(parameters, key=_is_scalar),
            lambda parameter: (
                _is_scalar(parameter),
                parameter.dtype,
                local(parameter).device,
                self.place_updates(parameter),
                parameter.requires_grad,
                before.get(id(parameter)) in updated,
            ),
        ):
            # quantized parameters never have gradients; parameters on the meta device have none yet
            if not _has_gradients(dtype) or device.type == "meta":
                yield [weight(parameter, _NOTHING) for parameter in run], 0
                continue
            found = self._examine(options, dimensions, self.format.update_dtype(dtype), device)
            weights = [weight(parameter, found) for parameter in run]
            if not found.elementwise and any(is_cut(weight.parameter) for weight in weights):
                raise UnsupportedError(
                    f"{self.name} needs whole parameters for an update, and these are sharded over ranks, each of which updates its shard: "
                    "use an optimizer that treats every element separately, such as AdamW"
                )
            value_bytes = self.format.element_bytes(found.states, dtype, self.name) + max(
                map(_rest_share, weights)
            )
            if self.gradients:
                value_bytes = max(value_bytes, dtype.itemsize)
            each = value_bytes + (dtype.itemsize if self.gradients else 0)
            cap, beside = self.budget.cap_bytes, self._beside_bytes(found, dtype, place)
            gpu_bytes = _memory_of(place) if each * elements <= cap else 0
            most = most_elements(cap, value_bytes, beside, gpu_bytes)
            yield (
                weights,
                most
                if found.separable
                else sum(local(parameter).numel() for parameter in parameters),
            )

    def _check_eps(self, parameters: Sequence[torch.Tensor], options: Mapping[str, Any]) -> None:
        """torch's Adafactor keeps the eps of its first parameter's dtype for all later parameters of
        the group. Updates of one bucket cannot know that parameter. Raises: UnsupportedError.
        """
        if not {"eps", "d", "beta2_decay"} <= options.keys() or options["eps"][0] is not None:
            return
        dtypes = {
            str(self.format.update_dtype(one.dtype)) for one in parameters if one.requires_grad
        }
        if len(dtypes) > 1:
            raise UnsupportedError(
                f"{self.name} takes eps[0] from the dtype of a group's first parameter, and this group is updated in {' and '.join(sorted(dtypes))}: "
                "pass eps with two numbers, or make one group for each dtype"
            )

    def _beside_bytes(self, traits: Traits, dtype: torch.dtype, device: torch.device) -> int:
        in_one_pass = self.format.eight_bit and packs_in_one_pass(device)
        return beside_bytes(self.format, traits, dtype, in_one_pass=in_one_pass)

    def _examine(
        self,
        options: Mapping[str, Any],
        dimensions: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Traits:
        key = repr(options), tuple(dimensions), dtype, device  # many groups share the same options
        if key not in self._found:
            make = self._maker(options)
            self._found[key] = examine(
                self.name, make, dimensions, dtype, device, declared=self.declared
            )
            self._tell(self._found[key])
        return self._found[key]

    def _maker(
        self, group: Mapping[str, Any]
    ) -> Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]:
        """A function that makes an optimizer of samples with the options of *group*."""
        options = {
            key: value for key, value in group.items() if key not in ("params", "param_names")
        }
        return lambda samples: self.make([{**copy.deepcopy(options), "params": list(samples)}])

    def _tell(self, traits: Traits) -> None:
        what = (
            "every element by itself"
            if traits.elementwise
            else "every parameter by itself, whole"
            if traits.separable
            else "all parameters together"
        )
        if what not in self._told:
            self._told.add(what)
            _log.info("%s updates %s (%s)", self.name, what, traits.why)


def _is_scalar(parameter: torch.Tensor) -> bool:
    return local(parameter).dim() == 0


def _memory_of(device: torch.device) -> int:
    """The memory of a GPU, less if little of it is free, so that large buckets do not exhaust it."""
    if device.type != "cuda":
        return 0
    free, total = memory_of(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(total, GPU_PARTS // _FREE_PARTS * (free + unused))


def _dimensions(parameters: Sequence[torch.Tensor]) -> list[int]:
    return sorted({max(parameter.dim(), 1) for parameter in parameters})


def _has_gradients(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _listed(keys: Iterable[Any]) -> str:
    return ", ".join(sorted(map(repr, keys)))


def _rest_share(weight: Weight) -> float:
    """Bytes per element, rounded up, of the states of *weight* that are not elementwise."""
    if not weight.traits.rest:
        return 0.0
    shape = local(weight.parameter).shape
    nbytes = sum(
        -(-form.nbytes // SLOT_BYTES) * SLOT_BYTES
        for key, form in weight.traits.foreseen(shape).items()
        if key not in weight.traits.states
    )
    return nbytes / max(-(-shape.numel() // _ALIGNED) * _ALIGNED, 1)


def is_cut(parameter: torch.Tensor) -> bool:
    """Whether *parameter* is sharded over ranks."""
    placements: Any = getattr(parameter, "placements", ())
    return is_distributed(parameter) and any(placement.is_shard() for placement in placements)


def _check(parameter: torch.Tensor) -> None:
    device = local(parameter).device
    if device.type not in ("cpu", "cuda", "meta"):
        raise UnsupportedError(
            f"parameters must be on the CPU or on a CUDA device, not on {device}: move the model there before the first step"
        )
    if parameter.layout is not torch.strided:
        raise UnsupportedError(f"parameters must be dense, not {parameter.layout}")
    if local(parameter).is_inference():
        raise UnsupportedError(
            "a parameter was made under torch.inference_mode, so that torch cannot train it: make the model outside"
        )
    if is_distributed(parameter) and type(local(parameter)) is not torch.Tensor:
        raise UnsupportedError(
            f"the parts of a DTensor on the ranks must be plain tensors, not {type(local(parameter)).__name__}"
        )
