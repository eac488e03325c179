"""The transformer block of the benchmarks: pre-norm, causal attention, and a GELU network four
times as wide.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and a network, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.before_network = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: batch x sequence x width, in and out."""
        parts = self.query_key_value(self.before_attention(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(seen.transpose(1, 2).flatten(-2))
        return x + self.narrow(functional.gelu(self.widen(self.before_network(x))))
