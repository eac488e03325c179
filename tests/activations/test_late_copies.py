"""Copies that run concurrently with the computation, as on a GPU."""

from __future__ import annotations

import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from activation_models import MODELS, gradients, made, same
from offloading import LateCopier, Make, left

from nvme_offload import AioConfig, IOFailure, save_on_nvme
from nvme_offload.swap.swapper import TensorSwapper


@pytest.mark.parametrize(
    ("name", "budget"), [*((name, 1) for name in MODELS), ("layers", 4), ("transformer", 4)]
)
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


class SmallDevice(LateCopier):
    """A device with memory for one restored tensor."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.refused = 0
        self._restored: list[weakref.ref[torch.Tensor]] = []

    def restore(self, place: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Any]:
        if any(one() is not None for one in self._restored):
            self.refused += 1
            raise torch.OutOfMemoryError("made up")
        restored, copy = super().restore(place, device)
        self._restored = [weakref.ref(restored)]
        return restored, copy


def test_without_memory_to_restore_ahead_backward_restores_what_it_needs(make: Make) -> None:
    model, x = made("layers")
    expected = gradients(model, x)
    offload = make()
    offload._cache._copier = copier = SmallDevice()
    assert same(gradients(model, x, offload), expected)
    assert copier.refused > 10
    with offload:
        pass
    offload._cache._wait_at_end()


def test_a_read_ahead_that_fails_is_repeated(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made("layers")
    expected = gradients(model, x)
    offload = make(host_memory=32 << 10)
    offload._cache._copier = LateCopier(seed=1)
    swap_in, left_calls = TensorSwapper.swap_in, 0

    def fails_once(swapper: TensorSwapper, name: str) -> torch.Tensor:
        nonlocal left_calls
        left_calls -= 1
        if left_calls == 0:
            raise IOFailure(5, "made up", operation="read", path="", offset=0, nbytes=1, done=0)
        return swap_in(swapper, name)

    monkeypatch.setattr(TensorSwapper, "swap_in", fails_once)
    unharmed = 0
    for left_calls in range(1, 13):
        with contextlib.suppress(IOFailure):
            assert same(gradients(model, x, offload), expected)
            unharmed += 1
        assert left_calls <= 0
    assert 0 < unharmed < 12  # the reads that backward waited for do raise
    gc.collect()
    with offload:
        pass
    offload._cache._wait_at_end()
