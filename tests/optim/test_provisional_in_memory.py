"""Provisional updates of states that stay in host memory, which keeps two versions: the bits of updates
after backward(), whatever happens in between. Only updates on GPUs are made so; here also on CPUs.
"""

from __future__ import annotations

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
    test_a_rate_that_is_set_between_is_that_of_the_step,
    test_accumulation_under_no_sync,
    test_an_undo_that_is_cut_short_is_not_taken_for_whole,
    test_any_program,
    test_nothing_is_left,
    test_the_same_bits,
    test_until_the_step_there_was_none,
    test_what_changes_one_gradient_undoes_one_update,
    test_whatever_was_undone_comes_in_the_step,
    test_with_overlap_step,
)

from nvme_offload.optim import NVMeOptimizer, provisional

ROOMY = 700_000  # of host memory: two versions of all states


@pytest.fixture(autouse=True)
def in_memory(monkeypatch):
    monkeypatch.setattr(test_provisional, "SMALL", ROOMY)
    monkeypatch.setattr(provisional, "BESIDE_ON", {"cpu", "cuda"})


def _steps(net, optimizer, count):
    """The buckets that backward() has updated in each step."""
    made = []
    for step in range(count):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        optimizer.step()
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
