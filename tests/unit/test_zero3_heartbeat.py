"""The sign of life of a tier: what it says, when it keeps quiet, and that it ends with the tier."""

from __future__ import annotations

import gc
import logging
import threading

import pytest
import torch

from nvme_offload.hardware.config import AioConfig
from nvme_offload.swap.tier import Tier
from nvme_offload.zero3 import heartbeat

MIB = 1 << 20


@pytest.fixture
def tier(tmp_path):
    """A tier whose memory holds one of the values that `use` moves."""
    made = Tier([str(tmp_path)], AioConfig(backend="posix", direct="auto"), host_memory=MIB)
    made.require(4 * MIB)
    yield made
    made.close()


def use(tier, *names):
    for name in names:
        if name not in tier.swapper:
            tier.swapper.swap_out(name, torch.zeros(MIB, dtype=torch.uint8))
        tier.swapper.swap_in(name)
        tier.swapper.release(name, changed=False)
    tier.swapper.flush()


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "nvme_offload")
    return lambda: [message for message in caplog.messages if message.startswith("still going")]


def test_what_moved_is_told_once(tier, said):
    beating = heartbeat.Heartbeat(tier)
    use(tier, "a", "b", "a")
    beating.beat()
    assert len(said()) == 1
    assert "read 1 MiB and wrote 2 MiB" in said()[0]
    beating.beat()
    assert len(said()) == 1


def test_a_step_that_ended_has_told_already(tier, said):
    heartbeat.watch(tier)
    beating = heartbeat._beating[tier]
    use(tier, "a", "b")
    heartbeat.rest(tier)
    beating.beat()
    assert said() == []
    use(tier, "a")
    beating.beat()
    assert len(said()) == 1
    assert "read 1 MiB and wrote 0 bytes" in said()[0]


def test_a_tier_that_keeps_nothing_yet_is_quiet(tmp_path, said):
    tier = Tier([str(tmp_path)], AioConfig(backend="posix", direct="auto"), host_memory=MIB)
    beating = heartbeat.Heartbeat(tier)
    beating.beat()
    tier.require(4 * MIB)
    beating.beat()
    use(tier, "a", "b")
    beating.beat()
    assert len(said()) == 1
    tier.close()
    beating.beat()
    assert len(said()) == 1


def test_the_beat_comes_by_itself_and_ends_with_the_tier(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "nvme_offload")
    monkeypatch.setattr(heartbeat, "_SECONDS", 0.01)
    tier = Tier([str(tmp_path)], AioConfig(backend="posix", direct="auto"), host_memory=MIB)
    tier.require(4 * MIB)
    before = set(threading.enumerate())
    heartbeat.watch(tier)
    heartbeat.watch(tier)
    (thread,) = set(threading.enumerate()) - before
    told = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: told.set()
    heartbeat._log.addHandler(handler)
    try:
        use(tier, "a", "b")
        assert told.wait(60)
    finally:
        heartbeat._log.removeHandler(handler)
    tier.close()
    del tier
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
