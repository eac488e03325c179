"""Streamed parameters: events order the copies in and out of slots and the kernels that use them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import covering
from modules import Blocks
from torch import nn
from virtual_gpu import Event, VirtualGpu, virtual_gpu

from nvme_offload import Offload
from nvme_offload.parameters import setup

Make = Callable[..., Offload]
WIDTH = 24


def _model(checkpointing: bool) -> nn.Module:
    """Blocks, one of which is used twice."""
    model = Blocks(checkpointing, count=28, width=WIDTH)
    model.blocks.append(model.blocks[3])
    return model


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, evaluates: bool) -> list[float]:
    losses = []
    for step in range(4):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if evaluates and step % 2:
            losses += [values.sum().item() for values in model.state_dict().values()]
            with torch.no_grad():
                losses.append(model(x).sum().item())
                trained = [one.data for one in model.parameters()]
                for factor in 0.5, 1.1:  # the first values go with the assignment of the second
                    for one, values in zip(model.parameters(), trained, strict=True):
                        one.data = factor * values
                    losses.append(model(x).sum().item())
                for one, values in zip(model.parameters(), trained, strict=True):
                    if one.dim() == 2:
                        one.data = values
                del trained, values
    return losses


ADAM = {"lr": 0.01, "foreach": False}
LITTLE = {"of the program": 60 << 10, "in backward": 176 << 10, "provisional": 176 << 10}
# with the host memory that keeps values on the drive


@covering(
    gpu_memory=["auto", 12 << 10, 30 << 10],
    place=["in memory", "on the drive"],
    updates=list(LITTLE),
)
def test_events_order_all_accesses(
    make: Make, monkeypatch: Any, place: str, gpu_memory: Any, updates: str
) -> None:
    monkeypatch.setattr(setup, "POISON", False)  # which waits for the GPU
    chance = random.Random(f"{place} {gpu_memory} {updates}")
    likely = chance.choice([0.0, 0.5, 1.0])
    checkpointing, evaluates = chance.random() < 0.5, chance.random() < 0.6
    in_memory = _model(checkpointing)
    losses = _train(in_memory, torch.optim.Adam(in_memory.parameters(), **ADAM), evaluates)
    model = _model(checkpointing)
    with virtual_gpu(VirtualGpu(lambda: chance.random() < likely)):
        offload = make(10 << 20 if place == "in memory" else LITTLE[updates])
        offload.parameters(model, device="cuda", gpu_memory=gpu_memory)
        if updates != "of the program":
            when: Any = updates if updates == "provisional" else True
            optimizer: Any = offload.optimizer(
                model.parameters(), torch.optim.Adam, step_in_backward=when, **ADAM
            )
        else:
            optimizer = torch.optim.Adam(model.parameters(), **ADAM)
        assert _train(model, optimizer, evaluates) == losses
        if updates == "provisional":
            assert optimizer.stats().updated_in_backward > 0
        for one, other in zip(model.parameters(), in_memory.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("gpu_memory", [12 << 10, 30 << 10])
def test_the_cpu_waits_for_no_copy_and_no_kernel(
    make: Make, monkeypatch: Any, gpu_memory: int
) -> None:
    monkeypatch.setattr(setup, "POISON", False)
    model = _model(False)
    gpu = VirtualGpu()
    waits: list[int] = []
    synchronize = Event.synchronize

    def counted(event: Event) -> None:
        waits[-1] += bool(event.clock - gpu.host)
        synchronize(event)

    monkeypatch.setattr(Event, "synchronize", counted)
    waits.append(0)
    with virtual_gpu(gpu):
        make(10 << 20).parameters(model, device="cuda", gpu_memory=gpu_memory)
        with torch.no_grad():
            for _ in range(6):
                waits.append(0)
                model(torch.ones(4, WIDTH))
                for parameter in reversed(list(model.parameters())):
                    parameter.mul_(0.9)
        assert waits[4:] == [0, 0, 0], waits
