"""Plain PyTorch: any optimizer's states on NVMe."""

from .optimizer import NVMeOptimizer
from .stats import UpdateStats

__all__ = ["NVMeOptimizer", "UpdateStats"]
