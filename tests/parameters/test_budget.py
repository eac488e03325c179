"""The parts of an `Offload` share one budget: what fits in it stays in memory, and what does not is on
the drive.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nvme_offload import Offload
from nvme_offload.parameters import setup, slots
from nvme_offload.parameters.buckets import Division

Make = Callable[..., Offload]
WIDTH, LAYERS, ROWS = 256, 8, 64
PARAMETERS = 4 * LAYERS * (WIDTH + 1) * WIDTH
STATES = 2 * PARAMETERS  # of AdamW in fp32
ACTIVATIONS = 4 * LAYERS * ROWS * WIDTH  # outputs of tanh, the last one included
STEPS = 5
# An eighth of the optimizer's share is scratch memory of updates on CPUs.
SCRATCH = 8 / 7


@pytest.fixture(autouse=True)
def buckets_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is a bucket."""
    monkeypatch.setattr(
        setup, "DIVISION", Division(4 * WIDTH * (WIDTH + 1), small_bytes=0, trainable_share=0)
    )


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _written(offload: Offload) -> int:
    """The bytes written to the drive so far. Nothing public has those of parameters."""
    found = 0
    for tier in offload._memory._tiers:
        counters = tier.counters()
        found += 0 if counters is None else counters.bytes_written
    return found


def test_auto_counts_the_memory_that_the_model_frees(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _Layers()
    monkeypatch.setattr("nvme_offload.swap.tier.available_bytes", lambda: PARAMETERS)
    offload = make("auto")
    offload.parameters(model, "cpu")
    model(torch.randn(ROWS, WIDTH)).sum().backward()
    assert _written(offload) == 0


def test_a_gpu_without_memory_for_another_slot_has_fewer(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, made = _Layers(), 0

    class Few(slots.Slot):
        def __init__(self, *args: Any) -> None:
            nonlocal made
            if made == 4:
                raise torch.OutOfMemoryError
            made += 1
            super().__init__(*args)

    monkeypatch.setattr(slots, "Slot", Few)
    model = copy.deepcopy(expected)
    make(4 * PARAMETERS).parameters(model, "cpu", gpu_memory=2 * PARAMETERS)
    for _ in range(3):
        x = torch.randn(ROWS, WIDTH)
        for one in (model, expected):
            one(x).square().mean().backward()
    assert made == 4
    for one, same in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, same.grad)


def _train(offload: Offload, *, activations: bool = True, **settings: Any) -> list[int]:
    """The bytes that each step writes to the drive."""
    model = _Layers()
    offload.parameters(model, "cpu")
    optimizer = offload.optimizer(
        model.parameters(), lr=1e-3, **{"step_in_backward": True, **settings}
    )
    context: Any = contextlib.nullcontext()
    if activations:
        context = offload.activations(min_bytes=4096)
    written = [0]
    for step in range(STEPS):
        with context:
            inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        written.append(_written(offload))
    return [after - before for before, after in itertools.pairwise(written)]


@pytest.mark.parametrize("activations", [True, False])
@pytest.mark.parametrize("mode", [True, False, "provisional"])
def test_a_budget_that_holds_everything_keeps_the_drive_idle(
    make: Make, mode: Any, activations: bool
) -> None:
    needed = PARAMETERS + SCRATCH * STATES + activations * ACTIVATIONS
    budget = int(1.15 * needed)
    assert not any(_train(make(budget), activations=activations, step_in_backward=mode))


def test_parameters_alone_may_take_all_but_a_part_of_the_budget(make: Make) -> None:
    offload, model = make(int(PARAMETERS * 8 / 6) + (1 << 20)), _Layers()
    offload.parameters(model, "cpu")
    for one in range(3):
        model(torch.randn(ROWS, WIDTH)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(one)
    assert not _written(offload)


def test_frozen_parameters_may_take_the_whole_budget(make: Make) -> None:
    offload, model = make(PARAMETERS + (64 << 10)), _Layers().requires_grad_(False)
    offload.parameters(model, "cpu")
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(ROWS, WIDTH))
    assert not _written(offload)


@pytest.mark.parametrize("share", [0.5, 0.7, 0.85])
def test_a_smaller_budget_leaves_the_overhang_to_the_drive(make: Make, share: float) -> None:
    needed = PARAMETERS + STATES + ACTIVATIONS
    budget = int(share * needed)
    # Space for values that pass through: a few layers and their states, and scratch memory.
    slack = 8 * 4 * WIDTH * (WIDTH + 1) + budget // 8
    steps = _train(make(budget))
    assert 0 < max(steps[2:]) <= needed - budget + slack


def test_a_part_that_is_closed_leaves_its_memory_to_the_others(make: Make) -> None:
    offload, model = make("16MB"), _Layers()
    offload.parameters(model, "cpu")
    before = repr(offload)
    for _ in range(3):
        optimizer = offload.optimizer(model.parameters(), host_memory="8MB")
        optimizer.close()
        assert repr(offload) == before
