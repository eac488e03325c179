"""A tier's memory grows as it is required, and never holds the old and the new at once."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch

import nvme_offload.tier
from nvme_offload.config import AioConfig
from nvme_offload.tier import Tier


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A tier of at most 256 MiB, every pool of which tells whether another one's memory is still there."""
    memories: list[weakref.ref] = []

    class Pool(nvme_offload.tier.PinnedPool):
        def __init__(self, nbytes: int) -> None:
            assert all(memory() is None for memory in memories), "two pools at once"
            super().__init__(nbytes)
            memories.append(weakref.ref(self._arena))

    monkeypatch.setattr(nvme_offload.tier, "PinnedPool", Pool)
    tier = Tier([str(tmp_path)], AioConfig(direct="auto"), host_memory=256 << 20)
    tier.memories = memories
    yield tier
    tier.close()


def test_memory_grows_without_the_old_beside_the_new(tier):
    tier.require(1 << 20)
    tier.make_scratch("scratch", 1 << 20)
    value = torch.arange(1 << 20, dtype=torch.int32)
    tier.swapper.swap_out("value", value)
    tier.require(100 << 20)
    tier.require(500 << 20)
    assert len(tier.memories) == 3
    assert tier.scratch("scratch").numel() == 1 << 20
    assert torch.equal(tier.swapper.swap_in("value").view(torch.int32), value)


def test_memory_in_use_stays_where_it_is(tier):
    tier.require(1 << 20)
    tier.make_scratch("scratch", 1 << 20)
    room = tier.swapper.create("value", 1 << 20)
    tier.require(100 << 20)
    assert len(tier.memories) == 1
    room.fill_(7)
    tier.swapper.release("value", changed=True)
    assert tier.scratch("scratch").numel() == 1 << 20
    assert tier.swapper.swap_in("value").eq(7).all()
