"""The store that moves no byte: it takes a drive's time, and neither its room nor anybody's
memory.
"""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch
from patience import PATIENCE

from nvme_offload._aio import FaultKind
from nvme_offload.errors import CancelledError, IOFailure, UsageError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine
from nvme_offload.swap.swapper import TensorSwapper
from sweeps.null import NullStore, UntouchedPool

MIB = 1 << 20


def test_no_byte_is_moved_and_every_one_is_counted() -> None:
    with NullStore() as store:
        memory = np.full(5 * MIB + 3, 7, np.uint8)
        assert store.put("a", np.zeros_like(memory)).wait(PATIENCE) == memory.size
        assert store.get("a", memory).wait(PATIENCE) == memory.size
        assert np.all(memory == 7)
        stats = store.engine.stats()
        assert (stats.read.bytes, stats.write.bytes) == (memory.size, memory.size)


def test_transfers_take_no_less_than_the_speeds_say() -> None:
    """In either direction, and both at once share the drive; how much longer they take is this
    machine's business.
    """
    read_speed, write_speed = 2e9, 4e9
    with NullStore(read_speed, write_speed) as store:
        memory = np.zeros(64 * MIB, np.uint8)
        for name in ("a", "b"):
            store.put(name, memory).wait(PATIENCE)
        written = store.engine.stats().write
        assert written.busy_seconds >= 2 * memory.size / write_speed
        both = [store.get("a", memory), store.put("b", memory)]
        for ticket in both:
            ticket.wait(PATIENCE)
        stats = store.engine.stats()
        longest = max(stats.read.busy_seconds, stats.write.busy_seconds - written.busy_seconds)
        # the slower one, with a part of the other in between
        assert longest >= memory.size / read_speed
        assert longest >= 0.9 * memory.size * (1 / read_speed + 1 / write_speed)


def test_a_store_and_a_pool_larger_than_the_machine() -> None:
    with NullStore() as store:
        store.reserve(1 << 42)
        pool = UntouchedPool(1 << 40)
        with pool, TensorSwapper(store, pool) as swapper:
            for number in range(6):
                swapper.create(str(number), 200 << 30)
                swapper.release(str(number), changed=True)
            room = swapper.swap_in("0")
            assert (room.numel(), room.dtype) == (200 << 30, torch.uint8)
            swapper.release("0", changed=False)
            assert swapper.stats().peak_bytes <= 1 << 40


def test_faults_and_followers_are_as_on_a_drive() -> None:
    with NullStore(faults=[(1, 1, FaultKind.FAIL, errno.EIO)]) as store:
        memory = np.zeros(4096, np.uint8)
        store.put("a", memory).wait(PATIENCE)
        failing = store.put("b", memory)
        follower = store.get("a", memory, after=[failing])
        with pytest.raises(CancelledError):
            follower.wait(PATIENCE)
        with pytest.raises(IOFailure):
            failing.wait(PATIENCE)


@pytest.mark.parametrize("name", ["nul", "null:", "null:0:1", "null:1e9", "null:-1:5", "nullable"])
def test_speeds_that_no_drive_has(name: str) -> None:
    with pytest.raises(UsageError, match="no backend called"):
        Engine(AioConfig(), _backend=name)
