"""Provisional updates of states that stay in host memory, which keeps two versions: the bits of updates
after backward(), whatever happens in between. Only updates on GPUs are made so; here also on CPUs.
"""

from __future__ import annotations

import itertools
import random

import pytest
import test_provisional
import torch
from reference import loss_of, model
from test_provisional import (  # noqa: F401  # again, with the fixture of this module
    assert_same,
    both,
    closing,
    step_of,
    test_a_model_that_is_loaded_after_backward_stays_loaded,
    test_accumulation_under_no_sync,
    test_an_undo_that_is_cut_short_is_not_taken_for_whole,
    test_any_program,
    test_nothing_is_left,
    test_the_same_bits,
    test_until_the_step_there_was_none,
    test_what_changes_one_gradient_undoes_one_update,
    test_whatever_was_undone_comes_in_the_step,
)
from virtual_gpu import VirtualGpu, virtual_gpu

from nvme_offload.device.room import DeviceRoom
from nvme_offload.optim import NVMeOptimizer, budget, provisional

ROOMY = 700_000  # of host memory: two versions of all states


@pytest.fixture(autouse=True)
def in_memory(monkeypatch):
    monkeypatch.setattr(test_provisional, "SMALL", ROOMY)
    monkeypatch.setattr(provisional, "BESIDE_ON", {"cpu", "cuda"})


def _steps(net, optimizer, count, x=None):
    """The buckets that backward() has updated in each step, with the loss of *x* or of `loss_of`."""
    made = []
    for step in range(count):
        optimizer.zero_grad()
        (loss_of(net, step) if x is None else net(x).square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        optimizer.step()
        if isinstance(optimizer, NVMeOptimizer):
            made.append(optimizer.stats().updated_in_backward)
    return made


def test_all_updates_are_made_in_backward_and_none_uses_the_drive(tmp_path):
    net = model()
    with NVMeOptimizer(
        net.parameters(), paths=tmp_path, host_memory=ROOMY, step_in_backward="provisional"
    ) as optimizer:
        made = _steps(net, optimizer, 5)
        buckets = len(optimizer._steps.binding.buckets)
        assert buckets > 2
        assert made[2:] == [buckets] * 3
        stats = optimizer.stats()
        assert stats.bytes_read == stats.bytes_written == 0
        swapper = optimizer._steps.tier.swapper
        assert len(swapper.names()) == buckets  # no second version is left


def test_as_many_updates_are_made_in_backward_as_memory_has_room_for(tmp_path):
    found = {}
    for host_memory in (400_000, 500_000, ROOMY):
        net = model()
        with NVMeOptimizer(
            net.parameters(),
            paths=tmp_path,
            host_memory=host_memory,
            step_in_backward="provisional",
        ) as optimizer:
            made = _steps(net, optimizer, 5)
            assert optimizer.stats().bytes_written == 0
            found[host_memory] = made[-1] / len(optimizer._steps.binding.buckets)
    assert 0 < found[400_000] < found[500_000] < found[ROOMY] == 1


def test_old_weights_take_no_more_gpu_memory_than_the_passes_leave(tmp_path, monkeypatch):
    plain = model()
    weights = sum(one.nbytes for one in plain.parameters())
    _steps(plain, torch.optim.AdamW(plain.parameters(), foreach=False), 5)
    found = {}
    for room in (0, weights // 2, weights):
        net = model()
        with (
            virtual_gpu(VirtualGpu()),
            NVMeOptimizer(
                net.parameters(),
                paths=tmp_path,
                host_memory=ROOMY,
                step_in_backward="provisional",
                foreach=False,
            ) as optimizer,
            monkeypatch.context() as patch,  # `virtual_gpu` patches the same
        ):
            patch.setattr(DeviceRoom, "suffices", lambda _, held, more, r=room: held + more <= r)
            made = _steps(net, optimizer, 5)
            assert all(map(torch.equal, net.parameters(), plain.parameters()))
            found[room] = made[-1] / len(optimizer._steps.binding.buckets)
    assert 0 == found[0] < found[weights // 2] < found[weights] == 1


def test_a_second_version_never_takes_the_memory_of_another_value(tmp_path, monkeypatch):
    """Versions of several sizes leave gaps into which a larger one does not fit."""
    monkeypatch.setattr(budget, "bucket_elements", lambda *args: 20_000.0)
    numbers = random.Random(0)
    widths = [32, *(numbers.randrange(32, 256, 4) for _ in range(80)), 32]
    layers = itertools.starmap(torch.nn.Linear, itertools.pairwise(widths))
    net = torch.nn.Sequential(*layers).bfloat16()
    values = 4 * sum(one.numel() for one in net.parameters())
    with NVMeOptimizer(
        net.parameters(),
        paths=tmp_path,
        host_memory=int(1.8 * values),
        step_in_backward="provisional",
        overlap_step=True,
        state_format="compact",
    ) as optimizer:
        made = _steps(net, optimizer, 7, torch.ones(2, 32).bfloat16())
        assert min(made[4:]) > 40
        assert optimizer._steps.tier.swapper.stats().bytes_written == 0
