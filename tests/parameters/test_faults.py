"""A drive that fails once, and exceptions at any line of a step: the caller gets the error, and the
next step has the right results, or says that the weights are lost.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from interrupts import Place, deadline, each_line, places, raising, sample
from torch import nn

import nvme_offload.store.store
from nvme_offload import AioConfig, Engine, Offload, OffloadError, UsageError
from nvme_offload._aio import FaultKind

Make = Callable[..., Offload]
ENOUGH_SECONDS = 600  # for a step, on a busy machine
WIDTH = 24


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(20)))


def _step(model: nn.Module) -> list[torch.Tensor]:
    """The loss and the gradients of a step. It changes the first layer, too."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    for one in model.parameters():
        one.grad = None
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(one.grad for one in model.parameters())]


def _replace(model: nn.Module) -> None:
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.ones_like(one) / WIDTH)


@pytest.mark.parametrize("first", [0, 1, 3, 8, 15, 22, 30, 41, 55])
def test_a_transfer_that_fails_once_changes_nothing(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        nvme_offload.store.store,
        "Engine",
        functools.partial(Engine, _faults=[(first, 1, FaultKind.FAIL, errno.EIO)]),
    )
    model = _model()
    in_memory = copy.deepcopy(model)
    # buckets of 4 KiB, of which two fit
    offload = Offload(tmp_path, 16 << 10, aio=AioConfig(block_size=4 << 10, direct="auto"))
    with contextlib.suppress(OffloadError):
        offload.parameters(model, "cpu")
    if not any(hasattr(one, "_nvme_offload_streamed") for one in model.parameters()):
        offload.parameters(model, "cpu")
    for call in (_step, _replace, _step, _step):
        expected = call(in_memory)
        while True:
            try:
                found = call(model)
            except OffloadError:
                continue
            break
        assert expected is None or all(map(torch.equal, found, expected))
    with contextlib.suppress(OffloadError):
        offload.close()


@functools.cache
def _in_memory() -> tuple[nn.Sequential, list[torch.Tensor]]:
    """The model, and the result of `_step` for it."""
    model = _model()
    return model, _step(model)


def _outcome(offload: Offload, place: Place, error: BaseException) -> str:
    model = _model()
    in_memory, expected = _in_memory()
    offload.parameters(model, "cpu")
    _step(model)
    came: BaseException | None = None
    top = torch._C._autograd._top_saved_tensors_default_hooks
    with raising(place, error) as raised:
        try:
            found = _step(model)
        except BaseException as caught:
            came = caught.with_traceback(None)
    while top(False) is not None:  # of an `__enter__` or `__exit__` that was interrupted
        torch._C._autograd._pop_saved_tensors_default_hooks()
    if came is None and raised.where is None:
        return "exact"
    if came is not None and came is not error:
        return f"{came!r} in place of it"
    if came is None and not all(map(torch.equal, found, expected)):
        return "other gradients"
    came = error.__context__ = error.__traceback__ = None
    gc.collect()
    for _ in range(2):
        try:
            found = _step(model)
        except OffloadError:
            return "exact"  # it says so
        if not all(map(torch.equal, found, expected)):
            return "other gradients in the next step"
    # outside of modules
    if not all(map(torch.equal, model.parameters(), in_memory.parameters())):
        return "other values"
    return "exact"


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_after_an_exception_at_any_line_the_next_step_is_right_or_refused(
    make: Make, every: bool
) -> None:
    model = _model()
    make("64KB").parameters(model, "cpu")
    _step(model)
    found = [
        place for place in places(lambda: _step(model)) if place.file.startswith("parameters/")
    ]
    assert len(found) > 150
    wrong = {}
    # of neighbouring lines one
    chosen = each_line(found)[::2] if every else sample(found, 15)
    for number, place in enumerate(chosen):
        error = (KeyboardInterrupt(), MemoryError())[number % 2]
        offload = make("64KB")
        with deadline(ENOUGH_SECONDS):
            said = _outcome(offload, place, error)
            offload.close()
        if said != "exact":
            wrong[f"{type(error).__name__} at {place}"] = said
    assert wrong == {}


@pytest.mark.parametrize("again", [False, True])
def test_loading_weights_restores_what_an_exception_has_ended(
    make: Make, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """In the midst of a call of the tier. *again*: another exception ends the first load."""
    model = _model()
    in_memory = copy.deepcopy(model)
    offload = make("64KB")
    offload.parameters(model, "cpu")
    _step(model)
    weights = {key: value.clone() for key, value in model.state_dict().items()}

    def interrupts_next(call: str) -> None:
        def interrupted(*_: object) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(call, interrupted)

    interrupts_next("nvme_offload.swap.schedule.Schedule.take")
    with pytest.raises(KeyboardInterrupt):
        _step(model)
    for _ in range(2):
        with pytest.raises(UsageError, match="load a checkpoint"):
            _step(model)
    if again:
        interrupts_next("nvme_offload.parameters.home.Home.admit")
        with pytest.raises(KeyboardInterrupt):
            model.load_state_dict(weights)
    model.load_state_dict(weights)
    for one in (model, in_memory):
        one.load_state_dict(weights)
    assert all(map(torch.equal, _step(model), _step(in_memory)))
    assert all(map(torch.equal, model.parameters(), in_memory.parameters()))
    offload.close()
