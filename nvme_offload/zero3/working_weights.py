"""The 16-bit parameters of a sub-group as one flat tensor, whether they are on the accelerator, in
memory or on a drive.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from .param_swapper import is_offloaded

if TYPE_CHECKING:
    from .stage3 import Stage3


def load(stage3: Stage3, index: int, into: torch.Tensor) -> None:
    """Copy the parameters of sub-group *index* into *into*. Shapes: flat, of their dtype. Raises:
    as `TensorSwapper.swap_in`.
    """
    flat = stage3.fp16_partitioned_groups_flat[index]
    if flat is not None:
        into.copy_(flat)
        return
    for param, place in _parts(stage3, index, into):
        if is_offloaded(param):
            param.nvme_swapper.swap_into_buffer(param, place)
        else:
            place.copy_(param.ds_tensor.data)


def store(stage3: Stage3, index: int, source: torch.Tensor) -> None:
    """Set the parameters of sub-group *index* to *source*. Shapes: flat, of their dtype. Raises: as
    `TensorSwapper.create`.
    """
    flat = stage3.fp16_partitioned_groups_flat[index]
    if flat is not None:
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
