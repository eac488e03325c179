"""Dispatch modes of the caller."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_untyped_torch: Any = torch._C


def outside_of_modes() -> contextlib.AbstractContextManager[Any]:
    """Context in which the caller's dispatch modes see no operation. Selective checkpointing counts
    operations, and returns what the operation of the same number returned in the forward pass.
    """
    if _untyped_torch._len_torch_dispatch_stack() == 0:
        return contextlib.nullcontext()
    return _disable_current_modes()
