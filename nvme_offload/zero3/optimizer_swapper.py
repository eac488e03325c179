"""`OptimizerSwapper`: the fp32 master weights and the optimizer states of ZeRO-3's sub-groups, each sub-group one packed name of a `TensorSwapper`.

It stands where stage 3 expects `deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerSwapper`, and answers to the same calls. Gradients are no
business of it: see `gradients.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import UnsupportedError, UsageError
from ..optimizer_states import Layout
from ..swap.tier import Tier

_SLOT_BYTES = 64  # a slot starts on a cache line, for the vector instructions of fused optimizers
_MASTER = ""  # the key of the slot that the master weights are in
_serial = itertools.count()


@dataclasses.dataclass
class SubGroup:
    """One flat parameter of stage 3, which begins with the element *start* of all.

    *slots* are the tensors packed under *name*, as they are: by key of the optimizer's state, offset and dtype.
    """

    start: int
    name: str
    numel: int
    capacity_bytes: int
    slots: dict[str, tuple[int, torch.dtype]] = dataclasses.field(default_factory=dict)
    layout: Layout | None = None  # instead of slots, where they are not as they are
    buffer: torch.Tensor | None = None  # while swapped in
    packed: int = 0  # how often

    def end(self, key: str) -> int:
        """Where the slot *key* ends, in bytes."""
        offset, dtype = self.slots[key]
        return offset + self.numel * dtype.itemsize

    @property
    def used_bytes(self) -> int:
        """Bytes of the place that are its value."""
        return max(self.end(key) for key in self.slots) if self.layout is None else self.layout.nbytes

    def view(self, key: str) -> torch.Tensor:
        """The tensor in the slot *key*, in use."""
        assert self.buffer is not None
        return self.buffer[self.slots[key][0] : self.end(key)].view(self.slots[key][1])


class OptimizerSwapper:
    """Keeps the states of *parameters*' sub-groups in a tier.

    Whatever the optimizer's state holds for a sub-group that has the sub-group's shape travels with the master weights, and whatever else (step
    counts and the like) stays in memory. The state's tensors stay the same objects: they are empty while their bytes are away.

    *optimizer* is asked for at every use: stage 3 replaces it. One sub-group is in use at a time: when another is taken, what a call that was cut
    short by an exception has left in use is given back.
    """

    def __init__(self, tier: Tier, optimizer: Callable[[], torch.optim.Optimizer], state_bytes: int) -> None:
        self.tier = tier
        self._optimizer = optimizer
        self._state_bytes = state_bytes
        self._prefix = f"optimizer{next(_serial)}"
        self._sub_groups: dict[int, SubGroup] = {}  # by the parameter's id, in the order of the step
        self._parameters: list[torch.Tensor] = []
        self._names: list[str] = []
        self._taken: torch.Tensor | None = None  # the parameter whose sub-group is in use, or was to be
        tier.abandon_with(self, self._names)

    def close(self) -> None:
        """Forget everything; a second call does nothing."""
        self.tier.forget(self._names)
        self._names.clear()

    def name(self, parameter: torch.Tensor) -> str:
        """What *parameter* and its states are called in the tier."""
        return self._sub_groups[id(parameter)].name

    # What stage 3 calls.

    def is_swappable_tensor(self, tensor: torch.Tensor | None = None, numel: int | None = None) -> bool:
        """Every sub-group is: small ones are packed like large ones."""
        return True

    def initialize_parameters(self, parameters: Sequence[torch.Tensor], src_tensors: Sequence[torch.Tensor]) -> None:
        """Make the master weights of *parameters* from *src_tensors*, which have them in any dtype."""
        for parameter, source in zip(parameters, src_tensors, strict=True):
            numel = source.numel()
            sub_group = self._add(parameter, numel, numel * self._state_bytes + 4 * _SLOT_BYTES)
            sub_group.slots = {_MASTER: (0, parameter.dtype)}
            self._take(parameter)
            sub_group.buffer = self.tier.swapper.create(sub_group.name, sub_group.capacity_bytes)
            sub_group.view(_MASTER).copy_(source)
            self._release(sub_group, changed=True)

    def swap_in_optimizer_state(self, parameter: torch.Tensor, async_parameter: torch.Tensor | None = None) -> None:
        """Bring *parameter* and its optimizer states to memory."""
        sub_group = self._take(parameter)
        sub_group.buffer = self.tier.swapper.swap_in(sub_group.name)
        self._bind(parameter, sub_group)

    def swap_out_optimizer_state(self, parameter: torch.Tensor, async_swap: bool = False) -> None:
        """Give back what `swap_in_optimizer_state` brought, with its changes and what the optimizer has added; the writing goes on behind."""
        self._pack(parameter)
        self._give_back(parameter, changed=True)

    def release_swap_buffers(self, parameter: torch.Tensor) -> None:
        """Give back what `swap_in_optimizer_state` brought, unchanged."""
        self._give_back(parameter, changed=False)

    def give_back(self) -> None:
        """Give back what a call that was cut short has left in use, as it is by now; where there is no such, nothing is done."""
        parameter, self._taken = self._taken, None
        if parameter is not None:
            self._empty(parameter)
            self._sub_groups[id(parameter)].buffer = None
            with contextlib.suppress(UsageError):  # it was not taken yet, or has been given back
                self.tier.swapper.release(self._sub_groups[id(parameter)].name, changed=True)

    def states(self, parameter: torch.Tensor) -> dict[str, torch.dtype]:
        """The optimizer states of *parameter* that travel with it, by key."""
        return {key: dtype for key, (_, dtype) in self._sub_groups[id(parameter)].slots.items() if key != _MASTER}

    def renew(self, parameter: torch.Tensor, states: Mapping[str, torch.dtype]) -> None:
        """Make room in memory for *parameter* and for *states* of it, and put these into the optimizer's state: for the caller to fill.

        What *parameter* had is forgotten without a look. It is in use, until `swap_out_optimizer_state`.
        """
        sub_group = self._take(parameter)
        sub_group.slots = self._layout(sub_group, states)
        sub_group.capacity_bytes = max(sub_group.capacity_bytes, sub_group.used_bytes)
        sub_group.buffer = self.tier.swapper.create(sub_group.name, sub_group.capacity_bytes)
        if states:
            self._optimizer().state[parameter].update({key: torch.empty(0, dtype=dtype) for key, dtype in states.items()})
        self._bind(parameter, sub_group)

    @property
    def swap_folder(self) -> str:
        """Where DeepSpeed's engine looks for files to copy when it saves or loads without this package's methods, after `zero3.disable`."""
        raise UnsupportedError("checkpoints of this engine need nvme_offload.zero3 enabled, as it was when the engine was made: call enable() again")

    def purge_state(self) -> None:
        """Forget the optimizer's states; the master weights stay."""
        for sub_group in self._sub_groups.values():
            sub_group.slots = {_MASTER: sub_group.slots[_MASTER]}

    def init_timers(self) -> None:
        """DeepSpeed's timers are not kept: see `zero3.stats`."""

    def log_timers(self) -> None:
        """Likewise."""

    def pre_backward(self) -> None:
        """Nothing to prepare."""

    def post_backward(self) -> None:
        """Nothing to finish: gradients stay where they are."""

    # Inside.

    def _add(self, parameter: torch.Tensor, numel: int, capacity_bytes: int) -> SubGroup:
        number = len(self._parameters)
        start = sum(sub_group.numel for sub_group in self._sub_groups.values())
        sub_group = self._sub_groups[id(parameter)] = SubGroup(start, f"{self._prefix}/{number}", numel, capacity_bytes)
        self._parameters.append(parameter)  # so that its id stays its own
        self._names.append(sub_group.name)
        return sub_group

    def _take(self, parameter: torch.Tensor) -> SubGroup:
        """The sub-group of *parameter*, which is about to be in use; noted first, so that no exception comes between."""
        self.give_back()
        self._taken = parameter
        return self._sub_groups[id(parameter)]

    def _bind(self, parameter: torch.Tensor, sub_group: SubGroup) -> None:
        state = self._optimizer().state.get(parameter, {})
        for key in sub_group.slots:
            target = parameter if key == _MASTER else state[key]
            target.data = sub_group.view(key)

    def _pack(self, parameter: torch.Tensor) -> None:
        """See that every tensor of the optimizer's state that belongs to the sub-group is in its buffer."""
        sub_group = self._sub_groups[id(parameter)]
        state = self._optimizer().state.get(parameter, {})
        values = travelling(state, parameter)
        slots = self._layout(sub_group, {key: value.dtype for key, value in values.items()})
        end = max(offset + sub_group.numel * dtype.itemsize for offset, dtype in slots.values())
        if end > sub_group.capacity_bytes:
            self._enlarge(parameter, sub_group, end)
        moved = {key: value.clone() for key, value in values.items() if sub_group.slots.get(key, slots[key]) != slots[key]}
        sub_group.slots = slots
        for key, value in values.items():
            place = sub_group.view(key)
            if value.data_ptr() != place.data_ptr():
                place.copy_(moved.get(key, value))
                value.data = place

    def _layout(self, sub_group: SubGroup, states: Mapping[str, torch.dtype]) -> dict[str, tuple[int, torch.dtype]]:
        slots = {_MASTER: sub_group.slots[_MASTER]}
        end = sub_group.end(_MASTER)
        for key, dtype in states.items():
            slots[key] = (-(-end // _SLOT_BYTES) * _SLOT_BYTES, dtype)
            end = slots[key][0] + sub_group.numel * dtype.itemsize
        return slots

    def _enlarge(self, parameter: torch.Tensor, sub_group: SubGroup, nbytes: int) -> None:
        """Move the sub-group to a place of *nbytes*: the optimizer keeps more for each element than was foreseen."""
        state = self._optimizer().state.get(parameter, {})
        for key in sub_group.slots:
            tensor = parameter if key == _MASTER else state.get(key)
            if torch.is_tensor(tensor) and tensor.data_ptr() == sub_group.view(key).data_ptr():  # not one that the optimizer has put in its place
                tensor.data = tensor.data.clone()
        self.tier.swapper.discard(sub_group.name)
        sub_group.capacity_bytes = nbytes
        sub_group.buffer = self.tier.swapper.create(sub_group.name, nbytes)
        sub_group.view(_MASTER).copy_(parameter)
        parameter.data = sub_group.view(_MASTER)
        sub_group.slots = {_MASTER: sub_group.slots[_MASTER]}

    def _give_back(self, parameter: torch.Tensor, changed: bool) -> None:
        sub_group = self._sub_groups[id(parameter)]
        if sub_group.buffer is None:
            return
        self._empty(parameter)
        self._release(sub_group, changed)

    def _empty(self, parameter: torch.Tensor) -> None:
        """Let nothing of *parameter* be in the memory of its sub-group."""
        state = self._optimizer().state.get(parameter, {})
        for tensor in (parameter, *(state.get(key) for key in self.states(parameter))):
            if torch.is_tensor(tensor):
                tensor.data = torch.empty(0, dtype=tensor.dtype)
        parameter.grad = None

    def _release(self, sub_group: SubGroup, changed: bool) -> None:
        sub_group.buffer = None
        self.tier.swapper.release(sub_group.name, changed=changed, nbytes=sub_group.used_bytes)
        self._taken = None


def states_of(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The states that *optimizer* will keep for each element of master weights of *dtype*, by key: found by one step of an optimizer like it on a few
    elements, or taken as Adam's where such a one cannot be made from its defaults.
    """
    sample = torch.zeros(8, dtype=dtype, requires_grad=True)
    sample.grad = torch.zeros_like(sample)
    accepted = inspect.signature(type(optimizer)).parameters  # AdamW's defaults have more than its constructor takes
    try:
        like: Any = type(optimizer)([sample], **{key: value for key, value in optimizer.defaults.items() if key in accepted})
        like.step()
        return {key: value.dtype for key, value in travelling(like.state[sample], sample).items()}
    except Exception:  # the constructor of an optimizer may want anything, and raise anything; nothing depends on this but how memory is planned
        return {"exp_avg": dtype, "exp_avg_sq": dtype}


def travelling(state: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """What of the optimizer's *state* of *parameter* has a value for each element, and so goes where this goes."""
    return {key: value for key, value in state.items() if _travels(value, parameter)}


def _travels(value: Any, parameter: torch.Tensor) -> bool:
    return torch.is_tensor(value) and value.shape == parameter.shape and value.is_cpu and getattr(value, "swappable", True)
