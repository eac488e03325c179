"""`OptimizerSwapper`: master weights and optimizer states of ZeRO-3's sub-groups, each sub-group one
value of a `TensorSwapper`, in a `StateFormat`.

It replaces `deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerSwapper` in stage 3 and has the
same methods. `gradients.py` keeps the gradients.

In "exact" the optimizer's tensors are views of the value. In the other formats the value holds only
the bits of the master weights that the 16-bit parameters lack, so every update loads the parameters
too. One sub-group at a time is unpacked, into scratch memory that all sub-groups share. These
formats differ from DeepSpeed:

- Parameters are rounded half away from zero. DeepSpeed rounds half to even: one parameter in 65536
  differs in its last bit.
- A master weight set by the user changes its parameter immediately, not after the next step.
- A parameter changed by the user changes its master weight. DeepSpeed undoes the change at the next
  step.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import UnsupportedError, known
from ..optimizer_states.formats import Layout
from ..optimizer_states.one_pass import Part, has_packed_moments, step_in_one_pass, update
from ..optimizer_states.rounding import BLOCK, block_names
from ..optimizer_states.tree import drop_memory
from ..optimizer_states.widening import far_blocks, least_eps, looks_at
from ..update.records import Records, Unit
from .cpu_adam import CPUAdam, is_cpu_adam
from .once_per_step import has_hooks, replaces_step
from .sub_groups import elementwise

_MASTER = ""  # the key of the master weights in a layout of "exact", which keeps them as a state
_serial = itertools.count()
_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, kw_only=True)
class SubGroup(Unit):
    """The flat *parameter* of a sub-group. *start* is the index of its first element among all elements
    of this rank. *weights*, in packed formats, are set while it is in use. *step*: the optimizer's
    step, if its own count is on a GPU and was read.
    """

    parameter: torch.Tensor  # keeps its id from being reused
    start: int
    weights: list[torch.Tensor] = dataclasses.field(default_factory=list)
    pack_count: int = 0
    step: int | None = None


class OptimizerSwapper(Records):
    """Keeps the states of sub-groups in the tier of *owner*, a `Tiered`, in its state format. Memory is
    planned for its expected states, and for *largest*, the elements of the largest sub-group.

    The swapper offloads the master weights and every state of a sub-group's shape. Other states,
    such as step counts, stay in memory. The state's tensors stay the same objects; they are empty
    while their bytes are offloaded.

    One sub-group at a time is in use: taking another releases a sub-group that a call left in use when
    an exception ended it. *at_once* is False if host memory cannot hold states that are being copied
    back from a GPU in addition to the states of the next sub-group.
    """

    def __init__(self, owner: Any, largest: int, at_once: bool = True) -> None:
        tier, state_format = owner.tier, owner.state_format
        self._in_place = state_format.in_place
        # In "exact" the flat parameter is the master itself, which is kept as one of the states.
        kept = dataclasses.replace(state_format, keeps_masters=not self._in_place)
        super().__init__(tier, kept, type(owner.optimizer).__name__)
        self._owner = owner  # not its optimizer, which stage 3 replaces
        self.device: torch.device = owner.update_device
        self._at_once = at_once
        self._warned = False
        self._prefix = f"optimizer{next(_serial)}"
        # Id of the parameter -> sub-group, in the order of the step.
        self._sub_groups: dict[int, SubGroup] = {}
        self._names: list[str] = []
        # The parameter whose sub-group is in use, or is about to be.
        self._taken: torch.Tensor | None = None
        self._is_packed = False  # its states are packed; `step` unpacks them if necessary
        self._cpu_adam = CPUAdam()
        self._unpacked_name = f"{self._prefix}/unpacked"
        self._working_name = f"{self._prefix}/working"
        tier.abandon_with(self, self._names)
        if not self._in_place and self.device.type == "cpu":
            self._names += self._unpacked_name, self._working_name
            layout = state_format.layout(largest, owner.expected_states, owner.dtype, self._name)
            tier.make_scratch(self._unpacked_name, state_format.unpacked_elements(layout) * 4)
            tier.make_scratch(self._working_name, largest * owner.dtype.itemsize)

    def abandon(self) -> None:
        """Discard all values: see `Tier.abandon`. No other method may be called afterwards."""
        self.tier.abandon(self._names)

    def name(self, parameter: torch.Tensor) -> str:
        """The name in the tier of *parameter* and its states."""
        return self._sub_groups[id(parameter)].name

    # Called by stage 3.

    def is_swappable_tensor(
        self, tensor: torch.Tensor | None = None, numel: int | None = None
    ) -> bool:
        """True: small sub-groups are offloaded like large ones."""
        return True

    def initialize_parameters(
        self, parameters: Sequence[torch.Tensor], src_tensors: Sequence[torch.Tensor]
    ) -> None:
        """Make the master weights of *parameters* from their weights. Of *src_tensors*, which
        DeepSpeed passes for that, only the sizes are used.

        Only "exact" writes values here. In the other formats a new value is all zeros, and its
        first use makes it.
        """
        for parameter, source in zip(parameters, src_tensors, strict=True):
            sub_group = SubGroup(
                name=f"{self._prefix}/{len(self._sub_groups)}",
                dtype=parameter.dtype if self._in_place else self._owner.dtype,
                device=self.device,
                numel=source.numel(),
                parameter=parameter,
                start=sum(other.numel for other in self._sub_groups.values()),
            )
            sub_group.room_bytes = self._layout(sub_group, self._owner.expected_states).nbytes
            sub_group.layout = self._layout(sub_group, {})
            self._sub_groups[id(parameter)] = sub_group
            self._names.append(sub_group.name)
            if self._in_place:
                self._make_master(parameter, sub_group)

    def swap_in_optimizer_state(
        self,
        parameter: torch.Tensor,
        async_parameter: torch.Tensor | None = None,
        *,
        packed: bool = False,
    ) -> None:
        """Load *parameter* and its optimizer states into memory. With *packed*, the states stay packed
        for `step` if updates run on the CPU; until then the parameter has undefined contents.
        """
        sub_group = self._take(parameter)
        # Load the weights before the states, so that only one value is in use at a time.
        self._load_weights(parameter, sub_group, fill=True)
        self._open(sub_group)
        if packed and not self._in_place and self.device.type == "cpu":
            # The parameter needs its shape before a gradient can be assigned to it.
            scratch = self.tier.scratch(self._unpacked_name).view(torch.float32)
            parameter.data = scratch[: sub_group.numel]
            self._is_packed = True
        else:
            self._bind(parameter, sub_group)

    def step(
        self,
        parameter: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        multiplied: int | None,
    ) -> bool:
        """Make the step of *optimizer* over *parameter*, with the options of *group*, if its states
        were left packed. *multiplied*: see `CPUAdam.constants`.

        Returns: False, with the states unpacked, if the optimizer has to make the step.
        """
        if not self._is_packed:
            return False
        sub_group = self._sub_groups[id(parameter)]
        if self._step_in_one_pass(parameter, sub_group, optimizer, group, multiplied):
            sub_group.pack_count += 1
            return True
        self._is_packed = False
        self._bind(parameter, sub_group)
        return False

    def _step_in_one_pass(
        self,
        parameter: torch.Tensor,
        sub_group: SubGroup,
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        multiplied: int | None,
    ) -> bool:
        state, gradient = optimizer.state.get(parameter, {}), parameter.grad
        if "step" not in state or gradient is None or not gradient.is_contiguous():
            return False
        layout, buffer = known(sub_group.layout), known(sub_group.memory)
        (weights,) = sub_group.weights
        step = int(state["step"]) + 1
        if looks_at(self._format, step):
            return False
        part = Part(parameter, group, weights, gradient, 0, sub_group.start // BLOCK)
        if not is_cpu_adam(optimizer):
            return step_in_one_pass(optimizer, self._format, layout, buffer, [part], step)
        if not has_packed_moments(layout) or gradient.dtype != torch.float32:
            return False
        constants = self._cpu_adam.constants(optimizer, group, step, sub_group.numel, multiplied)
        if constants is None:
            return False
        update(self._format, layout, buffer, part, constants, step)
        state["step"] = step
        return True

    def swap_out_optimizer_state(self, parameter: torch.Tensor, async_swap: bool = False) -> None:
        """Release the sub-group that `swap_in_optimizer_state` loaded, and keep its changes and the
        states that the optimizer has added. The write continues in the background; with
        *async_swap*, the copy from the GPU does too, until `drain`.
        """
        sub_group = self._sub_groups[id(parameter)]
        if not self._is_packed:
            self._pack(parameter, sub_group)
        weights = sub_group.weights
        self._end_use(parameter, changed=True)
        for weight in weights:
            self._owner.store_weights(parameter, weight)
        if not (async_swap and self._at_once):
            self.drain()

    def release_swap_buffers(self, parameter: torch.Tensor) -> None:
        """Release the sub-group that `swap_in_optimizer_state` loaded, without writing it back."""
        self._end_use(parameter, changed=False)
        self.drain()

    def count_step(self, parameter: torch.Tensor) -> None:
        """Count a step that the optimizer has made over *parameter*."""
        sub_group = self._sub_groups[id(parameter)]
        if sub_group.step is not None:
            sub_group.step += 1

    def give_back(self) -> None:
        """Release a sub-group that an interrupted call left in use, with its present contents."""
        parameter, self._taken = self._taken, None
        if parameter is not None:
            self._stager(self._emptied(parameter)).cancel()

    def states(self, parameter: torch.Tensor) -> Mapping[str, torch.dtype]:
        """The dtypes of *parameter*'s offloaded states, by key."""
        dtypes = self._sub_groups[id(parameter)].dtypes
        return {key: dtype for key, dtype in dtypes.items() if key != _MASTER}

    def renew(self, parameter: torch.Tensor, states: Mapping[str, torch.dtype]) -> None:
        """Make *parameter* and its *states* anew, for the caller to fill, and discard the old value."""
        sub_group = self._take(parameter)
        sub_group.layout = self._layout(sub_group, states)
        sub_group.step = None
        self._load_weights(parameter, sub_group, fill=False)
        self._renew(sub_group)
        if states:
            self._owner.optimizer.state[parameter].update(
                {
                    key: torch.empty(0, dtype=dtype, device=self.device)
                    for key, dtype in states.items()
                }
            )
        self._bind(parameter, sub_group)

    @property
    def swap_folder(self) -> str:
        """Of DeepSpeed's own checkpoint methods, which `zero3.disable` restores."""
        raise UnsupportedError(
            "checkpoints of this engine need nvme_offload.zero3 enabled, as it was when the engine was made: call enable() again"
        )

    def purge_state(self) -> None:
        """Drop the optimizer's states. The master weights stay: they are first in every layout."""
        for sub_group in self._sub_groups.values():
            sub_group.step = None
            sub_group.layout = self._layout(sub_group, {})

    def init_timers(self) -> None:
        """Do nothing: `zero3.stats` replaces DeepSpeed's timers."""

    def log_timers(self) -> None:
        """Do nothing: see `init_timers`."""

    def pre_backward(self) -> None:
        """Called when `engine.backward` begins."""
        self._owner.mark_backward(True)

    def post_backward(self) -> None:
        """Called when the backward pass of `engine.backward` has ended."""
        self._owner.mark_backward(False)

    # Internal.

    def _take(self, parameter: torch.Tensor) -> SubGroup:
        """The sub-group of *parameter*, from now on in use."""
        self.give_back()
        self._taken = parameter  # first: an exception must leave no unrecorded use
        return self._sub_groups[id(parameter)]

    def _layout(self, unit: Unit, states: Mapping[str, torch.dtype]) -> Layout:
        if self._in_place:
            states = {_MASTER: unit.dtype, **states}
        return super()._layout(unit, states)

    def _make_master(self, parameter: torch.Tensor, sub_group: SubGroup) -> None:
        """Make the value of a new sub-group in "exact": the master weights."""
        try:
            buffer = self._renewed(sub_group, self._host)
            _, values = self._format.unpack(known(sub_group.layout), buffer, ())
            self._owner.copy_weights(parameter, values[_MASTER])
            self._host.give_back(changed=True, nbytes=sub_group.nbytes)
        except BaseException:
            self._host.cancel()
            raise
        sub_group.is_stored = True

    def _load_weights(self, parameter: torch.Tensor, sub_group: SubGroup, *, fill: bool) -> None:
        """Load the 16-bit parameters that are part of the master weights."""
        if self._in_place:  # whole masters are kept
            return
        numel, dtype = sub_group.numel, self._owner.dtype
        weights: torch.Tensor | None = self._owner.present_weights(parameter)
        if weights is None:
            if self.device.type == "cpu":
                memory = self.tier.scratch(self._working_name)
                weights = memory.view(dtype).narrow(0, 0, numel)
            else:
                weights = torch.empty(numel, dtype=dtype, device=self.device)
            if fill:
                self._owner.copy_weights(parameter, weights)
        sub_group.weights = [weights]

    def _unpack(self, sub_group: SubGroup) -> dict[str, torch.Tensor]:
        layout, memory = known(sub_group.layout), None  # a GPU's allocator reuses freed memory
        if self.device.type == "cpu" and not self._in_place:
            memory = self.tier.scratch(self._unpacked_name).view(torch.float32)
            # It is too small if the optimizer has more states than expected.
            if memory.numel() < self._format.unpacked_elements(layout):
                memory = None
        master, states = self._format.unpack(
            layout, known(sub_group.memory), sub_group.weights, memory
        )
        return states if master is None else {_MASTER: master, **states}

    def _bind(self, parameter: torch.Tensor, sub_group: SubGroup) -> None:
        """Make *parameter* and the optimizer's states refer to the unpacked value."""
        state = self._owner.optimizer.state.get(parameter, {})
        for key, value in self._unpack(sub_group).items():
            target = parameter if key == _MASTER else state[key]
            target.data = value

    def _pack(self, parameter: torch.Tensor, sub_group: SubGroup) -> None:
        """Write *parameter* and its elementwise states into the sub-group's value."""
        state = self._owner.optimizer.state.get(parameter, {})
        values = {key: value.contiguous() for key, value in elementwise(state, parameter).items()}
        master: torch.Tensor | None = parameter.data
        if self._in_place:
            values, master = {_MASTER: parameter.data, **values}, None
        states = {key: value.dtype for key, value in values.items()}
        self._relay(sub_group, states, 0, list(values.values()))
        layout, buffer = known(sub_group.layout), known(sub_group.memory)
        sub_group.pack_count += 1
        seed, blocks = 0, None
        if self._format.eight_bit:
            # The seed depends only on the step and the position, so a resumed run rounds like an
            # uninterrupted one, however sub-groups are cut.
            seed = self._seed(sub_group, state)
            blocks = block_names(sub_group.start, sub_group.numel, self.device)
            if not self._format.wide and looks_at(
                self._format, 1 if sub_group.pack_count == 1 else seed
            ):
                self._warn_of_far_blocks(layout, values)
        self._format.pack(layout, buffer, sub_group.weights, master, values, seed, blocks)

    def _seed(self, sub_group: SubGroup, state: Mapping[str, Any]) -> int:
        """The step of *state*. A count on a GPU is read once, because reading waits for the GPU."""
        step = state.get("step", sub_group.pack_count)
        if not torch.is_tensor(step) or step.is_cpu:
            return int(step)
        if sub_group.step is None:
            sub_group.step = int(step)
        return sub_group.step

    def _end_use(self, parameter: torch.Tensor, *, changed: bool) -> None:
        if self._sub_groups[id(parameter)].memory is not None:
            self._give_back(self._emptied(parameter), changed=changed)
            self._taken = None

    def _emptied(self, parameter: torch.Tensor) -> SubGroup:
        """The sub-group of *parameter*, whose tensors no longer use its memory."""
        sub_group = self._sub_groups[id(parameter)]
        state = self._owner.optimizer.state.get(parameter, {})
        kept = [state.get(key) for key in self.states(parameter)]
        drop_memory(filter(torch.is_tensor, [parameter, *kept]))
        parameter.grad = None
        sub_group.memory, sub_group.weights = None, []
        self._is_packed = False
        return sub_group

    def _warn_of_far_blocks(self, layout: Layout, values: Mapping[str, torch.Tensor]) -> None:
        """Warn once. One rank cannot change to 16 bits alone: the ranks have different states."""
        if (
            self._warned
            or far_blocks(layout, values, least_eps(self._owner.optimizer.param_groups)) is None
        ):
            return
        self._warned = True
        _log.warning(
            '"state_format": "%s" has too few bits for second moments of one block that are more than 30 octaves apart: the weights with the smallest '
            'gradients take smaller steps than they should. Use "split"',
            self._format.name,
        )


def updates_packed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `OptimizerSwapper.step` may replace the method `step` of *optimizer*."""
    return (
        (type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) or is_cpu_adam(optimizer))
        and not has_hooks(optimizer)
        and not replaces_step(optimizer)
    )
