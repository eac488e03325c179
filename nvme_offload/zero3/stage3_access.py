"""`Access`: swaps in the sub-groups of ZeRO-3 for a step, and for DeepSpeed's functions that read
and change gradients, master weights and states.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from ..device.modes import outside_of_all_modes
from ..device.staging import CPU
from .param_swapper import has_value
from .stage3_gradients import Reductions


class Access(Reductions):
    """DeepSpeed's ZeRO-3 optimizer whose sub-groups are in memory while they are used."""

    # The sub-group whose gradient is being edited, and the copy that is edited.
    _edited: tuple[int, torch.Tensor] | None = None
    # Ids of parameters that required no gradient in the step: the program may thaw them before
    # `overlap_step` updates them.
    _frozen: frozenset[int] = frozenset()

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        # swap_out_optimizer_state has written the parameters in other formats
        if self.state_format.in_place or not self.swaps(sub_group_id):
            super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)

    @outside_of_all_modes()
    def set_local_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        """As in the base class, which needs the shape of a partition that may be offloaded."""
        self._awaits_backward = False
        with _with_shape(param):
            super().set_local_grad_for_param(value, param)

    @outside_of_all_modes()
    def set_local_hp_param(
        self, value: torch.Tensor, param: Any, optim_state_key: str | None = None
    ) -> None:
        """As in the base class, which needs the shape of a partition that may be offloaded."""
        with _with_shape(param):
            super().set_local_hp_param(value, param, optim_state_key)

    @outside_of_all_modes()
    def _optimizer_states_and_gradient_swap_in(
        self, sub_group_id: int, timer_names: Any = None
    ) -> None:
        if not self.swaps_natively:
            super()._optimizer_states_and_gradient_swap_in(sub_group_id, timer_names)
            return
        self.finish_updates()
        self.optimizer_swapper.give_back()
        gradient = self.gradient_store.widened(sub_group_id)
        super()._optimizer_states_and_gradient_swap_in(sub_group_id, timer_names)
        self.fp32_partitioned_groups_flat[sub_group_id].grad = gradient

    def _last_gradient(self, index: int) -> torch.Tensor:
        """On a GPU with zeros for frozen parameters, as in stock DeepSpeed."""
        gradient = super()._last_gradient(index)
        if self.keeps_last and self.update_device != CPU:
            offset = 0
            for param in self.fp16_groups[index]:
                numel = param.partition_numel()
                if id(param) in self._frozen:
                    gradient.narrow(0, offset, numel).zero_()
                offset += numel
        return gradient

    @outside_of_all_modes()
    def _writeback_swap_state(
        self, sub_group_id: int, write_opt_state: bool, write_gradients: bool
    ) -> None:
        if not self.swaps_natively:
            super()._writeback_swap_state(sub_group_id, write_opt_state, write_gradients)
            return
        parameter = self.fp32_partitioned_groups_flat[sub_group_id]
        if write_opt_state:
            self.partly_changed = True  # Muon writes momentum before its update
            self.optimizer_swapper.swap_out_optimizer_state(parameter)
        else:
            self.optimizer_swapper.release_swap_buffers(parameter)
        if write_gradients:
            self._awaits_backward = False
            if self._edited is None or self._edited[0] != sub_group_id:
                self.gradient_store.replace(sub_group_id)

    # Fragments: never return memory that the next read overwrites.

    @outside_of_all_modes()
    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> Any:
        index, offset, numel = self.grad_position[self.get_param_id(param)]
        if not (self.swaps_natively and self._swappable_optimizer_subgroup(index)):
            return super()._get_fp32_grad_state_partition(param, release_swap_buffers)
        if self._edited is not None and self._edited[0] == index:
            fragment = self._edited[1].narrow(0, offset, numel)
        else:
            self.finish_updates()
            self.gradient_store.require_whole()
            self.optimizer_swapper.give_back()
            fragment = self.gradient_store.widened(index).narrow(0, offset, numel)
        return fragment.clone() if release_swap_buffers else fragment, index

    @outside_of_all_modes()
    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: Any) -> None:
        """As in the base class. *update_func* may load another sub-group into memory."""
        if not self.swaps_natively:
            super().update_fp32_grad_for_param_vectorized(update_func, param_list)
            return
        numbers = {
            index: number for number, group in enumerate(self.user_sub_groups) for index in group
        }
        params: dict[int, list[Any]] = {}  # in the base class's order: by sub-group
        for param in param_list:
            if param.requires_grad:
                params.setdefault(numbers[self._sub_group_of(param)], []).append(param)
        in_order = itertools.chain.from_iterable(params.values())
        for index, together in itertools.groupby(in_order, self._sub_group_of):
            with self._editing_gradient(index):
                for param in together:
                    gradient = update_func(self.get_fp32_grad_for_param(param), param)
                    self.set_fp32_grad_for_param(gradient, param)

    def _sub_group_of(self, param: Any) -> int:
        index: int = self.grad_position[self.get_param_id(param)][0]
        return index

    @contextlib.contextmanager
    def _editing_gradient(self, index: int) -> Iterator[None]:
        """Context in which the gradient of sub-group *index* is a copy, which is stored at its end."""
        if not self._swappable_optimizer_subgroup(index):
            yield
            return
        self.finish_updates()
        self.gradient_store.require_whole()
        self.optimizer_swapper.give_back()
        copy = self.gradient_store.widened(index).clone()
        self._edited = index, copy
        try:
            yield
        finally:
            self._edited = None
            self.gradient_store.replace(index, copy)

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        """Copies of all gradients of this rank, by sub-group and parameter."""
        if not self.swaps_natively:
            found: dict[int, dict[int, torch.Tensor]] = super().get_fp32_grad_partitions()
            return found
        return {
            number: dict(
                enumerate(
                    self._get_fp32_grad_state_partition(param, release_swap_buffers=True)[0]
                    for index in group
                    for param in self.fp16_groups[index]
                )
            )
            for number, group in enumerate(self.user_sub_groups)
        }

    @outside_of_all_modes()
    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> Any:
        index, offset, numel = self.grad_position[self.get_param_id(param)]
        if not (self.swaps_natively and self._swappable_optimizer_subgroup(index)):
            return super()._get_fp32_opt_state_partition(
                param, release_swap_buffers, optim_state_key
            )
        self.finish_updates()
        parameter = self.fp32_partitioned_groups_flat[index]
        try:
            self.optimizer_swapper.swap_in_optimizer_state(parameter)
            fragment = (
                parameter
                if optim_state_key is None
                else self.optimizer.state[parameter][optim_state_key]
            ).narrow(0, offset, numel)
            if release_swap_buffers:
                fragment = fragment.clone()
                self._release_swap_buffers(index)
        except BaseException:
            self.optimizer_swapper.give_back()
            raise
        return fragment, index


def _with_shape(param: Any) -> contextlib.AbstractContextManager[None]:
    return param.nvme_swapper.with_shape(param) if has_value(param) else contextlib.nullcontext()
