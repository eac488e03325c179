"""Saved activations on a drive: `save_on_nvme`, a context manager beside `torch.autograd.graph.save_on_cpu`."""

from __future__ import annotations

from .context import save_on_nvme
from .shelf import ActivationStats

__all__ = ["ActivationStats", "save_on_nvme"]
