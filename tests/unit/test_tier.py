"""A tier's memory grows on demand, while it holds values."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from pathlib import Path

import pytest
import torch
from processes import finished, in_fork

from nvme_offload.errors import UsageError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.swap.tier import Tier


@pytest.fixture
def tier(tmp_path: Path):
    """A tier of at most 256 MiB."""
    tier = Tier([str(tmp_path)], AioConfig(direct="auto"), host_memory=256 << 20)
    yield tier
    tier.close()


def test_memory_grows_and_nothing_in_it_moves(tier):
    tier.require(1 << 20)
    tier.make_scratch("scratch", 1 << 20)
    scratch = tier.scratch("scratch").fill_(3)
    value = torch.arange(1 << 20, dtype=torch.int32)
    tier.swapper.swap_out("value", value)
    room = tier.swapper.create("in use", 1 << 20).fill_(7)
    for required in (100 << 20, 500 << 20):
        tier.require(required)
        assert tier.scratch("scratch").data_ptr() == scratch.data_ptr()
        assert room.eq(7).all()
        assert scratch.eq(3).all()
    tier.swapper.release("in use", changed=True)
    assert torch.equal(tier.swapper.swap_in("value").view(torch.int32), value)
    assert tier.swapper.swap_in("in use").data_ptr() == room.data_ptr()
    assert tier.swapper.create("all the rest", 250 << 20).fill_(1).numel() == 250 << 20
    assert (tier.swapper.stats().bytes_written, tier.swapper.stats().bytes_read) == (0, 0)


def test_memory_grows_to_the_cap_and_no_further(tier):
    tier.require(200 << 20)
    for _ in range(3):
        tier.require(200 << 20)
    assert tier._pool.nbytes == 256 << 20


def test_what_the_collector_abandons_goes_at_the_next_use(tier):
    tier.require(1 << 20)
    tier.make_scratch("scratch", 4096)
    tier.swapper.swap_out("value", torch.zeros(4096))
    tier.require(1 << 20)
    swapper = tier.swapper
    with tier.store._lock:  # as in the middle of a call of this thread
        tier.abandon({"scratch", "value", "no value"}, [1 << 20])
    assert "value" in swapper
    assert "value" not in tier.swapper
    with pytest.raises(KeyError):
        tier.scratch("scratch")
    assert tier._needed_bytes == 1 << 20


LEFT_OPEN = """
import atexit, sys
atexit.register(lambda: print(*(float(one[0, 0]) for one in updated)))  # after all finalizers
import torch
path, tests = sys.argv[1:]
sys.path.append(tests)
from late import only_when_awaited
from nvme_offload import NVMeOptimizer, save_on_nvme
updated = [torch.nn.Parameter(torch.full((300, 300), 0.5)) for _ in range(2)]
queue = NVMeOptimizer(
    [{"params": one} for one in updated], torch.optim.SGD, lr=0.125, paths=path, overlap_step=True
)
weights = [torch.nn.Parameter(torch.randn(512, 512)) for _ in range(6)]
optimizer = NVMeOptimizer(weights, paths=path, host_memory="9MB")
for weight in weights:
    weight.grad = torch.ones_like(weight)
optimizer.step()
offload = save_on_nvme(paths=path, host_memory="4MB", min_bytes=1 << 16)
values = torch.randn(512, 512, requires_grad=True)
with offload:
    for _ in range(16):
        values = values.sin()
late = only_when_awaited()
late.__enter__()
for _ in range(3):
    for one in updated:
        one.grad = torch.ones(300, 300)
    queue.step()
"""


def test_objects_left_open_are_closed_in_order_when_the_interpreter_ends(tmp_path):
    """torch has registered its finalizers by then, so finalizers registered later run earlier. The
    last updates under a next forward pass are made.
    """
    ended = finished(
        [sys.executable, "-W", "ignore", "-c", LEFT_OPEN, tmp_path, Path(__file__).parents[1]]
    )
    said = [line for line in ended.stderr.splitlines() if "is on the root filesystem" not in line]
    assert (ended.returncode, said, ended.stdout) == (0, [], "0.125 0.125\n")
    assert [*tmp_path.iterdir()] == []


def test_a_forked_child_is_refused_and_leaves_a_tier_to_its_parent(tier):
    tier.require(1 << 20)
    value = torch.arange(1 << 10)
    tier.swapper.swap_out("value", value)

    def uses_it():
        with pytest.raises(UsageError):
            tier.swapper.swap_in("value")
        gc.collect()

    ended = in_fork(uses_it)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("", "", 0)
    assert torch.equal(tier.swapper.swap_in("value").view(torch.int64), value)


def test_the_log_says_which_engine_settings_are_in_effect(tmp_path, caplog):
    caplog.set_level(logging.INFO, "nvme_offload")
    aio = AioConfig(block_size=256 << 10, queue_depth=7, thread_count=2, backend="posix")
    Tier([str(tmp_path)], aio, host_memory=1 << 20).close()
    lines = [line for line in caplog.messages if line.startswith("engine for")]
    assert lines == [
        f"engine for {tmp_path}: posix, blocks of 256 KiB, 7 in flight in each of 2 threads"
    ]


def test_a_closed_tier_frees_its_host_memory(tmp_path):
    """Its owner, such as an optimizer that the program closes, may live on."""
    made = Tier([str(tmp_path)], AioConfig(backend="posix", direct="auto"), host_memory=1 << 20)
    made.require(1 << 16)
    made.swapper.create("one", 4096)
    made.make_scratch("scratch", 4096)
    made.require(1 << 19)
    memory = weakref.ref(made._pool._arena)
    made.close()
    gc.collect()
    assert memory() is None
