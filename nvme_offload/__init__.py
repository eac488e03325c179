"""NVMe offload for PyTorch training: an asynchronous I/O engine, and the sweep that tunes it for a drive."""

from __future__ import annotations

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
    "Ticket",
    "TruncatedError",
    "UnsupportedError",
    "UsageError",
    "WaitTimeout",
]


def __getattr__(name: str) -> Any:
    if name == "PinnedPool":  # on first use: it needs numpy, which the engine and the sweep's command line start without
        from .pool import PinnedPool

        return PinnedPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
