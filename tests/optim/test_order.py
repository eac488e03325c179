"""Updates on a GPU: events order the copies of states and the kernels that use them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from virtual_gpu import VirtualGpu, virtual_gpu

from nvme_offload import AioConfig, NVMeOptimizer

WIDTH = 24
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "after backward": ({}, {"clips": True}),
    "in backward": ({"step_in_backward": True}, {}),
    "provisional": ({"step_in_backward": "provisional"}, {"clips": True}),
    "under the next pass": ({"overlap_step": True}, {"accumulates": 2}),
}


def _train(
    model: nn.Module, optimizer: Any, *, clips: bool = False, accumulates: int = 1
) -> list[float]:
    losses = []
    for step in range(5):
        for part in range(accumulates):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + part))
            loss = model(x).square().mean()
            loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)  # which some steps exceed
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(16)))


@pytest.mark.parametrize("host_memory", [48 << 10, 10 << 20], ids=["on the drive", "in memory"])
@pytest.mark.parametrize("mode", MODES)
def test_events_order_all_accesses(mode: str, host_memory: int, tmp_path: Path) -> None:
    settings, training = MODES[mode]
    chance = random.Random(f"{mode} {host_memory}")
    likely = chance.choice([0.0, 0.5])
    adam = {"lr": 0.01, "foreach": False}
    in_memory = _model()
    losses = _train(in_memory, torch.optim.Adam(in_memory.parameters(), **adam), **training)
    model = _model()
    with virtual_gpu(VirtualGpu(lambda: chance.random() < likely)):
        optimizer = NVMeOptimizer(
            model.parameters(),
            torch.optim.Adam,
            paths=tmp_path,
            host_memory=host_memory,
            aio=AioConfig(block_size=16 << 10, queue_depth=4, direct="auto"),
            **adam,
            **settings,
        )
        assert _train(model, optimizer, **training) == losses
        for one, other in zip(model.parameters(), in_memory.parameters(), strict=True):
            assert torch.equal(one, other)
        optimizer.close()
