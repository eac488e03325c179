"""What GPUs can do, by what `nvidia-smi` or a user calls them.

Source: the vendors' data sheets; 16-bit matrix operations without sparsity, in bfloat16 where the
GPU has that, and memory bandwidth.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class GpuModel(NamedTuple):
    """Dense 16-bit operations and bytes of memory a second; memory_bytes: None where it is sold
    with several sizes.
    """

    flops: float
    bytes_per_second: float
    memory_bytes: int | None


_GB = 10**9
_MODELS = {
    "B200": GpuModel(2250e12, 8.0e12, 180 * _GB),
    "GH200": GpuModel(989e12, 4.0e12, None),
    "H200": GpuModel(989e12, 4.8e12, 141 * _GB),
    "H100 NVL": GpuModel(835e12, 3.9e12, 94 * _GB),
    "H100 PCIe": GpuModel(756e12, 2.0e12, 80 * _GB),
    "H100": GpuModel(989e12, 3.35e12, 80 * _GB),
    "H20": GpuModel(148e12, 4.0e12, 96 * _GB),
    "A100": GpuModel(312e12, 1.9e12, None),
    "A40": GpuModel(150e12, 0.70e12, 48 * _GB),
    "A30": GpuModel(165e12, 0.93e12, 24 * _GB),
    "A10G": GpuModel(70e12, 0.6e12, 24 * _GB),
    "A10": GpuModel(125e12, 0.6e12, 24 * _GB),
    "A6000": GpuModel(155e12, 0.77e12, 48 * _GB),
    "RTX 6000 Ada": GpuModel(364e12, 0.96e12, 48 * _GB),
    "L40S": GpuModel(362e12, 0.86e12, 48 * _GB),
    "L40": GpuModel(181e12, 0.86e12, 48 * _GB),
    "L4": GpuModel(121e12, 0.3e12, 24 * _GB),
    "T4": GpuModel(65e12, 0.32e12, 16 * _GB),
    "V100": GpuModel(125e12, 0.9e12, None),
    "5090": GpuModel(210e12, 1.79e12, 32 * _GB),
    "4090": GpuModel(165e12, 1.0e12, 24 * _GB),
    "3090": GpuModel(71e12, 0.94e12, 24 * _GB),
    "MI300X": GpuModel(1307e12, 5.3e12, 192 * _GB),
    "MI250X": GpuModel(383e12, 3.2e12, 128 * _GB),
    "MI210": GpuModel(181e12, 1.6e12, 64 * _GB),
}


def find(name: str) -> GpuModel | None:
    """The model that is called *name*, or has its words in that; None for one that is not known.

    The longest wins: an L40S is no L40, and an H100 PCIe is not the one with the fastest memory.
    """
    for known in sorted(_MODELS, key=len, reverse=True):
        if re.search(rf"(?<![a-z0-9]){known}(?![a-z0-9])", name, re.IGNORECASE):
            return _MODELS[known]
    return None
