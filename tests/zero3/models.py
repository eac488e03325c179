"""The models that `training.py` trains: small ones with features that have caused faults, and
their inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


class Chain(nn.Module):
    """Layers one after another, each with a residual where its shape allows; *features* are those
    of the input.
    """

    def __init__(self, *layers: nn.Module, features: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.features = features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = self.call(layer, x)
            x = torch.tanh(y) + x if y.shape == x.shape else torch.tanh(y)
        return x

    def call(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    def inputs(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(2, self.features, generator=generator)


class Scale(nn.Module):
    """One parameter of one element, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class Bias(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.pad(self.shift, (0, x.shape[-1] - self.shift.numel()))


class Checkpointed(Chain):
    def __init__(self, *layers: nn.Module, features: int, reentrant: bool) -> None:
        super().__init__(*layers, features=features)
        self.reentrant = reentrant

    def call(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant and not x.requires_grad and torch.is_grad_enabled():
            x = x.detach().requires_grad_()
        return checkpoint(layer, x, use_reentrant=self.reentrant)


class Selective(Chain):
    """Its checkpoints keep the results of all operations."""

    def call(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def keep(*_: Any, **__: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE

        contexts = functools.partial(create_selective_checkpoint_contexts, keep)
        found: torch.Tensor = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return found


class Words(nn.Module):
    """An embedding larger than everything behind it, used again for the output where it is
    *tied*.
    """

    def __init__(self, words: int, features: int, tied: bool) -> None:
        super().__init__()
        self.words = words
        self.embedding = nn.Embedding(words, features)
        self.hidden = nn.Linear(features, features)
        self.output = nn.Linear(features, words if tied else 3, bias=False)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(torch.tanh(self.hidden(self.embedding(x))))

    def inputs(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(0, self.words, (2, 5), generator=generator)


class Adapted(nn.Module):
    """A frozen layer, and once it is adapted a small trained layer in parallel; where it is
    *shifted*, so is the small layer's output.
    """

    def __init__(self, features: int, shifted: bool) -> None:
        super().__init__()
        self.base = nn.Linear(features, features).requires_grad_(False)
        self.shift = Bias(features) if shifted else nn.Identity()

    def adapt(self, rank: int) -> None:
        features = self.base.in_features
        self.down, self.up = (
            nn.Linear(features, rank, bias=False),
            nn.Linear(rank, features, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.shift(self.up(self.down(x.to(self.down.weight.dtype)))).to(
            x.dtype
        )


class AdaptedChain(Chain):
    def adapt(self) -> None:
        """Add the small layers: in 32 bits next to 16-bit layers, where zero.Init made those and has
        ended.
        """
        for layer in self.layers:
            layer.adapt(3)


class Sometimes(Chain):
    """Layers of which the second rests in every other forward pass: its parameters then get no
    gradient.
    """

    passes = 0

    def call(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if layer is self.layers[1]:
            self.passes += torch.is_grad_enabled()
            if self.passes % 2 == 0:
                return torch.zeros_like(x)
        return layer(x)


class Dropped(Chain):
    """Layers of which another one rests in each forward pass, and the last is frozen in the second
    and third: parameters without a gradient, alternating.
    """

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.passes += 1
            self.layers[-1].requires_grad_(self.passes not in (2, 3))
        return super().forward(x)

    def call(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        rests = self.passes % (len(self.layers) - 1)
        return torch.zeros_like(x) if layer is self.layers[rests] else layer(x)


def odd() -> nn.Module:
    return Chain(
        nn.Linear(33, 17),
        nn.Linear(17, 71),
        nn.LayerNorm(71),
        nn.Linear(71, 3),
        Scale(),
        features=33,
    )


def gain() -> nn.Module:
    return Chain(Scale(), nn.Linear(33, 40), nn.Linear(40, 3), features=33)


def misaligned() -> nn.Module:
    return Chain(
        Bias(1000),
        nn.Linear(2048, 2048, bias=False),
        nn.Linear(2048, 1024, bias=False),
        features=2048,
    )


def blocks() -> nn.Module:
    return Chain(
        *(
            layer
            for _ in range(4)
            for layer in (nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64))
        ),
        features=64,
    )


def frozen() -> nn.Module:
    model = Chain(
        nn.Linear(33, 40), nn.Linear(40, 40), nn.Linear(40, 41), nn.Linear(41, 3), features=33
    )
    model.layers[1].requires_grad_(False)
    model.layers[2].bias.requires_grad_(False)
    return model


def adapted() -> nn.Module:
    return AdaptedChain(
        *(Adapted(64, shifted) for shifted in (False, True, True, False)), features=64
    )


def checkpointed() -> nn.Module:
    return Checkpointed(
        nn.Linear(32, 48), nn.Linear(48, 48), nn.Linear(48, 48), features=32, reentrant=False
    )


def reentrant() -> nn.Module:
    return Checkpointed(
        nn.Linear(32, 48), nn.Linear(48, 48), nn.Linear(48, 48), features=32, reentrant=True
    )


def selective() -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 48))

    return Selective(*(block() for _ in range(6)), features=48)


def embedding() -> nn.Module:
    return Words(5001, 64, tied=False)


def frozen_embedding() -> nn.Module:
    model = Words(5001, 64, tied=False)
    model.embedding.requires_grad_(False)
    return model


def tied() -> nn.Module:
    return Words(301, 24, tied=True)


def sometimes() -> nn.Module:
    return Sometimes(nn.Linear(32, 48), nn.Linear(48, 48), nn.Linear(48, 5), features=32)


def dropped() -> nn.Module:
    return Dropped(*(nn.Linear(64, 64) for _ in range(6)), features=64)


def layers(count: int, features: int = 8) -> nn.Module:
    return Chain(
        *(nn.Linear(features, features, bias=False) for _ in range(count)), features=features
    )


def wide() -> nn.Module:
    return layers(24, 64)


MODELS: dict[str, Callable[[], nn.Module]] = (
    {
        made.__name__: made
        for made in (
            odd,
            gain,
            misaligned,
            blocks,
            frozen,
            adapted,
            checkpointed,
            reentrant,
            selective,
            embedding,
            tied,
            sometimes,
            dropped,
            wide,
        )
    }
    | {
        "frozen embedding": frozen_embedding,
    }
    | {f"{count} layers": functools.partial(layers, count) for count in (16, 32, 64)}
)


class Sign(torch.optim.Optimizer):
    """Lion (Chen et al., 2023), with features that no optimizer of torch has: a state in 16 bits, a
    state that is created in the third step, a state that is no tensor.
    """

    def __init__(
        self,
        params: Iterator[nn.Parameter],
        lr: float = 1e-3,
        beta: float = 0.9,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["count"] = 0
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                state["count"] += 1
                if state["count"] == 3:
                    state["late"] = parameter.clone()
                direction = (
                    state["momentum"].to(parameter.dtype).lerp(parameter.grad, 1 - group["beta"])
                )
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(
                    direction.sign(), alpha=-group["lr"]
                )
                if "late" in state:
                    parameter.lerp_(state["late"], 0.01)
                state["momentum"] = direction.to(torch.bfloat16)  # another tensor at each step


class Counting(torch.optim.Optimizer):
    """SGD with momentum whose rate depends on counters in its groups: a number, a tensor, and a list
    that the first step makes. It also counts its steps in an attribute.
    """

    def __init__(self, params: Iterator[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "seen": torch.zeros(2)})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["k"] += 1
            group["seen"] += 1
            group.setdefault("past", []).append(group["k"])
            rate = 10 * group["lr"] / (group["k"] + len(group["past"]))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault(
                        "momentum", torch.zeros_like(parameter)
                    )
                    momentum.lerp_(parameter.grad, 0.5)
                    parameter.sub_(momentum * rate * group["seen"].prod().rsqrt())


class Estimating(torch.optim.Optimizer):
    """SGD whose rate depends on the gradients of all parameters, as Prodigy's does."""

    def __init__(self, params: Iterator[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "d": 1.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        d = sum(float(parameter.grad.norm()) for parameter in every if parameter.grad is not None)
        for group in self.param_groups:
            group["d"] = 0.9 * group["d"] + 0.1 * d
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * group["d"])


OPTIMIZERS = {
    "counting": lambda groups: Counting(groups),
    "estimating": lambda groups: Estimating(groups),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-1, momentum=0.9, nesterov=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.1),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9, centered=True),
    "sign": lambda groups: Sign(groups),
}

# The states that each keeps for an element, and for a tensor. DeepSpeed's CPU Adam comes through the
# configuration.
ELEMENTWISE = {
    "cpu_adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "fused": ("exp_avg", "exp_avg_sq"),
    "amsgrad": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "sgd": (),
    "counting": ("momentum",),
    "estimating": (),
    "momentum": ("momentum_buffer",),
    "adagrad": ("sum",),
    "nadam": ("exp_avg", "exp_avg_sq"),
    "radam": ("exp_avg", "exp_avg_sq"),
    "rmsprop": ("square_avg", "momentum_buffer", "grad_avg"),
    "sign": ("momentum", "late"),
}
SCALAR = {
    "cpu_adam": ("step",),
    "adamw": ("step",),
    "fused": ("step",),
    "amsgrad": ("step",),
    "adagrad": ("step",),
    "nadam": ("step", "mu_product"),
    "radam": ("step",),
    "rmsprop": ("step",),
    "sign": ("count",),
}
