"""Copies that go on beside the computation, as those of a GPU do."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from activation_models import MODELS, gradients, made, same
from offloading import LateCopier, left

from nvme_offload import AioConfig, save_on_nvme


@pytest.mark.parametrize("budget", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_bits(name: str, budget: int, tmp_path: Path) -> None:
    model, x = made(name)
    largest = {
        "layers": 16384,
        "convolutions": 65536,
        "transformer": 131072,
        "recurrent": 1540096,
        "odd": 409600,
    }[name]
    expected = [gradients(model.eval(), x, seed=seed) for seed in range(2)]
    offload = save_on_nvme(
        tmp_path,
        1 << 10,
        budget * largest,
        aio=AioConfig(block_size=16 << 10, queue_depth=4, direct="auto"),
    )
    offload._cache._copier = LateCopier(seed=budget)
    for seed in range(2):
        assert same(gradients(model, x, offload, seed=seed), expected[seed])
    gc.collect()
    with offload:
        pass
    offload._cache._wait_at_end()
    assert left(offload) == (0, 0, [])
    assert offload.stats().bytes_read > 0 or budget > 1
    offload.close()
