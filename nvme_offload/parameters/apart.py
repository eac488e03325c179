"""Parameters to whose `data` the program has assigned. As in torch, the parameter has the memory of
the assigned tensor, and the tensors that shared its memory before keep the old values.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from . import idle
from .buckets import Bucket, Place, has_other_strides
from .slots import Slot, references_to

_numbers = itertools.count(1)
_untyped: Any = torch.Tensor
_set_data = _untyped.data.__set__
# To the memory of a parameter: of the parameter, of `memory_of`, and of the storage's object.
_OWN_REFERENCES = 3


def has_form_of(parameter: torch.nn.Parameter, values: torch.Tensor) -> bool:
    """Whether *values* can be the `data` of *parameter*. Strides that no memory format has
    are no obstacle: the parameter gets a contiguous copy.
    """
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    memory_format = formats.get(values.dim())
    return (values.shape, values.dtype, values.device) == (
        parameter.shape,
        parameter.dtype,
        parameter.device,
    ) and not (
        memory_format is not None
        and has_other_strides(values)
        and values.is_contiguous(memory_format=memory_format)
    )


def assign(bucket: Bucket, parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Carry out ``parameter.data = values``. The *bucket* of the parameter is in a slot."""
    with torch.inference_mode(False):
        values = _plain(values)
        if _is_at(bucket.place_of(parameter), bucket.slot, values):
            idle.as_it_is(_set_data, parameter, values)
            bucket.apart.pop(parameter, None)
            return
        # In this order, the slot does not count as free before the parameter has left it.
        bucket.apart[parameter] = next(_numbers)
        idle.as_it_is(_set_data, parameter, values)


def rejoin(bucket: Bucket, slot: Slot) -> None:
    """Copy the values of parameters with separate memory into *slot*, which is free. A parameter
    stays apart if another tensor shares its memory, or if backward may need the old values.
    """
    for parameter in list(bucket.apart):
        own, place = memory_of(parameter), bucket.place_of(parameter)
        if not _is_at(place, slot, own):
            if bucket.is_held or references_to(own.untyped_storage()) > _OWN_REFERENCES:
                continue
            slot.begin_use()
            place.within(slot.buffer).copy_(own)
            bucket.written = True
        bucket.numbers[parameter] = bucket.apart[parameter]
        idle.as_it_is(_set_data, parameter, place.within(slot.buffer))
        del bucket.apart[parameter]


def memory_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The memory that *parameter* has at present, as a tensor."""
    detached: torch.Tensor = idle.as_it_is(torch.Tensor.detach, parameter)
    return detached


def _is_at(place: Place, slot: Slot, values: torch.Tensor) -> bool:
    start = values.storage_offset() * values.element_size()
    return values.untyped_storage()._cdata == slot.storage._cdata and start == place.offset


def _plain(values: torch.Tensor) -> torch.Tensor:
    """*values*, or a copy if a parameter cannot have the memory."""
    values = values.detach()
    is_kept = type(values) is torch.Tensor and values.layout is torch.strided
    if is_kept and not (values.is_inference() or values.is_conj() or values.is_neg()):
        return values.contiguous()
    return torch.empty(values.shape, dtype=values.dtype, device=values.device).copy_(values)
