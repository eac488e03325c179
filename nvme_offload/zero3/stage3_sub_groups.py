"""`SubGroups`: the sub-groups of ZeRO-3, cut to sizes that host memory can prefetch, and the
swappers that keep their states.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed import comm as dist

from ..device.staging import CPU
from ..errors import UnsupportedError
from ..optimizer_states.rounding import BLOCK
from ..sizes import PLACES
from . import compat, states
from .agreement import all_or_none
from .once_per_step import computed_from_values, depends_on_values
from .param_swapper import has_value, is_offloaded, require_budget, value_bytes, zero_padding
from .reader import first_element
from .sub_groups import cut, is_elementwise
from .tiered import VECTOR_ELEMENTS, Tiered
from .update_device import device_of, gpu_bytes, most_elements, trial_device

_UNUSED_KEYS = {
    "buffer_count",
    "buffer_size",
    "max_in_cpu",
    "pipeline",
    "pipeline_read",
    "pipeline_write",
    "fast_init",
}

_log = logging.getLogger(__name__)


class SubGroups(Tiered, compat.stage3()):  # type: ignore[misc]  # untyped
    """DeepSpeed's ZeRO-3 optimizer with the sub-groups and the swappers of `Stage3`."""

    fp16_groups: list[list[Any]]
    _most_on_gpu = sys.maxsize  # elements of a sub-group, if updates run on a GPU

    def _read_settings(self, ds_config: Mapping[str, Any]) -> None:
        super()._read_settings(ds_config)
        # The user's sub-groups: each is a list of our sub-groups, which are lists of parameters.
        self._logical_groups: list[list[list[Any]]] = []

    def _configure_offloading(
        self, offload_optimizer_config: Any, offload_param_config: Any
    ) -> None:
        super()._configure_offloading(offload_optimizer_config, offload_param_config)
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
        self._require_one_sub_group(fp16_param_groups)
        for param in itertools.chain(*(group["params"] for group in fp16_param_groups)):
            if not has_value(param):
                zero_padding(param, param.ds_tensor.data)
        if self.swap_optimizer:
            self._prepare_tier(lambda: self._open_tier(fp16_param_groups))
        else:
            all_or_none(lambda: require_budget(self.module))
        super()._create_fp16_partitions_with_defragmentation(fp16_param_groups)
        for param in itertools.chain.from_iterable(self.fp16_groups):
            if has_value(param):
                # The base class converts trained parameters when it moves them to host memory.
                param.nvme_swapper.convert(param, self.dtype)

    def _create_param_groups_fp16_flat_cpu_memory(self) -> None:
        if not self.params_in_nvme_and_cpu:
            super()._create_param_groups_fp16_flat_cpu_memory()
            return
        # host_memory decides which values stay in memory. The base class would make a placeholder
        # of one element here, and keep a sub-group of one element in it.
        self.param_groups_fp16_flat_cpu_memory += [
            torch.empty(0, dtype=self.dtype, device="cpu") for _ in self.trainable_param_groups
        ]

    def _require_one_sub_group(self, param_groups: Any) -> None:
        """Check that all parameters are in one sub-group if the optimizer needs them together."""
        count = sum(
            len(super(SubGroups, self)._create_fp16_sub_groups(group["params"]))
            for group in param_groups
        )
        if count > 1 and (name := computed_from_values(self.optimizer)):
            raise depends_on_values(self.optimizer, name)

    def _open_tier(self, param_groups: Any) -> None:
        """Choose the device of updates, and check that states and gradients fit."""
        params = [param for group in param_groups for param in group["params"]]
        sizes = [param.partition_numel() for param in params]
        uncut = [
            sum(param.partition_numel() for param in group)
            for groups in param_groups
            for group in super(SubGroups, self)._create_fp16_sub_groups(groups["params"])
        ]
        self._elementwise = is_elementwise(self.optimizer)
        # The smallest possible size of the largest sub-group, in elements.
        largest = max(sizes if self._elementwise else uncut)
        footprint = self._footprint_of(
            self.gradient_accumulation_dtype,
            trial_device(self.optimizer),
            parameter=self.dtype.itemsize if any(map(has_value, params)) else 0,
            largest_parameter=max(map(value_bytes, self.module.parameters()), default=0),
            in_flight=PLACES,
        )
        self.update_device = device_of(self._ds_config, self.optimizer, footprint, largest)
        if self.update_device == CPU:
            footprint = dataclasses.replace(footprint, in_flight=1)
        else:
            self._gpu_bytes = gpu_bytes(footprint)
            # The sub-groups in flight have to fit in GPU memory, too.
            self._most_on_gpu = max(most_elements(footprint), largest)
            footprint = dataclasses.replace(footprint, scratch=0)
        self._require_room(footprint, sizes, largest)

    def _plan(self) -> None:
        what = (
            "parameter"
            if self._elementwise
            else "sub-group (sub_group_size says how large they are)"
        )
        self._require_memory(
            f"the largest {what}, which has {self._least_sub_group} elements on this rank"
        )

    def _create_fp16_sub_groups(self, params_group: Any) -> Any:
        groups = super()._create_fp16_sub_groups(params_group)
        if not self.swap_optimizer:
            return groups
        unit = VECTOR_ELEMENTS if type(self.optimizer).__module__.startswith("deepspeed.") else 1
        if self.state_format.eight_bit:
            unit = BLOCK  # whose values share an exponent
        cap = self.tier.cap_bytes
        wanted = min(self._footprint.wanted_elements(cap), self._most_on_gpu)
        most = min(self._footprint.most_elements(cap), self._most_on_gpu)
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
        self._make_swappers(
            self.fp16_partitioned_groups_flat_numel, self.gradient_accumulation_dtype
        )

    def _swappable_optimizer_subgroup(self, sub_group_id: int) -> bool:
        # "ratio" keeps some on the accelerator
        return bool(self.swap_optimizer and self.subgroup_to_device[sub_group_id] == "cpu")

    def initialize_optimizer_states(self) -> None:
        """Prepare the first step: gradient buffers of the base class, and states made before it."""
        if not self.swaps_natively:
            super().initialize_optimizer_states()
            return
        # The base class makes swap files by a step over all states, and gradient buffers for
        # sub-groups that are not swapped. Only the buffers are needed.
        for index, parameter in enumerate(self.fp32_partitioned_groups_flat):
            if not self._swappable_optimizer_subgroup(index):
                parameter.grad = torch.zeros_like(parameter)
            else:
                self._make_first_states(index)
        # The base class then makes a gradient buffer for each sub-group listed here.
        self.fp16_groups = [
            params
            for index, params in enumerate(self.fp16_groups)
            if not self._swappable_optimizer_subgroup(index)
        ]

    def _setup_for_real_optimizer(self) -> None:
        groups = self.fp16_groups
        super()._setup_for_real_optimizer()
        self.fp16_groups = groups

    # The 16-bit parameters of a sub-group as one flat tensor. They may be on the accelerator, in
    # memory or on a drive.

    def flat_weights(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """See `Tiered`. Parameters on a drive are in no such tensor."""
        flat = self.fp16_partitioned_groups_flat[self._index_of(parameter)]
        weights: torch.Tensor | None = None if flat is None else flat.detach()
        return weights

    def copy_weights(self, parameter: torch.Tensor, into: torch.Tensor) -> None:
        """See `Tiered`."""
        if self.flat_weights(parameter) is not None:
            super().copy_weights(parameter, into)
            return
        for param, place in self._parts(parameter, into):
            if is_offloaded(param):
                param.nvme_swapper.swap_into_buffer(param, place)
            else:
                place.copy_(param.ds_tensor.data)

    def store_weights(self, parameter: torch.Tensor, source: torch.Tensor) -> None:
        """See `Tiered`."""
        if self.flat_weights(parameter) is not None:
            super().store_weights(parameter, source)
            self._unflatten_partitioned_parameters(self._index_of(parameter))
            return
        for param, part in self._parts(parameter, source):
            if is_offloaded(param):
                param.nvme_swapper.swap_out_partitioned_params([param], [part])
            else:
                param.ds_tensor.data.copy_(part)

    def _swap_in_sub_group_to_flat_buffer(self, flat_buffer: Any, sub_group_id: int) -> None:
        # The base class makes float32 copies of offloaded parameters, by way of the accelerator, for
        # `OptimizerSwapper.initialize_parameters`, which does not read them.
        if not self._swappable_optimizer_subgroup(sub_group_id):
            super()._swap_in_sub_group_to_flat_buffer(flat_buffer, sub_group_id)

    def _parts(
        self, parameter: torch.Tensor, flat: torch.Tensor
    ) -> Iterator[tuple[Any, torch.Tensor]]:
        params = self.fp16_groups[self._index_of(parameter)]
        numels = [param.partition_numel() for param in params]
        return zip(params, torch.split(flat, numels), strict=True)

    # For checkpoints.

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
