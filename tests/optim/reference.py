"""The reference for `NVMeOptimizer`: the same class in memory, over fp32 copies of 16-bit
parameters. And parameters and gradients for both.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))
from patience import PATIENCE

from nvme_offload.errors import UsageError
from nvme_offload.optim import NVMeOptimizer

# Odd sizes, a scalar, one element, no element, and a tensor that is larger than a bucket of the
# smallest budget.
SHAPES = ((40, 30), (7,), (300, 100), (), (1,), (0, 3), (64, 64), (5, 3, 2))

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw-foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "adamw-fused": functools.partial(torch.optim.AdamW, fused=True),
    "adamw-loop": functools.partial(torch.optim.AdamW, foreach=False, fused=False),
    "adam-amsgrad": functools.partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    "adam-maximize": functools.partial(torch.optim.Adam, maximize=True),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": functools.partial(torch.optim.Adagrad, initial_accumulator_value=0.3),
    "rmsprop": functools.partial(torch.optim.RMSprop, centered=True, momentum=0.5),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
}


class Lion(torch.optim.Optimizer):
    """Of no module of torch's: the sign of an average. Counts its steps in the group."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "count": 0}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                first, second = group["betas"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"] / group["count"])
                parameter.sub_(
                    state["average"].lerp(parameter.grad, 1 - first).sign_(), alpha=group["lr"]
                )
                state["average"].lerp_(parameter.grad, 1 - second)


def breaking() -> Any:
    """A new class of AdamW that raises after its update while it is `broken`."""

    class Breaking(torch.optim.AdamW):
        broken = False

        def step(self, closure: Any = None) -> None:
            super().step(closure)
            if Breaking.broken:
                raise RuntimeError("out of something")

    return Breaking


OPTIMIZERS["lion"] = Lion
# One of each kind that the package treats differently: with two states, in a fused step, with three,
# none, one and numbers, states before the first step, states of rows and columns, and of a class that
# is tried and counts in its groups.
KINDS = ("adamw", "adamw-fused", "rmsprop", "sgd", "asgd", "adagrad", "adafactor", "lion")


class Reference:
    """*optimizer_class* over fp32 copies of the parameters that have 16 bits; these follow by a
    cast.
    """

    def __init__(
        self,
        params: Sequence[Any],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        **kwargs: Any,
    ) -> None:
        groups = [
            dict(entry) if isinstance(entry, dict) else {"params": [entry]} for entry in params
        ]
        self.pairs = []
        for group in groups:
            pairs = [
                (
                    parameter,
                    parameter.detach().float() if parameter.dtype.itemsize == 2 else parameter,
                )
                for parameter in group["params"]
            ]
            self.pairs += pairs
            group["params"] = [master for _, master in pairs]
        self.optimizer = optimizer_class(
            groups if isinstance(params[0], dict) else [master for _, master in self.pairs],
            **kwargs,
        )

    def step(self) -> None:
        """One step."""
        for parameter, master in self.pairs:
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in self.pairs:
                if master is not parameter:
                    parameter.copy_(master)


def parameters(
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> list[torch.nn.Parameter]:
    """The same ones at each call."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
        for shape in shapes
    ]


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """Three layers, the same every time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(40, 200),
        torch.nn.Tanh(),
        torch.nn.Linear(200, 100),
        torch.nn.Tanh(),
        torch.nn.Linear(100, 3),
    ).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Inputs for `model`."""
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(step)).to(dtype)


def loss_of(net: torch.nn.Module, step: int) -> torch.Tensor:
    """The loss of a `model` for a `batch`."""
    loss: torch.Tensor = net(batch(step, next(net.parameters()).dtype)).float().square().mean()
    return loss


def step_of(net: torch.nn.Module, optimizer: Any, step: int) -> None:
    """One step of a `model`."""
    optimizer.zero_grad()
    loss_of(net, step).backward()
    optimizer.step()


def set_gradients(params: Sequence[torch.Tensor], step: int, scale: float = 1.0) -> None:
    """The gradients of a step; they do not depend on the parameters' values."""
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in params:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(
            parameter.device, parameter.dtype
        )


def train(params: Sequence[torch.Tensor], optimizer: Any, steps: int = 3, first: int = 0) -> None:
    """Some steps."""
    for step in range(first, first + steps):
        set_gradients(params, step)
        optimizer.step()


_MANY_STEPS = """
import gc, importlib, json, re, sys
import torch
from nvme_offload.optim import NVMeOptimizer

def now():
    # Without pages mapped from a state dict's file, which are page cache.
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

path, shapes, dtype, optimizer, host_memory, options = json.loads(sys.argv[1])
module, _, kind = optimizer.rpartition(".")
kind = getattr(importlib.import_module(module), kind)
dtype = getattr(torch, dtype)
params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
small = torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype))
for parameter in [*params, small]:
    parameter.grad = torch.full_like(parameter, 1e-3)
with NVMeOptimizer([small], kind, paths=path, host_memory="30MB", **options) as optimizer:  # what else there is to load and to make
    optimizer.step()
    optimizer.state_dict()
del optimizer
gc.collect()
before = most = now()
with NVMeOptimizer(params, kind, paths=path, host_memory=host_memory, **options) as optimizer:
    for step in range(24):
        optimizer.step()
        most = max(most, now())
        if step % 12 == 6:
            torch.save(optimizer.state_dict(), path + "/saved")
            optimizer.state_dict()
            optimizer.save(path + "/kept")
            most = max(most, now())
    print(most - before, sum(bucket.nbytes for bucket in optimizer._steps.binding.buckets))
"""


def taken_by_many_steps(
    path: Path,
    *,
    shapes: Sequence[tuple[int, ...]],
    optimizer: str,
    host_memory: str,
    dtype: str = "float32",
    options: Mapping[str, Any] | None = None,
) -> tuple[int, int]:
    """Bytes of memory that many steps of *optimizer*, a class by its name, take at most in a
    separate process, with state dicts; and bytes of states.
    """
    given = json.dumps([str(path), shapes, dtype, optimizer, host_memory, options or {}])
    folders = map(str, Path(__file__).parents[:2])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(folders),
    }
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _MANY_STEPS, given],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    taken, states = map(int, ran.stdout.split())
    return taken, states


def smallest(make: Callable[[int], NVMeOptimizer]) -> NVMeOptimizer:
    """What *make* makes with the least host memory that is not refused."""
    with pytest.raises(UsageError) as refusal:
        make(1)
    named = re.search(r"at least (\d+)", str(refusal.value))
    assert named is not None, refusal
    return make(int(named[1]))


def tight(
    params: Any, place: Path, optimizer_class: Any = torch.optim.AdamW, **options: Any
) -> NVMeOptimizer:
    """One with the least host memory that is not refused."""
    return smallest(
        lambda cap: NVMeOptimizer(params, optimizer_class, paths=place, host_memory=cap, **options)
    )


def copied(params: Sequence[torch.Tensor]) -> list[torch.nn.Parameter]:
    """Copies of these parameters."""
    return [torch.nn.Parameter(parameter.detach().clone()) for parameter in params]


def differing(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[int]:
    """Where the two differ, by a bit."""
    return [
        index
        for index, (one, other) in enumerate(zip(ones, others, strict=True))
        if one.dtype != other.dtype
        or not torch.equal(
            one.detach().cpu().contiguous().reshape(-1).view(torch.uint8),
            other.detach().cpu().contiguous().reshape(-1).view(torch.uint8),
        )
    ]


def compared(
    program: Callable[[Callable[..., torch.optim.Optimizer]], Sequence[torch.Tensor]],
    place: Path,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> list[int]:
    """Where the results of *program* differ between optimizers of *kind* in memory and
    `NVMeOptimizer`. It receives a function that makes an optimizer of parameters.
    """
    made: list[NVMeOptimizer] = []

    def ours(params: Any, **given: Any) -> NVMeOptimizer:
        made.append(NVMeOptimizer(params, kind, paths=place, **options, **given))
        return made[-1]

    expected = program(lambda params, **given: kind(list(params), **given))
    found = program(ours)
    for optimizer in made:
        optimizer.close()
    return differing(found, expected)


def unlike(one: Any, other: Any, at: str = "") -> list[str]:
    """Where two state dicts differ."""
    if torch.is_tensor(one) and torch.is_tensor(other):
        return [at] if one.shape != other.shape or differing([one], [other]) else []
    if isinstance(one, dict) and isinstance(other, dict):
        missing = [f"{at}.{key}" for key in one.keys() ^ other.keys()]
        return missing + [
            place
            for key in one.keys() & other.keys()
            for place in unlike(one[key], other[key], f"{at}.{key}")
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            place
            for index, pair in enumerate(zip(one, other, strict=True))
            for place in unlike(*pair, f"{at}.{index}")
        ]
    return [] if type(one) is type(other) and one == other else [f"{at}: {one!r} and {other!r}"]
