"""A drive that fails in the midst of steps: typed errors, steps that can be tried again without any
update made twice, and no silence.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from reference import Reference, breaking, differing, parameters, set_gradients, smallest, train

import nvme_offload.store.store
from nvme_offload._aio import FaultKind
from nvme_offload.errors import IOFailure, UsageError
from nvme_offload.io.engine import Engine
from nvme_offload.optim import NVMeOptimizer

EIO = 5


def expected(steps, dtype=torch.bfloat16):
    params = parameters(dtype)
    train(params, Reference(params, torch.optim.AdamW), steps=steps)
    return params


@pytest.fixture
def faulty(monkeypatch, tmp_path):
    """A function from faults, as `Engine` takes them, and parameters to an optimizer with the
    smallest budget.
    """

    def make(faults, params):
        monkeypatch.setattr(
            nvme_offload.store.store, "Engine", functools.partial(Engine, _faults=faults)
        )
        return smallest(lambda cap: NVMeOptimizer(params, paths=tmp_path, host_memory=cap))

    return make


def test_what_passes_leaves_no_trace(faulty):
    params = parameters(torch.bfloat16)
    with faulty([(at, 1, FaultKind.CUT, 4096) for at in range(0, 200, 2)], params) as optimizer:
        train(params, optimizer)
        assert optimizer.stats().bytes_read > 0
    assert differing(params, expected(3)) == []


@pytest.mark.parametrize("first", range(0, 30, 3))
def test_a_step_that_failed_is_tried_again_and_updates_nothing_twice(faulty, first):
    params = parameters(torch.bfloat16)
    failures = 0
    with faulty([(first, 2, FaultKind.FAIL, EIO)], params) as optimizer:
        for step in range(4):
            set_gradients(params, step)
            while True:
                try:
                    optimizer.step()
                except IOFailure as error:
                    assert error.errno == EIO  # noqa: PT017
                    failures += 1
                    assert failures < 5, "the failure should have passed"
                else:
                    break
        assert optimizer.stats().step == 4
        assert failures > 0
        assert all(float(optimizer.state[parameter]["step"]) == 4 for parameter in params)
    assert differing(params, expected(4)) == []


def test_a_drive_that_stays_broken_is_an_error_each_time(faulty):
    params = parameters(torch.bfloat16)
    optimizer = faulty([(12, 1 << 40, FaultKind.FAIL, EIO)], params)
    with pytest.raises(IOFailure):
        train(params, optimizer, steps=4)
    for _ in range(3):
        with pytest.raises(IOFailure):
            optimizer.step()
    optimizer.close()


def test_a_failed_step_can_be_dropped(faulty, caplog):
    """The first one too, in which states are made."""
    given_up = set()
    for first in range(2, 60, 2):
        params = parameters(torch.bfloat16)
        with faulty([(first, 1, FaultKind.FAIL, EIO)], params) as optimizer:
            failed = []
            for step in range(4):
                optimizer.zero_grad()
                set_gradients(params, step)
                try:
                    optimizer.step()
                except IOFailure:
                    failed.append((step, len(optimizer._steps.updated)))
            counts = {float(optimizer.state[parameter]["step"]) for parameter in params}
        if len(failed) == 1 and failed[0][1] > 0 and failed[0][0] < 3:
            assert counts == {3.0, 4.0}
            given_up.add(failed[0][0])
    assert {0, 1} <= given_up
    assert "is given up" in caplog.text


def test_an_error_within_an_update_wants_a_checkpoint(tmp_path):
    Breaking = breaking()
    params = parameters(torch.bfloat16)

    with NVMeOptimizer(params, Breaking, paths=tmp_path) as optimizer:
        train(params, optimizer)
        saved, kept = optimizer.state_dict(), [parameter.detach().clone() for parameter in params]
        Breaking.broken = True
        with pytest.raises(RuntimeError, match="out of something"):
            train(params, optimizer, first=3)
        Breaking.broken = False
        for use in (optimizer.step, optimizer.state_dict):
            with pytest.raises(
                UsageError,
                match=r"failed in the midst of an update \(RuntimeError: out of something\).*load both from a checkpoint",
            ):
                use()
        optimizer.load_state_dict(saved)
        with torch.no_grad():
            for parameter, value in zip(params, kept, strict=True):
                parameter.copy_(value)
        train(params, optimizer, first=3)
    assert differing(params, expected(6)) == []


def test_a_load_that_failed_is_to_be_done_again(faulty):
    plain = parameters()
    reference = torch.optim.AdamW(plain)
    train(plain, reference)
    params = [torch.nn.Parameter(parameter.detach().clone()) for parameter in plain]
    state = reference.state_dict()
    with faulty([(3, 2, FaultKind.FAIL, EIO)], params) as optimizer:
        with pytest.raises(IOFailure):
            optimizer.load_state_dict(state)
        with pytest.raises(UsageError, match="were being loaded"):
            optimizer.step()
        # a failed write is reported where its memory is needed, and retried
        with contextlib.suppress(IOFailure):
            optimizer.load_state_dict(state)
        optimizer.load_state_dict(state)
        train(plain, reference, first=3)
        train(params, optimizer, first=3)
    assert differing(params, plain) == []
