"""`admit`: which parameters can be taken, and how they are put together into buckets."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import UnsupportedError, UsageError
from ..optimizer_states import BLOCK, StateFormat
from ..optimizer_states.on_gpu import packs_in_one_pass
from ..optimizer_states.traits import Traits, examine, lasting_keys
from .buckets import SLOT_BYTES, Bucket, Weight, cut, is_distributed, local
from .budget import Budget, beside_bytes, most_elements
from .update import MASTER

# elements, 64 bytes: a dot product of the BLAS rounds by how its operands are aligned, and torch
# aligns all tensors so
_ALIGNED = 16

_log = logging.getLogger(__name__)


class Bucketing:
    """Makes buckets of the parameters of groups. *make* makes optimizers, which are called *name*,
    with options; *prefix* is of the buckets' names. *declared*: the user
    asserts that every element is updated separately. *gradients*: the gradients of a bucket are a
    value, too. *place_updates* returns the device on which a parameter is updated.

    Raises: UsageError and UnsupportedError for parameters and optimizers that cannot be taken.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        state_format: StateFormat,
        budget: Budget,
        prefix: str,
        *,
        declared: bool,
        gradients: bool,
        place_updates: Callable[[torch.Tensor], torch.device],
    ) -> None:
        self._name = name
        self._place_updates = place_updates
        self._make = make
        self._format = state_format
        self._budget = budget
        self._prefix = prefix
        self._declared = declared
        self._gradients = gradients
        self._found: dict[Any, Traits] = {}
        self._told: set[str] = set()
        # of all parameters, where they cannot be updated apart
        self._together: Bucket | None = None

    def admit(
        self,
        index: int,
        parameters: Sequence[torch.Tensor],
        options: Mapping[str, Any],
        number: int,
    ) -> tuple[list[Weight], list[Bucket]]:
        """The *parameters* of the group of *index*, and their buckets, numbered from
        *number* on.
        """
        if len(set(parameters)) < len(parameters):
            raise UsageError("a parameter is more than once in a group: each may be there once")
        for parameter in parameters:
            _check(parameter)
        weights: list[Weight] = []
        buckets: list[Bucket] = []
        for kind, most in self._kinds(parameters, options):
            tensors = [local(weight.parameter) for weight in kind]
            divisible = [
                tensor.is_contiguous() and weight.traits.elementwise
                for tensor, weight in zip(tensors, kind, strict=True)
            ]
            unit = (
                BLOCK if self._format.eight_bit else 1 if kind[0].traits.elementwise else _ALIGNED
            )
            for parts in (
                cut([tensor.numel() for tensor in tensors], most, divisible, unit) if most else ()
            ):
                own, dtype = number + len(buckets), tensors[0].dtype
                bucket = Bucket(
                    f"{self._prefix}/{own}",
                    dtype,
                    self._format.update_dtype(dtype),
                    tensors[0].device,
                    self._place_updates(kind[0].parameter),
                    kind[0].traits,
                    unit,
                )
                for which, start, stop in parts:
                    bucket.add(kind[which], index, start, stop)
                buckets.append(bucket)
            weights += kind
        return weights, buckets

    def required_bytes(self, buckets: Sequence[Bucket]) -> int:
        """Bytes of the values of *buckets*, of states and gradients, for which the budget is
        divided.
        """
        values, beside = [], []
        for bucket in buckets:
            states, rest_bytes = bucket.foreseen()
            layout = self._format.layout(bucket.numel, states, bucket.dtype, self._name)
            bucket.room_bytes = layout.nbytes + rest_bytes
            values.append(bucket.room_bytes)
            if bucket.device.type == "cpu":
                each = self._beside_bytes(bucket.traits, bucket.dtype, bucket.device)
                if rest_bytes and layout.master is not None:
                    each += 4  # a copy of the master, while the first step makes the value anew
                beside.append(bucket.numel * each + rest_bytes)
        # of the two values of a bucket one at a time is in use
        gradients = [bucket.gradient_bytes if self._gradients else 0 for bucket in buckets]
        most = [*map(self._wide_bytes, buckets), *gradients]
        try:
            return self._budget.divide(values, beside, max(most, default=0)) + sum(gradients)
        except UsageError as error:
            if self._together is None:
                raise
            raise UsageError(
                f"{self._name} looks at all parameters at once, so that host_memory has to hold all of its states: {error}"
            ) from None

    def growth_bytes(self, buckets: Sequence[Bucket]) -> int:
        """Bytes by which the values of *buckets* grow, should their states show to need 16 bits."""
        return sum(max(self._wide_bytes(bucket) - bucket.room_bytes, 0) for bucket in buckets)

    def _wide_bytes(self, bucket: Bucket) -> int:
        """Of the bucket's value, should its states show to need 16 bits."""
        wide = dataclasses.replace(self._format, wide=self._format.eight_bit)
        states, rest_bytes = bucket.foreseen()
        return wide.layout(bucket.numel, states, bucket.dtype, self._name).nbytes + rest_bytes

    def joined(self, buckets: list[Bucket], *, alone: bool) -> list[Bucket]:
        """*buckets*, or one of all that is trained, where parameters cannot be updated apart.
        *alone*: there are no others.
        """
        if self._together is None and all(bucket.traits.separable for bucket in buckets):
            return buckets
        trained = [bucket for bucket in buckets if bucket.trained]
        if not trained:
            return buckets
        if not alone or len({(bucket.dtype, bucket.home, bucket.device) for bucket in trained}) > 1:
            raise UnsupportedError(
                f"{self._name} looks at all parameters at once: NVMeOptimizer takes it with parameters of one dtype on one device, all of them given when "
                "it is made. Use an optimizer that treats every parameter by itself, such as AdamW"
            )
        first, *others = trained
        for other in others:
            first.join(other)
        self._together = first
        return [bucket for bucket in buckets if bucket not in others]

    def check(self, due: Sequence[Bucket]) -> None:
        """See that the buckets that are *due* can be updated. Raises: UnsupportedError."""
        if self._together is not None and any(bucket is not self._together for bucket in due):
            raise UnsupportedError(
                f"{self._name} looks at all parameters at once, and some that were frozen when NVMeOptimizer was made have gradients: make it after they "
                "are thawed"
            )

    def check_keys(
        self, states: Mapping[Weight, Mapping[Any, Any]], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """See that *states* have the keys without which the optimizer fails in its next step, with
        the options of *groups*. An empty state begins anew. Raises: UsageError.
        """
        needed: dict[Any, frozenset[Any]] = {}
        for weight, state in states.items():
            if state.keys() <= {MASTER} or not weight.fragments:
                continue
            fragment = weight.fragments[0]
            bucket, group = fragment.bucket, groups[fragment.group]
            kind = fragment.group, max(local(weight.parameter).dim(), 1), bucket.update_dtype
            if kind not in needed:
                options = {
                    key: value
                    for key, value in group.items()
                    if key not in ("params", "param_names")
                }

                def make(
                    samples: Sequence[torch.Tensor], options: Mapping[str, Any] = options
                ) -> torch.optim.Optimizer:
                    return self._make([{**copy.deepcopy(dict(options)), "params": list(samples)}])

                device = local(weight.parameter).device
                needed[kind] = lasting_keys(make, kind[1], kind[2], device)
            missing, others = needed[kind] - state.keys(), state.keys() - needed[kind]
            if missing:
                raise UsageError(
                    f"the state of a parameter lacks {_listed(missing)}, without which {self._name} cannot go on"
                    f"{f', and has {_listed(others)}' if others else ''}: load states that {self._name} has saved, or rename their keys"
                )

    def _kinds(
        self, parameters: Sequence[torch.Tensor], options: Mapping[str, Any]
    ) -> Iterator[tuple[list[Weight], int]]:
        """Consecutive *parameters* of one kind, with the most elements that a bucket of such should
        have.
        """
        dimensions = sorted({max(parameter.dim(), 1) for parameter in parameters})
        for (dtype, _, device, _), run in itertools.groupby(
            parameters,
            lambda parameter: (
                parameter.dtype,
                local(parameter).device,
                self._place_updates(parameter),
                parameter.requires_grad,
            ),
        ):
            # what is quantized has no gradients, ever
            if not dtype.is_floating_point and not dtype.is_complex:
                yield (
                    [
                        Weight(
                            parameter,
                            Traits({}, eager=False, separable=True, elementwise=True, why=""),
                        )
                        for parameter in run
                    ],
                    0,
                )
                continue
            found = self._examine(options, dimensions, self._format.update_dtype(dtype), device)
            weights = [Weight(parameter, found) for parameter in run]
            if not found.elementwise and any(is_cut(weight.parameter) for weight in weights):
                raise UnsupportedError(
                    f"{self._name} looks at whole parameters, and the elements of these are on several ranks, each of which updates its own: "
                    "use an optimizer that treats every element by itself, such as AdamW"
                )
            value_bytes = self._format.element_bytes(found.states, dtype, self._name) + max(
                map(_rest_share, weights)
            )
            if self._gradients:
                value_bytes = max(value_bytes, dtype.itemsize)
            most = most_elements(
                self._budget.cap_bytes, value_bytes, self._beside_bytes(found, dtype, device)
            )
            yield (
                weights,
                most
                if found.separable
                else sum(local(parameter).numel() for parameter in parameters),
            )

    def _beside_bytes(self, traits: Traits, dtype: torch.dtype, device: torch.device) -> int:
        in_one_pass = self._format.eight_bit and packs_in_one_pass(device)
        return beside_bytes(self._format, traits, dtype, in_one_pass=in_one_pass)

    def _examine(
        self,
        options: Mapping[str, Any],
        dimensions: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Traits:
        key = repr(options), tuple(dimensions), dtype, device  # many groups have the same options
        if key not in self._found:

            def make(samples: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
                return self._make([{**copy.deepcopy(dict(options)), "params": list(samples)}])

            self._found[key] = examine(
                self._name, make, dimensions, dtype, device, declared=self._declared
            )
            self._tell(self._found[key])
        return self._found[key]

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
            _log.info("%s updates %s (%s)", self._name, what, traits.why)


def _listed(keys: Iterable[Any]) -> str:
    return ", ".join(sorted(map(repr, keys)))


def _rest_share(weight: Weight) -> float:
    """Bytes for each element of *weight* of its states that are not elementwise, rounded up as in a
    bucket.
    """
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
    """Whether several ranks have elements of *parameter* that others do not have."""
    placements: Any = getattr(parameter, "placements", ())
    return is_distributed(parameter) and any(placement.is_shard() for placement in placements)


def _check(parameter: torch.Tensor) -> None:
    device = local(parameter).device
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"parameters must be on the CPU or on a CUDA device, not on {device}: move the model before the optimizer is made"
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
