"""What a graph holds in place of a saved tensor: the tensor where it is, or how to make it again from bytes that are elsewhere."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ALIGNED = 512  # bytes, as CUDA's allocator aligns: who reads a tensor from here finds it as well aligned as it was


def movable(tensor: torch.Tensor) -> bool:
    """Whether *tensor* is no more than its storage, dtype, size and stride say, and no parameter, nor a view of one."""
    import torch

    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False
    viewed = tensor if tensor._base is None else tensor._base
    return not (isinstance(viewed, torch.nn.Parameter) or (viewed.is_leaf and viewed.requires_grad))


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage to save for *tensor*, from the first to the one behind the last: all of it where half of it is between them.

    So the parts that a tensor is split into, which lie across each other, are saved once, and what is expanded is as small as it was before.
    """
    if tensor.numel() == 0:
        return 0, 0
    item = tensor.element_size()
    begin = int(tensor.storage_offset()) * item
    end = begin + (1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))) * item
    whole = tensor.untyped_storage().nbytes()
    return (0, whole) if 2 * (end - begin) >= whole else (begin // _ALIGNED * _ALIGNED, end)


def _check(like: torch.Tensor, version: int, size: torch.Size) -> None:
    """Raises: RuntimeError, as autograd itself does where no hooks are, when what *like* is of was modified in place after *version*."""
    if like._version != version:
        raise RuntimeError(
            f"a tensor that backward needs ({like.dtype}, {list(size)}) was modified by an inplace operation after it was saved: "
            f"it is at version {like._version}, and was saved at version {version}"
        )


class Stayed:
    """A tensor that stays where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # an output would otherwise hold the graph that holds it
        self._version = tensor._version

    def restore(self) -> torch.Tensor:
        """The tensor. Raises: RuntimeError when it was modified since."""
        _check(self._tensor, self._version, self._tensor.shape)
        return self._tensor


class Moved:
    """A tensor whose bytes are elsewhere; when the graph lets go of it, *gone* is told its *number*, from whatever thread."""

    __slots__ = ("_begin", "_gone", "_like", "_size", "_stride", "_version", "number")

    def __init__(self, tensor: torch.Tensor, number: int, gone: deque[int]) -> None:
        import torch

        self.number = number
        self._gone = gone
        self._begin = tensor.storage_offset() * tensor.element_size()
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._version = tensor._version
        self._like = tensor.detach()  # which counts modifications with it, also when its memory is taken away
        self._like.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def __del__(self) -> None:
        self._gone.append(self.number)  # no more: the garbage collector calls this in the middle of any line

    def check(self) -> None:
        """Raises: RuntimeError when the tensor was modified since."""
        _check(self._like, self._version, self._size)

    def restore(self, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
        """The tensor on *storage*, which has what was saved from the byte *offset* of the original storage on."""
        import torch

        first = (self._begin - offset) // self._like.element_size()
        tensor: Any = torch.empty(0, dtype=self._like.dtype, device=storage.device)
        restored: torch.Tensor = tensor.set_(storage, first, self._size, self._stride)
        return restored
