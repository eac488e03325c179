"""Parameters of ZeRO-3 whose updates are queued: reading `ds_tensor`, the partition, waits for the
update, whoever reads it.

DeepSpeed, its users and this package all come to a partition by that attribute. While any
parameter is awaited, `torch.nn.Parameter` has a descriptor of that name, which has precedence over
the parameter's own attribute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_KEY = "_nvme_offload_wait"  # in the __dict__ of a parameter: returns when its update is made
_NAME = "ds_tensor"
_lock = threading.RLock()
_awaited = 0  # parameters that are held


class _Partition:
    """The descriptor."""

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


def hold(param: torch.nn.Parameter, wait: Callable[[], None]) -> None:
    """From now on whoever reads the partition of *param* calls *wait* first."""
    global _awaited
    with _lock:
        if _KEY not in param.__dict__:
            _awaited += 1
        param.__dict__[_KEY] = wait
        if not isinstance(torch.nn.Parameter.__dict__.get(_NAME), _Partition):
            setattr(torch.nn.Parameter, _NAME, _Partition())


def let_go(param: torch.nn.Parameter) -> None:
    """Nobody waits for *param* any more."""
    global _awaited
    with _lock:
        if param.__dict__.pop(_KEY, None) is not None:
            _awaited -= 1
        if not _awaited and isinstance(torch.nn.Parameter.__dict__.get(_NAME), _Partition):
            delattr(torch.nn.Parameter, _NAME)


def is_awaited(param: torch.nn.Parameter) -> bool:
    """Whether *param* was updated, or is to be, and nobody has read its partition since."""
    return _KEY in param.__dict__


def _wait(param: Any) -> None:
    wait = param.__dict__.get(_KEY)
    if wait is not None:
        wait()
