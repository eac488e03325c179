"""A drive that fails or is full during a forward or backward pass: the caller gets the error,
nothing hangs or leaks, and the next step works.
"""

from __future__ import annotations

import errno
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from activation_models import gradients, made, same
from offloading import Make, left

import nvme_offload.store.store
from nvme_offload import (
    Engine,
    IOFailure,
    NoSpaceError,
    Offload,
    OffloadError,
    UnsupportedError,
    UsageError,
    save_on_nvme,
)
from nvme_offload._aio import FaultKind

Inject = Callable[..., None]
EVER = 1 << 30


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Inject:
    """A function that makes *count* transfers fail, from the one numbered *first* on, in engines
    made from then on.
    """

    def faults(first: int, count: int, kind: FaultKind, value: int) -> None:
        monkeypatch.setattr(
            nvme_offload.store.store,
            "Engine",
            functools.partial(Engine, _faults=[(first, count, kind, value)]),
        )

    return faults


def failure(offload: save_on_nvme, model: torch.nn.Module, x: torch.Tensor) -> OffloadError | None:
    try:
        gradients(model, x, offload)
    except OffloadError as error:
        return error.with_traceback(None)
    return None


@pytest.mark.parametrize(("code", "kind"), [(errno.EIO, IOFailure), (errno.ENOSPC, NoSpaceError)])
@pytest.mark.parametrize("first", [0, 1, 12, 20, 27, 33])
def test_one_transfer_fails(
    first: int, code: int, kind: type[OffloadError], inject: Inject, make: Make
) -> None:
    model, x = made("layers")
    expected = gradients(model, x)
    inject(first, 1, FaultKind.FAIL, code)
    offload = make(host_memory=64 << 10)
    error = failure(offload, model, x)
    assert error is None or isinstance(error, kind)
    gc.collect()
    assert left(offload) == (0, 0, [])
    assert same(gradients(model, x, offload), expected)
    assert offload.stats().bytes_written > 0


@pytest.mark.parametrize("first", [0, 9, 26])
def test_a_drive_that_never_works_again(first: int, inject: Inject, tmp_path: Path) -> None:
    model, x = made("layers")
    expected = gradients(model, x)
    inject(first, EVER, FaultKind.FAIL, errno.EIO)
    offload = save_on_nvme(tmp_path, 1 << 10, 64 << 10)
    for _ in range(3):
        assert isinstance(failure(offload, model, x), IOFailure)
        gc.collect()
        assert left(offload) == (0, 0, [])  # the error that is kept keeps nothing else
    assert same(gradients(model, x), expected)
    offload.close()


def test_short_transfers_are_continued(inject: Inject, make: Make) -> None:
    model, x = made("layers")
    expected = gradients(model, x)
    inject(0, EVER, FaultKind.CUT, 4096)
    offload = make(host_memory=64 << 10)
    assert same(gradients(model, x, offload), expected)


def test_a_full_filesystem(mounted: Callable[[str], Path]) -> None:
    model, _ = made("layers")
    x = torch.randn(8192, 64)  # of which 2 MiB are saved, again and again, on 16 MiB
    directory = mounted("ext4-full")
    for rows, full in ((8192, True), (512, False), (8192, True)):
        offload = save_on_nvme(directory, 1 << 10, "4 MiB" if full else "256 KiB")
        assert isinstance(failure(offload, model, x[:rows]), NoSpaceError) == full
        assert full or same(gradients(model, x[:rows], offload), gradients(model, x[:rows]))
        offload.close()


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is not a directory, and is not created"):
        save_on_nvme(tmp_path / "file")
    with pytest.raises(
        UsageError,
        match="missing/below does not exist, and is not created: mount the drive, or create the directory",
    ):
        save_on_nvme(tmp_path / "missing" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"paths": []}, "at least one path"),
        ({"min_bytes": "many"}, "min_bytes is not a number of bytes: 'many'"),
        ({"min_bytes": -1}, "min_bytes"),
        ({"host_memory": 0}, "host_memory must be"),
        ({"host_memory": "much"}, "host_memory must be .* not 'much'"),
        ({"host_memory": 1.5}, "host_memory must be"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        save_on_nvme(**{"paths": tmp_path, **settings})


def test_a_torch_that_cannot_tell_the_innermost_hooks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    with pytest.raises(UnsupportedError, match=r"^save_on_nvme needs torch 2\.8 or newer"):
        save_on_nvme(tmp_path)
    offload = Offload(tmp_path, host_memory="64MiB")
    with pytest.raises(UnsupportedError, match=r"^offload\.parameters needs torch 2\.8 or newer"):
        offload.parameters(torch.nn.Linear(8, 8), "cpu")
    offload.close()
