"""Which buckets are copied to the device."""

from __future__ import annotations

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


def test_passes_that_use_each_bucket_once_fetch_the_same_ones(
    make: Callable[..., Offload], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the tier learns which of them to keep in memory."""
    monkeypatch.setattr(setup, "DIVISION", Division(BUCKET, small_bytes=0, trainable_share=0))
    layers, slot_count, in_memory = 48, 20, 20
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    monkeypatch.setattr(setup, "STREAMED_IN_MEMORY", 1)
    offload = make(in_memory * BUCKET)
    offload.parameters(model, "cpu", host_memory=in_memory * BUCKET, gpu_memory=slot_count * BUCKET)
    fetched: list[str] = []
    read = 0
    of_home, of_store = home.Home.fill, TensorStore.start

    def fill(one: home.Home, slot: slots.Slot, bucket: Bucket) -> None:
        fetched.append(bucket.name)
        of_home(one, slot, bucket)

    def start(store: TensorStore, transfer: Transfer, memory: torch.Tensor) -> None:
        nonlocal read
        read += 0 if transfer.writes else transfer.nbytes
        of_store(store, transfer, memory)

    monkeypatch.setattr(home.Home, "fill", fill)
    monkeypatch.setattr(TensorStore, "start", start)
    passes: list[list[str]] = []
    with torch.inference_mode():
        for _ in range(8):
            fetched.clear()
            read = 0
            model(torch.ones(2, WIDTH))
            passes.append(list(fetched))
    assert passes[-1] == passes[-2]
    assert len(passes[-1]) == layers - (slot_count - AHEAD - 1)
    # Some of the memory has buckets that are read and used next.
    assert read <= (len(passes[-1]) - in_memory + 6) * BUCKET
