"""Ctrl-C and other exceptions at any line of a step: it continues with the same bits, or it says that a
checkpoint has to be loaded, and loading restores it. `python tests/optim/interrupted.py` prints the table.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from interrupted import MODES, ON_CPUS, found, outcomes
from interrupts import Hang, Place, deadline, each_line, sample
from reference import differing, model, train

from nvme_offload.errors import UsageError
from nvme_offload.optim import NVMeOptimizer, provisional
from nvme_offload.optim.provisional import ProvisionalUpdates
from nvme_offload.optim.update import Updater

GOOD = {"exact", "refused", "unreached"}


@pytest.fixture(autouse=True)
def second_versions_on_cpus(monkeypatch):
    monkeypatch.setattr(provisional, "BESIDE_ON", ON_CPUS)


def tried(mode: str, places: Sequence[Place], place: Path) -> Counter[str]:
    """How often each outcome was seen. Fails, and names the faults in full, if one is not `GOOD`."""
    seen: Counter[str] = Counter()
    faults = []
    for at, result in outcomes(mode, places, place):
        seen[result] += 1
        if result not in GOOD:
            faults.append(f"{at}: {result}")
    if faults:
        pytest.fail("\n".join(faults))
    return seen


@pytest.mark.parametrize(
    "mode",
    [
        *("plain, compact", "host", "in backward", "provisional, in memory"),
        *("overlap", "overlap, provisional"),
    ],
)
def test_a_step_that_is_interrupted_goes_on_or_is_refused(tmp_path, mode):
    # as many as one training tries
    seen = tried(mode, sample(found(mode, tmp_path), 8, first=5), tmp_path)
    assert seen.total() > 3


@pytest.mark.parametrize(
    ("mode", "files"),
    [
        ("in backward", ["optim/backward.py"]),
        ("overlap, provisional", ["optim/modes.py", "optim/awaited.py"]),
    ],
)
def test_modes_and_waits_are_as_before_an_exception(tmp_path, mode, files):
    """Gradients stay enabled, a use of a parameter waits for its update, and a gradient that was
    queued is not used in later steps.
    """
    places = [place for place in found(mode, tmp_path) if place.file in files]
    tried(mode, sample(each_line(places), 32), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_step_goes_on_or_is_refused_wherever_it_is_interrupted(tmp_path, mode):
    """Of the lines that modes share, each mode tries others."""
    places = sample(found(mode, tmp_path), 30, first=7 * [*MODES].index(mode))
    seen = tried(mode, places, tmp_path)
    assert seen["exact"] > 0
    assert seen["refused"] > 0


def test_a_hang_names_what_every_thread_does():
    end = threading.Event()
    other = threading.Thread(target=end.wait, name="the other one")
    other.start()
    with pytest.raises(Hang, match=r"the other one: \S+threading.py"), deadline(1):
        threading.Event().wait()
    end.set()
    other.join()


def begun(place: Path, **options: object) -> tuple[list[torch.nn.Parameter], NVMeOptimizer]:
    params = list(model().parameters())
    optimizer = NVMeOptimizer(params, lr=1e-2, paths=place, host_memory="64MB", **options)
    train(params, optimizer, steps=2)
    return params, optimizer


def expected(steps: int) -> list[torch.nn.Parameter]:
    params = list(model().parameters())
    train(params, torch.optim.AdamW(params, lr=1e-2), steps=steps)
    return params


@pytest.mark.parametrize("options", [{}, {"accumulate": "host"}, {"overlap_step": True}])
def test_a_step_that_is_made_is_not_made_again(tmp_path, monkeypatch, options):
    """Ctrl-C comes after the last update. The next step, with other gradients, is made."""
    params, optimizer = begun(tmp_path, **options)
    ended = optimizer._steps.forget_step

    def interrupted():
        monkeypatch.undo()
        ended()
        raise KeyboardInterrupt

    monkeypatch.setattr(optimizer._steps, "forget_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(params, optimizer, steps=1, first=2)
    optimizer.step()
    assert optimizer.state_dict()["nvme_offload"]["steps"] == 3
    assert differing(params, expected(3)) == []
    train(params, optimizer, steps=1, first=3)
    optimizer.synchronize()
    assert differing(params, expected(4)) == []
    optimizer.close()


def test_an_exception_before_an_update_changes_nothing(tmp_path, monkeypatch):
    """As where a GPU has no memory for a bucket that host memory has already."""
    params, optimizer = begun(tmp_path)
    opened = Updater.open

    def no_memory(updater, bucket):
        opened(updater, bucket)
        monkeypatch.undo()
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(Updater, "open", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        train(params, optimizer, steps=1, first=2)
    optimizer.step()
    optimizer.close()
    assert differing(params, expected(3)) == []


def test_a_first_update_that_did_not_begin_leaves_no_states(tmp_path, monkeypatch):
    """As on a GPU, where the new value in host memory has undefined contents until the update ends."""
    opened, trained = Updater.open, []

    def no_memory(updater, bucket):
        opened(updater, bucket)
        bucket.memory.fill_(255)
        monkeypatch.undo()
        raise torch.OutOfMemoryError("made up")

    for fails in (False, True):
        params = list(model().bfloat16().parameters())
        with NVMeOptimizer(
            params, lr=1e-2, paths=tmp_path, host_memory="64MB", state_format="split"
        ) as optimizer:
            if fails:
                monkeypatch.setattr(Updater, "open", no_memory)
                with pytest.raises(torch.OutOfMemoryError):
                    train(params, optimizer, steps=1)
                optimizer.step()
            else:
                train(params, optimizer, steps=1)
            trained.append(optimizer.state_dict()["state"][0]["master"].clone())
    assert torch.equal(*trained)


@pytest.mark.parametrize("weights_first", [False, True])
def test_a_load_restores_what_an_exception_has_ended(tmp_path, monkeypatch, weights_first):
    """In the middle of a call of the store, and into the same objects, without a new drive."""
    params, optimizer = begun(tmp_path)
    saved = optimizer.state_dict()
    weights = [parameter.detach().clone() for parameter in params]

    def load_weights():
        with torch.no_grad():
            for parameter, value in zip(params, weights, strict=True):
                parameter.copy_(value)

    def interrupted(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr("nvme_offload.swap.schedule.Schedule.take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(params, optimizer, steps=1, first=2)
    for use in (optimizer.step, optimizer.state_dict, functools.partial(optimizer.save, "x")):
        with pytest.raises(UsageError, match="load both from a checkpoint"):
            use()
    if weights_first:
        load_weights()
    optimizer.load_state_dict(saved)
    if not weights_first:
        load_weights()
    train(params, optimizer, steps=2, first=2)
    optimizer.close()
    assert differing(params, expected(4)) == []


def test_a_load_that_was_interrupted_can_be_repeated(tmp_path, monkeypatch):
    """It drops values of the last step first."""
    params, optimizer = begun(tmp_path)
    saved = optimizer.state_dict()

    def interrupted(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    discarded = ProvisionalUpdates.forget

    def forget(updates, buckets):
        monkeypatch.setattr("nvme_offload.swap.schedule.Schedule.take", interrupted)
        updates._tier.swapper.swap_in(next(iter(buckets)).name)
        return discarded(updates, buckets)

    monkeypatch.setattr(ProvisionalUpdates, "forget", forget)
    with pytest.raises(KeyboardInterrupt):
        optimizer.load_state_dict(saved)
    optimizer.load_state_dict(saved)
    train(params, optimizer, steps=1, first=2)
    optimizer.close()
    assert differing(params, expected(3)) == []


def test_states_whose_write_was_interrupted_are_refused(tmp_path, monkeypatch):
    params, optimizer = begun(tmp_path)
    saved, kept = optimizer.state_dict(), optimizer.state[params[0]]

    def interrupted(*_, **__):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr("nvme_offload.optim.saved.restore", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.state[params[0]]["exp_avg"].zero_()
    for state in (optimizer.state[params[0]], kept):
        with pytest.raises(UsageError, match="load both from a checkpoint"):
            state["exp_avg"].sum()
    optimizer.load_state_dict(saved)
    assert len(optimizer.state) == len(params)
    train(params, optimizer, steps=1, first=2)
    optimizer.close()
    assert differing(params, expected(3)) == []
