"""`OptimizerSwapper`: master weights and optimizer states of ZeRO-3's sub-groups, each one value of
a `TensorSwapper`, in a `StateFormat`.

It stands where stage 3 expects `deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerSwapper`,
and answers to the same calls. Gradients are no business of it: see `gradients.py`.

In "exact" the tensors of the optimizer are views of the value. In the other formats the value has
of the master weights only what the 16-bit parameters lack, so that these are part of every update;
one sub-group at a time is unpacked, into memory that all share. What DeepSpeed does otherwise than
there:

- Parameters are rounded half away from zero, and DeepSpeed rounds half to even: in one of 65536
  they differ by their last bit.
- A master weight that is set from outside shows in its parameter at once, and not at the next step.
- A parameter that is changed from outside takes its master weight with it; DeepSpeed undoes the
  change at the next step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedError, UsageError
from ..optimizer_states import BLOCK, Layout, StateFormat, far_blocks, looks_at
from ..swap.tier import Tier

# the key that the master weights have in a layout of "exact", where they are kept whole as states
# are
_MASTER = ""
_serial = itertools.count()
_log = logging.getLogger(__name__)


class Working(NamedTuple):
    """The 16-bit parameters of sub-groups: *load* copies those of a flat master parameter to a
    tensor, *store* is given them, changed.
    """

    dtype: torch.dtype
    load: Callable[[torch.Tensor, torch.Tensor], None]
    store: Callable[[torch.Tensor, torch.Tensor], None]


@dataclasses.dataclass
class SubGroup:
    """One flat parameter of stage 3, which begins with the element *start* of all. *layout*: what
    its value *name* holds where.
    """

    start: int
    name: str
    numel: int
    capacity_bytes: int
    layout: Layout
    buffer: torch.Tensor | None = None  # while swapped in
    packed: int = 0  # how often


class OptimizerSwapper:
    """Keeps the states of *parameters*' sub-groups in a tier, in *state_format*.

    Whatever the optimizer's state holds for a sub-group that has the sub-group's shape is offloaded
    with the master weights, and whatever else (step counts and the like) stays in memory. The
    state's tensors stay the same objects: they are empty while their bytes are offloaded.

    *optimizer* is asked for at every use: stage 3 replaces it. *states* are those that it will
    have, by key, and *largest* is the number of elements of the largest sub-group, by which memory
    is planned. One sub-group is in use at a time: when another is taken, what a call that was cut
    short by an exception has left in use is given back.
    """

    def __init__(
        self,
        tier: Tier,
        optimizer: Callable[[], torch.optim.Optimizer],
        state_format: StateFormat,
        states: Mapping[str, torch.dtype],
        largest: int,
        working: Working,
    ) -> None:
        self.tier = tier
        self._optimizer = optimizer
        self._format = state_format
        self._expected = states
        self._working = working
        self._told = False
        self._prefix = f"optimizer{next(_serial)}"
        # by the parameter's id, in the order of the step
        self._sub_groups: dict[int, SubGroup] = {}
        self._parameters: list[torch.Tensor] = []
        self._names: list[str] = []
        # the parameter whose sub-group is in use, or was to be
        self._taken: torch.Tensor | None = None
        self._unpacked_name, self._working_name = (
            f"{self._prefix}/unpacked",
            f"{self._prefix}/working",
        )
        tier.abandon_with(self, self._names)
        if not state_format.in_place:
            layout = state_format.layout(largest, states, working.dtype, self._called)
            tier.make_scratch(self._unpacked_name, state_format.unpacked_elements(layout) * 4)
            tier.make_scratch(self._working_name, largest * working.dtype.itemsize)

    def close(self) -> None:
        """Forget everything; a second call does nothing."""
        self.tier.forget(self._names)
        self._names.clear()
        self.tier.drop_scratch(self._unpacked_name)
        self.tier.drop_scratch(self._working_name)

    def name(self, parameter: torch.Tensor) -> str:
        """What *parameter* and its states are called in the tier."""
        return self._sub_groups[id(parameter)].name

    # What stage 3 calls.

    def is_swappable_tensor(
        self, tensor: torch.Tensor | None = None, numel: int | None = None
    ) -> bool:
        """Every sub-group is: small ones are packed like large ones."""
        return True

    def initialize_parameters(
        self, parameters: Sequence[torch.Tensor], src_tensors: Sequence[torch.Tensor]
    ) -> None:
        """Make the master weights of *parameters* from *src_tensors*, which have them in any dtype,
        or are the 16-bit parameters, which lack nothing yet.
        """
        for parameter, source in zip(parameters, src_tensors, strict=True):
            number, numel = len(self._parameters), source.numel()
            start = sum(sub_group.numel for sub_group in self._sub_groups.values())
            capacity = self._layout(parameter, numel, self._expected).nbytes
            sub_group = SubGroup(
                start,
                f"{self._prefix}/{number}",
                numel,
                capacity,
                self._layout(parameter, numel, {}),
            )
            self._sub_groups[id(parameter)] = sub_group
            self._parameters.append(parameter)  # so that its id stays its own
            self._names.append(sub_group.name)
            self._take(parameter)
            buffer = sub_group.buffer = self.tier.swapper.create(sub_group.name, capacity)
            if self._format.in_place:
                self._unpacked(sub_group)[_MASTER].copy_(source)
            else:
                buffer.zero_()
            self._release(sub_group, changed=True)

    def swap_in_optimizer_state(
        self, parameter: torch.Tensor, async_parameter: torch.Tensor | None = None
    ) -> None:
        """Bring *parameter* and its optimizer states to memory."""
        sub_group = self._take(parameter)
        # before the states: so no two values need have room at once
        for weights in self._working_of(sub_group):
            self._working.load(parameter, weights)
        sub_group.buffer = self.tier.swapper.swap_in(sub_group.name)
        self._bind(parameter, sub_group)

    def swap_out_optimizer_state(self, parameter: torch.Tensor, async_swap: bool = False) -> None:
        """Give back what `swap_in_optimizer_state` brought, with its changes and what the optimizer
        has added; the writing goes on behind.
        """
        sub_group = self._sub_groups[id(parameter)]
        self._pack(parameter, sub_group)
        self._give_back(parameter, changed=True)
        for weights in self._working_of(sub_group):
            self._working.store(parameter, weights)

    def release_swap_buffers(self, parameter: torch.Tensor) -> None:
        """Give back what `swap_in_optimizer_state` brought, unchanged."""
        self._give_back(parameter, changed=False)

    def give_back(self) -> None:
        """Give back what a call that was cut short has left in use, as it is by now; where there is
        no such, nothing is done.
        """
        parameter, self._taken = self._taken, None
        if parameter is not None:
            self._empty(parameter)
            self._sub_groups[id(parameter)].buffer = None
            with contextlib.suppress(UsageError):  # it was not taken yet, or has been given back
                self.tier.swapper.release(self._sub_groups[id(parameter)].name, changed=True)

    def states(self, parameter: torch.Tensor) -> dict[str, torch.dtype]:
        """The optimizer states of *parameter* that are offloaded with it, by key."""
        return {
            key: slot.dtype
            for key, slot in self._sub_groups[id(parameter)].layout.states.items()
            if key != _MASTER
        }

    def renew(self, parameter: torch.Tensor, states: Mapping[str, torch.dtype]) -> None:
        """Make room in memory for *parameter* and for *states* of it, and put these into the
        optimizer's state: for the caller to fill.

        What *parameter* had is forgotten without a look. It is in use, until
        `swap_out_optimizer_state`.
        """
        sub_group = self._take(parameter)
        sub_group.layout = self._layout(parameter, sub_group.numel, states)
        sub_group.capacity_bytes = max(sub_group.capacity_bytes, sub_group.layout.nbytes)
        buffer = sub_group.buffer = self.tier.swapper.create(
            sub_group.name, sub_group.capacity_bytes
        )
        if not self._format.in_place:
            buffer.zero_()
        if states:
            self._optimizer().state[parameter].update(
                {key: torch.empty(0, dtype=dtype) for key, dtype in states.items()}
            )
        self._bind(parameter, sub_group)

    @property
    def swap_folder(self) -> str:
        """Where DeepSpeed's engine looks for files to copy when it saves or loads without this
        package's methods, after `zero3.disable`.
        """
        raise UnsupportedError(
            "checkpoints of this engine need nvme_offload.zero3 enabled, as it was when the engine was made: call enable() again"
        )

    def purge_state(self) -> None:
        """Forget the optimizer's states; the master weights, with which every layout
        begins, stay.
        """
        for parameter in self._parameters:
            sub_group = self._sub_groups[id(parameter)]
            sub_group.layout = self._layout(parameter, sub_group.numel, {})

    def init_timers(self) -> None:
        """DeepSpeed's timers are not kept: see `zero3.stats`."""

    def log_timers(self) -> None:
        """Likewise."""

    def pre_backward(self) -> None:
        """Nothing to prepare."""

    def post_backward(self) -> None:
        """Nothing to finish: gradients stay where they are."""

    # Inside.

    def _take(self, parameter: torch.Tensor) -> SubGroup:
        """The sub-group of *parameter*, which is about to be in use; noted first, so that no
        exception comes between.
        """
        self.give_back()
        self._taken = parameter
        return self._sub_groups[id(parameter)]

    @property
    def _called(self) -> str:
        return type(self._optimizer()).__name__

    def _layout(
        self, parameter: torch.Tensor, numel: int, states: Mapping[str, torch.dtype]
    ) -> Layout:
        if not self._format.in_place:
            return self._format.layout(numel, states, self._working.dtype, self._called)
        # the flat parameter is the master itself
        masters = dataclasses.replace(self._format, keeps_masters=False)
        return masters.layout(
            numel, {_MASTER: parameter.dtype, **states}, parameter.dtype, self._called
        )

    def _working_of(self, sub_group: SubGroup) -> list[torch.Tensor]:
        """Where the 16-bit parameters are that the master weights are made of; [] where those are
        whole.
        """
        if self._format.in_place:
            return []
        return [
            self.tier.scratch(self._working_name)
            .view(self._working.dtype)
            .narrow(0, 0, sub_group.numel)
        ]

    def _unpacked(self, sub_group: SubGroup) -> dict[str, torch.Tensor]:
        """The master weights and the states of a sub-group in use, by key."""
        assert sub_group.buffer is not None
        memory = None
        if not self._format.in_place:
            memory = self.tier.scratch(self._unpacked_name).view(torch.float32)
            # the optimizer has more states than was foreseen
            if memory.numel() < self._format.unpacked_elements(sub_group.layout):
                memory = None
        master, states = self._format.unpack(
            sub_group.layout, sub_group.buffer, self._working_of(sub_group), memory
        )
        return states if master is None else {_MASTER: master, **states}

    def _bind(self, parameter: torch.Tensor, sub_group: SubGroup) -> None:
        state = self._optimizer().state.get(parameter, {})
        for key, value in self._unpacked(sub_group).items():
            target = parameter if key == _MASTER else state[key]
            target.data = value

    def _pack(self, parameter: torch.Tensor, sub_group: SubGroup) -> None:
        """See that all that is offloaded with *parameter* is in the sub-group's value."""
        assert sub_group.buffer is not None
        state = self._optimizer().state.get(parameter, {})
        values = {key: value.contiguous() for key, value in offloaded(state, parameter).items()}
        layout = self._layout(
            parameter, sub_group.numel, {key: value.dtype for key, value in values.items()}
        )
        if self._format.in_place:
            values = {_MASTER: parameter.data, **values}
        if layout != sub_group.layout:
            values = self._arrange(sub_group, layout, values)
        sub_group.packed += 1
        seed, blocks = 0, None
        if self._format.eight_bit:
            # The same at the same step, whatever went before, so that a run that was resumed goes
            # on as it would have.
            seed = int(state.get("step", sub_group.packed))
            if (
                not self._told
                and looks_at(self._format, 1 if sub_group.packed == 1 else seed)
                and not self._format.wide
            ):
                self._look(layout, values)
            # by the place in all that is trained, whatever the sub-groups are
            first = sub_group.start // BLOCK
            blocks = torch.arange(first, first - (-sub_group.numel // BLOCK), dtype=torch.int64)
        master = None if self._format.in_place else parameter.data
        self._format.pack(
            layout, sub_group.buffer, self._working_of(sub_group), master, values, seed, blocks
        )

    def _arrange(
        self, sub_group: SubGroup, layout: Layout, values: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Have the value in use follow *layout*; *values*, of which those are copies whose bytes
        are written over by that.
        """
        assert sub_group.buffer is not None
        start, end = (
            sub_group.buffer.data_ptr(),
            sub_group.buffer.data_ptr() + sub_group.buffer.numel(),
        )
        grows = layout.nbytes > sub_group.capacity_bytes
        for key, value in values.items():
            place = start + layout.states[key].values.offset
            if start <= value.data_ptr() < end and (grows or value.data_ptr() != place):
                values[key] = value.clone()
        if grows:
            sub_group.capacity_bytes = layout.nbytes
            self.tier.swapper.discard(sub_group.name)
            sub_group.buffer = self.tier.swapper.create(sub_group.name, layout.nbytes)
        sub_group.layout = layout
        return values

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
        self.tier.swapper.release(sub_group.name, changed=changed, nbytes=sub_group.layout.nbytes)
        self._taken = None

    def _look(self, layout: Layout, values: Mapping[str, torch.Tensor]) -> None:
        """Tell of states that are too far apart for 8 bits. Other ranks have other states, so that
        one rank cannot go over to 16 bits by itself.
        """
        eps = min(
            (
                eps
                for group in self._optimizer().param_groups
                if isinstance(eps := group.get("eps"), int | float)
            ),
            default=0.0,
        )
        self._told = far_blocks(layout, values, eps) is not None
        if self._told:
            _log.warning(
                '"state_format": "%s" has too few bits for second moments of one block that are more than 30 octaves apart: the weights with the least '
                'gradients take smaller steps than they should. Use "split"',
                self._format.name,
            )


def element_bytes(
    state_format: StateFormat,
    states: Mapping[str, torch.dtype],
    working: torch.dtype,
    master: torch.dtype,
    optimizer: str,
) -> tuple[float, int]:
    """Bytes of an element's *master* weight and *states* as they are kept, and of the memory beside
    that to which they are unpacked.

    Raises: UnsupportedError where *state_format* cannot keep them.
    """
    if state_format.name == "exact":
        return master.itemsize + sum(dtype.itemsize for dtype in states.values()), 0
    if (working, master) != (torch.bfloat16, torch.float32):
        raise UnsupportedError(
            f'"state_format": "{state_format.name}" is for parameters in bfloat16 with master weights in float32, and these are in {working} with {master}: '
            'have "bf16" enabled, or leave "state_format" out'
        )
    unpacked = state_format.unpacked_elements(state_format.layout(1, states, working, optimizer))
    return state_format.element_bytes(
        states, working, optimizer
    ), unpacked * master.itemsize + working.itemsize


def states_of(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The states that *optimizer* will keep for each element of master weights of *dtype*, by key:
    found by one step of an optimizer like it on a few elements, or taken as Adam's where such a one
    cannot be made from its defaults.
    """
    sample = torch.zeros(8, dtype=dtype, requires_grad=True)
    sample.grad = torch.zeros_like(sample)
    # AdamW's defaults have more than its constructor takes
    accepted = inspect.signature(type(optimizer)).parameters
    try:
        like: Any = type(optimizer)(
            [sample], **{key: value for key, value in optimizer.defaults.items() if key in accepted}
        )
        like.step()
        return {key: value.dtype for key, value in offloaded(like.state[sample], sample).items()}
    # the constructor of an optimizer may want anything, and raise anything; nothing depends on this
    # but how memory is planned
    except Exception:
        return {"exp_avg": dtype, "exp_avg_sq": dtype}


def offloaded(state: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """What of the optimizer's *state* of *parameter* has a value for each element, and so is
    offloaded with it.
    """
    return {key: value for key, value in state.items() if _is_offloaded(value, parameter)}


def _is_offloaded(value: Any, parameter: torch.Tensor) -> bool:
    return (
        torch.is_tensor(value)
        and value.shape == parameter.shape
        and value.is_cpu
        and getattr(value, "swappable", True)
    )
