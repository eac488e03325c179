"""A drive that fails in the midst of steps: typed errors, steps that can be tried again without any
update made twice, and no silence.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from reference import (
    Reference,
    breaking,
    differing,
    loss_of,
    model,
    parameters,
    set_gradients,
    smallest,
    train,
)

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


MODES = {
    "after": {},
    "overlapped": {"overlap_step": True},
    "in backward": {"step_in_backward": True},
    "in both": {"step_in_backward": True, "overlap_step": True},
    "provisional": {"step_in_backward": "provisional"},
    "accumulated": {"accumulate": "host"},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_drive_that_fails_at_any_transfer_loses_nothing(tmp_path, monkeypatch, caplog, mode):
    """A call that failed is made again, and no update is made twice. A backward pass leaves its
    updates to `step`; passes that accumulate are begun again.
    """
    steps, seen = 5, 0
    plain = model(torch.bfloat16)
    reference = Reference(list(plain.parameters()), torch.optim.AdamW, lr=0.01)

    def passes(net, step):
        net.zero_grad()
        for number in range(3 if mode == "accumulated" else 1):
            loss_of(net, 10 * step + number).backward()
        if mode == "provisional" and step in (2, 4):
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)

    for step in range(steps):
        passes(plain, step)
        reference.step()
    for first in range(0, 60, 6):
        failures = []

        def until_done(action, failures=failures):
            while True:
                try:
                    return action()
                except IOFailure as error:
                    assert error.errno == EIO  # noqa: PT017
                    failures.append(error)
                    assert len(failures) < 5, "the failure should have passed"

        faults = functools.partial(Engine, _faults=[(first, 4, FaultKind.FAIL, EIO)])
        monkeypatch.setattr(nvme_offload.store.store, "Engine", faults)
        net = model(torch.bfloat16)
        with NVMeOptimizer(
            net.parameters(), lr=0.01, paths=tmp_path, host_memory=200_000, **MODES[mode]
        ) as optimizer:
            for step in range(steps):
                until_done(functools.partial(passes, net, step))
                until_done(optimizer.step)
            until_done(optimizer.synchronize)
            assert optimizer.stats().step == steps
            assert {float(optimizer.state[one]["step"]) for one in net.parameters()} == {steps}
        assert differing(list(net.parameters()), list(plain.parameters())) == []
        seen += len(failures)
    left = "is left to step()" in caplog.text
    assert left or seen > 0
    assert left == (mode == "in backward") or mode in ("in both", "provisional")


def test_a_drive_that_stays_broken_is_an_error_each_time(faulty):
    params = parameters(torch.bfloat16)
    optimizer = faulty([(12, 1 << 40, FaultKind.FAIL, EIO)], params)
    with pytest.raises(IOFailure):
        train(params, optimizer, steps=4)
    for _ in range(3):
        with pytest.raises(IOFailure):
            optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("by_optimizer", [True, False])
def test_a_failed_step_can_be_dropped(faulty, caplog, by_optimizer):
    """The first one too, in which states are made; also by other gradients, without a zero_grad()."""
    given_up = set()
    for first in range(2, 60, 5):
        params = parameters(torch.bfloat16)
        with faulty([(first, 1, FaultKind.FAIL, EIO)], params) as optimizer:
            failed = []
            for step in range(4):
                if by_optimizer:
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
    assert ("is given up" in caplog.text) == by_optimizer


@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_within_an_update_wants_a_checkpoint(tmp_path, overlap):
    Breaking = breaking()
    params = parameters(torch.bfloat16)
    with NVMeOptimizer(params, Breaking, paths=tmp_path, overlap_step=overlap) as optimizer:
        train(params, optimizer)
        saved, kept = optimizer.state_dict(), [parameter.detach().clone() for parameter in params]
        Breaking.broken = True
        with pytest.raises(RuntimeError, match="out of something"):
            train(params, optimizer, first=3)
        Breaking.broken = False
        assert {type(parameter) for parameter in params} == {torch.nn.Parameter}
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
