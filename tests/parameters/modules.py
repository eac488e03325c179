"""Modules that use their parameters in unusual ways, and ways to train them."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class _KeepsWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.weight = x, weight  # not by save_for_backward
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient @ ctx.weight, gradient.flatten(0, -2).t() @ ctx.x.flatten(0, -2)


class ByFunction(nn.Module):
    """Its autograd function keeps the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _KeepsWeight.apply(x, self.weight)


class OfChildren(nn.Module):
    """Uses the parameters of its children, before and after their forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.first.weight
        y = F.linear(self.second(x), weight, self.first.bias)
        return y + F.linear(x, self.second.weight.t())


class InLists(nn.Module):
    """Parameters in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList(
            [nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(4)]
        )
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.randn(WIDTH))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.listed:
            x = torch.tanh(x @ one)
        return x * self.named["scale"]


class Blocks(nn.Module):
    """Linear layers, of which a checkpoint recomputes half, if asked to."""

    def __init__(
        self,
        checkpointing: bool = False,
        dtype: torch.dtype = torch.float32,
        *,
        count: int = 40,
        width: int = 48,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpointing = checkpointing
        self.blocks = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            recomputes = self.checkpointing and index % 2
            change = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
            x = torch.tanh(x + change)
        return x


class Tied(nn.Module):
    """Two modules with the same parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.second.weight = self.first.weight
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.between(self.first(x))))


class KeepsView(nn.Module):
    """Keeps a view of its weight past its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.inner.weight.t()
        return self.inner(x) @ self.kept


class Through(nn.Module):
    """A module whose forward pass takes and returns other things than one tensor."""

    def __init__(self, inner: nn.Module, call: Any) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.inner, x)


class Frozen(nn.Module):
    """A frozen matrix, which `addmm` saves as it is, between trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4, requires_grad=False)
        self.offset = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = torch.addmm(self.offset, x.flatten(0, -2), self.matrix)
        return torch.tanh(flat.view(x.shape))


KINDS = {
    "autograd function": ByFunction,
    "parameters of children": OfChildren,
    "containers": InLists,
    "tied": Tied,
    "kept view": KeepsView,
    "frozen": Frozen,
    "LSTM": lambda: Through(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), lambda m, x: m(x)[0]),
    "attention": lambda: Through(
        nn.MultiheadAttention(WIDTH, 4, batch_first=True), lambda m, x: m(x, x, x)[0]
    ),
    "encoder layer": lambda: nn.TransformerEncoderLayer(
        WIDTH, 4, 32, dropout=0.0, batch_first=True
    ),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "convolution": lambda: Through(
        nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(2, WIDTH)),
        lambda m, x: m(x.transpose(1, 2)).transpose(1, 2),
    ),
    "bilinear": lambda: Through(nn.Bilinear(WIDTH, WIDTH, WIDTH), lambda m, x: m(x, x)),
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Linear(WIDTH, WIDTH)),
}


class Stack(nn.Module):
    """Five modules of a *kind*, and a head; with *checkpointing* "reentrant" or "other"."""

    def __init__(self, kind: Any, checkpointing: str = "") -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.blocks = nn.ModuleList([kind() for _ in range(5)])
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            call = functools.partial(block)
            if self.checkpointing:
                reentrant = self.checkpointing == "reentrant"
                call = functools.partial(checkpoint, block, use_reentrant=reentrant)
            x = x + 0.5 * call(x)
        return self.head(x)


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y)


def plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = _loss(model, x, y)
    loss.backward()
    return loss


def accumulated(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    plain(model, x, y)
    return plain(model, x.flip(0), y)


def outside_of_modules(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss multiplies by the head itself."""
    loss = F.cross_entropy((model(x) @ model.head.weight).flatten(0, 1)[:, :7], y)
    loss.backward()
    return loss


def twice_through(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = _loss(model, x, y)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def second_order(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = _loss(model, x, y)
    trained = [one for one in model.parameters() if one.requires_grad]
    gradients = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
    sum((one * one).sum() for one in gradients if one is not None).backward()
    return loss


def two_losses(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output = model(x)
    loss, other = F.cross_entropy(output.flatten(0, 1), y), output.square().mean()
    loss.backward(retain_graph=True)
    other.backward()
    return loss


def in_autocast(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = _loss(model, x, y)
    loss.backward()
    return loss


def after_an_exception(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def fail(*_: Any) -> None:
        raise ValueError("of the model")

    hook = model.blocks[3].register_forward_hook(fail)
    with contextlib.suppress(ValueError):
        model(x)
    hook.remove()
    return plain(model, x, y)


def after_an_evaluation(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    model.eval()
    with torch.inference_mode():
        evaluated = model(x)
    with torch.no_grad():
        evaluated = evaluated + model(x)
    model.train()
    plain(model, x, y)
    return evaluated


WAYS = (
    *(plain, accumulated, outside_of_modules, twice_through, second_order, two_losses),
    *(in_autocast, after_an_exception, after_an_evaluation),
)
