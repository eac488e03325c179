"""What a graph holds in place of a saved tensor: the tensor where it is, or how to make it again
from bytes that are elsewhere.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# bytes, as CUDA's allocator aligns: who reads a tensor from here finds it as well aligned as it was
_ALIGNED = 512


def is_weight(tensor: torch.Tensor) -> bool:
    """Whether *tensor* is a parameter or another leaf of the graph, or a view of one, and so is
    there anyway.
    """
    import torch

    viewed = counter_of(tensor)
    return isinstance(viewed, torch.nn.Parameter) or (viewed.is_leaf and viewed.requires_grad)


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that counts modifications with *tensor*: itself, or what it is a view of. Others
    on its storage may count for themselves.

    So do those of `Tensor.data`, and of the gates of a GRU (`unsafe_chunk`): the same version of
    two of them need not be the same bytes.
    """
    return tensor if tensor._base is None else tensor._base


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether *tensor* is no more than its storage, dtype, size and stride say."""
    import torch

    special = (
        type(tensor) is not torch.Tensor
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_meta
    )
    return not (special or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether *tensor* is a DTensor, as tensor parallelism makes them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage to save for *tensor*, from the first to the one behind the last: all
    of it where half of it is between them.

    So the parts that a tensor is split into, which lie across each other, are saved once, and what
    is expanded is as small as it was before.
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


def _check(version: int, saved_version: int, what: str) -> None:
    """Raises: RuntimeError, as autograd itself does where no hooks are, when *what* was modified in
    place since it was saved.
    """
    if version != saved_version:
        raise RuntimeError(
            f"a tensor that backward needs ({what}) was modified by an inplace operation after it was saved: it is at version {version}, "
            f"and was saved at version {saved_version}"
        )


class Stayed:
    """A tensor that stays where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # an output would otherwise hold the graph that holds it
        self._version = tensor._version

    def restore(self) -> torch.Tensor:
        """The tensor. Raises: RuntimeError when it was modified since."""
        # a nested one has no shape
        _check(
            self._tensor._version,
            self._version,
            f"{self._tensor.dtype}, {self._tensor.numel()} elements",
        )
        return self._tensor


class Parts:
    """A tensor that consists of others, which are packed for themselves. Source: the protocol of
    traceable wrapper subclasses.
    """

    __slots__ = ("_context", "_kind", "_like", "_parts", "_size", "_stride", "_version")

    def __init__(self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Packed]) -> None:
        import torch

        whole: Any = tensor
        names, self._context = whole.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        # others: a mesh of devices
        self._parts = {
            name: pack(part) if isinstance(part, torch.Tensor) else part
            for name, part in parts.items()
        }
        self._kind: Any = type(tensor)
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._version = tensor._version
        self._like = tensor.detach()  # which counts modifications with it, as its parts do not
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                setattr(self._like, name, None)

    def restore(self, unpack: Callable[[Packed], torch.Tensor]) -> torch.Tensor:
        """The tensor, of its parts. Raises: RuntimeError when it was modified since; as
        *unpack*.
        """
        _check(self._like._version, self._version, f"{self._kind.__name__} of {list(self._size)}")
        parts = {
            name: unpack(part) if isinstance(part, Stayed | Parts | Moved) else part
            for name, part in self._parts.items()
        }
        tensor: torch.Tensor = self._kind.__tensor_unflatten__(
            parts, self._context, self._size, self._stride
        )
        return tensor.detach()


class Moved:
    """A tensor whose bytes are elsewhere; when the graph lets go of it, *gone* is told its
    *number*, from whatever thread.
    """

    __slots__ = ("_begin", "_gone", "_like", "_size", "_stride", "_version", "number")

    def __init__(self, tensor: torch.Tensor, number: int, gone: deque[int]) -> None:
        self.number = number
        self._gone = gone
        self._begin = tensor.storage_offset() * tensor.element_size()
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._version = tensor._version
        # which counts modifications with it, also when its memory is taken away
        self._like = tensor.detach()
        self._like.data = _without_memory(tensor.dtype, tensor.device)

    def __del__(self) -> None:
        # no more: the garbage collector calls this in the middle of any line
        self._gone.append(self.number)

    def check(self) -> None:
        """Raises: RuntimeError when the tensor was modified since."""
        _check(self._like._version, self._version, f"{self._like.dtype} of {list(self._size)}")

    def restore(self, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
        """The tensor on *storage*, which has what was saved from the byte *offset* of the original
        storage on.
        """
        import torch

        first = (self._begin - offset) // self._like.element_size()
        tensor: Any = torch.empty(0, dtype=self._like.dtype, device=storage.device)
        # a backward that modifies it is counted, and found out by whoever needs it later
        restored = self._like.detach()
        restored.data = tensor.set_(storage, first, self._size, self._stride)
        return restored


@functools.cache
def _without_memory(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    import torch

    return torch.empty(0, dtype=dtype, device=device)


Packed = Stayed | Parts | Moved
