"""`Stayed`: a saved tensor that stays on its device. `innermost_hooks`: on the tensors that are saved.
`reuse`: of memory whose values tensors do not show.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..errors import UnsupportedError

_autograd: Any = torch._C._autograd


def require_hooks(what: str) -> None:
    """Raises: UnsupportedError if this torch has no `innermost_hooks`, which *what* needs."""
    if not hasattr(_autograd, "_top_saved_tensors_default_hooks"):
        raise UnsupportedError(
            f"{what} needs torch 2.8 or newer, and this is {torch.__version__}: update torch"
        )


def innermost_hooks(*, ignores_tracing: bool) -> Any:
    """The innermost hooks of this thread on saved tensors, as a pair; None without any."""
    return _autograd._top_saved_tensors_default_hooks(ignores_tracing)


class ModifiedError(RuntimeError):
    """A tensor was modified since it was saved. Autograd raises a RuntimeError."""


def check_version(version: int, saved_version: int, what: str) -> None:
    """Raises: ModifiedError when *what* was modified since it was saved."""
    if version != saved_version:
        raise ModifiedError(
            f"a tensor that backward needs ({what}) was modified by an inplace operation after it was saved: it is at version {version}, "
            f"and was saved at version {saved_version}"
        )


_reused: set[int] = set()  # addresses of storages


def reuse(owner: object, storage: torch.UntypedStorage) -> None:
    """As long as *owner* lives, it may give *storage* other values once no tensor refers to it: hooks
    on saved tensors that keep only a weak reference cannot find the old ones.
    """
    _reused.add(storage._cdata)
    weakref.finalize(owner, _reused.discard, storage._cdata).atexit = False


def is_reused(tensor: torch.Tensor) -> bool:
    """Whether `reuse` was called for the storage of *tensor*."""
    return tensor.untyped_storage()._cdata in _reused


def is_plain(tensor: torch.Tensor, *kinds: type) -> bool:
    """Whether *tensor*, a Tensor or of one of the classes *kinds*, is fully described by its storage,
    dtype, size and stride.
    """
    special = (
        type(tensor) not in (torch.Tensor, *kinds)
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_meta
    )
    return not (special or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())


class Stayed:
    """A tensor that stays on its device."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # not the output itself, which holds the graph that holds this
        self._tensor = tensor.detach()
        self._version = tensor._version

    def restore(self) -> torch.Tensor:
        """The tensor. Raises: RuntimeError when it was modified since it was saved."""
        # A nested tensor has no shape, so the message has the number of elements.
        check_version(
            self._tensor._version,
            self._version,
            f"{self._tensor.dtype}, {self._tensor.numel()} elements",
        )
        return self._tensor
