"""Modes of the caller: those that see operations, inference mode, and the capture of a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import UnsupportedError

_untyped_torch: Any = torch._C


def outside_of_modes() -> contextlib.AbstractContextManager[Any]:
    """Context in which the caller's dispatch modes see no operation. Selective checkpointing counts
    operations, and returns what the operation of the same number returned in the forward pass.
    """
    if _untyped_torch._len_torch_dispatch_stack() == 0:
        return contextlib.nullcontext()
    return _disable_current_modes()


@contextlib.contextmanager
def outside_of_all_modes() -> Iterator[None]:
    """As `outside_of_modes`, and without inference mode: a later step could neither change the tensors
    made in it nor save them for backward.
    """
    with outside_of_modes(), contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield


def check_no_capture(cannot: str) -> None:
    """Raises: UnsupportedError while the current stream captures a CUDA graph, of which a replay would
    not call this package. *cannot*: the operation that the graph cannot contain, and a remedy.
    """
    cuda: Any = torch.cuda
    if cuda.is_initialized() and cuda.is_current_stream_capturing():
        raise UnsupportedError(f"a CUDA graph that is being captured cannot {cannot}")
