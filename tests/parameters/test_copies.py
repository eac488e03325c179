"""Which buckets are copied to the device."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from nvme_offload import Offload
from nvme_offload.parameters import home, setup, slots
from nvme_offload.parameters.buckets import Bucket, Division
from nvme_offload.parameters.streamer import AHEAD
from nvme_offload.store.store import TensorStore
from nvme_offload.store.transfer import Transfer

WIDTH = 32
BUCKET = WIDTH * WIDTH * 4


class _Copies:
    """Names of the buckets that were fetched, and bytes that were read from the drive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begin()
        of_home, of_store = home.Home.fill, TensorStore.start

        def fill(one: home.Home, slot: slots.Slot, bucket: Bucket) -> None:
            self.fetched.append(bucket.name)
            of_home(one, slot, bucket)

        def start(store: TensorStore, transfer: Transfer, memory: torch.Tensor) -> None:
            self.read += 0 if transfer.writes else transfer.nbytes
            of_store(store, transfer, memory)

        monkeypatch.setattr(home.Home, "fill", fill)
        monkeypatch.setattr(TensorStore, "start", start)
        monkeypatch.setattr(setup, "DIVISION", Division(BUCKET, small_bytes=0, trainable_share=0))
        monkeypatch.setattr(setup, "STREAMED_IN_MEMORY", 1)

    def begin(self) -> None:
        self.fetched: list[str] = []
        self.read = 0


def test_passes_that_use_each_bucket_once_fetch_the_same_ones(
    make: Callable[..., Offload], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the tier learns which of them to keep in memory."""
    copies = _Copies(monkeypatch)
    layers, slot_count, in_memory = 48, 20, 20
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    offload = make(in_memory * BUCKET)
    offload.parameters(model, "cpu", host_memory=in_memory * BUCKET, gpu_memory=slot_count * BUCKET)
    passes: list[list[str]] = []
    with torch.inference_mode():
        for _ in range(8):
            copies.begin()
            model(torch.ones(2, WIDTH))
            passes.append(copies.fetched)
    assert passes[-1] == passes[-2]
    assert len(passes[-1]) == layers - (slot_count - AHEAD - 1)
    # Some of the memory has buckets that are read and used next.
    assert copies.read <= (len(passes[-1]) - in_memory + 6) * BUCKET


class _Experts(nn.Module):
    """Layers that choose one of four experts for each input."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        for experts, number in zip(self.layers, chosen, strict=True):
            x = torch.tanh(experts[number](x))
        return x


def test_passes_in_random_orders_fetch_little_but_what_they_use(
    make: Callable[..., Offload], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = _Copies(monkeypatch)
    layers, slot_count, in_memory, passes = 10, 6, 22, 60
    model = _Experts(layers)
    offload = make(in_memory * BUCKET)
    offload.parameters(model, "cpu", host_memory=in_memory * BUCKET, gpu_memory=slot_count * BUCKET)
    chance = random.Random(0)
    with torch.inference_mode():
        for number in range(2 * passes):
            if number == passes:
                copies.begin()
            model(torch.ones(2, WIDTH), [chance.randrange(4) for _ in range(layers)])
    uses = passes * layers
    assert len(copies.fetched) <= 1.2 * uses
    assert copies.read <= 0.7 * uses * BUCKET  # chance alone finds 22 of 40 in memory
