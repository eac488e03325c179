"""`Reductions`: the gradients of ZeRO-3. They are kept in the dtype in which they are reduced until
the optimizer needs them, and their norms are computed when they are reduced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator

from ..device.staging import CPU
from . import compat
from .param_swapper import has_value
from .stage3_sub_groups import SubGroups

if TYPE_CHECKING:
    from .once_per_step import OncePerStep


class Reductions(SubGroups):
    """DeepSpeed's ZeRO-3 optimizer with its gradients in a tier.

    Norms are summed over the sub-groups that the user configured, so that results equal a run
    without offload bit for bit.
    """

    # Set during `step`: the calls of the optimizer, and the scaler of "torch_autocast".
    _once: OncePerStep | None = None
    _scaler: torch.amp.GradScaler | None = None
    _found_inf = False  # whether a gradient of the step is not finite, on any rank

    def _read_settings(self, ds_config: Mapping[str, Any]) -> None:
        super()._read_settings(ds_config)
        # With fp16 and "last": id of a parameter -> whether its summed gradient is finite.
        self._finite: dict[int, torch.Tensor] = {}

    def partition_grads(
        self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]
    ) -> Any:
        """As in the base class, but gradients of swapped sub-groups go to the tier."""
        self._partly_reduced = True
        if not self.swaps_natively:
            return super().partition_grads(params_to_release, grad_partitions)
        self.finish_updates()
        self.optimizer_swapper.give_back()
        completes = compat.at_accumulation_boundary(self)
        # by sub-group: parameters, and the partitions with their offsets
        swapped: dict[int, tuple[list[Any], list[tuple[int, torch.Tensor]]]] = {}
        arrived: dict[int, list[Any]] = {}
        others = []
        for param, partition in zip(params_to_release, grad_partitions, strict=True):
            index, offset, numel = self.grad_position[self.get_param_id(param)]
            if not self._swappable_optimizer_subgroup(index):
                others.append((param, partition))
                continue
            arrived.setdefault(index, []).append(param)
            # The partition has more than padding.
            if numel * self._get_param_partition_rank(param) < param.ds_numel:
                params, pieces = swapped.setdefault(index, ([], []))
                params.append(param)
                pieces.append((offset, partition))
            if param.grad is not None and not get_accelerator().is_synchronized_device():
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None
        # Add the gradient that the update needs first last, so that it is evicted last.
        for index in sorted(swapped, reverse=True):
            params, pieces = swapped[index]
            totals = self.gradient_store.add(index, pieces, to_earlier=self.micro_step_id != 0)
            self.gradient_store.partial = not completes
            for param, total in zip(params, totals, strict=True):
                if self.keeps_last and self.dtype == torch.float16:
                    self._finite[self.get_param_id(param)] = total.isfinite().all()
                if completes:
                    self.norm_for_param_grads[self.get_param_id(param)] = self._norm(param, total)
            if completes:
                self.gradient_store.complete(index, [offset for offset, _ in pieces])
        if self.in_backward is not None and completes:
            for index in sorted(arrived, reverse=True):
                self.in_backward.reduced(index, arrived[index])
        return super().partition_grads(
            [param for param, _ in others], [partition for _, partition in others]
        )

    def _norm(self, param: Any, total: torch.Tensor) -> torch.Tensor:
        if self.update_device == CPU:
            norm: torch.Tensor = self._constant_buffered_norm2(total)
            return norm
        # Like `get_grad_norm_direct`, compute it over the whole partition, including padding.
        if padding := param.partition_numel() - total.numel():
            total = torch.nn.functional.pad(total, (0, padding))
        found: torch.Tensor = torch.linalg.vector_norm(total.to(compat.norm_dtype()))
        return found

    def independent_gradient_partition_epilogue(self) -> None:
        """The backward pass is over."""
        self.finish_updates()
        super().independent_gradient_partition_epilogue()
        if self.swaps_natively:
            self.gradient_store.pause()
        elif not self.offload_optimizer:
            self._fill_frozen_gradients()
        self._awaits_backward = False
        if not self._within_backward:
            self._partly_reduced = False

    def _fill_frozen_gradients(self) -> None:
        """Give frozen parameters zeros as gradients. The base class makes them like the partition,
        which is a scalar while it is offloaded.
        """
        for index, params in enumerate(self.fp16_groups):
            for place, param in enumerate(params):
                if not param.requires_grad and has_value(param):
                    self.averaged_gradients[index][place] = torch.zeros(
                        param.partition_numel(),
                        dtype=self.gradient_accumulation_dtype,
                        device=get_accelerator().current_device_name(),
                    )

    def _finalize_offload_gradient_accumulation(self) -> None:
        self.finish_updates()
        super()._finalize_offload_gradient_accumulation()
        self._make_missing_norms()

    def _make_missing_norms(self) -> None:
        """Compute the norms of gradients that were not known to be complete when they were reduced."""
        for index, params in enumerate(self.fp16_groups if self.swaps_natively else []):
            for param in params:
                identifier = self.get_param_id(param)
                offset = self.grad_position[identifier][1]
                numel = self.gradient_store.reduced(index).get(offset)
                if identifier not in self.norm_for_param_grads and numel is not None:
                    total = torch.empty(
                        numel,
                        dtype=self.gradient_accumulation_dtype,
                        device=get_accelerator().current_device_name(),
                    )
                    self.gradient_store.read(index, offset, total)
                    self.norm_for_param_grads[identifier] = self._norm(param, total)
                    self.gradient_store.complete(index, [offset])
        if self.swaps_natively:
            self.gradient_store.pause()
            self.gradient_store.partial = False

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """As in the base class, but with the norms of the gradients that are in the tier."""
        if self.swaps_natively:
            finite = (
                list(self._finite.values())
                if self.keeps_last
                else [norm.isfinite() for norm in self.norm_for_param_grads.values()]
            )
            if finite:
                overflow = torch.stack(finite).all().logical_not()
                self.inf_or_nan_tracker.logical_or_(overflow.to(self.inf_or_nan_tracker.device))
        overflows: bool = super().has_overflow(partition_gradients)
        return overflows

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: torch.Tensor) -> None:
        """Set the factor by which the base class would multiply the gradients."""
        self.partly_changed = True
        scale = self.loss_scale
        if self.clip_grad > 0.0:
            clip = ((total_norm / scale) + 1e-6) / self.clip_grad
            scale = torch.clamp(clip, min=1.0) * scale
        self._factor = 1.0 / scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients as the base class does; a step still uses those reduced before."""
        super().zero_grad(set_to_none)
        if self.swaps_natively:
            self.gradient_store.close()

    def reset_cpu_buffers(self) -> None:
        """Discard norms, as the base class does; from now on the gradients are only read."""
        super().reset_cpu_buffers()
        if self.overlap is None or not self.overlap.holds_gradients:
            self.spend_gradients()

    def spend_gradients(self) -> None:
        """End the step that has used the gradients."""
        if self.swaps_natively:
            self.gradient_store.spend()

    def _get_norm_groups(self) -> Any:
        groups = [list(itertools.chain.from_iterable(group)) for group in self._logical_groups]
        if not self.swaps_natively:
            norms = super()._get_norm_groups()
        elif self.update_device != CPU:
            none = torch.zeros((), dtype=compat.norm_dtype(), device=self.update_device)
            norms = [
                # The norm of a norm is itself.
                self.get_grad_norm_direct(
                    [
                        self.norm_for_param_grads.get(self.get_param_id(param), none)
                        if param.requires_grad
                        else none
                        for param in params
                    ],
                    params,
                )
                for params in groups
            ]
        else:
            norms = [
                self.complete_grad_norm_calculation_for_cpu_offload(params) for params in groups
            ]
        if self._scaler is not None:  # reading the norms waits for the GPU
            # DeepSpeed sets the norm of gradients that are not finite to -1.
            self._found_inf = not all(0 <= float(norm) < math.inf for norm in norms)
        return norms
