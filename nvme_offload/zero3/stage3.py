"""`Stage3`: DeepSpeed's ZeRO-3 optimizer on this package's swappers.

Sub-groups are cut to sizes that host memory can prefetch. `Gradients` keeps gradients in the dtype in
which they are reduced until the optimizer needs them. Offloaded states go through
`OptimizerSwapper`. Updates run on the device that `update_device` chooses. Results equal, bit for
bit, a run with `"device": "cpu"` if that is the CPU, and a run without offload if it is a GPU.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed import comm as dist

from ..device.modes import outside_of_all_modes
from ..device.staging import CPU
from ..errors import known
from ..io import archive
from . import compat, states
from .in_backward import InBackward, require_possible
from .once_per_step import depends_on_values, one_step, update_scale
from .overlap import Overlap, tell_left_out
from .param_swapper import ParameterSwapper, has_value, swappers_of
from .reader import CheckpointReader
from .replacing import replaced
from .stage3_access import Access
from .step_stats import StepClock
from .update_device import NO_STATES, impossible
from .updates import is_awaited, partly_applied

# DeepSpeed's `step` calls these for each sub-group, before `_release_sub_group`.
_PARTS_OF_UPDATE = (
    "_prepare_sub_group",
    "_optimizer_step",
    "_reassign_or_swap_out_partitioned_parameters",
)
_NAMED = 5  # number of parameters that a warning lists

_log = logging.getLogger(__name__)


class Stage3(Access):
    """DeepSpeed's ZeRO-3 optimizer with parameters or states in this package's swappers."""

    _param_swappers: Sequence[ParameterSwapper] = ()

    def __init__(self, ds_config: Mapping[str, Any], /, *args: Any, **named: Any) -> None:
        self._read_settings(ds_config)
        super().__init__(*args, **named)
        module: torch.nn.Module = self.module
        every: dict[str, Any] = dict(module.named_parameters())
        grouped = set(map(id, itertools.chain.from_iterable(self.fp16_groups)))
        # Parameters in no group of the optimizer, by name; removed when they require a gradient.
        self._untrained = {
            name: param
            for name, param in every.items()
            if id(param) not in grouped and param.ds_numel
        }
        self._param_swappers = swappers_of(module)
        tiers = [swapper.tier for swapper in self._param_swappers]
        if self.swaps_natively:
            tiers.insert(0, self.tier)
        self._tiers = list(dict.fromkeys(tiers))
        self.tier = self._tiers[0]
        self.clock = StepClock(self.tier)
        self._hooks.append(module.register_forward_pre_hook(self._require_no_backward))
        if not self.swaps_natively:
            if self._settings.update_device == "gpu":
                raise impossible(NO_STATES)
            for setting in ("overlap_step", "step_in_backward"):
                if getattr(self._settings, setting):
                    tell_left_out(set(), "no optimizer states are on a drive", setting)
            return
        if self._settings.overlap_step:
            self.overlap = Overlap(self)
        if self._settings.step_in_backward:
            require_possible(self, self._ds_config)
            self.in_backward = InBackward(self)
        # Parameters of a drive are copied to the GPU in the forward pass.
        self.optimizer_swapper.looks_ahead = self.overlap is None and len(tiers) == 1

    def _drop(self) -> None:
        super()._drop()
        compat.drop_references(self.module)

    # The step.

    def _make_step(self, closure: Any) -> bool:
        self._warn_of_untrained()
        if not self.keeps_last or self.update_device != CPU:
            self._make_missing_norms()
        if self.keeps_last:
            params = itertools.chain.from_iterable(self.fp16_groups)
            self._frozen = frozenset(id(param) for param in params if not param.requires_grad)
        self.partly_changed |= bool(self.dynamic_loss_scale)
        if self.overlap is None:
            self._step_once(closure)
        else:
            self.overlap.begin()
            with self.overlap.gathers_nothing():
                self._step_once(closure)
        if not self.overflow:
            self.powers.count(self.optimizer, self.groups_of_sub_groups)
        pending = False
        if self.overlap is not None:
            if self.overlap.notes:
                self.partly_changed = False  # from here on, the thread sets it
            pending = self.overlap.end(self.clock.number)
        if self.in_backward is not None:
            self.in_backward.end()
        return pending

    def end_period(self) -> None:
        """End a period in which a step has used all values: the swappers learn their order."""
        for swapper in self._param_swappers:
            swapper.drain()
        super().end_period()

    def _warn_of_untrained(self) -> None:
        """Log, once each, parameters that require gradients and are in no group."""
        named = [name for name, param in self._untrained.items() if param.requires_grad]
        for name in named:
            del self._untrained[name]
        if named and dist.get_rank() == 0:
            _log.warning(
                "these parameters require gradients and are in no group of the optimizer, so DeepSpeed does not train them: "
                "%s (%d): thaw them and pass them to the optimizer before deepspeed.initialize, or freeze them",
                ", ".join([*named[:_NAMED], *["..."] * (len(named) > _NAMED)]),
                len(named),
            )

    def _step_once(self, closure: Any) -> None:
        """The base class's step, in which the optimizer and the scaler count one step."""
        self._scaler = scaler = getattr(self, "torch_autocast_gradscaler", None)
        try:
            if scaler is not None:
                self.torch_autocast_gradscaler = None
                self.overflow = False  # set below, and releases before 0.19.5 do not reset it
            with (
                one_step(self.optimizer, len(self.fp16_groups)) as self._once,
                replaced(self, **dict.fromkeys(_PARTS_OF_UPDATE, lambda *_: None)),
                replaced(self, _release_sub_group=self._update_or_defer),
            ):
                self._base_step(closure)
        finally:
            self._once = self._scaler = None
            if scaler is not None:
                self.torch_autocast_gradscaler = scaler
        if scaler is not None and not self.overflow:
            update_scale(scaler, self._found_inf)
            self.overflow = self._found_inf

    def _update_or_defer(self, index: int, timer_names: set[str]) -> None:
        if self.overlap is not None and self.overlap.notes:
            self.overlap.note(index, self._factor)
            return
        if self.in_backward is not None and index in self.in_backward.updated:
            pass
        elif self.swaps(index):
            self.update(index, self._factor, functools.partial(self._step_in_turn, index))
        else:
            super()._prepare_sub_group(index, timer_names)
            self._multiply_gradient(index, self._factor)
            self._step_in_turn(index)
            super()._reassign_or_swap_out_partitioned_parameters(index)
            super()._release_sub_group(index, timer_names)
        if self.swaps_natively and index == len(self.fp16_groups) - 1:
            self.optimizer_swapper.drain()

    def _step_in_turn(self, index: int) -> None:
        once = known(self._once)
        if self._scaler is not None:
            if self._found_inf:
                return
            self._multiply_gradient(index, 1.0 / self._scaler.get_scale())
        with once.sub_group(self.sub_group_to_group_id[index]):
            if self.swaps(index):
                self.step_sub_group(index, self.optimizer)
            else:
                super()._optimizer_step(index)
        if once.conflict:
            raise depends_on_values(self.optimizer, once.conflict)

    # Calls that wait for updates.

    def reset_swap_buffers(self) -> None:
        """As in the base class, after pending updates."""
        self.finish_updates()
        super().reset_swap_buffers()

    @property
    def state(self) -> Any:
        """The optimizer's state, after pending updates."""
        self.finish_updates()
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.finish_updates()
        self.optimizer.state = value

    def _partition_all_parameters(self) -> None:
        """As in the base class. Also drops copies that an exception between read and gather left."""
        super()._partition_all_parameters()
        for param in itertools.chain.from_iterable(self.fp16_groups):
            if (
                has_value(param)
                and not is_awaited(param)  # it has not been read since its update
                and not param.nvme_swapper.is_offloaded(param)
            ):
                param.nvme_swapper.remove_partition_and_release_buffers([param])

    def release_all(self) -> None:
        """Release everything that is in use."""
        self._clear_fp32_optimizer_param_groups()
        super().release_all()
        for swapper in self._param_swappers:
            swapper.give_back()

    # Checkpoints.

    def _drop_gradients(self) -> None:
        for param in itertools.chain.from_iterable(self.fp16_groups):
            # An exception in backward left it. The base class drops it only on a stream, which a
            # CPU does not have.
            param.grad = None
        self.zero_grad()
        super()._drop_gradients()
        self._finite.clear()

    @property
    def rounds_half_away_from_zero(self) -> bool:
        """Whether parameters are rounded half away from zero instead of half to even."""
        return self.swaps_natively and not self.state_format.in_place

    def require_complete(self, saved: Mapping[str, Any]) -> None:
        """Raises: OffloadError if *saved* lacks states: see `states.require_complete`."""
        states.require_complete(self, saved, sum(self.fp16_partitioned_groups_flat_numel))

    @outside_of_all_modes()
    def _rigid_state_dict(self) -> dict[str, Any]:
        self.finish_updates()
        self.require_whole()
        if self._updates_in_backward:
            raise partly_applied()
        self.give_back()
        return self._completed(states.save(self, super()._rigid_state_dict))

    @outside_of_all_modes()
    def _rigid_load_state_dict(
        self, state_dict: Mapping[str, Any], load_optimizer_states: bool = True
    ) -> None:
        self._forget_updates()
        saved = states.of_state_dict(self, state_dict)
        states.check(self, saved, True, load_optimizer_states)
        self.load(saved, load_optimizer_states, True)

    def load(
        self, saved: CheckpointReader, load_optimizer_states: bool, from_fp32_weights: bool
    ) -> None:
        """Load *saved*, which has passed `states.check`. See `states.load`."""
        self._partition_all_parameters()  # drops copies on the accelerator
        states.load(self, saved, load_optimizer_states, load_optimizer_states or from_fp32_weights)

    def load_global_state(self, tree: Mapping[str, Any]) -> None:
        """Load the loss scale and other values that all sub-groups share."""
        self._load_global_state_stage3(tree)
        scaler = getattr(self, "torch_autocast_gradscaler", None)
        if scaler and tree.get(states.SCALER):
            scaler.load_state_dict(archive.whole(tree[states.SCALER]))
