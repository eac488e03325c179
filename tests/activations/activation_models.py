"""Models that save all kinds of tensors for their backward, and the gradients that they come to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Residual(nn.Module):
    """A module with a residual connection around it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Attention(nn.Module):
    """Queries, keys and values are views of one tensor; the positions are a buffer."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("positions", torch.randn(64, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.into(self.norm(x) * self.positions).split(width, dim=-1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + functional.dropout(
            self.out(mixed.transpose(1, 2).reshape(batch, length, width)), 0.2, self.training
        )


class Feed(nn.Module):
    """A gated feed-forward layer with an operation in place."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * functional.relu_(value.clone()))


class Words(nn.Module):
    """A transformer over tokens whose output layer shares its weights with the embedding."""

    def __init__(self, blocks: int = 3, words: int = 97, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(Attention(width), Feed(width)) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embedding.weight)


class Recurrent(nn.Module):
    """An LSTM, of which the last state goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, (hidden, _) = self.lstm(x)
        return hidden


class Odd(nn.Module):
    """Complex numbers, conjugates, expanded and strided tensors, half precision, sorting and
    indexing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x * self.scale)
        power = (spectrum * spectrum.conj()).real
        wide = (
            power.mean(dim=0, keepdim=True).expand(64, -1, -1)
            * power[:1].expand(64, -1, -1).sigmoid()
        )
        sparse = (x[:, ::3] * self.scale)[..., 5:37].sin().bfloat16().square().float()
        values, indices = sparse.sort(dim=-1)
        return (
            wide.mean()
            + values.cos().mean()
            + x.mul(self.scale).gather(-1, indices.repeat(1, 2, 1)).tanh().mean()
        )


def _mlp() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(64, 64),
                nn.ReLU(inplace=True),
                nn.Dropout(0.1),
                nn.Linear(64, 64),
                nn.GELU(),
            )
            for _ in range(6)
        )
    )


def _convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(3):
        layers += [
            Residual(
                nn.Sequential(
                    nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
                )
            )
        ]  # type: ignore[list-item]
    return nn.Sequential(
        *layers, nn.Conv2d(8, 8, 2, stride=2), nn.Flatten(), nn.Linear(8 * 64, 10)
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "layers": lambda: (_mlp(), torch.randn(64, 64)),
    "convolutions": lambda: (_convolutions(), torch.randn(8, 3, 16, 16)),
    "transformer": lambda: (Words(), torch.randint(97, (2, 64))),
    "recurrent": lambda: (Recurrent(), torch.randn(16, 24, 32)),
    "odd": lambda: (Odd(), torch.randn(16, 48, 64)),
}


def made(name: str, device: str = "cpu") -> tuple[nn.Module, torch.Tensor]:
    """The model *name* and its input; every call returns equal ones."""
    torch.manual_seed(3)
    model, x = MODELS[name]()
    return model.to(device), x.to(device)


def gradients(
    model: Callable[..., Any],
    x: torch.Tensor,
    context: AbstractContextManager[Any] | None = None,
    seed: int = 1,
) -> list[torch.Tensor]:
    """One step of *model*, with the forward pass in *context*; the gradients of all parameters, and
    the buffers.
    """
    module: Any = model
    module.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with context or contextlib.nullcontext():
        loss = model(x).float().square().mean()
    loss.backward()
    return [parameter.grad.clone() for parameter in module.parameters()] + [
        buffer.clone() for buffer in module.buffers()
    ]


def same(ours: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether they are equal to the bit, and numbers."""
    return all(
        torch.isfinite(mine).all() and torch.equal(mine, other)
        for mine, other in zip(ours, others, strict=True)
    )
