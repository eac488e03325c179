"""NVMe offload for PyTorch training: an asynchronous I/O engine, a swapper of tensors behind
DeepSpeed ZeRO-3, and the sweep that tunes a drive.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import (
    BufferChangedError,
    CancelledError,
    CorruptionError,
    IOFailure,
    NoSpaceError,
    OffloadError,
    OutOfHostMemoryError,
    TruncatedError,
    UnsupportedError,
    UsageError,
    WaitTimeout,
)
from .hardware.config import AioConfig
from .io.engine import Engine, File, Ticket

if TYPE_CHECKING:
    from .activations import save_on_nvme
    from .io.pool import PinnedPool
    from .store.store import TensorStore
    from .swap.swapper import TensorSwapper

__version__ = "0.1.0"

__all__ = [
    "AioConfig",
    "BufferChangedError",
    "CancelledError",
    "CorruptionError",
    "Engine",
    "File",
    "IOFailure",
    "NVMeOptimizer",
    "NoSpaceError",
    "OffloadError",
    "OutOfHostMemoryError",
    "PinnedPool",
    "TensorStore",
    "TensorSwapper",
    "Ticket",
    "TruncatedError",
    "UnsupportedError",
    "UsageError",
    "WaitTimeout",
    "save_on_nvme",
]

# On first use: they need numpy or torch, which the engine and the sweep's command line start
# without.
_LAZY = {
    "NVMeOptimizer": "optim",
    "PinnedPool": "io.pool",
    "TensorStore": "store.store",
    "TensorSwapper": "swap.swapper",
    "save_on_nvme": "activations",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
