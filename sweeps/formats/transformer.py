"""A character-level transformer as everybody writes it, with tied embeddings."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional

from sweeps.blocks import Block

VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class Shape:
    """layers, width, heads: of the transformer. context: bytes that it sees."""

    layers: int
    width: int
    heads: int
    context: int


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.letters = nn.Embedding(VOCABULARY, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape.width, shape.heads) for _ in range(shape.layers)))
        self.last = nn.LayerNorm(shape.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                into_stream = name.endswith(("attended.weight", "narrow.weight"))
                nn.init.normal_(
                    parameter, std=0.02 / (2 * shape.layers) ** 0.5 if into_stream else 0.02
                )
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)

    def forward(self, letters: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy in nats a byte. Shapes: batch x context, int64, both."""
        x = self.letters(letters) + self.places.weight[: letters.shape[1]]
        logits = functional.linear(self.last(self.blocks(x)), self.letters.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), following.flatten())
