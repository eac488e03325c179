"""NVMe offload for PyTorch training: an asynchronous I/O engine, and the sweep that tunes it for a drive."""

from __future__ import annotations

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

__version__ = "0.1.0"

__all__ = [
    "AioConfig",
    "CorruptionError",
    "Engine",
    "File",
    "IOFailure",
    "NoSpaceError",
    "OffloadError",
    "Ticket",
    "TruncatedError",
    "UnsupportedError",
    "UsageError",
    "WaitTimeout",
]
