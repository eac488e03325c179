"""`Stage3`: DeepSpeed's ZeRO-3 optimizer on this package's swappers.

It differs from its base class as follows. Sub-groups are cut to sizes that host memory can
prefetch. `Gradients` keeps gradients in the dtype in which they are reduced until the optimizer
needs them. Offloaded states go through `OptimizerSwapper`. With `"overlap_step"`, updates are made
after `step`: see `Overlap`. Updates run on the device that `update_device` chooses. Results equal,
bit for bit, a run with `"device": "cpu"` if updates run on the CPU, and a run without offload if
they run on a GPU. To this end, norms are summed over the sub-groups that the user configured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ..device.staging import CPU, PLACES
from ..errors import UnsupportedError, UsageError
from ..io import archive
from ..optimizer_states import BLOCK, FORMATS, wide_enough
from ..swap.tier import Tier
from ..units import format_bytes
from . import awaited, compat, states, working_weights
from .adam_powers import AdamPowers
from .agreement import all_or_none, least, share_cores
from .gradients import Gradients, KeptGradients
from .in_backward import InBackward, require_possible
from .last_gradients import LastGradients
from .moving import move_partitions
from .once_per_step import (
    OncePerStep,
    computed_from_values,
    depends_on_values,
    has_hooks,
    update_scale,
    warn_of_hooks,
)
from .optimizer_swapper import (
    OptimizerSwapper,
    Working,
    element_bytes,
    states_of,
    updates_packed,
)
from .overlap import Overlap, tell_left_out
from .param_swapper import (
    has_value,
    require_budget,
    return_to_device,
    swappers_of,
    value_bytes,
    zero_padding,
)
from .partial_steps import PartialSteps
from .reader import CheckpointReader, first_element
from .settings import Settings
from .shared_tier import tier_of, trained
from .step_stats import StepClock
from .sub_groups import Footprint, cut, is_elementwise
from .update_device import NO_STATES, device_of, gpu_bytes, impossible, most_elements, trial_device
from .updates import partly_applied, quiesce

_VECTOR_ELEMENTS = 128  # DeepSpeed's AVX512 kernels: 16 floats, unrolled 8 times
_UNUSED_KEYS = {
    "buffer_count",
    "buffer_size",
    "max_in_cpu",
    "pipeline",
    "pipeline_read",
    "pipeline_write",
    "fast_init",
}
# Sub-groups prefetched in the first step, before the swapper has learned the order, and while a
# checkpoint is written.
_PREFETCHED = 4
_NAMED = 5  # number of parameters that a warning lists

_log = logging.getLogger(__name__)


class Stage3(PartialSteps, compat.stage3()):  # type: ignore[misc]  # untyped
    """DeepSpeed's ZeRO-3 optimizer with this package's swappers, unless the section "nvme_offload"
    of the configuration has "swappers": "deepspeed".
    """

    fp16_groups: list[list[Any]]
    tier: Tier  # only set if something is offloaded
    overflow: bool
    swaps_natively = False  # whether optimizer states are in an `OptimizerSwapper`
    update_device = CPU

    def __init__(self, *args: Any, **named: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **named).arguments
        module: torch.nn.Module = given["module"]
        self._ds_config: Mapping[str, Any] = as_mapping(given["ds_config"])
        self.native = Settings.of(self._ds_config).swappers == "native"
        self._format = FORMATS[Settings.of(self._ds_config).state_format]
        self.keeps_last = Settings.of(self._ds_config).missing_gradients == "last"
        # With fp16 and "last": id of a parameter -> whether its summed gradient is finite.
        self._finite: dict[int, torch.Tensor] = {}
        # The user's sub-groups: each is a list of our sub-groups, which are lists of parameters.
        self._logical_groups: list[list[list[Any]]] = []
        self._indexes: dict[int, int] = {}  # of sub-groups, by the id of their master weights
        self._steps_per_print = self._ds_config.get("steps_per_print", 10) or math.inf
        # True while a checkpoint is written that streams states from the drive.
        self.leaves_states_offloaded = False
        self.clock: StepClock | None = None  # only set if something is offloaded
        self._within_backward = False
        self._hooks: list[Any] = []  # handles of hooks of the module
        self.overlap: Overlap | None = None
        self.in_backward: InBackward | None = None
        # Set during `step`: the calls of the optimizer, and the scaler of "torch_autocast".
        self._once: OncePerStep | None = None
        self._scaler: torch.amp.GradScaler | None = None
        # The sub-group whose gradient is being edited, and the copy that is edited.
        self._edited: tuple[int, torch.Tensor] | None = None
        self.powers = AdamPowers()
        # Whether engine.load_checkpoint is loading, to continue a run bit for bit. A load by
        # `load_state_dict` has the bits of "device": "cpu".
        self.resumes = False
        self._found_inf = False  # whether a gradient of the step is not finite, on any rank
        self._clip_grad = 0.0
        # If updates run on a GPU: bytes for each element of a sub-group, and its maximum of
        # elements.
        self._gpu_bytes = 0.0
        self._most_on_gpu = sys.maxsize
        self._tiers: list[Tier] = []  # the tiers of states and of parameters
        return_to_device(module)
        move_partitions(module, self._ds_config)
        try:
            super().__init__(*args, **named)
        except BaseException:
            compat.let_go_of(module)
            raise
        every: dict[str, Any] = dict(module.named_parameters())
        grouped = set(map(id, itertools.chain.from_iterable(self.fp16_groups)))
        # Parameters in no group of the optimizer, by name; removed when they require a gradient.
        self._untrained = {
            name: param
            for name, param in every.items()
            if id(param) not in grouped and param.ds_numel
        }
        tiers = [swapper.tier for swapper in swappers_of(module)]
        if self.swaps_natively:
            tiers.insert(0, self.tier)
        self._tiers = list(dict.fromkeys(tiers))
        if self._tiers:
            self.tier = self._tiers[0]
            self.clock = StepClock(self.tier)
            self._hooks.append(module.register_forward_pre_hook(self._require_no_backward))
        if Settings.of(self._ds_config).overlap_step and self.swaps_natively:
            self.overlap = Overlap(self)
        elif Settings.of(self._ds_config).overlap_step:
            tell_left_out(set(), "no optimizer states are on a drive")
        if Settings.of(self._ds_config).update_device == "gpu" and not self.swaps_natively:
            raise impossible(NO_STATES)
        if Settings.of(self._ds_config).step_in_backward:
            if self.swaps_natively:
                require_possible(self, self._ds_config)
                self.in_backward = InBackward(self)
            else:
                tell_left_out(set(), "no optimizer states are on a drive", "step_in_backward")

    # Sub-groups and swapper.

    def _configure_offloading(
        self, offload_optimizer_config: Any, offload_param_config: Any
    ) -> None:
        super()._configure_offloading(offload_optimizer_config, offload_param_config)
        if not self.native:
            return
        if dist.get_rank() == 0:
            _log_unused_keys(self._ds_config)
        # The swapper reads 16-bit parameters in bulk anyway.
        self.offload_optimizer_fast_init = False

    def _create_fp16_partitions_with_defragmentation(self, fp16_param_groups: Any) -> None:
        if self._tiers:
            raise UnsupportedError(
                "the parameters that an engine with offload to a drive trains cannot change after deepspeed.initialize: "
                "train the same ones throughout, or leave out offload_param and offload_optimizer"
            )
        if self.native and (self.swap_optimizer or self.params_in_nvme_and_cpu):
            self._require_one_sub_group(fp16_param_groups)
            for param in itertools.chain(*(group["params"] for group in fp16_param_groups)):
                if not has_value(param):
                    zero_padding(param, param.ds_tensor.data)
        if self.native and self.swap_optimizer:
            share_cores()
            all_or_none(lambda: self._open_tier(fp16_param_groups))
            self.tier.cap_bytes = least(self.tier.cap_bytes)
            all_or_none(self._plan)
        elif self.native and self.params_in_nvme_and_cpu:
            all_or_none(lambda: require_budget(self.module))
        super()._create_fp16_partitions_with_defragmentation(fp16_param_groups)
        for param in itertools.chain.from_iterable(self.fp16_groups):
            if has_value(param):
                # The base class converts trained parameters when it moves them to host memory.
                param.nvme_swapper.convert(param, self.dtype)

    def _create_param_groups_fp16_flat_cpu_memory(self) -> None:
        if not (self.native and self.params_in_nvme_and_cpu):
            super()._create_param_groups_fp16_flat_cpu_memory()
            return
        # host_memory decides which values stay in memory. The base class would make a placeholder
        # of one element here, and keep a sub-group of one element in it.
        self.param_groups_fp16_flat_cpu_memory += [
            torch.empty(0, dtype=self.dtype) for _ in self.trainable_param_groups
        ]

    def _require_one_sub_group(self, param_groups: Any) -> None:
        """Check that all parameters are in one sub-group if the optimizer needs them together.
        Raises: UnsupportedError.
        """
        count = sum(
            len(super(Stage3, self)._create_fp16_sub_groups(group["params"]))
            for group in param_groups
        )
        if count > 1 and (name := computed_from_values(self.optimizer)):
            raise depends_on_values(self.optimizer, name)

    def _open_tier(self, param_groups: Any) -> None:
        """Compute the sizes of states and gradients, and check that they fit in memory and on the
        drives. Raises: UsageError or NoSpaceError with the numbers.
        """
        self._format = wide_enough(
            self._format, type(self.optimizer).__name__, self.optimizer.param_groups
        )
        sizes = [param.partition_numel() for group in param_groups for param in group["params"]]
        groups = [
            super(Stage3, self)._create_fp16_sub_groups(group["params"]) for group in param_groups
        ]
        uncut = [
            sum(param.partition_numel() for param in group)
            for group in itertools.chain.from_iterable(groups)
        ]
        self._elementwise = is_elementwise(self.optimizer)
        # The smallest possible size of the largest sub-group, in elements.
        self._least_sub_group = max(sizes if self._elementwise else uncut)
        self._footprint = self._footprint_of(param_groups)
        self._whole_bytes = self._footprint.whole_bytes(sizes, self._least_sub_group)
        self.tier = tier_of(self._ds_config)
        quiesce(self.tier)
        self.tier.require_memory(self._whole_bytes)
        self.tier.require_space(self._footprint.drive_bytes(sum(sizes)))

    def _footprint_of(self, param_groups: Any) -> Footprint:
        """Choose the device of updates, and compute the host memory that they need."""
        self._expected_states = states_of(
            self.optimizer, self.master_weights_and_grads_dtype, trial_device(self.optimizer)
        )
        kept, unpacked = element_bytes(
            self._format,
            self._expected_states,
            self.dtype,
            self.master_weights_and_grads_dtype,
            type(self.optimizer).__name__,
        )
        footprint = Footprint(
            states=kept,
            gradient=self.gradient_accumulation_dtype.itemsize
            + (self.master_weights_and_grads_dtype.itemsize if self.keeps_last else 0),
            scratch=self.master_weights_and_grads_dtype.itemsize + unpacked,
            parameter=self.dtype.itemsize
            if any(has_value(param) for group in param_groups for param in group["params"])
            else 0,
            largest_parameter=max(map(value_bytes, self.module.parameters()), default=0),
            in_flight=PLACES,
        )
        self.update_device = device_of(
            self._ds_config, self.optimizer, footprint, self._least_sub_group
        )
        if self.update_device == CPU:
            return dataclasses.replace(footprint, in_flight=1)
        self._gpu_bytes = gpu_bytes(footprint)
        # The sub-groups in flight have to fit in GPU memory, too.
        self._most_on_gpu = max(most_elements(footprint), self._least_sub_group)
        return dataclasses.replace(footprint, scratch=0)

    def _plan(self) -> None:
        """Check that host memory can hold the largest sub-group that cannot be cut. Raises:
        UsageError.
        """
        cap, fewest = self.tier.cap_bytes, self._footprint.least_bytes(self._least_sub_group)
        if cap < fewest:
            largest = (
                "parameter"
                if self._elementwise
                else "sub-group (sub_group_size says how large they are)"
            )
            raise UsageError(
                f'"host_memory" of {format_bytes(cap)} cannot hold the optimizer states of the largest {largest}, which has {self._least_sub_group} '
                f"elements on this rank: allow at least {fewest} bytes ({format_bytes(fewest)})"
            )

    def _create_fp16_sub_groups(self, params_group: Any) -> Any:
        groups = super()._create_fp16_sub_groups(params_group)
        if not (self.native and self.swap_optimizer):
            return groups
        # DeepSpeed's CPU optimizers round elements after the last whole vector of a tensor
        # differently (csrc/adam/cpu_adam_impl.cpp).
        unit = _VECTOR_ELEMENTS if type(self.optimizer).__module__.startswith("deepspeed.") else 1
        if self._format.eight_bit:
            unit = BLOCK  # whose values share an exponent
        wanted, most = (
            min(self._footprint.wanted_elements(self.tier.cap_bytes), self._most_on_gpu),
            min(self._footprint.most_elements(self.tier.cap_bytes), self._most_on_gpu),
        )
        parts = [
            cut(group, wanted, most, unit) if self._elementwise else [group] for group in groups
        ]
        if not all(
            sum(param.partition_numel() for param in part) % unit == 0
            for group in parts
            for part in group[:-1]
        ):
            _log.warning(
                "sub-groups were cut inside SIMD vectors or blocks of 8-bit states, so the last bits depend on host_memory: a larger host_memory avoids it"
            )
        self._logical_groups += parts
        return list(itertools.chain.from_iterable(parts))

    def _configure_tensor_swapping(self, offload_optimizer_config: Any, aio_config: Any) -> None:
        if not self.native:
            super()._configure_tensor_swapping(offload_optimizer_config, aio_config)
            return
        self.tier.require(self._whole_bytes)
        widened, on_gpu = self.master_weights_and_grads_dtype, self.update_device != CPU
        last = KeptGradients if on_gpu else LastGradients
        kind = last if self.keeps_last else Gradients
        largest = max(self.fp16_partitioned_groups_flat_numel, default=0)
        self._gradients = kind(
            self.tier,
            self.fp16_partitioned_groups_flat_numel,
            self.gradient_accumulation_dtype,
            widened,
            self._wait_for_copies,
            self.update_device,
            int(self._gpu_bytes * largest),
        )
        self.optimizer_swapper = OptimizerSwapper(
            self.tier,
            lambda: self.optimizer,
            self._format,
            self._expected_states,
            largest,
            Working(
                self.dtype,
                lambda parameter, allocate, fill: working_weights.load(
                    self, self._index_of(parameter), allocate, fill
                ),
                lambda parameter, source: working_weights.store(
                    self, self._index_of(parameter), source
                ),
            ),
            self._mark_backward,
            self.update_device,
            self._footprint.holds_in_flight(largest, self.tier.cap_bytes),
        )
        self.swaps_natively = True

    def _index_of(self, parameter: torch.Tensor) -> int:
        known = len(self._indexes)  # the base class appends to the list while it makes masters
        for index, other in enumerate(self.fp32_partitioned_groups_flat[known:], known):
            self._indexes[id(other)] = index
        return self._indexes[id(parameter)]

    def _swappable_optimizer_subgroup(self, sub_group_id: int) -> bool:
        if not self.native:
            return bool(super()._swappable_optimizer_subgroup(sub_group_id))
        # "ratio" keeps some on the accelerator
        return bool(self.swap_optimizer and self.subgroup_to_device[sub_group_id] == "cpu")

    def initialize_optimizer_states(self) -> None:
        """Prepare the first step: make the base class's gradient buffers, and the states of an
        optimizer that has states before its first step.
        """
        if not self.swaps_natively:
            super().initialize_optimizer_states()
            return
        # The base class makes swap files by a step over all states, and gradient buffers for
        # sub-groups that are not swapped. Only the buffers are needed.
        for index, parameter in enumerate(self.fp32_partitioned_groups_flat):
            if not self._swappable_optimizer_subgroup(index):
                parameter.grad = torch.zeros_like(parameter)
            # Only Adagrad has states before its first step.
            elif isinstance(self.optimizer, torch.optim.Adagrad):
                self.optimizer_swapper.swap_in_optimizer_state(parameter)
                start = self.optimizer.defaults["initial_accumulator_value"]
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "sum": torch.full_like(parameter, start, requires_grad=False),
                }
                self.optimizer_swapper.swap_out_optimizer_state(parameter)
        # The base class then makes a gradient buffer for each sub-group listed here.
        self.fp16_groups = [
            params
            for index, params in enumerate(self.fp16_groups)
            if not self._swappable_optimizer_subgroup(index)
        ]

    def destroy(self) -> None:
        """Drop the states; the base class drops its hooks. Raises: the error of the last updates,
        if they failed, after everything is dropped.

        Called from a `__del__`, such as the one of DeepSpeed's engine, it waits for no updates, and
        the next use of the tier drops the states: the garbage collector may run in the middle of
        another engine's call that holds the tier's locks.
        """
        if is_in_del():
            if self.overlap is None or not self.overlap.updates.afterwards(self._drop):
                self._drop()
            return
        error = None
        if self.overlap is not None:
            error = self.overlap.updates.abandon()
            self.overlap.updates.stop(finish=False)
        self._drop()
        if self.swaps_natively:
            quiesce(self.tier)
            self.tier.forget(())  # drops abandoned values
        if error is not None:
            raise error

    def _drop(self) -> None:
        super().destroy()
        while self._hooks:
            self._hooks.pop().remove()
        compat.let_go_of(self.module)
        if self.swaps_natively:
            self._gradients.abandon()
            self.optimizer_swapper.abandon()
            self.tier.abandon((), [self._whole_bytes])
            self._whole_bytes = 0

    # Gradients.

    def _setup_for_real_optimizer(self) -> None:
        groups = self.fp16_groups
        super()._setup_for_real_optimizer()
        self.fp16_groups = groups

    def _wait_for_copies(self) -> None:
        if not get_accelerator().resolves_data_dependency():
            self.reduce_and_partition_stream.synchronize()

    def partition_grads(
        self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]
    ) -> Any:
        """As in the base class, except that gradients of swapped sub-groups go to the tier. Their
        norms are computed while they are on the accelerator.
        """
        self._partly_reduced = True
        if not self.swaps_natively:
            return super().partition_grads(params_to_release, grad_partitions)
        self.finish_updates()
        self.optimizer_swapper.give_back()
        swapped: dict[int, list[tuple[int, torch.Tensor, Any]]] = {}
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
                swapped.setdefault(index, []).append((offset, partition, param))
            if param.grad is not None and not get_accelerator().is_synchronized_device():
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None
        # Add the gradient that the update needs first last, so that it is evicted last.
        for index in sorted(swapped, reverse=True):
            pieces = [(offset, partition) for offset, partition, _ in swapped[index]]
            totals = self._gradients.add(index, pieces, to_earlier=self.micro_step_id != 0)
            self._gradients.partial = not compat.at_accumulation_boundary(self)
            if self.keeps_last and self.dtype == torch.float16:
                self._finite |= {
                    self.get_param_id(param): total.isfinite().all()
                    for (_, _, param), total in zip(swapped[index], totals, strict=True)
                }
            if compat.at_accumulation_boundary(self):
                for (offset, _, param), total in zip(swapped[index], totals, strict=True):
                    self.norm_for_param_grads[self.get_param_id(param)] = self._norm(
                        param, index, offset, total
                    )
                self._gradients.complete(
                    index,
                    [
                        (offset, total)
                        for (offset, _, _), total in zip(swapped[index], totals, strict=True)
                    ],
                )
        if self.in_backward is not None and compat.at_accumulation_boundary(self):
            for index in sorted(arrived, reverse=True):
                self.in_backward.reduced(index, arrived[index])
        return super().partition_grads(
            [param for param, _ in others], [partition for _, partition in others]
        )

    def _norm(self, param: Any, index: int, offset: int, total: torch.Tensor) -> torch.Tensor:
        """The norm of *total*, the gradient of *param* at *offset* of sub-group *index*."""
        if self.update_device == CPU:
            norm: torch.Tensor = self._constant_buffered_norm2(total)
            return norm
        # Like `get_grad_norm_direct`, compute it over the whole partition, including padding.
        whole = self._gradients.padded(index, offset, param.partition_numel(), total)
        found: torch.Tensor = torch.linalg.vector_norm(whole.to(compat.norm_dtype()))
        return found

    def independent_gradient_partition_epilogue(self) -> None:
        """The backward pass is over."""
        self.finish_updates()
        super().independent_gradient_partition_epilogue()
        if self.swaps_natively:
            self._gradients.pause()
        self._awaits_backward = False
        if not self._within_backward:
            self._partly_reduced = False

    def _mark_backward(self, begins: bool) -> None:
        """Record that `engine.backward` begins or ends. It is not called if the user calls
        `Tensor.backward`.
        """
        self._within_backward = begins
        if not begins:
            self._partly_reduced = False

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
                if (
                    identifier not in self.norm_for_param_grads
                    and offset in self._gradients.reduced(index)
                ):
                    partition = self._gradients.partition(index, offset).to(
                        get_accelerator().current_device_name()
                    )
                    self.norm_for_param_grads[identifier] = self._norm(
                        param, index, offset, partition
                    )
                    self._gradients.complete(index, [(offset, partition)])
        if self.swaps_natively:
            self._gradients.pause()
            self._gradients.partial = False

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """As in the base class, which checks only the gradients that it keeps itself. The norms of
        other gradients are checked instead.
        """
        finite_by_id: Mapping[int, torch.Tensor] = self._finite if self.keeps_last else {}
        # The base class has norms only if it offloads.
        if self.swaps_natively and not self.keeps_last:
            finite_by_id = {key: norm.isfinite() for key, norm in self.norm_for_param_grads.items()}
        if self.swaps_natively and finite_by_id:
            finite = torch.stack(list(finite_by_id.values())).all()
            self.inf_or_nan_tracker.logical_or_(
                finite.logical_not().to(self.inf_or_nan_tracker.device)
            )
        overflows: bool = super().has_overflow(partition_gradients)
        return overflows

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: torch.Tensor) -> None:
        """As in the base class, but without a pass over the gradients that multiplies by 1."""
        self.partly_changed = self.clock is not None
        if not self.swaps_natively:
            super().unscale_and_clip_grads(sub_group_id, total_norm)
            return
        scale = self.loss_scale
        if self.clip_grad > 0.0:
            clip = ((total_norm / scale) + 1e-6) / self.clip_grad
            scale = torch.clamp(clip, min=1.0) * scale
        self._multiply_gradient(sub_group_id, 1.0 / scale)

    def _multiply_gradient(self, index: int, factor: Any) -> None:
        # Reading a factor on a GPU would wait for the GPU.
        if (torch.is_tensor(factor) and not factor.is_cpu) or factor != 1.0:
            self.fp32_partitioned_groups_flat[index].grad.mul_(factor)
            if self.swaps_natively and self._swappable_optimizer_subgroup(index):
                self._gradients.used(index, factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the parameters, as the base class does. A step still uses gradients
        that were reduced before; the next backward pass replaces them.
        """
        super().zero_grad(set_to_none)
        if self.swaps_natively:
            self._gradients.close()

    def reset_cpu_buffers(self) -> None:
        """Discard the norms of the finished step, as the base class does. From now on, or after the
        pending updates, its gradients are only read.
        """
        super().reset_cpu_buffers()
        if self.overlap is None or not self.overlap.holds_gradients:
            self.spend_gradients()

    def use_up_gradient(self, index: int) -> None:
        """Discard the gradient of sub-group *index*, which an update in backward has used."""
        self._gradients.use_up(index)

    def spend_gradients(self) -> None:
        """End the step that has used the gradients."""
        if self.swaps_natively:
            self._gradients.spend()

    def _get_norm_groups(self) -> Any:
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
                for params in map(list, map(itertools.chain.from_iterable, self._logical_groups))
            ]
        else:
            groups = [list(itertools.chain.from_iterable(group)) for group in self._logical_groups]
            norms = [
                self.complete_grad_norm_calculation_for_cpu_offload(params) for params in groups
            ]
        if self._scaler is not None:  # reading the norms waits for the GPU
            # DeepSpeed sets the norm of gradients that are not finite to -1.
            self._found_inf = not all(0 <= float(norm) < math.inf for norm in norms)
        return norms

    # The step.

    def step(self, closure: Any = None) -> None:
        """Update the parameters, as the base class does. Every steps_per_print steps, log the time
        that the step spent on the drive.

        Raises: OffloadError if an exception ended the previous step or load after it had changed
        some states; loading a checkpoint clears this condition. With `"overlap_step"`, the error of
        the previous step's updates, if they failed.
        """
        if self.clock is None:
            super().step(closure)
            return
        self.finish_updates()
        self.require_whole()
        self._require_backward()
        # A second call would count the step twice, or repeat updates of backward.
        self.partly_changed = self._updates_in_backward
        self._warn_of_untrained()
        overlaps = False
        try:
            self.clock.begin_update()
            if not self.keeps_last or self.update_device != CPU:
                self._make_missing_norms()
            self.partly_changed |= bool(self.dynamic_loss_scale)
            if self.overlap is None:
                self._step_once(closure)
            else:
                self.overlap.begin()
                with self.overlap.gathers_nothing():
                    self._step_once(closure)
            if not self.overflow:
                self.powers.count(self.optimizer, self.groups_of_sub_groups)
            if self.overlap is not None and self.overlap.notes:
                self.partly_changed = False  # from here on, the thread sets it
                overlaps = self.overlap.end(self.clock.number)
            elif self.overlap is not None:
                self.overlap.end(self.clock.number)
            if self.in_backward is not None:
                self.in_backward.end()
                self.optimizer_swapper.drain()
            if not (self.overflow or overlaps):
                self.end_period()
            stats = self.clock.end(*self._update_waits())
            self._awaits_backward = True
            if not overlaps:
                self.partly_changed = False
        except BaseException:
            changed = self.partly_changed
            if self.overlap is not None:
                changed |= self.overlap.cancel()
            self.give_back()  # after updates, which clear the mark
            self.partly_changed |= changed
            raise
        if stats.step % self._steps_per_print == 0 and dist.get_rank() == 0:
            _log.info("%s", stats)

    @property
    def _updates_in_backward(self) -> bool:
        """Whether the last backward pass has updated sub-groups, and no step has followed."""
        return self.in_backward is not None and bool(self.in_backward.updated)

    def end_period(self) -> None:
        """End a period in which a step has used all values: the swappers learn their order."""
        for swapper in swappers_of(self.module):
            swapper.drain()
        for tier in self._tiers:
            tier.swapper.step()
            trained.add(tier)

    def _warn_of_untrained(self) -> None:
        """Log parameters that require gradients and are in no group, such as parameters that were
        frozen when the engine was made and have been unfrozen since. Each is logged once.
        """
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
        """The base class's step, in which the optimizer's `step` and the scaler of "torch_autocast"
        count one step for all sub-groups.
        """
        scaler = getattr(self, "torch_autocast_gradscaler", None)
        self._once, self._scaler = OncePerStep(self.optimizer), scaler
        if scaler is not None:
            self.torch_autocast_gradscaler = None
            self.overflow = False  # set below, and releases before 0.19.5 do not reset it
        if len(self.fp16_groups) > 1 and has_hooks(self.optimizer):
            warn_of_hooks(type(self.optimizer).__name__, len(self.fp16_groups))
        try:
            super().step(closure)
            self._once.end()
        except BaseException:
            self._once.undo()
            raise
        finally:
            self._once = self._scaler = None
            if scaler is not None:
                self.torch_autocast_gradscaler = scaler
        if scaler is not None and not self.overflow:
            update_scale(scaler, self._found_inf)
            self.overflow = self._found_inf

    def _optimizer_step(self, sub_group_id: int) -> None:
        if self._once is None:
            self._update_sub_group(sub_group_id)
            return
        if self._scaler is not None:
            if self._found_inf:
                return
            self._multiply_gradient(sub_group_id, 1.0 / self._scaler.get_scale())
        with self._once.sub_group(self.sub_group_to_group_id[sub_group_id]):
            self._update_sub_group(sub_group_id)
        if self._once.conflict:
            raise depends_on_values(self.optimizer, self._once.conflict)

    def _update_sub_group(self, sub_group_id: int) -> None:
        if not self.step_packed(sub_group_id, self.optimizer):
            super()._optimizer_step(sub_group_id)
            self.count_step(sub_group_id)

    def count_step(self, sub_group_id: int) -> None:
        """Count a step that the optimizer has made over sub-group *sub_group_id*."""
        if self.swaps_natively and self._swappable_optimizer_subgroup(sub_group_id):
            self.optimizer_swapper.count_step(self.fp32_partitioned_groups_flat[sub_group_id])

    def step_packed(self, sub_group_id: int, optimizer: Any) -> bool:
        """Update sub-group *sub_group_id*, which is in memory, for *optimizer* without unpacking
        its states. Returns: False if the optimizer has to make the step.
        """
        return self.swaps_natively and self.optimizer_swapper.step(
            self.fp32_partitioned_groups_flat[sub_group_id],
            optimizer,
            optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]],
            self.powers.multiplied if compat.keeps_powers_for_a_step() else None,
        )

    def _update_waits(self) -> tuple[float, float]:
        """See `Overlap.take_waits`."""
        return (0.0, 0.0) if self.overlap is None else self.overlap.take_waits()

    def finish_updates(self) -> None:
        """Wait until no update is pending, of this engine or of another that shares the memory.
        Raises: the error of this engine's updates, if they failed.
        """
        if self.overlap is not None:
            self.overlap.updates.wait()
        if self.clock is not None:
            quiesce(self.tier)

    def _forget_updates(self) -> None:
        """Prepare for a load of states: complete the pending updates, and forget failed ones."""
        if self.overlap is not None:
            self.overlap.begin_load()
        if self.clock is not None:
            quiesce(self.tier)

    # Deferred updates read these values as they were in `step`.

    @property
    def loss_scale(self) -> Any:
        """The loss scale, as in the base class."""
        if self.overlap is None or not self.overlap.updates.is_worker():
            return super().loss_scale
        return self.overlap.scaling.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: Any) -> None:
        super(Stage3, type(self)).loss_scale.fset(self, value)

    @property
    def clip_grad(self) -> float:
        """The largest norm of the gradients, to which they are clipped."""
        if self.overlap is None or not self.overlap.updates.is_worker():
            return self._clip_grad
        return self.overlap.scaling.clip_grad

    @clip_grad.setter
    def clip_grad(self, value: float) -> None:
        self._clip_grad = value

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
        """As in the base class. Also drops copies that an exception between read and gather has
        left: a step would change the copies instead of the offloaded values.
        """
        super()._partition_all_parameters()
        for param in itertools.chain.from_iterable(self.fp16_groups):
            if (
                has_value(param)
                and not awaited.is_awaited(param)  # it has not been read since its update
                and not param.nvme_swapper.is_offloaded(param)
            ):
                param.nvme_swapper.remove_partition_and_release_buffers([param])

    def give_back(self) -> None:
        """Release everything that an interrupted call left in use, after pending updates."""
        if self.overlap is not None:
            self.overlap.updates.quiesce()
        self.release_all()

    def release_all(self) -> None:
        """Release everything that is in use."""
        self._clear_fp32_optimizer_param_groups()
        if self.swaps_natively:
            self._gradients.give_back()
            self.optimizer_swapper.give_back()
            self.optimizer_swapper.drain()
        for swapper in swappers_of(self.module):
            swapper.give_back()

    def begin_load(self) -> None:
        """Release everything that an interrupted call left in use, and discard all gradients: they
        belong to weights that are about to be replaced.
        """
        self._forget_updates()
        if any(tier.interrupted for tier in self._tiers):
            self._reset_tiers()
        self.give_back()
        for param in itertools.chain.from_iterable(self.fp16_groups):
            # An exception in backward left it. The base class drops it only on a stream, which a
            # CPU does not have.
            param.grad = None
        compat.end_backward(self)
        if self.in_backward is not None:
            self.in_backward.end()
        self._partly_reduced = self._within_backward = self._awaits_backward = False
        self.reset_cpu_buffers()
        self.zero_grad()
        if self.swaps_natively:
            self._gradients.forget_all()
            self._finite.clear()
        if self.clock is not None and (self.partly_changed or self.tier.swapper.lacks_writes()):
            # Otherwise the load would raise the errors of failed writes midway.
            self.tier.swapper.flush()

    def _reset_tiers(self) -> None:
        """Delete all values, after an exception has interrupted a call of a tier. The load creates
        them again.
        """
        self.partly_changed = True
        for tier in self._tiers:
            tier.reset()
        if self.swaps_natively:
            for index, parameter in enumerate(self.fp32_partitioned_groups_flat):
                if self._swappable_optimizer_subgroup(index):
                    self.optimizer.state.pop(parameter, None)
                    self.optimizer_swapper.renew(parameter, {})
                    self.optimizer_swapper.swap_out_optimizer_state(parameter)

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        if not (
            self.swaps_natively
            and not self._format.in_place
            and self._swappable_optimizer_subgroup(sub_group_id)
        ):  # swap_out_optimizer_state has written the parameters
            super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)

    def set_local_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        """As in the base class, which needs the shape of a partition that may be offloaded."""
        self._awaits_backward = False
        with _with_shape(param):
            super().set_local_grad_for_param(value, param)

    def set_local_hp_param(
        self, value: torch.Tensor, param: Any, optim_state_key: str | None = None
    ) -> None:
        """As in the base class, which needs the shape of a partition that may be offloaded."""
        with _with_shape(param):
            super().set_local_hp_param(value, param, optim_state_key)

    # Fetching states and gradients.

    def _optimizer_states_and_gradient_swap_in(
        self, sub_group_id: int, timer_names: Any = None
    ) -> None:
        if not self.swaps_natively:
            super()._optimizer_states_and_gradient_swap_in(sub_group_id, timer_names)
            return
        parameter, steps = self.fp32_partitioned_groups_flat[sub_group_id], timer_names is not None
        if not steps:  # `step` has waited already
            self.finish_updates()
        self.optimizer_swapper.give_back()
        self.partly_changed |= steps
        if steps and not self.tier.swapper.learned:
            self.read_ahead(sub_group_id)
        # Fetch the gradient before the states, so that only one value is in use at a time.
        gradient = self._gradients.widened(sub_group_id, last=steps)
        self.optimizer_swapper.leaves_packed = steps and updates_packed(self.optimizer)
        try:
            super()._optimizer_states_and_gradient_swap_in(sub_group_id, timer_names)
        finally:
            self.optimizer_swapper.leaves_packed = False
        parameter.grad = self._without_frozen(sub_group_id, gradient) if steps else gradient

    def _without_frozen(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """*gradient* of sub-group *index*. On a GPU it has zeros for frozen parameters, as in stock
        DeepSpeed.
        """
        if self.keeps_last and self.update_device != CPU:
            offset = 0
            for param in self.fp16_groups[index]:
                numel = param.partition_numel()
                if not param.requires_grad:
                    gradient.narrow(0, offset, numel).zero_()
                offset += numel
        return gradient

    def read_ahead(self, index: int) -> None:
        """Prefetch the gradients and the states of sub-group *index* and the next ones."""
        later = self.overlap.following(index, _PREFETCHED) if self.overlap is not None else ()
        names = (
            (
                self._gradients.name(number),
                self.optimizer_swapper.name(self.fp32_partitioned_groups_flat[number]),
            )
            for number in later or self._next_ones(index)[:_PREFETCHED]
            if self._swappable_optimizer_subgroup(number)
        )
        self.tier.swapper.prefetch(itertools.chain.from_iterable(names))

    def _next_ones(self, index: int) -> range:
        """Sub-group *index* and the sub-groups that are probably used after it."""
        if self.in_backward is not None and self.in_backward.updating:
            return range(index, -1, -1)
        return range(index, len(self.fp16_groups))

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
                self._gradients.replace(sub_group_id)

    # Fragments: never return memory that the next read overwrites.

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> Any:
        index, offset, numel = self.grad_position[self.get_param_id(param)]
        if not (self.swaps_natively and self._swappable_optimizer_subgroup(index)):
            return super()._get_fp32_grad_state_partition(param, release_swap_buffers)
        if self._edited is not None and self._edited[0] == index:
            fragment = self._edited[1].narrow(0, offset, numel)
        else:
            self.finish_updates()
            self._gradients.require_whole()
            self.optimizer_swapper.give_back()
            fragment = self._gradients.widened(index).narrow(0, offset, numel)
        return fragment.clone() if release_swap_buffers else fragment, index

    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: Any) -> None:
        """As in the base class. *update_func* may read gradients, weights and states, which loads
        another sub-group into memory.
        """
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
        """Context in which the gradient of sub-group *index* is read and changed in a copy. The
        copy is stored once, at the end of the context, even after an exception.
        """
        if not self._swappable_optimizer_subgroup(index):
            yield
            return
        self.finish_updates()
        self._gradients.require_whole()
        self.optimizer_swapper.give_back()
        copy = self._gradients.widened(index).clone()
        self._edited = index, copy
        try:
            yield
        finally:
            self._edited = None
            self._gradients.replace(index, copy)

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

    # Checkpoints.

    @property
    def user_sub_groups(self) -> list[list[int]]:
        """The sub-groups that the user configured, each a list of indexes of ours."""
        ends = list(
            itertools.accumulate(
                (
                    len(group)
                    for group in self._logical_groups or [[group] for group in self.fp16_groups]
                ),
                initial=0,
            )
        )
        return [list(range(start, end)) for start, end in itertools.pairwise(ends)]

    @property
    def groups_of_sub_groups(self) -> list[int]:
        """The index of the parameter group of each sub-group."""
        return [self.sub_group_to_group_id[index] for index in range(len(self.fp16_groups))]

    @property
    def rounds_half_away_from_zero(self) -> bool:
        """Whether parameters are rounded half away from zero instead of half to even."""
        return self.swaps_natively and not self._format.in_place

    @property
    def has_offloaded_states(self) -> bool:
        """Whether some states are offloaded, so that DeepSpeed's own save and load would miss them."""
        return self.swaps_natively or (self.native and self.params_in_nvme_and_cpu)

    def require_complete(self, saved: Mapping[str, Any]) -> None:
        """Raises: OffloadError if *saved* lacks states: see `states.require_complete`."""
        states.require_complete(self, saved, sum(self.fp16_partitioned_groups_flat_numel))

    def _rigid_state_dict(self) -> dict[str, Any]:
        if not self.has_offloaded_states:
            state_dict: dict[str, Any] = super()._rigid_state_dict()
            return state_dict
        self.finish_updates()
        self.require_whole()
        if self._updates_in_backward:
            raise partly_applied()
        self.give_back()
        tree = states.save(self, super()._rigid_state_dict)
        if powers := self.powers.state(self.optimizer):
            tree[states.POWERS] = powers
        if scaler := getattr(self, "torch_autocast_gradscaler", None):
            tree[states.SCALER] = scaler.state_dict()
        return tree if self.leaves_states_offloaded else archive.gather(tree)

    def _rigid_load_state_dict(
        self, state_dict: Mapping[str, Any], load_optimizer_states: bool = True
    ) -> None:
        self._forget_updates()
        if self.has_offloaded_states:
            saved = states.of_state_dict(self, state_dict)
            states.check(self, saved, True, load_optimizer_states)
            self.load(saved, load_optimizer_states, True)
        else:
            super()._rigid_load_state_dict(state_dict, load_optimizer_states)

    def load(
        self, saved: CheckpointReader, load_optimizer_states: bool, from_fp32_weights: bool
    ) -> None:
        """Load *saved*, which has passed `states.check`. With neither *load_optimizer_states* nor
        *from_fp32_weights*, master weights get the values of the 16-bit parameters.
        """
        self._partition_all_parameters()  # drops copies on the accelerator
        states.load(self, saved, load_optimizer_states, load_optimizer_states or from_fp32_weights)

    def load_global_state(self, tree: Mapping[str, Any]) -> None:
        """Load the loss scale and other values that all sub-groups share."""
        self._load_global_state_stage3(tree)
        scaler = getattr(self, "torch_autocast_gradscaler", None)
        if scaler and tree.get(states.SCALER):
            scaler.load_state_dict(archive.whole(tree[states.SCALER]))

    @property
    def trained_groups(self) -> list[list[Any]]:
        """The parameters of each parameter group."""
        groups: list[list[Any]] = [[] for _ in self.optimizer.param_groups]
        for index, params in enumerate(self.fp16_groups):
            groups[self.sub_group_to_group_id[index]] += params
        return groups

    def shares(self, index: int) -> list[states.Share]:
        """The partitions of parameters in sub-group *index*."""
        params = self.fp16_groups[index]
        numels = [param.partition_numel() for param in params]
        places = itertools.accumulate(numels, initial=0)
        return [
            states.Share(param, first_element(param), numel, place)
            for param, numel, place in zip(params, numels, places, strict=False)
        ]

    def _restore_from_bit16_weights(self) -> None:
        self._forget_updates()
        if self.has_offloaded_states:
            states.take_masters_from_parameters(self)
            self.partly_changed = False
        else:
            super()._restore_from_bit16_weights()


def as_mapping(ds_config: Any) -> Mapping[str, Any]:
    """*ds_config* as a mapping: DeepSpeed accepts a mapping or the path of a file."""
    if isinstance(ds_config, Mapping):
        return ds_config
    from deepspeed.runtime.config import DeepSpeedConfig

    mapping: Mapping[str, Any] = DeepSpeedConfig(ds_config)._param_dict
    return mapping


def is_in_del() -> bool:
    """Whether this is called from a `__del__`, directly or indirectly."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _with_shape(param: Any) -> contextlib.AbstractContextManager[None]:
    return param.nvme_swapper.with_shape(param) if has_value(param) else contextlib.nullcontext()


def _log_unused_keys(ds_config: Mapping[str, Any]) -> None:
    for name in ("offload_param", "offload_optimizer"):
        section = ds_config.get("zero_optimization", {}).get(name) or {}
        unused = [key for key in section if key in _UNUSED_KEYS]
        if section.get("device") == "nvme" and unused:
            _log.info(
                '%s in "%s": not used; "host_memory" is the one budget for everything',
                ", ".join(unused),
                name,
            )
