"""`move_partitions` moves the partitions of a module to the device in an engine's configuration,
before the engine is made: `zero.Init`, or an earlier engine of the module, may have had another.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ..units import format_bytes
from . import compat
from .param_swapper import has_value, open_swapper
from .settings import Settings

_log = logging.getLogger(__name__)


def move_partitions(module: torch.nn.Module, ds_config: Mapping[str, Any]) -> None:
    """Move the partitions of *module*, if any, to the device of *ds_config*'s "offload_param".
    Raises: as `open_swapper`; UsageError if "host_memory" cannot hold a partition.
    """
    if Settings.of(ds_config).swappers != "native":
        return
    section = ds_config.get("zero_optimization", {}).get("offload_param") or {}
    device = section.get("device", OffloadDeviceEnum.none)
    _log_whole_parameters(module, device)
    param: Any
    for param in module.parameters():
        if not hasattr(param, "ds_id") or has_value(param) == (device == OffloadDeviceEnum.nvme):
            continue
        if param.ds_status == ZeroParamStatus.AVAILABLE:
            param.partition()  # an earlier engine has left it gathered
        if device == OffloadDeviceEnum.nvme:
            _move_to_drive(param, ds_config)
        else:
            _move_to_memory(param, on_host=device == OffloadDeviceEnum.cpu)


def _log_whole_parameters(module: torch.nn.Module, device: Any) -> None:
    """Log the bytes of parameters for a drive that are all in memory until they are partitioned."""
    nbytes = sum(param.nbytes for param in module.parameters() if not hasattr(param, "ds_id"))
    if device == OffloadDeviceEnum.nvme and nbytes:
        _log.info(
            "%s of parameters were made outside of zero.Init, so all of them are in memory until they are partitioned: make the model under "
            "deepspeed.zero.Init(config_dict_or_path=...) to move each parameter to the drive when it is made",
            format_bytes(nbytes),
        )


def _move_to_drive(param: Any, ds_config: Mapping[str, Any]) -> None:
    # Parameters that the context partitions later, such as added layers, go to the drive too.
    context = compat.init_of(param)
    if context.param_swapper is None:
        context.param_swapper = open_swapper(ds_config, context.ds_process_group)
    context.remote_device = OffloadDeviceEnum.nvme
    param.nvme_swapper = context.param_swapper
    param.ds_tensor.final_location = OffloadDeviceEnum.nvme
    param.nvme_swapper.swap_out_and_release([param])


def _move_to_memory(param: Any, *, on_host: bool) -> None:
    context, partition = compat.init_of(param), param.nvme_swapper.partition(param)
    context.remote_device = OffloadDeviceEnum.cpu if on_host else context.local_device
    if not on_host:
        partition = partition.to(context.local_device)
    param.ds_tensor.data = partition
    param.ds_tensor.status = PartitionedParamStatus.AVAILABLE
    param.ds_tensor.final_location = None
    param.nvme_swapper = None
    del param.nvme_value  # the tier discards the value
