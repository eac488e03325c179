"""NVMe offload for PyTorch training: an asynchronous I/O engine, and the sweep that tunes it for a drive."""

from __future__ import annotations

__version__ = "0.1.0"
