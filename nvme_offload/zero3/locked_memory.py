"""Page-locked tensors, and what is known to be locked."""

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

# Locked memory that is in use: first address -> bytes. Entries also go when the memory does, in the
# middle of anything, so iterate over a copy.
_locked: dict[int, int] = {}


def locked_tensor(
    count: int, example: torch.Tensor, lock: Callable[[int], memoryview]
) -> torch.Tensor:
    """A tensor of *count* zeros with the example\'s dtype, in memory that *lock* makes. Lifetime:
    until it and its views are gone. Raises: UsageError.
    """
    import numpy as np
    import torch

    if count < 0:
        raise UsageError(f"num_elem must not be negative: {count}")
    if example.is_quantized:
        raise UsageError(f"a tensor of {example.dtype} has no fixed scale in memory")
    if count == 0:
        return torch.empty(0, dtype=example.dtype)
    nbytes = count * example.dtype.itemsize
    # The storage of a tensor made from an array holds that very array until it goes itself.
    array = np.frombuffer(lock(nbytes), np.uint8, nbytes)
    address = array.ctypes.data
    _locked[address] = nbytes
    weakref.finalize(array, _locked.pop, address, None).atexit = False
    # Not a view of a tensor of bytes: deepspeed.utils.pin_memory takes the end of this very tensor
    # for the end of all views of it.
    return torch.empty(0, dtype=example.dtype).set_(
        torch.from_numpy(array).untyped_storage(), 0, (count,), (1,)
    )


def locked_memory(nbytes: int) -> memoryview:
    """*nbytes* of memory, locked as far as the limit allows, and not known to CUDA. Source:
    mlock(2).
    """
    memory = Memory(nbytes)  # there in forked children too, as other memory is
    if (count := memory.lock()) < nbytes:
        _log.info(
            "%d of %d bytes could be locked in memory; the rest may be swapped out", count, nbytes
        )
    return memoryview(memory)


def forget(address: int) -> bool:
    """Count the tensor that starts at *address* as locked no longer; False where none does."""
    return _locked.pop(address, None) is not None


def is_pinned(buffer: torch.Tensor) -> bool:
    """Whether all of *buffer* is pinned, by torch or as a locked tensor or a view of one."""
    if not buffer.is_cpu:
        return False
    begin, end = extent(buffer)
    if any(first <= begin and end <= first + nbytes for first, nbytes in _locked.copy().items()):
        return True
    return buffer.is_pinned()


def extent(buffer: torch.Tensor) -> tuple[int, int]:
    """The first address of *buffer* and the one behind its last byte. Addresses on GPUs are none of
    the CPU's.
    """
    begin = buffer.data_ptr()
    if buffer.is_contiguous():
        return begin, begin + buffer.nbytes
    last = sum(
        (count - 1) * stride for count, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )
    return begin, begin + (last + 1) * buffer.itemsize
