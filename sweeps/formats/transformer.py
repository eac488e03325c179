"""A character-level transformer as everybody writes it: pre-norm blocks of causal attention and a GELU network four times as wide, tied embeddings."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class Shape:
    """layers, width, heads: of the transformer. context: bytes that it sees."""

    layers: int
    width: int
    heads: int
    context: int


class Block(nn.Module):
    """Attention and a network beside the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before_attention = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.attended = nn.Linear(shape.width, shape.width)
        self.before_network = nn.LayerNorm(shape.width)
        self.widen = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: batch x context x width, in and out."""
        batch, context, width = x.shape
        query, key, value = self.query_key_value(self.before_attention(x)).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(seen.transpose(1, 2).reshape(batch, context, width))
        return x + self.narrow(functional.gelu(self.widen(self.before_network(x))))


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.letters = nn.Embedding(VOCABULARY, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.last = nn.LayerNorm(shape.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                into_stream = name.endswith(("attended.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if into_stream else 0.02)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)

    def forward(self, letters: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy in nats a byte. Shapes: batch x context, int64, both."""
        x = self.letters(letters) + self.places.weight[: letters.shape[1]]
        logits = functional.linear(self.last(self.blocks(x)), self.letters.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), following.flatten())
