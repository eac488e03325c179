"""Parameters of ZeRO-3 whose updates are queued: every read of `ds_tensor`, the partition, waits
for the update.

DeepSpeed, its users and this package all reach a partition through that attribute. While any
parameter is awaited, `torch.nn.Parameter` has a descriptor named `ds_tensor`, which takes
precedence over the parameter's own attribute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_KEY = "_nvme_offload_wait"  # in a parameter's __dict__: a function that waits for its update
_NAME = "ds_tensor"
_lock = threading.RLock()
_awaited = 0  # parameters that are held


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


def hold(param: torch.nn.Parameter, wait: Callable[[], Any]) -> None:
    """Make every read of the partition of *param* call *wait* first, until `let_go`."""
    global _awaited
    with _lock:
        if _KEY not in param.__dict__:
            _awaited += 1
        param.__dict__[_KEY] = wait
        if not isinstance(torch.nn.Parameter.__dict__.get(_NAME), _Partition):
            setattr(torch.nn.Parameter, _NAME, _Partition())


def let_go(param: torch.nn.Parameter) -> None:
    """End `hold`: reads of the partition of *param* no longer wait."""
    global _awaited
    with _lock:
        if param.__dict__.pop(_KEY, None) is not None:
            _awaited -= 1
        if not _awaited and isinstance(torch.nn.Parameter.__dict__.get(_NAME), _Partition):
            delattr(torch.nn.Parameter, _NAME)


def is_awaited(param: torch.nn.Parameter) -> bool:
    """Whether an update of *param* is queued or done, and its partition has not been read since."""
    return _KEY in param.__dict__


def _wait(param: Any) -> None:
    wait = param.__dict__.get(_KEY)
    if wait is not None:
        wait()
