"""`PackedOptimizerSwapper`: as `OptimizerSwapper`, for a `StateFormat` in which states take fewer bytes, on the drive and in memory, than in use.

The drive has of the master weights only what the 16-bit parameters lack, so that these are part of every update, and are made here. One sub-group at a
time is unpacked, into memory that all share. What DeepSpeed does otherwise than in "exact":

- Parameters are rounded half away from zero, and DeepSpeed rounds half to even: in one of 65536 they differ by their last bit.
- A master weight that is set from outside shows in its parameter at once, and not at the next step.
- A parameter that is changed from outside takes its master weight with it; DeepSpeed undoes the change at the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from ..errors import UnsupportedError
from ..optimizer_states import BLOCK, Layout, StateFormat, far_blocks, looks_at
from ..swap.tier import Tier
from .optimizer_swapper import OptimizerSwapper, SubGroup, travelling

_log = logging.getLogger(__name__)

_SPARE_BYTES = 256  # of each sub-group's place


class PackedOptimizerSwapper(OptimizerSwapper):
    """Keeps the states of *parameters*' sub-groups in a tier, in *state_format*.

    *states* are those that the optimizer will have, by key, and *largest* is the number of elements of the largest sub-group, by which memory is planned.
    *load_working* copies a sub-group's 16-bit parameters, of *working_dtype*, to where it is told; *store_working* is given them, changed.
    """

    def __init__(
        self,
        tier: Tier,
        optimizer: Callable[[], torch.optim.Optimizer],
        state_format: StateFormat,
        states: Mapping[str, torch.dtype],
        largest: int,
        working_dtype: torch.dtype,
        load_working: Callable[[torch.Tensor, torch.Tensor], None],
        store_working: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        super().__init__(tier, optimizer, 0)
        self._format = state_format
        self._told = False
        self._expected = states
        self._working_dtype = working_dtype
        self._load_working = load_working
        self._store_working = store_working
        self._unpacked_name, self._working_name = f"{self._prefix}/unpacked", f"{self._prefix}/working"
        layout = self._layout_for(largest, states)
        tier.make_scratch(self._unpacked_name, state_format.unpacked_elements(layout) * 4)
        tier.make_scratch(self._working_name, largest * working_dtype.itemsize)

    def close(self) -> None:
        """Forget everything; a second call does nothing."""
        super().close()
        self.tier.drop_scratch(self._unpacked_name)
        self.tier.drop_scratch(self._working_name)

    def initialize_parameters(self, parameters: Sequence[torch.Tensor], src_tensors: Sequence[torch.Tensor]) -> None:
        """Make the master weights of *parameters*: what *src_tensors* have are the 16-bit parameters, which lack nothing yet."""
        for parameter, source in zip(parameters, src_tensors, strict=True):
            numel = source.numel()
            sub_group = self._add(parameter, numel, self._layout_for(numel, self._expected).nbytes + _SPARE_BYTES)
            sub_group.layout = self._layout_for(numel, {})
            self._take(parameter)
            sub_group.buffer = self.tier.swapper.create(sub_group.name, sub_group.capacity_bytes).zero_()
            self._release(sub_group, changed=True)

    def swap_in_optimizer_state(self, parameter: torch.Tensor, async_parameter: torch.Tensor | None = None) -> None:
        """Bring *parameter* and its optimizer states to memory."""
        sub_group = self._take(parameter)
        self._load_working(parameter, self._working(sub_group))  # before the states: so no two values need have room at once
        sub_group.buffer = self.tier.swapper.swap_in(sub_group.name)
        self._bind(parameter, sub_group)

    def swap_out_optimizer_state(self, parameter: torch.Tensor, async_swap: bool = False) -> None:
        """Give back what `swap_in_optimizer_state` brought, with its changes and what the optimizer has added; parameters follow."""
        super().swap_out_optimizer_state(parameter)
        self._store_working(parameter, self._working(self._sub_groups[id(parameter)]))

    def states(self, parameter: torch.Tensor) -> dict[str, torch.dtype]:
        """The optimizer states of *parameter* that travel with it, by key."""
        layout = self._sub_groups[id(parameter)].layout
        assert layout is not None
        return {key: slot.dtype for key, slot in layout.states.items()}

    def renew(self, parameter: torch.Tensor, states: Mapping[str, torch.dtype]) -> None:
        """Make room in memory for *parameter* and for *states* of it, and put these into the optimizer's state: for the caller to fill.

        What *parameter* had is forgotten without a look. It is in use, until `swap_out_optimizer_state`.
        """
        sub_group = self._take(parameter)
        sub_group.layout = self._layout_for(sub_group.numel, states)
        sub_group.capacity_bytes = max(sub_group.capacity_bytes, sub_group.layout.nbytes)
        sub_group.buffer = self.tier.swapper.create(sub_group.name, sub_group.capacity_bytes).zero_()
        if states:
            self._optimizer().state[parameter].update({key: torch.empty(0, dtype=dtype) for key, dtype in states.items()})
        self._bind(parameter, sub_group)

    def purge_state(self) -> None:
        """Forget the optimizer's states; the master weights stay."""
        for sub_group in self._sub_groups.values():
            sub_group.layout = self._layout_for(sub_group.numel, {})  # whose first bytes are those of the master weights, as in every other

    # Inside.

    def _layout_for(self, numel: int, states: Mapping[str, torch.dtype]) -> Layout:
        return self._format.layout(numel, states, self._working_dtype, type(self._optimizer()).__name__)

    def _working(self, sub_group: SubGroup) -> torch.Tensor:
        return self.tier.scratch(self._working_name).view(self._working_dtype).narrow(0, 0, sub_group.numel)

    def _bind(self, parameter: torch.Tensor, sub_group: SubGroup) -> None:
        layout, memory = sub_group.layout, self.tier.scratch(self._unpacked_name).view(torch.float32)
        assert layout is not None
        assert sub_group.buffer is not None
        enough = memory.numel() >= self._format.unpacked_elements(layout)  # unless the optimizer has more states than was foreseen
        master, states = self._format.unpack(layout, sub_group.buffer, [self._working(sub_group)], memory if enough else None)
        assert master is not None
        parameter.data = master
        for key, value in states.items():
            self._optimizer().state[parameter][key].data = value

    def _pack(self, parameter: torch.Tensor) -> None:
        sub_group, state = self._sub_groups[id(parameter)], self._optimizer().state.get(parameter, {})
        assert sub_group.buffer is not None
        values = travelling(state, parameter)
        layout = self._layout_for(sub_group.numel, {key: value.dtype for key, value in values.items()})
        if layout != sub_group.layout:
            if self.states(parameter):  # may be views of what is written to
                values = {key: value.clone() for key, value in values.items()}
            sub_group.layout = layout
        if layout.nbytes > sub_group.capacity_bytes:
            sub_group.capacity_bytes = layout.nbytes
            self.tier.swapper.discard(sub_group.name)
            sub_group.buffer = self.tier.swapper.create(sub_group.name, layout.nbytes)
        # The same at the same step, whatever went before, so that a run that was resumed goes on as it would have.
        sub_group.packed += 1
        seed = int(state.get("step", sub_group.packed))
        if not self._told and looks_at(self._format, 1 if sub_group.packed == 1 else seed) and not self._format.wide:
            self._look(layout, values)
        # By the place in all that is trained, whatever the sub-groups are.
        first = sub_group.start // BLOCK
        blocks = torch.arange(first, first - (-sub_group.numel // BLOCK), dtype=torch.int64)
        self._format.pack(layout, sub_group.buffer, [self._working(sub_group)], parameter.data, values, seed, blocks)

    def _look(self, layout: Layout, values: Mapping[str, torch.Tensor]) -> None:
        """Tell of states that are too far apart for 8 bits. Other ranks have other states, so that one rank cannot go over to 16 bits by itself."""
        eps = min((eps for group in self._optimizer().param_groups if isinstance(eps := group.get("eps"), int | float)), default=0.0)
        self._told = far_blocks(layout, values, eps) is not None
        if self._told:
            _log.warning(
                '"state_format": "%s" has too few bits for second moments of one block that are more than 30 octaves apart: the weights with the least '
                'gradients take smaller steps than they should. Use "split"',
                self._format.name,
            )


def element_bytes(state_format: StateFormat, states: Mapping[str, torch.dtype], working: torch.dtype, master: torch.dtype, optimizer: str) -> tuple[float, int]:
    """Bytes of an element's *master* weight and *states* as they are kept, and of the memory beside that to which they are unpacked.

    Raises: UnsupportedError where *state_format* cannot keep them.
    """
    if state_format.name == "exact":
        return master.itemsize + sum(dtype.itemsize for dtype in states.values()), 0
    if (working, master) != (torch.bfloat16, torch.float32):
        raise UnsupportedError(
            f'"state_format": "{state_format.name}" is for parameters in bfloat16 with master weights in float32, and these are in {working} with {master}: '
            'have "bf16" enabled, or leave "state_format" out'
        )
    sample = 1 << 20
    layout = state_format.layout(sample, states, working, optimizer)
    return layout.nbytes / sample, state_format.unpacked_elements(layout) // sample * master.itemsize + working.itemsize
