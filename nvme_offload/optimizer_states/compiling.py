"""While torch compiles, its optimizers compute in a different way, in all threads.

Source: `_compile_session_context` of torch.compiler, torch.optim.adam.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

_used = False  # whether torch.compile has begun to compile


def was_used(wait: Callable[[], None]) -> bool:
    """Whether torch.compile has compiled anything in this process, or could without calling *wait*
    before.
    """
    global _used
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return _used
    handler = getattr(dynamo, "callback_handler", None)  # since torch 2.3
    if handler is None:
        return True
    callback = _before_compiling(wait)
    # `torch._dynamo.reset` removes the callback.
    if callback not in handler.start_callbacks:
        handler.register_start_callback(callback)
    _used = _used or dynamo.utils.counters["frames"]["total"] > 0
    return _used


@functools.cache
def _before_compiling(wait: Callable[[], None]) -> Callable[..., None]:
    def waiting(*_: Any) -> None:
        global _used
        _used = True
        # Make the pending updates compute in the usual way.
        compiler: Any = torch.compiler
        compiling = getattr(compiler, "_is_compiling_flag", False)
        compiler._is_compiling_flag = False
        try:
            wait()
        finally:
            compiler._is_compiling_flag = compiling

    return waiting
