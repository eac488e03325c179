"""Activation offload: `save_on_nvme`, the drive's counterpart of
`torch.autograd.graph.save_on_cpu`.
"""

from .cache import ActivationStats
from .context import save_on_nvme

__all__ = ["ActivationStats", "save_on_nvme"]
