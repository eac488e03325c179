"""The parameters that wait for updates of `Overlap`, and waits for the updates in a tier.

DeepSpeed, its users and this package all reach the partition of a parameter through its attribute
`ds_tensor`. While the update of any parameter is awaited, `torch.nn.Parameter` has a descriptor of
this name, which takes precedence over the parameter's own attribute: every read waits.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import OffloadError
from ..swap.tier import Tier
from ..update.queue import Pending, UpdateQueue, queues

_KEY = "_nvme_offload_awaited"  # in a parameter's __dict__: the `Awaited` that it waits for
_NAME = "ds_tensor"
_lock = threading.RLock()


class Awaited(Pending):
    """The update of sub-group *index*, whose parameters are *params*; it is in *queue*."""

    def __init__(
        self, queue: UpdateQueue, index: int, params: Sequence[torch.nn.Parameter]
    ) -> None:
        super().__init__()
        self.queue = queue
        self.index = index
        self._params = params

    def hold(self) -> None:
        """See `Pending`."""
        with _lock:
            _held.add(self)
            for param in self._params:
                param.__dict__[_KEY] = self
            if not isinstance(torch.nn.Parameter.__dict__.get(_NAME), _Partition):
                setattr(torch.nn.Parameter, _NAME, _Partition())

    def order(self) -> None:
        """See `Pending`."""
        if self.event is not None:
            self.event.synchronize()

    def restore(self) -> None:
        """See `Pending`."""
        with _lock:
            _held.discard(self)
            for param in self._params:
                param.__dict__.pop(_KEY, None)
            if not _held and isinstance(torch.nn.Parameter.__dict__.get(_NAME), _Partition):
                delattr(torch.nn.Parameter, _NAME)


_held: weakref.WeakSet[Awaited] = weakref.WeakSet()


class _Partition:
    """The descriptor `ds_tensor` of `torch.nn.Parameter`."""

    def __get__(self, param: Any, owner: Any = None) -> Any:
        if param is None:
            return self
        _wait(param)
        try:
            return param.__dict__[_NAME]
        except KeyError:
            raise AttributeError(_NAME) from None

    def __set__(self, param: Any, value: Any) -> None:
        _wait(param)
        param.__dict__[_NAME] = value

    def __delete__(self, param: Any) -> None:
        _wait(param)
        del param.__dict__[_NAME]


def _wait(param: Any) -> None:
    awaited = param.__dict__.get(_KEY)
    if awaited is not None:
        awaited.queue.use(awaited)


def is_awaited(param: torch.nn.Parameter) -> bool:
    """Whether an update of *param* is queued or done, and its partition has not been read since."""
    return _KEY in param.__dict__


def partly_applied() -> OffloadError:
    """The error for states that belong to no completed step."""
    return OffloadError(
        "the last step was only partly applied, because an exception ended it: load_checkpoint() brings back the states of the last checkpoint"
    )


def unfinished_backward() -> OffloadError:
    """The error for gradients of a backward pass that this engine did not end."""
    return OffloadError(
        "a backward pass was not ended, and its step is only partly applied: load_checkpoint() brings back the states of the last checkpoint; if no "
        "exception ended the pass, it was another engine's: call requires_grad_(False) on this engine's module while that pass runs"
    )


def quiesce(tier: Tier) -> None:
    """Wait until no engine makes updates in *tier*. Failures are left to the callers that wait."""
    for updates in _of(tier):
        updates.quiesce()


@contextlib.contextmanager
def paused(tier: Tier) -> Iterator[None]:
    """Context in which no update uses memory of *tier*."""
    with contextlib.ExitStack() as stack:
        for updates in _of(tier):
            stack.enter_context(updates.paused())
        yield


def beside(tier: Tier) -> bool:
    """Whether this thread's uses of *tier*'s values may interleave with uses by updates."""
    return not is_worker() and any(updates.holds for updates in _of(tier))


def is_worker() -> bool:
    """Whether this is a thread that makes updates."""
    return any(queue.is_worker() for queue in queues())


def _of(tier: Tier) -> list[UpdateQueue]:
    return [queue for queue in queues() if getattr(queue, "tier", None) is tier]
