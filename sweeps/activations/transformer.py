"""The model that is trained: a decoder on long sequences of noise, of which only the blocks matter."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional


class Shape(NamedTuple):
    """Of the model and of what goes into it."""

    blocks: int
    width: int
    heads: int
    sequence: int
    batch: int

    @property
    def forward_flops(self) -> float:
        """Of a forward pass: the matrices, and attention, which is causal."""
        return self.batch * self.sequence * self.blocks * (24.0 * self.width**2 + 2.0 * self.sequence * self.width)


class Block(nn.Module):
    """Attention and a feed-forward layer, each beside a way around it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before_attention = nn.LayerNorm(shape.width)
        self.into = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.before_feed = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A block's output for its input: batch, sequence, width."""
        parts = self.into(self.before_attention(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.before_feed(x))))


def make(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[nn.ModuleList, torch.Tensor]:
    """The blocks and a batch, the same in every call."""
    torch.manual_seed(0)
    with torch.device(device):
        blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks)).to(dtype)
        return blocks, torch.randn(shape.batch, shape.sequence, shape.width, dtype=dtype)


def checksum(blocks: nn.ModuleList) -> int:
    """Of the bits of all gradients."""
    total = 0
    for number, parameter in enumerate(blocks.parameters()):
        if parameter.grad is not None:
            bits = parameter.grad.view({2: torch.int16, 4: torch.int32}[parameter.element_size()])
            total += (number + 1) * int(bits.to(torch.int64).sum())
    return total
