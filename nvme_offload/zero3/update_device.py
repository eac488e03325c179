"""Chooses where ZeRO-3's optimizer updates run: on the GPU, with the optimizer that DeepSpeed uses
without offload, or on the CPU, with the optimizer of "device": "cpu".

DeepSpeed makes the configured optimizer before stage 3. Therefore `_configure_optimizer` decides first,
and `device_of` decides later, for the optimizer that was made.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ..device.room import memory_of
from ..device.staging import CPU
from ..errors import UsageError
from ..sizes import Footprint
from .agreement import least
from .replacing import ENGINE, replaces
from .settings import Settings, zero_stage

# If a GPU has less free memory than this, updates run on the CPU. It is enough for several
# sub-groups and for the temporary tensors of one update.
_LEAST_FREE_BYTES = 1 << 30
# Sub-groups that are being updated get 1 / _PARTS of the free memory of a GPU.
_PARTS = 2
_MUON = "DeepSpeed's Muon updates offloaded states on the CPU"
NO_STATES = "no optimizer states of ZeRO-3 are on a drive"

_log = logging.getLogger(__name__)
# Whether the engine that is making its optimizer will update on the GPU.
_on_gpu: ContextVar[bool] = ContextVar("on_gpu", default=False)


@replaces(ENGINE)
def _configure_optimizer(
    original: Callable[..., Any], engine: Any, *args: Any, **named: Any
) -> Any:
    """Make the optimizer for the device of updates, with or without DeepSpeed's FusedAdam."""
    ds_config = engine._config._param_dict
    on_gpu = not _reason_for_cpu(ds_config)
    token = _on_gpu.set(on_gpu)
    ops: Any = importlib.import_module("deepspeed.ops.adam")
    fused = ops.FusedAdam
    if on_gpu and _wants_fused_adam(ds_config) and (fault := _fault_of_fused_adam()):
        _log.info("torch's fused Adam updates: DeepSpeed's FusedAdam cannot be built: %s", fault)
        ops.FusedAdam = _torch_fused_adam
    try:
        return original(engine, *args, **named)
    finally:
        ops.FusedAdam = fused
        _on_gpu.reset(token)


@replaces(ENGINE)
def zero_use_cpu_optimizer(original: Callable[[Any], bool], engine: Any) -> bool:
    """False while an optimizer that updates on the GPU is made."""
    return not _on_gpu.get() and original(engine)


def _wants_fused_adam(ds_config: Mapping[str, Any]) -> bool:
    section = ds_config.get("optimizer") or {}
    parameters = section.get("params") or {}
    return str(section.get("type", "")).lower() in ("adam", "adamw") and not parameters.get(
        "torch_adam"
    )


def _torch_fused_adam(
    params: Any,
    *,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    set_grad_none: bool = True,
    **options: Any,
) -> torch.optim.Optimizer:
    if not bias_correction:
        raise UsageError(
            '"bias_correction": false needs DeepSpeed\'s FusedAdam, which cannot be built here: install nvcc, or set "update_device": "cpu" in "nvme_offload"'
        )
    kind: Any = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    made: torch.optim.Optimizer = kind(params, fused=True, **{"weight_decay": 0.0, **options})
    return made


@functools.cache
def _fault_of_fused_adam() -> str:
    """Why DeepSpeed's FusedAdam cannot be used; "" if it can."""
    from deepspeed.ops.op_builder import FusedAdamBuilder

    try:
        FusedAdamBuilder().load()
    except Exception as error:  # compilers and loaders raise errors without a common class
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def device_of(
    ds_config: Mapping[str, Any], optimizer: Any, footprint: Footprint, elements: int
) -> torch.device:
    """The device on which *optimizer* updates sub-groups. The largest has at least *elements*;
    *footprint* is the footprint of updates on the CPU. All ranks call it. Logs the reason. Raises:
    UsageError.
    """
    reason = _reason_for_cpu(ds_config)
    only = _only_device(optimizer)
    name = type(optimizer).__name__
    if not reason and only == "cpu":
        reason = f'{name} updates on the CPU only (Accelerate makes it of torch.optim.AdamW unless "zero_force_ds_cpu_optimizer" is false)'
    if not reason and name.startswith("Muon"):
        reason = _MUON
    if not reason and only != "cuda":
        needed = gpu_bytes(footprint) * elements
        free = least(memory_of()[0])
        if needed > free // _PARTS:
            reason = f"sub-groups of {elements} elements need too much of the GPU's memory: a smaller sub_group_size helps"
    choice = Settings.of(ds_config).update_device
    if reason and only == "cuda":
        raise UsageError(f"{name} updates on the GPU only, and {reason}: use torch.optim.AdamW")
    if reason and choice == "gpu":
        raise impossible(reason)
    if not reason:
        device = torch.device("cuda", torch.cuda.current_device())
        _log.info(
            'optimizer updates run on %s, by %s; "update_device": "cpu" in "nvme_offload" gives the bits of "device": "cpu"',
            *(device, name),
        )
        return device
    if get_accelerator().device_name() == "cuda":
        _log.info("optimizer updates run on the CPU, by %s: %s", name, reason)
    return CPU


def impossible(reason: str) -> UsageError:
    """The error for "update_device": "gpu" if updates run on the CPU for this *reason*."""
    return UsageError(f'"update_device": "gpu" is not possible, since {reason}')


def trial_device(optimizer: Any) -> torch.device:
    """A device on which *optimizer* can make a step."""
    if _only_device(optimizer) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return CPU


def gpu_bytes(footprint: Footprint) -> float:
    """GPU bytes for each element of the largest sub-group; *footprint* is of the CPU."""
    return footprint.states * footprint.in_flight + footprint.scratch + footprint.gradient


def most_elements(footprint: Footprint) -> int:
    """The elements of the largest sub-group for the memory of every GPU. All ranks call it."""
    return int(least(memory_of()[0]) / _PARTS / gpu_bytes(footprint))


def _reason_for_cpu(ds_config: Mapping[str, Any]) -> str:
    """Why an engine of *ds_config* updates on the CPU; "" if it updates on the GPU."""
    if zero_stage(ds_config) != 3:
        return NO_STATES
    settings = Settings.of(ds_config)
    section = ds_config["zero_optimization"].get("offload_optimizer") or {}
    kind = str((ds_config.get("optimizer") or {}).get("type", "")).lower()
    if section.get("device") != "nvme":
        return NO_STATES
    if settings.swappers != "native":
        return 'DeepSpeed\'s own swappers are used ("swappers")'
    if settings.update_device == "cpu":
        return '"update_device" is "cpu"'
    if get_accelerator().device_name() != "cuda":
        return "there is no CUDA device"
    if section.get("ratio", 1.0) != 1.0:
        return '"ratio" divides updates between the GPU and the CPU'
    if "muon" in kind:
        return _MUON
    for name in ("bf16", "fp16"):
        precision = ds_config.get(name) or {}
        if precision.get(f"{name}_master_weights_and_grads") or precision.get(
            f"{name}_optimizer_states"
        ):
            return f"masters or states in 16 bits ({name}) need DeepSpeedCPUAdam"
    free = least(memory_of()[0])
    if settings.update_device == "auto" and free < _LEAST_FREE_BYTES:
        return f"a GPU has {free >> 20} MiB free"
    return ""


def _only_device(optimizer: Any) -> str:
    """The only device, "cpu" or "cuda", on which *optimizer* updates; "" if it updates on both."""
    module = type(optimizer).__module__
    if hasattr(optimizer, "ds_opt_adam") or module.startswith(
        ("deepspeed.ops.adam.cpu", "deepspeed.ops.adagrad.cpu", "deepspeed.ops.lion.cpu")
    ):
        return "cpu"
    if module.startswith(
        ("deepspeed.ops.adam.fused", "deepspeed.ops.lion.fused", "deepspeed.ops.lamb")
    ):
        return "cuda"
    return ""
