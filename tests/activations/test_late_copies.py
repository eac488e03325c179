"""Copies that go on beside the computation, as a GPU's do: here they end when they are waited for, or when a test says so."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from activation_models import MODELS, gradients, made, same
from conftest import left

from nvme_offload import AioConfig, save_on_nvme
from nvme_offload.activations.copies import Copier


class LateCopy:
    """A copy that is made when it is waited for, found to be done, or must be: whatever comes in between sees the memory as it was."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor, chance: random.Random) -> None:
        self._pair: tuple[torch.Tensor, torch.Tensor] | None = (target, source)
        self._chance = chance

    def done(self) -> bool:
        if self._pair is not None and self._chance.random() < 0.2:
            self.wait()
        return self._pair is None

    def wait(self) -> None:
        if self._pair is not None:
            self._pair[0].copy_(self._pair[1])
            self._pair = None

    def let_go(self) -> None:
        self.wait()

    def precede(self, storage: torch.UntypedStorage) -> None:
        self.wait()


class LateCopier(Copier):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(seed)

    def overlaps(self, device: torch.device) -> bool:
        return True

    def _start(self, target: torch.Tensor, source: torch.Tensor, saving: bool) -> Any:
        target.fill_(77)
        return LateCopy(target, source, self._chance)


@pytest.mark.parametrize("budget", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_bits(name: str, budget: int, tmp_path: Path) -> None:
    model, x = made(name)
    largest = {"layers": 16384, "convolutions": 65536, "transformer": 131072, "recurrent": 1540096, "odd": 409600}[name]
    expected = [gradients(model.eval(), x, seed=seed) for seed in range(2)]
    offload = save_on_nvme(tmp_path, 1 << 10, budget * largest, aio=AioConfig(block_size=16 << 10, queue_depth=4, direct="auto"))
    offload._shelf._copier = LateCopier(seed=budget)
    for seed in range(2):
        assert same(gradients(model, x, offload, seed=seed), expected[seed])
    gc.collect()
    with offload:
        pass
    offload._shelf._wait_at_end()
    assert left(offload) == (0, 0, [])
    assert offload.stats().bytes_read > 0 or budget > 1
    offload.close()
