"""Ctrl-C and MemoryError at any line of a pass: the caller gets that exception, and the next pass of
the same context works and leaves nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
from collections.abc import Iterator

import pytest
import torch
from activation_models import gradients, made, same
from interrupts import Place, deadline, each_line, places, raising, sample
from offloading import LateCopier, Make, left
from torch import nn

from nvme_offload import UsageError, save_on_nvme

ENOUGH_SECONDS = 600  # for a step, on a busy machine


@contextlib.contextmanager
def hooks_left() -> Iterator[None]:
    """Leave the contexts of hooks on saved tensors that an exception, as the last line of `__enter__`
    or the first of `__exit__` ran, has kept entered: Python cannot leave them then.
    """
    top = torch._C._autograd._top_saved_tensors_default_hooks
    before = top(False)
    try:
        yield
    finally:
        while (now := top(False)) is not None and now != before:
            torch._C._autograd._pop_saved_tensors_default_hooks()


@functools.cache
def in_memory() -> list[torch.Tensor | None]:
    return gradients(*made("layers"))


def outcome(offload: save_on_nvme, place: Place, error: BaseException) -> str:
    """The outcome of a step with *error* raised at *place*: "exact" where the next pass is right
    and leaves nothing; else the fault. The step of the next place is another pass.
    """
    model, x = made("layers")
    expected = in_memory()
    came: BaseException | None = None
    with hooks_left(), raising(place, error) as raised:
        try:
            found = gradients(model, x, offload)
        except BaseException as caught:
            came = caught.with_traceback(None)
    if came is not None and came is not error:
        return f"{came!r} in place of it"
    if came is None and not same(found, expected):
        return "other gradients"
    if came is None and raised.where is not None:
        return f"no exception from {raised.where}"
    came = error.__context__ = error.__traceback__ = None
    if not same(gradients(model, x, offload), expected):
        return "other gradients in the next pass"
    gc.collect()
    with offload:
        pass
    offload._cache._wait_at_end()
    return "exact" if left(offload) == (0, 0, []) else f"left {left(offload)}"


# What a pass calls below this package's contexts; tests/faults/test_interrupts.py has half of its lines.
BELOW = ("swap/", "store/", "io/", "errors.py", "units.py")


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("late", [False, True])
def test_a_pass_works_after_an_exception_at_any_line(late: bool, every: bool, make: Make) -> None:
    """At some lines; or, with and without late copies alternately, at each line of the package's contexts,
    and at some of those below.
    """
    offload = make(host_memory=(32 if late else 64) << 10)
    if late:
        offload._cache._copier = LateCopier(seed=1)
    model, x = made("layers")
    gradients(model, x, offload)
    found = places(lambda: gradients(model, x, offload))
    assert len(found) > 500
    below = [place for place in found if place.file.startswith(BELOW)]
    own = each_line([place for place in found if not place.file.startswith(BELOW)])
    chosen = [*own[late::2], *sample(below, 20, first=late)] if every else sample(found, 12)
    wrong = {}
    for number, place in enumerate(chosen):
        error = (KeyboardInterrupt(), MemoryError())[number % 2]
        with deadline(ENOUGH_SECONDS):
            said = outcome(offload, place, error)
        if said != "exact":
            wrong[f"{type(error).__name__} at {place}"] = said
    assert wrong == {}


def test_a_graph_from_before_is_refused(make: Make) -> None:
    model, x = made("layers")
    offload = make()
    with offload:
        before = model(x).square().mean()
    place = next(
        place
        for place in places(lambda: gradients(model, x, offload))
        if place.file == "swap/schedule.py"
    )
    with raising(place, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        gradients(model, x, offload)
    with pytest.raises(UsageError, match=r"was interrupted .* run the forward pass again"):
        before.backward()
    model.eval()
    assert same(gradients(model, x, offload), gradients(model, x))


def test_a_context_in_a_model_is_not_copied(make: Make) -> None:
    model = nn.Linear(2, 2)
    model.offload = make()
    for refused in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(
            UsageError, match="cannot be pickled or copied: make one in each process"
        ):
            refused(model.offload)
    with pytest.raises(UsageError, match="keep it out of the model"):
        copy.deepcopy(model)
    with model.offload:
        loss = model(torch.ones(64, 2)).sum()
    loss.backward()
