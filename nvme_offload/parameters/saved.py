"""`SavedTensors`: hooks on the tensors that autograd saves. A view of a streamed parameter is saved
without its values, and brought back for backward.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ..device.stayed import Stayed, check_version, innermost_hooks, is_plain
from .apart import memory_of
from .idle import UsedParameter

if TYPE_CHECKING:
    from .buckets import Bucket
    from .streamer import Streamer

_autograd: Any = torch._C._autograd


class SavedTensors:
    """Hooks for the parameters of *streamer*: `__call__` packs a tensor, and `unpack` restores it. All
    other tensors are passed to the *outer* hooks.
    """

    # Selective checkpointing of torch 2.14 uses the outer hooks, as with hooks of checkpoints.
    _checkpoint_internal = True

    def __init__(self, streamer: Streamer, outer: Any) -> None:
        self.streamer = streamer
        self.outer = outer
        self.has_ended = False  # `pop` was called
        # A checkpoint counts the tensors that are saved, so it has to receive every tensor.
        self._is_in_checkpoint = (
            outer is not None and getattr(outer[0], "__module__", "") == "torch.utils.checkpoint"
        )

    @property
    def _user_hooks(self) -> Any:
        """The innermost hooks that are not a checkpoint's."""
        if getattr(self.outer and self.outer[0], "_checkpoint_internal", False):
            return getattr(self.outer[0], "_user_hooks", None)
        return self.outer

    def __call__(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps of *tensor*."""
        slot = None
        if is_plain(tensor, torch.nn.Parameter, UsedParameter):
            slot = self.streamer.slots.holding(tensor)
        if slot is not None and slot.bucket is not None:
            if not self._is_in_checkpoint:
                return SavedView(slot.bucket, tensor)
            # A recomputation keeps it until backward. Unlike the parameter itself, this tensor
            # keeps the slot, too.
            tensor = tensor.detach()
        return Stayed(tensor) if self.outer is None else self.outer[0](tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor. Raises: RuntimeError when it was modified since it was saved; as
        `TensorSwapper.swap_in`.
        """
        if isinstance(packed, SavedView):
            return packed.restore(self.streamer)
        if self.outer is None:
            restored: torch.Tensor = packed.restore()
        else:
            restored = self.outer[1](packed)
        return restored


class SavedView:
    """A view of a parameter of *bucket*."""

    __slots__ = (
        *("_bucket", "_dtype", "_hold", "_is_whole", "_offset", "_parameter", "_size"),
        *("_stride", "_version"),
    )

    def __init__(self, bucket: Bucket, tensor: torch.Tensor) -> None:
        self._bucket = bucket
        self._dtype = tensor.dtype
        self._offset = int(tensor.storage_offset())
        self._size = tensor.size()
        self._stride = tensor.stride()
        start = self._offset * tensor.element_size()
        place = bucket.at(start)
        self._parameter = place.parameter
        self._is_whole = (
            start == place.offset and self._size == place.shape and tensor.is_contiguous()
        )
        self._version = self._parameter._version
        self._hold = bucket.hold_places()

    def restore(self, streamer: Streamer) -> torch.Tensor:
        """The view, in the bucket's present slot."""
        check_version(
            self._parameter._version, self._version, f"{self._dtype} of {list(self._size)}"
        )
        if self._is_whole and self._parameter in self._bucket.apart:
            # Autograd saves the parameter itself, with the `data` that it has in backward.
            return memory_of(self._parameter)
        return streamer.view(self._bucket, self._dtype, self._offset, self._size, self._stride)


def hide_from_compiler() -> None:
    """Keep the compiler out of the hooks, which run wherever the code of a compiled block saves a
    tensor that the compiler has left to torch.
    """
    disable: Any = torch.compiler.disable  # untyped there
    for name in "__call__", "unpack":
        hook = getattr(SavedTensors, name)
        if not hasattr(hook, "_torchdynamo_disable"):
            setattr(SavedTensors, name, disable(hook))


def push(streamer: Streamer) -> SavedTensors | None:
    """Hooks for *streamer* on the tensors that this thread saves from now on, until `pop`; None if
    these would have no effect, or are the innermost ones already.
    """
    if not torch.is_grad_enabled():
        return None
    outer = innermost_hooks(ignores_tracing=True)
    if (owner := _owner(outer)) is not None and owner.streamer is streamer:
        return None
    own = SavedTensors(streamer, outer)
    _autograd._push_saved_tensors_default_hooks(own, own.unpack)
    return own


def pop(own: SavedTensors | None) -> None:
    """Undo `push`. If *own* are not the innermost hooks, they are removed once they are.

    The hooks of a generator that an exception has ended are removed when the generator is collected.
    Source: torch.utils.checkpoint of torch 2.11, without *use_reentrant*.
    """
    if own is None:
        return
    own.has_ended = True
    innermost = innermost_hooks(ignores_tracing=True)
    if innermost is not None and _owner(innermost) is not own:
        with contextlib.suppress(TypeError):  # it has no weak references
            weakref.finalize(innermost[0], _pop_ended).atexit = False
    _pop_ended()


def others_receive_tensors() -> bool:
    """Whether hooks for a streamer are the innermost ones, and pass tensors to other hooks."""
    owner = _owner(innermost_hooks(ignores_tracing=True))
    return owner is not None and owner.outer is not None


def _owner(hooks: Any) -> SavedTensors | None:
    owner = None if hooks is None else hooks[0]
    return owner if isinstance(owner, SavedTensors) else None


def _pop_ended() -> None:
    while (owner := _owner(innermost_hooks(ignores_tracing=True))) is not None and owner.has_ended:
        _autograd._pop_saved_tensors_default_hooks()
