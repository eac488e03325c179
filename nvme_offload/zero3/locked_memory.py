"""Page-locked tensors, and the record of locked memory."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..io.engine import Memory

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

# Locked memory in use: first address -> bytes. The garbage collector may remove entries at any
# time, so iterate over a copy.
_locked: dict[int, int] = {}


def locked_tensor(
    count: int, example: torch.Tensor, lock: Callable[[int], memoryview]
) -> torch.Tensor:
    """A tensor of *count* zeros in memory from *lock*, which its last view frees."""
    import numpy as np
    import torch

    if count < 0:
        raise UsageError(f"num_elem must not be negative: {count}")
    if example.is_quantized:
        raise UsageError(f"a tensor of {example.dtype} has no fixed scale in memory")
    if count == 0:
        return torch.empty(0, dtype=example.dtype, device="cpu")
    nbytes = count * example.dtype.itemsize
    # The storage of a tensor made from an array holds the array until it is freed.
    array = np.frombuffer(lock(nbytes), np.uint8, nbytes)
    address = array.ctypes.data
    _locked[address] = nbytes
    weakref.finalize(array, _locked.pop, address, None).atexit = False
    # Not a view of a uint8 tensor: deepspeed.utils.pin_memory assumes that the end of this tensor
    # is the end of its views.
    return torch.empty(0, dtype=example.dtype, device="cpu").set_(
        torch.from_numpy(array).untyped_storage(), 0, (count,), (1,)
    )


def locked_memory(nbytes: int) -> memoryview:
    """*nbytes* of memory, locked as far as RLIMIT_MEMLOCK allows, and not registered with CUDA."""
    memory = Memory(nbytes)  # forked children inherit it like other memory
    if (count := memory.lock()) < nbytes:
        _log.info(
            "%d of %d bytes could be locked in memory; the rest may be swapped out", count, nbytes
        )
    return memoryview(memory)


def forget(address: int) -> bool:
    """Stop counting the tensor at *address* as locked. Returns False if there is no such tensor."""
    return _locked.pop(address, None) is not None


def is_pinned(buffer: torch.Tensor) -> bool:
    """Whether all of *buffer* is pinned: by torch, or as a locked tensor or a view of one."""
    if not buffer.is_cpu:
        return False
    begin, end = extent(buffer)
    if any(first <= begin and end <= first + nbytes for first, nbytes in _locked.copy().items()):
        return True
    return buffer.is_pinned()


def extent(buffer: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte of *buffer* and the address after its last byte."""
    begin = buffer.data_ptr()
    if buffer.is_contiguous():
        return begin, begin + buffer.nbytes
    last = sum(
        (count - 1) * stride for count, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )
    return begin, begin + (last + 1) * buffer.itemsize
