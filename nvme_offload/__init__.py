"""NVMe offload for PyTorch training: an asynchronous I/O engine, a swapper of tensors behind
DeepSpeed ZeRO-3, and the sweep that tunes a drive.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .activations import save_on_nvme
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
    from .io.pool import PinnedPool
    from .offload import Offload
    from .optim import NVMeOptimizer
    from .store.store import TensorStore
    from .swap.swapper import TensorSwapper

__version__ = "0.1.0"

# Where each public name is defined, unless in `errors`. All are imported on first use: the commands
# need few of them.
_MODULES = {
    "AioConfig": "hardware.config",
    "Engine": "io.engine",
    "File": "io.engine",
    "NVMeOptimizer": "optim",
    "Offload": "offload",
    "PinnedPool": "io.pool",
    "TensorStore": "store.store",
    "TensorSwapper": "swap.swapper",
    "Ticket": "io.engine",
    "save_on_nvme": "activations",
}

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
    "Offload",
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


def __getattr__(name: str) -> Any:
    if name in ("errors", "hardware", "io", "units"):
        return importlib.import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES.get(name, 'errors')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
