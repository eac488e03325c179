"""`Stage3`: DeepSpeed's ZeRO-3 optimizer with this package's swappers behind it.

What differs from the class below it: sub-groups are cut to sizes that the host memory can read ahead; gradients stay in the buffer that they are
reduced to, in 16 bit, until the optimizer wants them widened; everything that DeepSpeed does with states on a drive goes through `OptimizerSwapper`.
Results do not differ, by a bit: norms are summed in the sub-groups that the user asked for.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ..errors import OffloadError, UsageError
from ..pool import PinnedPool
from ..units import format_bytes
from . import archive, states
from .optimizer_swapper import OptimizerSwapper, state_bytes
from .param_swapper import ParameterSwapper
from .settings import Settings
from .shared_tier import tier_of
from .step_stats import StepClock, StepStats

# Sub-groups that the budget should hold, where parameters are small enough: one is in use, two are read ahead, one is written back, and the more
# the others are, the less of the budget is lost to what does not fit whole.
_IN_MEMORY = 16
_LARGEST_SUB_GROUP = 1 << 26  # elements; more at a time gains nothing and makes the first read and the last write of a step longer
_VECTOR_ELEMENTS = 128  # of DeepSpeed's kernels: 16 floats, 8 at a time
_WITHOUT_EFFECT = {"buffer_count", "buffer_size", "max_in_cpu", "pipeline", "pipeline_read", "pipeline_write", "fast_init"}
_SLACK_BYTES = 1 << 16  # of a sub-group's place for its rounding to pages, and of a few small parameters beside it

_log = logging.getLogger(__name__)
_serial = itertools.count()


class Stage3(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]  # untyped
    """As its base; the swappers are this package's where the section "nvme_offload" of the configuration does not say otherwise."""

    offload_optimizer_pin_memory: bool
    grad_partitions_flat_buffer: torch.Tensor

    def __init__(self, module: torch.nn.Module, init_optimizer: Any, param_names: Any, timers: Any, ds_config: Any, *args: Any, **kwargs: Any) -> None:
        self._ds_config: Mapping[str, Any] = as_mapping(ds_config)
        self.native = Settings.of(self._ds_config).swappers == "native" and not kwargs.get("zenflow_config")
        self._logical_groups: list[list[list[Any]]] = []  # the user's sub-groups, each a list of ours, each a list of parameters
        self._kept_gradients: dict[int, torch.Tensor] = {}  # by sub-group: gradients that were set from outside, which 16 bit might not hold
        self._steps_per_print = self._ds_config.get("steps_per_print", 10) or math.inf
        self.last_step: StepStats | None = None
        self.norm_for_param_grads: dict[int, Any] = {}  # which the base makes later than it asks for states
        self.leaves_states_away = False  # while a checkpoint is written that can have them from where they are
        super().__init__(module, init_optimizer, param_names, timers, ds_config, *args, **kwargs)

    @property
    def swaps_natively(self) -> bool:
        """Whether optimizer states are in an `OptimizerSwapper`."""
        return isinstance(self.optimizer_swapper, OptimizerSwapper)

    # Making sub-groups and swapper.

    def _configure_offloading(self, offload_optimizer_config: Any, offload_param_config: Any) -> None:
        super()._configure_offloading(offload_optimizer_config, offload_param_config)
        if not self.native:
            return
        if dist.get_rank() == 0:
            _tell_of_unused_keys(self._ds_config)
        self.offload_optimizer_fast_init = False  # to read 16-bit parameters in bulk is what the swapper does anyway
        self.max_params_in_cpu = 0  # what is kept in memory is the budget's business

    def _create_fp16_partitions_with_defragmentation(self, fp16_param_groups: Any) -> None:
        if self.native and self.swap_optimizer:
            _all_or_none(lambda: self._open_tier(fp16_param_groups))
            self._tier.cap_bytes = _least(self._tier.cap_bytes)
            _all_or_none(self._plan)
        super()._create_fp16_partitions_with_defragmentation(fp16_param_groups)

    def _open_tier(self, param_groups: Any) -> None:
        """Find out how much has to be kept, and see that memory and drives have room for it. Raises: UsageError or NoSpaceError with the numbers."""
        self._state_bytes = state_bytes(self.optimizer, self.master_weights_and_grads_dtype)
        self._elementwise = is_elementwise(self.optimizer)
        sizes = [param.partition_numel() for group in param_groups for param in group["params"]]
        groups = [super(Stage3, self)._create_fp16_sub_groups(group["params"]) for group in param_groups]
        uncut = [sum(param.partition_numel() for param in group) for group in itertools.chain.from_iterable(groups)]
        self._least_sub_group = max(sizes if self._elementwise else uncut)  # elements of the largest, however small they are made
        self._parameter_bytes = self.dtype.itemsize if param_groups[0]["params"][0].nvme_swapper is not None else 0
        widened = (min(_LARGEST_SUB_GROUP, sum(sizes)) + self._least_sub_group) * self.master_weights_and_grads_dtype.itemsize
        self._whole_bytes = sum(sizes) * self._state_bytes + widened + (len(sizes) + 2) * _SLACK_BYTES
        gradients = sum(sizes) * self.gradient_accumulation_dtype.itemsize
        self._tier = tier_of(self._ds_config)
        self._tier.require_memory(self._whole_bytes, gradients)
        self._tier.require_space(sum(sizes) * (self._state_bytes + self._parameter_bytes))
        _log.info("host memory for gradients, beside that for offload: %s (%s)", format_bytes(gradients), self.gradient_accumulation_dtype)

    def _plan(self) -> None:
        """Choose how large sub-groups may be. Raises: UsageError when the host memory cannot hold the largest that cannot be cut."""
        widened = self.master_weights_and_grads_dtype.itemsize
        cap = self._tier.cap_bytes
        fewest = self._least_sub_group * (self._state_bytes + widened + self._parameter_bytes) + 2 * _SLACK_BYTES
        if cap < fewest:
            largest = "parameter" if self._elementwise else "sub-group (sub_group_size says how large they are)"
            raise UsageError(
                f'"host_memory" of {format_bytes(cap)} cannot hold the optimizer states of the largest {largest}, which has {self._least_sub_group} '
                f"elements on this rank: allow at least {fewest} bytes ({format_bytes(fewest)})"
            )
        self._most_elements = (cap - 2 * _SLACK_BYTES) // (self._state_bytes + widened + self._parameter_bytes)
        self._largest_sub_group = min(_LARGEST_SUB_GROUP, max(1, cap // (_IN_MEMORY * self._state_bytes + widened)))

    def _create_fp16_sub_groups(self, params_group: Any) -> Any:
        groups = super()._create_fp16_sub_groups(params_group)
        if not (self.native and self.swap_optimizer):
            return groups
        # DeepSpeed's optimizers for the CPU round differently in the elements behind the last whole vector of a tensor (csrc/adam/cpu_adam_impl.cpp).
        unit = _VECTOR_ELEMENTS if type(self.optimizer).__module__.startswith("deepspeed.") else 1
        cut = [_cut(group, self._largest_sub_group, self._most_elements, unit) if self._elementwise else [group] for group in groups]
        if not all(sum(param.partition_numel() for param in part) % unit == 0 for parts in cut for part in parts[:-1]):
            _log.warning('sub-groups had to be cut within vectors, so last bits may differ from "device": "cpu": a larger "host_memory" avoids it')
        self._logical_groups += cut
        return list(itertools.chain.from_iterable(cut))

    def _configure_tensor_swapping(self, offload_optimizer_config: Any, aio_config: Any) -> None:
        if not self.native:
            super()._configure_tensor_swapping(offload_optimizer_config, aio_config)
            return
        self._tier.require(self._whole_bytes)
        self._clock = StepClock(self._tier)
        self._widened = f"gradient{next(_serial)}"
        if self.gradient_accumulation_dtype != self.master_weights_and_grads_dtype:
            largest = max(self.fp16_partitioned_groups_flat_numel)
            self._tier.make_scratch(self._widened, largest * self.master_weights_and_grads_dtype.itemsize)
        self.optimizer_swapper = OptimizerSwapper(self._tier, lambda: self.optimizer, self._gradient, self._keep_gradient, self._state_bytes)

    def _swappable_optimizer_subgroup(self, sub_group_id: int) -> bool:
        swappable = super()._swappable_optimizer_subgroup(sub_group_id)
        return swappable and (not self.native or self.subgroup_to_device[sub_group_id] == "cpu")  # "ratio" leaves some on the accelerator

    def initialize_optimizer_states(self) -> None:
        """Make what the first step finds: the base's gradient buffers, and the states of an optimizer that does not make them at its first step."""
        if not self.swaps_natively:
            super().initialize_optimizer_states()
            return
        # The base steps through all states once, to make files of them. What it makes besides are gradient buffers for the others.
        for index, parameter in enumerate(self.fp32_partitioned_groups_flat):
            if not self._swappable_optimizer_subgroup(index):
                parameter.grad = torch.zeros_like(parameter)
            elif isinstance(self.optimizer, torch.optim.Adagrad):  # the one that makes its states before the first step
                self.optimizer_swapper.swap_in_optimizer_state(parameter)
                start = self.optimizer.defaults["initial_accumulator_value"]
                self.optimizer.state[parameter] = {"step": torch.tensor(0.0), "sum": torch.full_like(parameter, start, requires_grad=False)}
                self.optimizer_swapper.swap_out_optimizer_state(parameter)

    def destroy(self) -> None:
        """Give up the states, as the base does its hooks."""
        super().destroy()
        if self.swaps_natively:
            self.optimizer_swapper.close()
            self._tier.drop_scratch(self._widened)
            self._tier.give_back(self._whole_bytes)
            self._whole_bytes = 0

    # Gradients.

    def _setup_for_real_optimizer(self) -> None:
        pins = self.offload_optimizer_pin_memory
        self.offload_optimizer_pin_memory = pins and not self.swaps_natively
        super()._setup_for_real_optimizer()
        self.offload_optimizer_pin_memory = pins
        if self.swaps_natively and (pins or get_accelerator().device_name() == "cuda"):
            self._pin_gradients()

    def _pin_gradients(self) -> None:
        """Pin the buffer that gradients are reduced to, in as many bytes as it has: torch would take the next power of two, and two buffers at once."""
        numel, dtype = self.grad_partitions_flat_buffer.numel(), self.grad_partitions_flat_buffer.dtype
        partitions = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        partitions.clear()
        del self.grad_partitions_flat_buffer  # the last reference, so that its memory is there for the other
        self.grad_partitions_flat_buffer = PinnedPool(numel * dtype.itemsize).empty(numel, dtype).zero_()
        params = list(itertools.chain.from_iterable(self.fp16_groups))
        sizes = [param.partition_numel() for param in params]
        for param, size, start in zip(params, sizes, itertools.accumulate(sizes, initial=0), strict=False):
            partitions[param.ds_id] = self.grad_partitions_flat_buffer.narrow(0, start, size)

    def _offload_grad_partition_at_boundary(self, param: Any, grad_buffer: torch.Tensor, gradients: Any, offsets: Any) -> None:
        identifier = self.get_param_id(param)
        index, offset, _ = self.grad_position[identifier]
        if not (self.swaps_natively and self._swappable_optimizer_subgroup(index)):
            super()._offload_grad_partition_at_boundary(param, grad_buffer, gradients, offsets)
            return
        self.norm_for_param_grads[identifier] = self._constant_buffered_norm2(grad_buffer)
        if index in self._kept_gradients:
            self._kept_gradients[index].narrow(0, offset, grad_buffer.numel()).copy_(grad_buffer)

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a sub-group, in the optimizer's type: zeros for parameters that got none since the last step; None before the first pass."""
        index = self._index_of(parameter)
        if index in self._kept_gradients:
            return self._kept_gradients[index]
        if getattr(self, "grad_partitions_flat_buffer", None) is None:
            return None
        params, numels = self.fp16_groups[index], self.fp16_partitioned_groups_flat_numel
        reduced = [self.get_param_id(param) in self.norm_for_param_grads for param in params]
        source = self.grad_partitions_flat_buffer.narrow(0, sum(numels[:index]), numels[index])
        if source.dtype == parameter.dtype:
            gradient = source
        else:
            gradient = self._tier.scratch(self._widened).view(parameter.dtype).narrow(0, 0, source.numel()).copy_(source)
        for param, has_gradient in zip(params, reduced, strict=True):
            if not has_gradient:
                _, offset, numel = self.grad_position[self.get_param_id(param)]
                gradient.narrow(0, offset, numel).zero_()
        return gradient

    def _keep_gradient(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._kept_gradients[self._index_of(parameter)] = parameter.grad.clone()

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: torch.Tensor) -> None:
        """As the base, which multiplies by 1 too: a pass through all gradients for nothing."""
        if not self.swaps_natively or self.loss_scale != 1.0 or (self.clip_grad > 0.0 and (total_norm / self.loss_scale + 1e-6) / self.clip_grad > 1.0):
            super().unscale_and_clip_grads(sub_group_id, total_norm)

    def reset_cpu_buffers(self) -> None:
        """Forget the gradients of the step that is over, as the base does."""
        super().reset_cpu_buffers()
        self._kept_gradients.clear()

    def _index_of(self, parameter: torch.Tensor) -> int:
        return next(index for index, other in enumerate(self.fp32_partitioned_groups_flat) if other is parameter)

    def _get_norm_groups(self) -> Any:
        if not self.swaps_natively:
            return super()._get_norm_groups()
        groups = [list(itertools.chain.from_iterable(group)) for group in self._logical_groups]
        return [self.complete_grad_norm_calculation_for_cpu_offload(params) for params in groups]

    # The step.

    def step(self, closure: Any = None) -> None:
        """Update the parameters, as the base does; and say at every steps_per_print'th step what it spent on the drive."""
        if not self.swaps_natively:
            super().step(closure)
            return
        self._clock.begin_update()
        super().step(closure)
        if not self.overflow:
            self._tier.swapper.step()
        self.last_step = self._clock.end_update()
        if self.last_step.step % self._steps_per_print == 0 and dist.get_rank() == 0:
            _log.info("%s", self.last_step)

    def set_local_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        """As the base, which wants to see the shape of a partition that may be away."""
        with _with_shape(param):
            super().set_local_grad_for_param(value, param)

    def set_local_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        """Likewise."""
        with _with_shape(param):
            super().set_local_hp_param(value, param, optim_state_key)

    # Fragments: what is handed out must not be memory that the next read overwrites.

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> Any:
        fragment, index = super()._get_fp32_grad_state_partition(param, release_swap_buffers=False)
        return self._detached(fragment, index, release_swap_buffers)

    def _get_fp32_opt_state_partition(self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None) -> Any:
        fragment, index = super()._get_fp32_opt_state_partition(param, release_swap_buffers=False, optim_state_key=optim_state_key)
        return self._detached(fragment, index, release_swap_buffers)

    def _detached(self, fragment: torch.Tensor, index: int, release: bool) -> Any:
        if release and self._swappable_optimizer_subgroup(index):
            fragment = fragment.clone()
            self._release_swap_buffers(index)
        return fragment, index

    # Checkpoints.

    @property
    def user_sub_groups(self) -> list[list[int]]:
        """The sub-groups that the user asked for, each a list of the numbers of ours."""
        ends = list(itertools.accumulate((len(group) for group in self._logical_groups or [[group] for group in self.fp16_groups]), initial=0))
        return [list(range(start, end)) for start, end in itertools.pairwise(ends)]

    @property
    def holds_states_away(self) -> bool:
        """Whether DeepSpeed's ways to save and load do not find everything in memory."""
        return self.swaps_natively or (self.native and self.params_in_nvme_and_cpu)

    def _rigid_state_dict(self) -> dict[str, Any]:
        if not self.holds_states_away:
            state_dict: dict[str, Any] = super()._rigid_state_dict()
            return state_dict
        tree = states.save(self, super()._rigid_state_dict)
        return tree if self.leaves_states_away else archive.gather(tree)

    def _rigid_load_state_dict(self, state_dict: Mapping[str, Any], load_optimizer_states: bool = True) -> None:
        if self.holds_states_away:
            states.load(self, state_dict, load_optimizer_states)
        else:
            super()._rigid_load_state_dict(state_dict, load_optimizer_states)

    def _restore_from_bit16_weights(self) -> None:
        if self.holds_states_away:
            states.take_masters_from_parameters(self)
        else:
            super()._restore_from_bit16_weights()

    def _load_universal_checkpoint(self, checkpoint_folder: str, load_optimizer_states: bool, load_from_fp32_weights: bool) -> None:
        if self.holds_states_away:
            states.load_universal(self, checkpoint_folder, load_optimizer_states, load_from_fp32_weights)
        else:
            super()._load_universal_checkpoint(checkpoint_folder, load_optimizer_states, load_from_fp32_weights)


def as_mapping(ds_config: Any) -> Mapping[str, Any]:
    """*ds_config* as DeepSpeed is given it, a mapping or the path of a file, as a mapping."""
    if isinstance(ds_config, Mapping):
        return ds_config
    from deepspeed.runtime.config import DeepSpeedConfig

    mapping: Mapping[str, Any] = DeepSpeedConfig(ds_config)._param_dict
    return mapping


def _with_shape(param: Any) -> contextlib.AbstractContextManager[None]:
    return param.nvme_swapper.with_shape(param) if isinstance(param.nvme_swapper, ParameterSwapper) else contextlib.nullcontext()


def _least(number: int) -> int:
    """The least that any rank has, so that all plan alike."""
    numbers = torch.tensor([number], device=get_accelerator().current_device_name())
    dist.all_reduce(numbers, op=dist.ReduceOp.MIN)
    return int(numbers.item())


def _all_or_none(action: Callable[[], None]) -> None:
    """Do *action* on every rank. Where it fails on one, the others raise too: they would wait for that one for ever."""
    failure = None
    try:
        action()
    except (OffloadError, OSError) as error:
        failure = error
    anywhere = _least(0 if failure is not None else 1) == 0
    if failure is not None:
        raise failure
    if anywhere:
        raise UsageError("another rank cannot train with this configuration, and says why")


def _tell_of_unused_keys(ds_config: Mapping[str, Any]) -> None:
    for name in ("offload_param", "offload_optimizer"):
        section = ds_config.get("zero_optimization", {}).get(name) or {}
        unused = [key for key in section if key in _WITHOUT_EFFECT]
        if section.get("device") == "nvme" and unused:
            _log.info('%s in "%s": no longer needed; the one budget "host_memory" holds for all', ", ".join(unused), name)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether *optimizer* is known to update every element by itself, so that it does not matter which are in a tensor together."""
    kind = type(optimizer)
    known = kind.__module__.startswith(("torch.optim.", "deepspeed.ops.adam.", "deepspeed.ops.lion.", "deepspeed.ops.adagrad."))
    return known and kind.__name__ not in ("Adafactor", "LBFGS", "Muon", "SparseAdam")


def _cut(params: list[Any], wanted: int, most: int, unit: int) -> list[list[Any]]:
    """*params* in consecutive lists of at most *wanted* elements each, or of one parameter, that are whole *units* but for the last.

    Where they cannot be both, they are longer, up to *most* elements; and where that does not help, they are not whole units.
    """
    lists: list[list[Any]] = []
    rest = list(params)
    while rest:
        ends = list(itertools.accumulate(param.partition_numel() for param in rest))
        fitting = max(sum(end <= wanted for end in ends), 1)
        whole = [count for count, end in enumerate(ends, 1) if (end % unit == 0 or count == len(rest)) and (count <= fitting or end <= most)]
        shorter = [count for count in whole if count <= fitting]
        count = shorter[-1] if shorter else whole[0] if whole else fitting
        lists.append(rest[:count])
        rest = rest[count:]
    return lists
