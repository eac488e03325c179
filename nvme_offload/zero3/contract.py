"""The contract with DeepSpeed: every name, signature and attribute of it that this package uses.

`check` compares it with the installed DeepSpeed before `enable` replaces anything. Without it, a
renamed private method would raise no error: DeepSpeed would write checkpoints without states.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import logging
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import UnsupportedError
from .replacing import owner_at

# Tested releases, oldest first.
TESTED = ("0.16.9", "0.17.6", "0.18.9", "0.19.4", "0.19.8")
OLDEST, NEWEST = TESTED[0], TESTED[-1]

_log = logging.getLogger(__name__)

# The key is the owner: a module or "module:class". The value has the names. A name with parentheses
# is a function with these parameters, "..." for any further ones. A name without is a constant, or
# an attribute that the owner's source mentions. A bound after a name limits it to the releases that have
# it.
CONTRACT: Mapping[str, str] = {
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": """
        _configure_offloading(offload_optimizer_config, offload_param_config)
        _configure_tensor_swapping(offload_optimizer_config, aio_config)
        _create_fp16_partitions_with_defragmentation(fp16_param_groups)
        _create_fp16_sub_groups(params_group) _create_param_groups_fp16_flat_cpu_memory()
        _finalize_offload_gradient_accumulation() >=0.19.5
        _get_fp32_grad_state_partition(param, release_swap_buffers)
        _get_fp32_opt_state_partition(param, release_swap_buffers, optim_state_key)
        _get_norm_groups() _optimizer_states_and_gradient_swap_in(sub_group_id, timer_names)
        _optimizer_step(sub_group_id) _prepare_sub_group(sub_group_id, timer_names)
        _reassign_or_swap_out_partitioned_parameters(sub_group_id)
        _release_sub_group(sub_group_id, timer_names) _restore_from_bit16_weights()
        _rigid_load_state_dict(state_dict, load_optimizer_states) _rigid_state_dict()
        _setup_for_real_optimizer() _swappable_optimizer_subgroup(sub_group_id)
        _writeback_swap_state(sub_group_id, write_opt_state, write_gradients) destroy()
        get_fp32_grad_for_param(param) get_fp32_grad_partitions()
        get_grad_norm_direct(gradients, params, ...) has_overflow(partition_gradients)
        independent_gradient_partition_epilogue() initialize_optimizer_states()
        partition_grads(params_to_release, grad_partitions) reset_cpu_buffers()
        reset_swap_buffers() set_fp32_grad_for_param(value, param)
        set_local_grad_for_param(value, param) set_local_hp_param(value, param, optim_state_key)
        step(closure) unscale_and_clip_grads(sub_group_id, total_norm)
        update_fp32_grad_for_param_vectorized(update_func, param_list) zero_grad(set_to_none)
        _backward_active_depth >=0.18.3 _clear_fp32_optimizer_param_groups()
        _constant_buffered_norm2(input, ...) _get_param_partition_rank(param) >=0.19
        _load_global_state_stage3(sd) _partition_all_parameters()
        _release_swap_buffers(sub_group_id)
        _swap_in_sub_group_to_flat_buffer(flat_buffer, sub_group_id)
        _unflatten_partitioned_parameters(sub_group_id) _zero3_partition_group_metadata() >=0.19
        complete_grad_norm_calculation_for_cpu_offload(params) get_param_id(param)
        ipg_buckets >=0.17.2 is_gradient_accumulation_boundary() >=0.19.5
        is_gradient_accumulation_boundary <0.19.5
        load_hp_checkpoint_state(folder, key, param) >=0.19
        load_hp_checkpoint_state(folder, key) <0.19 master_weights_and_grads_dtype >=0.18
        param_names >=0.18 params_in_ipg_bucket <0.17.2 refresh_fp32_params()
        sub_group_partition_counts >=0.19 sub_group_process_groups >=0.19
        torch_autocast_gradscaler >=0.17.6 averaged_gradients clip_grad dp_process_group dtype
        dynamic_loss_scale fp16_groups fp16_partitioned_groups_flat fp16_partitioned_groups_flat_numel
        fp32_partitioned_groups_flat grad_position gradient_accumulation_dtype inf_or_nan_tracker
        loss_scale micro_step_id module norm_for_param_grads
        offload_optimizer offload_optimizer_fast_init optimizer optimizer_swapper overflow
        param_groups_fp16_flat_cpu_memory parameter_offload params_already_reduced
        params_in_nvme_and_cpu persistent_parameters state
        sub_group_to_group_id subgroup_to_device swap_optimizer timers trainable_param_groups
    """,
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": """
        __init__(init_optimizer, param_names, timers, ...)
        _finalize_cpu_offload_gradient_accumulation() >=0.19.5
        _get_compact_grad_partition_slice(group_idx, partition_id, param_id, num_elements) >=0.19.5
        _get_groups_without_padding(groups_with_padding) _get_offload_gradient_dict()
        _lazy_init_hp_params_optimizer_state() _link_all_hp_params() _load_global_state(sd)
        _load_legacy_checkpoint(state_dict_list, load_optimizer_states, load_from_fp32_weights)
        _optimizer_step(group_no) _release_ipg_buffers()
        _restore_cpu_offload_grad_to_gpu(param) >=0.19.5 _restore_from_bit16_weights()
        _use_compact_grad_partition_buffer(group_idx) >=0.19.5
        async_accumulate_grad_in_cpu_via_gpu(param)
        async_inplace_copy_grad_to_fp32_buffer_from_gpu(param) clear_grad_attribute(param)
        copy_grads_in_partition(param, group_idx) >=0.19.5 copy_grads_in_partition(param) <0.19.5
        destroy() get_param_gradient_attribute(param) get_param_id(param)
        independent_gradient_partition_epilogue() initialize_optimizer_states()
        offload_states(...) >=0.17 reset_cpu_buffers() state_dict() step(closure)
        unscale_and_clip_grads(grad_groups_flat, total_norm) update_lp_params()
        update_offload_overflow_tracker(grad) >=0.17 _offload_accumulated_param_ids >=0.19.5
        averaged_gradients bit16_groups device dtype dynamic_loss_scale grad_accum grad_position
        gradient_accumulation_dtype groups_padding micro_step_id nccl_start_alignment_factor
        norm_for_param_grads optimizer overflow parallel_partitioned_bit16_groups param_names
        partition_size real_dp_process_group round_robin_bit16_groups
        single_partition_of_fp32_groups use_grad_accum_attribute
    """,
    "deepspeed.utils.mixed_precision_linkage": "_hp_mapping",
    "deepspeed.utils.tensor_fragment:tensor_fragment": """
        get_hp_fragment(optim_state_key) get_lp_grad_fragment(index_in_param_group)
        get_optim_state_fragment(key) get_optim_state_keys()
    """,
    "deepspeed.runtime.config:DeepSpeedConfig": "_initialize_params(param_dict) _param_dict",
    "deepspeed.runtime.zero.stage3:IPGBucketZ3": "elements >=0.17.2 params >=0.17.2",
    "deepspeed.runtime.engine:DeepSpeedEngine": """
        _configure_optimizer(...) _configure_zero_optimizer(optimizer)
        bf16_master_weights_and_gradients() >=0.18 fp16_master_weights_and_gradients()
        zero_cpu_offload() _do_sanity_check() _get_all_ckpt_names(checkpoints_path, tag)
        _get_ckpt_name(checkpoints_path, tag, mp_placeholder, ...) _get_param_fragment_func(param)
        _get_zero_param_shapes() _load_checkpoint(...)
        _load_zero_checkpoint(load_dir, tag, load_optimizer_states) _save_checkpoint(...)
        _save_zero_checkpoint(...) load_checkpoint(load_dir, tag, ...)
        load_module_state_dict(checkpoint, ...) load_universal_checkpoint()
        save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        zero_load_from_fp32_weights() zero_nvme_offload_optimizer()
        zero_optimization_partition_weights() zero_use_cpu_optimizer() use_node_local_storage()
        gradient_accumulation_steps() _config checkpoint_engine device global_rank global_steps
        has_moe_layers local_rank micro_steps mp_world_size optimizer param_names
        pipeline_parallelism
    """,
    "deepspeed.runtime.engine": "DeepSpeedZeRoOffload DeepSpeedZeroOptimizer",
    # imported here, since its class derives from DeepSpeedZeroOptimizer_Stage3
    "deepspeed.runtime.superoffload.superoffload_stage3": "SuperOffloadOptimizer_Stage3 >=0.18",
    "deepspeed.runtime.zero.parameter_offload": "FWD_MODULE_STACK",
    "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload": """
        __init__(module, ...) get_param_coordinator()
        partition_all_parameters() dp_process_group forward_hooks
    """,
    "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator": """
        fetch_sub_module(current_submodule, forward) is_complete_trace() is_record_trace()
        _PartitionedParameterCoordinator__param_queue
        _PartitionedParameterCoordinator__prefetch_bucket_sz
        _PartitionedParameterCoordinator__step_id
    """,
    "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator._PartitionedParameterCoordinator__ParamInTrace": """
        __init__(param, step_id_last_used_at)
    """,
    "deepspeed.runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3",
    "deepspeed.runtime.zero.partition_parameters": """
        AsyncPartitionedParameterSwapper(ds_config, model_dtype) ZeroParamStatus
        convert_to_zero_parameters ds_id ds_numel ds_process_group ds_shape ds_status ds_tensor
        final_location nvme_swapper partition partition_numel status
    """,
    "deepspeed.runtime.zero.partition_parameters:Init": """
        ds_process_group local_device param_swapper remote_device
    """,
    "deepspeed.runtime.zero.partition_parameters:InsertPostInitMethodToModuleSubClasses": """
        __enter__()
    """,
    "deepspeed.runtime.zero.partition_parameters:ZeroParamStatus": "AVAILABLE INFLIGHT",
    "deepspeed.utils.init_on_device:OnDevice": "__enter__()",
    "deepspeed.runtime.swap_tensor.partitioned_param_swapper:PartitionedParamStatus": """
        AVAILABLE NOT_AVAILABLE
    """,
    "deepspeed.runtime.zero.offload_config:OffloadDeviceEnum": "nvme",
    "deepspeed.runtime.utils": "is_optimized_parameter(param) >=0.19.5",
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine:TorchCheckpointEngine": """
        commit(info) >=0.17 commit(tag) <0.17 load(path, map_location) save(state_dict, path)
        zipfile_serialization >=0.17
    """,
    "deepspeed.checkpoint.constants": """
        BASE_OPTIMIZER_STATE FP32_FLAT_GROUPS FROZEN_PARAM_FRAGMENTS FROZEN_PARAM_SHAPES
        OPTIMIZER_STATE_DICT PARAM PARAM_SHAPES SINGLE_PARTITION_OF_FP32_GROUPS
    """,
    "deepspeed.comm": "get_rank(...) get_world_size(...)",
    "deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator": """
        current_device() current_device_name() current_stream(...) device_name(device_index)
        is_synchronized_device() set_device(device_index)
        stream(stream) Stream
    """,
    "deepspeed.accelerator": "get_accelerator()",
    "deepspeed.ops.adam.cpu_adam:DeepSpeedCPUAdam": "ds_opt_adam opt_id",
    "deepspeed.ops.op_builder:AsyncIOBuilder": "is_compatible(...) NAME _loaded_ops",
    "deepspeed.ops.op_builder.builder:OpBuilder": "jit_load(verbose)",
    "deepspeed.ops.adam": "FusedAdam(params, ...)",
    "deepspeed.ops.op_builder": "FusedAdamBuilder",
}

# Methods that DeepSpeed calls on its swappers and that ours do not need, because `Stage3` does not
# reach these calls. The key is the attribute that holds the swapper.
_SWAPPERS = {
    "nvme_swapper": {"get_path", "release_reserved_buffers", "reserve_available_buffers"},
    "optimizer_swapper": {
        "initialize_from_swapped_fp16_params",
        "swap_out_gradients",
        "writeback_optimizer_state_and_gradients",
    },
}
_ENTRY = re.compile(
    r"(?P<name>\w+)(\((?P<parameters>[^)]*)\))?( (?P<bound><|>=)(?P<release>[\d.]+))?"
)


@dataclasses.dataclass(frozen=True)
class Use:
    """A name of DeepSpeed that this package uses, and the *owner* that defines it. *parameters* are
    the parameters of a function, with "..." at the end for any further ones.
    """

    owner: str
    name: str
    parameters: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{self.owner.rpartition(':')[2].rpartition('.')[2]}.{self.name}"


def uses(version: str) -> Iterator[Use]:
    """The contract for the release *version*."""
    for owner, entries in CONTRACT.items():
        for found in _ENTRY.finditer(entries):
            if found["release"] and (numbers(version) >= numbers(found["release"])) != (
                found["bound"] == ">="
            ):
                continue
            parameters = (
                None
                if found["parameters"] is None
                else tuple(filter(None, found["parameters"].split(", ")))
            )
            yield Use(owner, found["name"], parameters)


def numbers(version: str) -> tuple[int, ...]:
    """The release numbers of *version*, for comparison."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


def is_too_old(version: str) -> bool:
    """Whether *version* of DeepSpeed is older than all tested ones."""
    return numbers(version) < numbers(OLDEST)


def is_too_new(version: str) -> bool:
    """Whether *version* of DeepSpeed is newer than all tested ones."""
    return numbers(version) > numbers(NEWEST)


def check() -> None:
    """Check the installed DeepSpeed against the contract. Raises: UnsupportedError."""
    try:
        version: str = importlib.import_module("deepspeed").__version__
        importlib.import_module("deepspeed.runtime.engine")
    except ImportError as error:
        raise UnsupportedError(
            f"DeepSpeed is not installed here: {error}; pip install deepspeed"
        ) from None
    if is_too_old(version):
        raise UnsupportedError(
            f"zero3 needs DeepSpeed {OLDEST} or newer, and this is {version}: pip install --upgrade deepspeed"
        )
    _source.cache_clear()
    lacking = [fault for use in uses(version) if (fault := _fault(use))] + _unanswered()
    if lacking:
        raise UnsupportedError(
            f"DeepSpeed {version} does not match what nvme_offload uses: {'; '.join(lacking[:3])} ({len(lacking)} in all): pip install deepspeed=={NEWEST}"
        )
    if is_too_new(version):
        _log.warning(
            "DeepSpeed %s is newer than %s, the newest that was tested: every name that is used exists, nothing else was checked",
            version,
            NEWEST,
        )


def _fault(use: Use) -> str:
    """The difference between *use* and the installed DeepSpeed; "" if there is none."""
    try:
        owner = owner_at(use.owner)
    except (ImportError, AttributeError):
        return f"{use.owner} is missing"
    value = getattr(owner, use.name, None)
    if use.parameters is None:
        return "" if value is not None or mentions(owner, use.name) else f"{use} is missing"
    if not callable(value):
        return f"{use} is missing"
    found = parameters(value)
    expected, rest = use.parameters, use.parameters[-1:] == ("...",)
    if rest:
        expected, found = expected[:-1], found[: len(expected) - 1]
    if found != expected:
        return f"{use} takes ({', '.join(found)}) and not ({', '.join(expected)})"
    if inspect.isclass(owner) and use.name.startswith("_") and not use.name.startswith("__"):
        module = importlib.import_module(use.owner.partition(":")[0])
        if not mentions(module, use.name):
            return f"nothing calls {use}"
    return ""


def _unanswered() -> list[str]:
    """The methods that DeepSpeed calls on its swappers and that ours lack."""
    from .optimizer_swapper import OptimizerSwapper
    from .param_swapper import ParameterSwapper

    ours = {"nvme_swapper": ParameterSwapper, "optimizer_swapper": OptimizerSwapper}
    places = (
        "engine",
        "zero.stage3",
        "zero.partition_parameters",
        "zero.partitioned_param_coordinator",
        "zero.parameter_offload",
    )
    source = "\n".join(
        _source(importlib.import_module(f"deepspeed.runtime.{place}")) for place in places
    )
    called = set(re.findall(rf"\.({'|'.join(ours)})\.(\w+)", source))
    return [
        f"it calls {name} on {holder}"
        for holder, name in sorted(called)
        if name not in _SWAPPERS[holder] and not hasattr(ours[holder], name)
    ]


def parameters(function: Any) -> tuple[str, ...]:
    """The parameters of *function*, or of a class's constructor, without self."""
    if inspect.isclass(function):
        function = function.__init__
    return tuple(
        name for name in inspect.signature(_undecorated(function)).parameters if name != "self"
    )


def _undecorated(function: Any) -> Any:
    """*function* without the decorators of DeepSpeed and torch, not all of which set `__wrapped__`."""
    while True:
        inside = [
            cell.cell_contents
            for cell in getattr(function, "__closure__", None) or ()
            if isinstance(cell.cell_contents, types.FunctionType)
        ]
        if hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif len(inside) == 1 and tuple(inspect.signature(function).parameters) == (
            "args",
            "kwargs",
        ):
            (function,) = inside
        else:
            return function


@functools.lru_cache
def _source(owner: Any) -> str:
    """DeepSpeed's source of the module *owner*, or of the modules of a class and its bases."""
    names = (
        {kind.__module__ for kind in owner.__mro__} if inspect.isclass(owner) else {owner.__name__}
    )
    return "\n".join(
        inspect.getsource(importlib.import_module(name))
        for name in sorted(names)
        if name.startswith("deepspeed.")
    )


def sets(owner: Any, name: str) -> bool:
    """Whether *owner*'s source sets an attribute *name* of the object."""
    return re.search(rf"\bself\.{name}(: [^=]+)? = ", _source(owner)) is not None


def mentions(owner: Any, name: str) -> bool:
    """Whether *owner*'s source reads or sets an attribute *name*."""
    private = f"_{getattr(owner, '__name__', '')}__"
    name = name.replace(private, "__")  # the source has the name that the compiler mangles
    return re.search(rf"\.{name}\b", _source(owner)) is not None
