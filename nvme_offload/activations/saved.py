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


class _Version:
    """Whether a tensor was modified in place since; without its memory, of which it keeps nothing."""

    __slots__ = ("_at_first", "_like", "_what")

    def __init__(self, tensor: torch.Tensor) -> None:
        import torch

        self._at_first = tensor._version
        self._what = f"{tensor.dtype}, {list(tensor.shape)}"
        self._like = tensor.detach()  # which counts the modifications with it; also when what is in it is taken away
        self._like.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def check(self) -> None:
        """Raises: RuntimeError, as autograd itself does for a tensor that no hook has packed."""
        if self._like._version != self._at_first:
            raise RuntimeError(
                f"a tensor that backward needs ({self._what}) was modified by an inplace operation after it was saved: it is at version "
                f"{self._like._version}, and was saved at version {self._at_first}"
            )


class Stayed:
    """A tensor that stays where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # an output would otherwise hold the graph that holds it
        self._version = _Version(tensor)

    def restore(self) -> torch.Tensor:
        """The tensor. Raises: RuntimeError when it was modified since."""
        self._version.check()
        return self._tensor


class Moved:
    """A tensor whose bytes are elsewhere; when the graph lets go of it, *gone* is told its *serial* number, from whatever thread."""

    __slots__ = ("_begin", "_dtype", "_gone", "_size", "_stride", "_version", "serial")

    def __init__(self, tensor: torch.Tensor, serial: int, gone: deque[int]) -> None:
        self.serial = serial
        self._gone = gone
        self._begin = tensor.storage_offset() * tensor.element_size()
        self._dtype = tensor.dtype
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._version = _Version(tensor)

    def __del__(self) -> None:
        self._gone.append(self.serial)  # no more: the garbage collector calls this in the middle of any line

    def check(self) -> None:
        """Raises: RuntimeError when the tensor was modified since."""
        self._version.check()

    def restore(self, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
        """The tensor on *storage*, which has what was saved from the byte *offset* of the original storage on."""
        import torch

        first = (self._begin - offset) // self._dtype.itemsize
        tensor: Any = torch.empty(0, dtype=self._dtype, device=storage.device)
        restored: torch.Tensor = tensor.set_(storage, first, self._size, self._stride)
        return restored
