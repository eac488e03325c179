"""The objects that a graph holds in place of saved tensors: the tensor itself, or the description
from which it is rebuilt from offloaded bytes.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..device.stayed import Stayed, check_version

# Bytes: the alignment of CUDA's allocator, so that a restored tensor is aligned as the saved one
# was.
_ALIGNED = 512


def is_weight(tensor: torch.Tensor) -> bool:
    """Whether *tensor* is a parameter or another leaf that requires gradients, or a view of one: it
    stays in memory anyway.
    """
    viewed = counter_of(tensor)
    return isinstance(viewed, torch.nn.Parameter) or (viewed.is_leaf and viewed.requires_grad)


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that shares *tensor*'s version counter: itself, or its base if it is a view.

    Other tensors on the same storage may have their own counters, such as `Tensor.data` and the
    gates of a GRU (`unsafe_chunk`). So equal versions of different counters do not mean equal
    bytes.
    """
    return tensor if tensor._base is None else tensor._base


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether *tensor* is a DTensor, as in tensor parallelism."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The byte range of *tensor*'s storage to save: the range that it spans, or the whole storage
    if that is at least half of it.

    So the overlapping parts of a split tensor are saved once, and an expanded tensor stays small.
    """
    if tensor.numel() == 0:
        return 0, 0
    item = tensor.element_size()
    begin = int(tensor.storage_offset()) * item
    spread = tensor.numel()
    if not tensor.is_contiguous():
        spread = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    end = begin + spread * item
    whole = tensor.untyped_storage().nbytes()
    return (0, whole) if 2 * (end - begin) >= whole else (begin // _ALIGNED * _ALIGNED, end)


class Parts:
    """A tensor that consists of others, each packed separately. Source: the traceable wrapper
    subclass protocol, `__tensor_flatten__`.
    """

    __slots__ = ("_context", "_kind", "_like", "_parts", "_size", "_stride", "_version")

    def __init__(self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Packed]) -> None:
        whole: Any = tensor
        names, self._context = whole.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        # Other attributes, such as a device mesh, are kept unchanged.
        self._parts = {
            name: pack(part) if isinstance(part, torch.Tensor) else part
            for name, part in parts.items()
        }
        self._kind: Any = type(tensor)
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._version = tensor._version
        self._like = tensor.detach()  # shares its version counter; the parts do not
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                setattr(self._like, name, None)

    def restore(self, unpack: Callable[[Packed], torch.Tensor]) -> torch.Tensor:
        """The tensor, rebuilt from its parts. Raises: RuntimeError when it was modified since it
        was saved; as *unpack*.
        """
        check_version(
            self._like._version, self._version, f"{self._kind.__name__} of {list(self._size)}"
        )
        parts = {
            name: unpack(part) if isinstance(part, Stayed | Parts | Moved) else part
            for name, part in self._parts.items()
        }
        tensor: torch.Tensor = self._kind.__tensor_unflatten__(
            parts, self._context, self._size, self._stride
        )
        return tensor.detach()


class Moved:
    """A tensor whose bytes are offloaded."""

    __slots__ = ("__weakref__", "_begin", "_like", "_size", "_stride", "_version", "number")

    def __init__(self, tensor: torch.Tensor, number: int) -> None:
        self.number = number
        self._begin = tensor.storage_offset() * tensor.element_size()
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._version = tensor._version
        # shares its version counter, even without its memory
        self._like = tensor.detach()
        self._like.data = _without_memory(tensor.dtype, tensor.device)

    def check(self) -> None:
        """Raises: RuntimeError when the tensor was modified since it was saved."""
        check_version(
            self._like._version, self._version, f"{self._like.dtype} of {list(self._size)}"
        )

    def restore(self, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
        """The tensor on *storage*, which has the saved bytes; its first byte was byte *offset* of
        the original storage.
        """
        first = (self._begin - offset) // self._like.element_size()
        tensor: Any = torch.empty(0, dtype=self._like.dtype, device=storage.device)
        # shares the version counter: a backward that modifies it in place is detected by later
        # users
        restored = self._like.detach()
        restored.data = tensor.set_(storage, first, self._size, self._stride)
        return restored


class Held(weakref.ref[Moved]):
    """A weak reference to a saved tensor, with its *number*. Its callback is a method of a deque,
    which takes no lock, and has no Python code that Ctrl-C could end.
    """

    __slots__ = ("number",)

    number: int


@functools.cache
def _without_memory(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


Packed = Stayed | Parts | Moved
