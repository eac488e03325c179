"""The model: decoder blocks on long sequences of noise."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from sweeps.blocks import Block


class Shape(NamedTuple):
    """Sizes of the model and its input."""

    blocks: int
    width: int
    heads: int
    sequence: int
    batch: int


def make(
    shape: Shape, device: torch.device, dtype: torch.dtype
) -> tuple[nn.ModuleList, torch.Tensor]:
    """The blocks and a batch, the same in every call."""
    torch.manual_seed(0)
    with torch.device(device):
        blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.blocks)).to(
            dtype
        )
        return blocks, torch.randn(shape.batch, shape.sequence, shape.width, dtype=dtype)


def checksum(blocks: nn.ModuleList) -> int:
    """A sum of the bits of all gradients."""
    total = 0
    for number, parameter in enumerate(blocks.parameters()):
        if parameter.grad is not None:
            bits = parameter.grad.view({2: torch.int16, 4: torch.int32}[parameter.element_size()])
            total += (number + 1) * int(bits.to(torch.int64).sum())
    return total
