"""What the ranks agree on before training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ..errors import OffloadError, UsageError


def least(number: int) -> int:
    """The minimum of *number* over all ranks, so that all plan alike."""
    numbers = torch.tensor([number], device=get_accelerator().current_device_name())
    dist.all_reduce(numbers, op=dist.ReduceOp.MIN)
    return int(numbers.item())


def all_or_none(action: Callable[[], None]) -> None:
    """Run *action* on every rank. Where it fails on one, the others raise too instead of waiting
    for it for ever.
    """
    failure = None
    try:
        action()
    except (OffloadError, OSError) as error:
        failure = error
    anywhere = least(0 if failure is not None else 1) == 0
    if failure is not None:
        raise failure
    if anywhere:
        raise UsageError("another rank cannot train with this configuration; its message says why")
