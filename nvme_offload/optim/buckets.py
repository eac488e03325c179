"""`Bucket`: parameters that are updated together, with their states in one value."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..optimizer_states.fingerprint import fingerprint
from ..optimizer_states.rounding import BLOCK, block_names
from ..optimizer_states.traits import UNIT, Traits
from ..optimizer_states.tree import Key, dense_strides, in_a_row, is_for_each
from ..parameters.idle import address_of, detached
from ..update.records import Unit

if TYPE_CHECKING:
    from .awaited import Awaited

_TAKEN = "_nvme_offload_taken"  # key in the __dict__ of a gradient
_marks = itertools.count()
SLOT_BYTES = 64  # a cache line: alignment of the states outside the layout


class Form(NamedTuple):
    """The properties that a binding depends on: shape, dtype and device of the local shard of a
    parameter, and the placements of a DTensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    placements: tuple[Any, ...]

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Form:
        """The form of *parameter*. It does not wait for a queued update."""
        part = local_as_it_is(parameter)
        placements: Any = parameter.placements if is_distributed(parameter) else ()  # type: ignore[attr-defined]
        return cls(part.shape, part.dtype, part.device, placements)


@dataclasses.dataclass(eq=False)
class Weight:
    """One parameter. *seen*: version and address of its data after the last update. *updates*: how
    often its states have changed.

    *traits*: of the optimizer's class with parameters like this one. *number*: its index among all
    parameters of the optimizer. *offset*: of the local shard in the whole parameter, in elements.

    *form*, *group* and *trained*: the form of the parameter, the index of its group, and whether it
    required gradients, all at the time of binding.

    *awaited*: the queued update. *taken*: mark and version of the gradient that was queued or used
    last. It is not a weak reference, since torch.utils.swap_tensors refuses a gradient that has one.
    """

    parameter: torch.Tensor
    traits: Traits
    form: Form
    group: int
    trained: bool = True
    fragments: list[Fragment] = dataclasses.field(default_factory=list)
    seen: tuple[int, int] | None = None
    updates: int = 0
    number: int = 0
    offset: int = 0
    shown: Any = None  # the `ShownState`, once it exists
    # the placeholders that `shown` has
    placeholders: dict[Key, torch.Tensor] = dataclasses.field(default_factory=dict)
    awaited: Awaited | None = None
    taken: tuple[int, int] | None = None

    @property
    def is_as_bound(self) -> bool:
        """Whether the parameter was neither moved, cast nor unfrozen since it was bound."""
        parameter = self.parameter
        return Form.of(parameter) == self.form and (self.trained or not parameter.requires_grad)

    def release(self) -> None:
        """Detach from the buckets. `shown` stays for the next binding."""
        self.fragments, self.placeholders, self.seen = [], {}, None

    @property
    def states(self) -> dict[Any, Any]:
        """The states of the first fragment, if any: all fragments have the same small states."""
        return self.fragments[0].states if self.fragments else {}

    @property
    def gradient(self) -> torch.Tensor | None:
        """The gradient of the queued update; without one, the parameter's own."""
        return self.parameter.grad if self.awaited is None else self.awaited.values

    @property
    def has_new_gradient(self) -> bool:
        """Whether the parameter has another gradient than `taken`, or that was changed since."""
        gradient = self.parameter.grad
        return gradient is not None and self.taken != _mark_of(gradient)

    @property
    def has_other_gradient(self) -> bool:
        """Whether the parameter has another gradient than `taken`."""
        gradient, taken = self.parameter.grad, self.taken
        return gradient is not None and (taken is None or taken[0] != _mark_of(gradient)[0])

    def taken_up(self) -> None:
        """Mark the gradient as queued and bump the parameter's version counter."""
        gradient = self.parameter.grad
        if gradient is not None:
            torch.autograd.graph.increment_version(self.parameter)
        self.mark_gradient()
        self.seen = self._now()

    def mark_gradient(self) -> None:
        """Mark the present gradient as `taken`."""
        gradient = self.parameter.grad
        if gradient is not None:
            gradient.__dict__[_TAKEN] = next(_marks)
            self.taken = _mark_of(gradient)

    @property
    def was_changed(self) -> bool:
        """Whether the program has changed the parameter since the last update."""
        return self.seen not in (None, self._now())

    def settle_gradient(self) -> None:
        """Redistribute the gradient to the placements of the parameter, on every rank."""
        parameter: Any = self.parameter
        if (
            parameter.grad is not None
            and is_distributed(parameter.grad)
            and parameter.grad.placements != parameter.placements
        ):
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

    def updated(self, *, always: bool = False) -> None:
        """Record an update, and bump the version counter of a parameter that it has changed."""
        if always or self.gradient is not None:
            torch.autograd.graph.increment_version(self.parameter)
        self.seen = self._now()
        self.updates += 1

    def _now(self) -> tuple[int, int]:
        return self.parameter._version, address_of(local(self.parameter))


def _mark_of(gradient: torch.Tensor) -> tuple[Any, int]:
    """A key that differs for each gradient, and after each in-place change of one."""
    return gradient.__dict__.get(_TAKEN), 0 if gradient.is_inference() else gradient._version


class Place(NamedTuple):
    """The place of a tensor whose shape is not its parameter's, in the rest of the bucket's value:
    *offset* in bytes, shape, strides and dtype.
    """

    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        """The end, in bytes."""
        return self.offset + self.shape.numel() * self.dtype.itemsize

    def within(self, rest: torch.Tensor) -> torch.Tensor:
        """The tensor, as a view of *rest*."""
        flat = rest[self.offset : self.stop].view(self.dtype)
        return flat.as_strided(self.shape, self.strides, flat.storage_offset())


@dataclasses.dataclass(eq=False)
class Fragment:
    """The elements from *start* to *stop* of a parameter's local shard. *place*: the position of
    the first of them in the bucket.

    *shadow*: the parameter that the inner optimizer sees. *states*: its states there. *leaves*: the
    tensors of *states* that are stored in the bucket's value; they have memory only while the
    bucket is bound. *keys*: the bucket's states of which this fragment has a part, with strides.
    *rest*: the places of its other states. *strides*: of the shadow. *stepped*: it has had a
    gradient, so that its master may differ from the weight. *summed*: during an update, its part of
    a gradient that was in host memory. *norm*: of the part of a gradient that an update has brought
    to a GPU, which has the norm. *has_master*: the bucket's value has its master, which may be older
    than the weight. *rounded*: the fingerprint of the weight when the master was up to date: after
    an update on the CPU, or when the program has given the master; None if it was not taken.
    """

    weight: Weight
    bucket: Bucket
    start: int
    stop: int
    place: int
    shape: torch.Size
    shadow: torch.Tensor
    states: dict[Any, Any] = dataclasses.field(default_factory=dict)
    leaves: dict[Key, torch.Tensor] = dataclasses.field(default_factory=dict)
    keys: dict[Key, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    rest: dict[Key, Place] = dataclasses.field(default_factory=dict)
    strides: tuple[int, ...] = ()
    stepped: bool = False
    has_master: bool = False
    rounded: torch.Tensor | None = None
    summed: torch.Tensor | None = None
    norm: torch.Tensor | None = None

    @property
    def group(self) -> int:
        """The index of the parameter's group."""
        return self.weight.group

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def first_block(self) -> int:
        """The name of the fragment's first block: see `Bucket.block_names`."""
        return (self.weight.number << 40) + (self.weight.offset + self.start) // BLOCK

    @property
    def is_whole(self) -> bool:
        """Whether the fragment has all elements of the parameter's local shard."""
        return len(self.weight.fragments) == 1

    def of_weight(self) -> torch.Tensor:
        """The elements of the parameter; a copy, for `put_weight`, if `is_scattered`."""
        return self.of(detached(local(self.weight.parameter)))

    def fingerprint(self) -> torch.Tensor:
        """The fingerprint of the elements of the parameter."""
        return fingerprint(self.in_memory_order(self.of_weight()))

    @property
    def is_rounded(self) -> bool:
        """Whether the weight is known to be as it was when the master was up to date."""
        if self.rounded is None:
            return False
        now = self.fingerprint()
        return now.device == self.rounded.device and torch.equal(now, self.rounded)

    @property
    def is_scattered(self) -> bool:
        """Whether the elements are apart: the parameter was cut, and has other strides now."""
        return not self.is_whole and not local(self.weight.parameter).is_contiguous()

    def put_weight(self, values: torch.Tensor) -> None:
        """Write *values* to the elements of the parameter."""
        whole = detached(local(self.weight.parameter))
        if not self.is_scattered:
            self.of(whole).copy_(values)
            return
        rows, start, stop = self._rows(whole)
        flat = rows.reshape(-1)
        flat[start:stop] = values
        rows.copy_(flat.view(rows.shape))

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The fragment's part of *whole*, a tensor like the parameter; a view if possible."""
        if self.is_whole:
            return rows_of(whole, 0, len(whole)) if hasattr(whole, "rows") else whole
        if whole.is_contiguous() and not hasattr(whole, "rows"):
            return whole.view(-1)[self.start : self.stop]
        rows, start, stop = self._rows(whole)
        return rows.reshape(-1)[start:stop]

    def _rows(self, whole: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        """The rows of *whole* that contain this fragment, and its start and stop within them."""
        size = whole[0].numel()
        first, last = self.start // size, -(-self.stop // size)
        return rows_of(whole, first, last), self.start - first * size, self.stop - first * size

    def flat_within(self, flat: torch.Tensor) -> torch.Tensor:
        """The fragment's part of *flat*, which has an entry for each element of the bucket."""
        return flat[self.place : self.place + self.numel]

    def within(self, flat: torch.Tensor, strides: tuple[int, ...] | None = None) -> torch.Tensor:
        """As `flat_within`, with the shape of the parameter, and its strides or other *strides*."""
        return flat.as_strided(
            self.shape,
            self.strides if strides is None else strides,
            flat.storage_offset() + self.place,
        )

    def state(
        self, key: Key, states: Mapping[Key, torch.Tensor], rest: torch.Tensor
    ) -> torch.Tensor:
        """The state *key*, as a view of the bucket's *states* or of the *rest* of its value."""
        return (
            self.within(states[key], self.keys[key])
            if key in self.keys
            else self.rest[key].within(rest)
        )

    def in_memory_order(self, weight: torch.Tensor) -> torch.Tensor:
        """*weight*, flat: a view if it has the strides of this fragment, else a copy."""
        return in_a_row(weight, self.strides)

    def look_at_strides(self) -> None:
        """Set `strides`, with which states are created, to the parameter's own without gaps."""
        whole = local(self.weight.parameter)
        self.strides = dense_strides(whole) if self.numel == whole.numel() else (1,)

    def of_gradient(self) -> torch.Tensor | None:
        """The gradient of the fragment, in the dtype and on the device of the parameter."""
        if (gradient := self.weight.gradient) is None:
            return None
        return self.of(local(gradient)) if self.summed is None else self.summed

    def in_update_dtype(
        self, part: torch.Tensor, widened: torch.Tensor, *, copy: bool
    ) -> torch.Tensor:
        """The gradient *part* in the dtype of the shadow. A gradient of another dtype is converted
        into *widened*, which has an entry for each element of the bucket, or is empty. *copy*:
        return a copy, if the update may have to be repeated: some optimizers, such as Muon, compute
        in the gradient itself.
        """
        if part.dtype == self.shadow.dtype or widened.numel() == 0:
            return part.to(self.shadow.dtype, copy=copy or part.is_inference())
        return self.within(widened).copy_(part)


@dataclasses.dataclass(eq=False, kw_only=True)
class Bucket(Unit):
    """*fragments* of one *dtype*, which are updated in *update_dtype*. They belong to one parameter
    group, or to several if the optimizer updates all parameters together.

    *home*: the device of the parameters. *device*: the device of their updates; a GPU also for
    parameters in host memory if `update_device` chose it. *alignment*: of the fragments, in
    elements. *numel*: the elements of all fragments and of the gaps between them.
    """

    update_dtype: torch.dtype
    home: torch.device
    traits: Traits
    alignment: int = 1
    fragments: list[Fragment] = dataclasses.field(default_factory=list)
    inner: torch.optim.Optimizer | None = None

    @property
    def visits_device(self) -> bool:
        """Whether weights and gradients are copied to `device` for an update, and weights back."""
        return self.home != self.device

    def arrange(
        self, forms: Mapping[Fragment, Mapping[Key, torch.Tensor]]
    ) -> tuple[dict[Key, torch.dtype], int]:
        """Assign places to all states that are stored in the value; *forms* has a tensor like each
        of them. Return the states of the layout, and the bytes of the rest.
        """
        states, places, end = self._arranged(forms)
        for fragment, (keys, rest) in places.items():
            # set together: an exception must not separate them
            fragment.keys, fragment.rest = keys, rest
        return states, end

    def foreseen(self) -> tuple[dict[Key, torch.dtype], int]:
        """The result of `arrange` that the trial of the optimizer lets expect."""
        if not self.traits.rest:
            return dict(self.traits.states), 0
        states, _, end = self._arranged(
            {fragment: self.traits.foreseen(fragment.shape) for fragment in self.fragments}
        )
        return {**self.traits.states, **states}, end

    def _arranged(
        self, forms: Mapping[Fragment, Mapping[Key, torch.Tensor]]
    ) -> tuple[
        dict[Key, torch.dtype],
        dict[Fragment, tuple[dict[Key, tuple[int, ...]], dict[Key, Place]]],
        int,
    ]:
        """As `arrange`, and each fragment's keys and places in the rest."""
        # A state may be elementwise for some parameters only, such as vectors. In the layout it
        # would waste room for all other parameters, such as matrices.
        uneven = {
            key
            for fragment in self.fragments
            for key, form in forms[fragment].items()
            if not is_for_each(form, fragment.shape)
        }
        states: dict[Key, torch.dtype] = {}
        places = {}
        end = 0
        for fragment in self.fragments:
            keys: dict[Key, tuple[int, ...]] = {}
            rest: dict[Key, Place] = {}
            for key, form in forms[fragment].items():
                if key not in uneven and states.setdefault(key, form.dtype) == form.dtype:
                    keys[key] = dense_strides(form)
                else:
                    rest[key] = Place(
                        -(-end // SLOT_BYTES) * SLOT_BYTES,
                        form.shape,
                        dense_strides(form),
                        form.dtype,
                    )
                    end = rest[key].stop
            places[fragment] = keys, rest
        return states, places, end

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the gradients of all fragments, with the gaps."""
        return self.numel * self.dtype.itemsize

    def forget(self) -> None:
        """Drop the states, and `inner`."""
        self.inner = None
        self.layout, self.rest_bytes = None, 0
        self.is_stored = self.is_retained = False
        for fragment in self.fragments:
            fragment.states, fragment.leaves, fragment.keys, fragment.rest = {}, {}, {}, {}
            fragment.stepped, fragment.summed = False, None

    def with_gaps(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """*flats*, one for each fragment, with zeros for the gaps between them."""
        filled: list[torch.Tensor] = []
        end = 0
        for fragment, flat in zip(self.fragments, flats, strict=True):
            if fragment.place > end:
                filled.append(flat.new_zeros(fragment.place - end))
            filled.append(flat)
            end = fragment.place + fragment.numel
        return filled

    @property
    def _next_place(self) -> int:
        return -(-self.numel // self.alignment) * self.alignment

    @property
    def groups(self) -> list[int]:
        """The indices of the fragments' parameter groups, in order."""
        return sorted({fragment.group for fragment in self.fragments})

    def block_names(self, device: torch.device | str | None = None) -> torch.Tensor:
        """The numbers by which "compact" rounds each block, independent of the division into buckets."""
        made_on = self.device if device is None else device  # so that a GPU waits for no copy
        return torch.cat(
            [
                block_names(fragment.first_block * BLOCK, fragment.numel, made_on)
                for fragment in self.fragments
            ]
        )

    def join(self, other: Bucket) -> None:
        """Take over the fragments of *other*, for which nothing is stored yet."""
        for fragment in other.fragments:
            fragment.bucket, fragment.place = self, self._next_place
            self._append(fragment)

    def add(self, weight: Weight, start: int, stop: int) -> None:
        """Add the elements *start* to *stop* of *weight*."""
        whole = local(weight.parameter)
        shape = whole.shape if stop - start == whole.numel() else torch.Size([stop - start])
        # Its data is set for each step only. It is a Parameter that requires gradients, since some
        # optimizers skip frozen tensors, or refuse other tensors.
        shadow = torch.nn.Parameter(torch.empty(0, dtype=self.update_dtype, device=self.device))
        fragment = Fragment(weight, self, start, stop, self._next_place, shape, shadow)
        self._append(fragment)
        weight.fragments.append(fragment)
        fragment.look_at_strides()

    def _append(self, fragment: Fragment) -> None:
        self.fragments.append(fragment)
        self.numel = fragment.place + fragment.numel

    @property
    def trained(self) -> bool:
        """Whether its parameters, all or none, required gradients when they were bound."""
        return self.fragments[0].weight.trained

    @property
    def has_gradient(self) -> bool:
        """Whether any of its parameters has a gradient."""
        return any(fragment.weight.parameter.grad is not None for fragment in self.fragments)

    @property
    def weight_bytes(self) -> int:
        """The bytes of the fragments' elements of the parameters."""
        return sum(one.numel * one.weight.parameter.dtype.itemsize for one in self.fragments)

    def weights(self) -> list[torch.Tensor]:
        """The fragments' elements of the parameters."""
        return [fragment.of_weight() for fragment in self.fragments]


def rows_of(tensor: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """The rows of *tensor* from *first* to *stop*. A tensor without memory may have an attribute
    *rows*, a function that returns them.
    """
    rows: Callable[[int, int], torch.Tensor] | None = getattr(tensor, "rows", None)
    return tensor[first:stop] if rows is None else rows(first, stop)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of *tensor*."""
    if not is_distributed(tensor):
        return tensor
    distributed: Any = tensor
    with torch.no_grad():
        part: torch.Tensor = distributed.to_local()
    return part


def local_as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """`local` without a wait for a pending update: for the shape, dtype and device."""
    if not is_distributed(tensor):
        return tensor
    part: torch.Tensor = _dtensor()._local_tensor.__get__(tensor)
    return part


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether *tensor* is a DTensor. It does not import the class."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    kind = _dtensor()
    return kind is not None and isinstance(tensor, kind)


def _dtensor() -> Any:
    """The class DTensor; None if it is not imported."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def offset_of(parameter: torch.Tensor) -> int:
    """The offset of the local shard's first element in the whole *parameter*."""
    if not is_distributed(parameter) or local(parameter).numel() == 0:
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole: Any = parameter
    _, starts = compute_local_shape_and_global_offset(
        whole.shape, whole.device_mesh, whole.placements
    )
    sizes = [*whole.shape[1:], 1]
    return sum(start * math.prod(sizes[dimension:]) for dimension, start in enumerate(starts))


def like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """*part* as the local shard of a tensor that is distributed as *parameter* is."""
    if not is_distributed(parameter):
        return part
    # DTensor.from_local would move the shard to the device of the mesh.
    spec: Any = parameter._spec  # type: ignore[attr-defined]
    whole: torch.Tensor = _dtensor()(
        part,
        type(spec)(
            spec.mesh, spec.placements, tensor_meta=spec.tensor_meta._replace(dtype=part.dtype)
        ),
        requires_grad=False,
    )
    return whole


def cut(
    sizes: Sequence[int], most: int, divisible: Sequence[bool], unit: int = 1
) -> list[list[tuple[int, int, int]]]:
    """Divide items of *sizes* elements, in order, into lists of at most *most* elements. An entry
    of a list is (index of the item, start, stop) and occupies whole *units*, as *most* does.

    An item of more than *most* elements is cut if it is *divisible*; otherwise it gets a list.
    """
    lists: list[list[tuple[int, int, int]]] = []
    room = -1
    for index, size in enumerate(sizes):
        for start, stop in (
            _parts(size, most, max(room, 0)) if size > most and divisible[index] else [(0, size)]
        ):
            taken = -(-(stop - start) // unit) * unit
            if taken > room:
                lists.append([])
                room = most
            lists[-1].append((index, start, stop))
            room -= taken
    return lists


def _parts(size: int, most: int, room: int) -> Iterator[tuple[int, int]]:
    """The bounds of parts of *size* elements: the first fills *room*."""
    start, count = 0, room // UNIT * UNIT
    while start < size:
        if count:
            yield start, min(start + count, size)
            start += count
        count = most // UNIT * UNIT
