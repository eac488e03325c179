"""The 16-bit parameters of a sub-group as one flat tensor. They may be on the accelerator, in
memory or on a drive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .param_swapper import is_offloaded

if TYPE_CHECKING:
    from .stage3 import Stage3


def load(
    stage3: Stage3, index: int, allocate: Callable[[], torch.Tensor], fill: bool
) -> torch.Tensor:
    """The parameters of sub-group *index*. If one flat tensor holds them on the device of updates,
    it is returned; otherwise a copy in memory from *allocate*. Without *fill*, the copy has
    undefined contents. The tensor is flat and has the parameters' dtype. Raises: as
    `TensorSwapper.swap_in`.
    """
    flat = stage3.fp16_partitioned_groups_flat[index]
    if flat is not None and flat.device.type == stage3.update_device.type:
        weights: torch.Tensor = flat.detach()
        return weights
    into = allocate()
    if not fill:
        return into
    if flat is not None:
        into.copy_(flat)
        return into
    for param, place in _parts(stage3, index, into):
        if is_offloaded(param):
            param.nvme_swapper.swap_into_buffer(param, place)
        else:
            place.copy_(param.ds_tensor.data)
    return into


def store(stage3: Stage3, index: int, source: torch.Tensor) -> None:
    """Set the parameters of sub-group *index* to *source*, which `load` returned. Raises: as
    `TensorSwapper.create`.
    """
    flat = stage3.fp16_partitioned_groups_flat[index]
    if flat is not None:
        if flat.data_ptr() != source.data_ptr():
            flat.data.copy_(source)
        stage3._unflatten_partitioned_parameters(index)
        return
    for param, part in _parts(stage3, index, source):
        if is_offloaded(param):
            param.nvme_swapper.swap_out_partitioned_params([param], [part])
        else:
            param.ds_tensor.data.copy_(part)


def _parts(stage3: Stage3, index: int, flat: torch.Tensor) -> Iterator[tuple[Any, torch.Tensor]]:
    offset = 0
    for param in stage3.fp16_groups[index]:
        yield param, flat.narrow(0, offset, param.partition_numel())
        offset += param.partition_numel()
