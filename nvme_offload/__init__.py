"""NVMe offload for PyTorch training: an asynchronous I/O engine, a swapper of tensors behind DeepSpeed ZeRO-3, and the sweep that tunes a drive."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .config import AioConfig
from .engine import Engine, File, Ticket
from .errors import (
    CorruptionError,
    IOFailure,
    NoSpaceError,
    OffloadError,
    TruncatedError,
    UnsupportedError,
    UsageError,
    WaitTimeout,
)

if TYPE_CHECKING:
    from .pool import PinnedPool
    from .store import TensorStore
    from .swapper import TensorSwapper

__version__ = "0.1.0"

__all__ = [
    "AioConfig",
    "CorruptionError",
    "Engine",
    "File",
    "IOFailure",
    "NoSpaceError",
    "OffloadError",
    "PinnedPool",
    "TensorStore",
    "TensorSwapper",
    "Ticket",
    "TruncatedError",
    "UnsupportedError",
    "UsageError",
    "WaitTimeout",
]


def __getattr__(name: str) -> Any:
    if name == "PinnedPool":  # on first use: it needs numpy, which the engine and the sweep's command line start without
        from .pool import PinnedPool
    from .store import TensorStore
    from .swapper import TensorSwapper

        return PinnedPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
