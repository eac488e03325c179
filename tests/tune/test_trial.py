from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE

from nvme_offload import _aio
from nvme_offload.errors import CorruptionError, IOFailure, NoSpaceError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.hardware.profile import PHASES, Setting
from nvme_offload.io.engine import Engine
from nvme_offload.tune import trial
from nvme_offload.tune.trial import REQUEST_BYTES, Rig

FILE_BYTES = 2 * REQUEST_BYTES

SETTING = Setting(block_size=1 << 20, queue_depth=8, thread_count=2)


@pytest.fixture(scope="module")
def rig(disk: Path) -> Iterator[Rig]:
    """Two filled files of two requests each."""
    with Rig(disk, FILE_BYTES) as made:
        made.fill(SETTING, None, lambda done: None)
        yield made


@pytest.mark.parametrize(
    "setting",
    [
        SETTING,
        Setting(128 << 10, 1, 1),
        Setting(8 << 20, 16, 1),
        Setting(1 << 20, 1, 4, backend="posix"),
    ],
)
@pytest.mark.parametrize("phase", PHASES)
def test_counts_what_moves_in_the_window(rig: Rig, setting: Setting, phase: str) -> None:
    result = rig.run(setting, phase, 0.1)
    assert (result.read_bytes > 0) == (phase != "write")
    assert (result.write_bytes > 0) == (phase != "read")
    assert result.seconds >= 0.1
    assert result.bytes_per_second == pytest.approx(
        (result.read_bytes + result.write_bytes) / result.seconds
    )


def test_mixed_moves_as_much_one_way_as_the_other(rig: Rig) -> None:
    result = rig.run(SETTING, "mixed", 0.3)
    assert result.read_bytes == pytest.approx(result.write_bytes, rel=0.3)


def test_files_hold_what_they_were_filled_with(disk: Path) -> None:
    reports: list[int] = []
    with Rig(disk, FILE_BYTES) as rig, Engine(AioConfig.of(SETTING)) as engine:
        assert rig.fill(SETTING, None, reports.append) > 0
        assert reports == sorted(reports)
        found = trial._native_buffer(REQUEST_BYTES)
        for index in range(FILE_BYTES // REQUEST_BYTES):
            pages = []
            for file in (rig.file("read"), rig.file("write")):
                engine.read(found.data, file, index * REQUEST_BYTES).wait()
                pages.append(found.reshape(-1, 4096).copy())
            stamps = pages[0][:, :8].copy().view(np.uint64)[:, 0]
            assert stamps.tolist() == list(range(index * 4096, (index + 1) * 4096))
            assert (pages[0] == pages[1]).all()
            assert len(np.unique(pages[0][:, 8:], axis=0)) == 4096


def test_fill_stops_when_its_time_is_over_and_uses_what_it_reached(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "LEAST_REQUESTS", 1)
    with Rig(disk, FILE_BYTES) as rig:
        rig.fill(SETTING, 0.0, lambda done: None)
        assert rig.file_bytes == REQUEST_BYTES
        assert rig.run(SETTING, "read", 0.1).read_bytes > 0


@pytest.mark.parametrize("place", [0, 4095, REQUEST_BYTES - 1])
def test_a_write_that_did_not_arrive_is_corruption(
    disk: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    verify = trial._Lane.verify

    def damaged(self: Any) -> None:
        with Engine(AioConfig.of(SETTING)) as engine:
            for buffer, index in self._last.values():
                engine.write(
                    bytes([buffer[place] ^ 1]), self._file, index * REQUEST_BYTES + place
                ).wait()
        verify(self)

    monkeypatch.setattr(trial._Lane, "verify", damaged)
    with Rig(disk, FILE_BYTES) as rig:
        rig.fill(SETTING, None, lambda done: None)
        with pytest.raises(CorruptionError) as caught:
            rig.run(SETTING, "write", 0.1)
        assert caught.value.offset % REQUEST_BYTES == place


def test_a_read_of_the_wrong_body_is_corruption(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = trial._Lane.verify

    def damaged(self: Any) -> None:
        for buffer, _ in self._last.values():
            buffer[70_000] ^= 1
        verify(self)

    monkeypatch.setattr(trial._Lane, "verify", damaged)
    with pytest.raises(CorruptionError) as caught:
        rig.run(SETTING, "read", 0.1)
    assert caught.value.offset % REQUEST_BYTES == 70_000


class HeldWrite:
    """A write that is carried out when the test says so."""

    def __init__(self, rig: Rig, data: Any, offset: int) -> None:
        self._carry_out = lambda: rig._reader.write(data, rig.file("write"), offset).wait()
        self._nbytes = len(data)
        self.finished = False

    def finish(self) -> None:
        self._carry_out()
        self.finished = True

    def done(self) -> bool:
        return self.finished

    def wait(self, timeout: float | None = None) -> int:
        assert self.finished
        return self._nbytes


def test_writes_that_end_out_of_order_are_no_corruption(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with room for the pending requests only: its first request is still being written when the
    buffer of the second is free for the next.
    """
    monkeypatch.setattr(trial, "READ_BACK_SHARE", 1)
    held: list[HeldWrite] = []

    class Engine:
        def write(self, data: Any, file: Any, offset: int) -> HeldWrite:
            held.append(HeldWrite(rig, data, offset))
            return held[-1]

    lane = trial._Lane(rig, Engine(), "write", 2)  # type: ignore[arg-type]
    rig._positions["write"] = 0
    lane.refill()
    held[1].finish()
    lane.refill()
    for write in reversed(held):
        if not write.finished:
            write.finish()
    lane.drain()
    lane.verify()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("failing", [1, 1000])
def test_an_error_of_the_drive_is_raised_once(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    phase: str,
    failing: int,
) -> None:
    faults = [(20, failing, _aio.FaultKind.FAIL, errno.EIO)]
    monkeypatch.setattr(trial, "Engine", functools.partial(Engine, _faults=faults))
    with pytest.raises(IOFailure) as caught:
        rig.run(SETTING, phase, 0.2)
    assert caught.value.errno == errno.EIO
    assert caught.value.nbytes == REQUEST_BYTES
    assert caplog.messages == []
    monkeypatch.undo()
    assert rig.run(SETTING, "read", 0.05).read_bytes > 0


def test_an_error_while_filling_is_raised(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Rig(disk, FILE_BYTES) as rig:
        monkeypatch.setattr(
            trial,
            "Engine",
            functools.partial(Engine, _faults=[(3, 1000, _aio.FaultKind.FAIL, errno.EIO)]),
        )
        with pytest.raises(IOFailure, match=os.strerror(errno.EIO)):
            rig.fill(SETTING, None, lambda done: None)
    assert caplog.messages == []


@pytest.mark.parametrize("request_bytes", [4 << 20, REQUEST_BYTES])
def test_a_changed_byte_is_corruption_in_requests_of_any_size(
    disk: Path, request_bytes: int
) -> None:
    with (
        Rig(disk, FILE_BYTES, request_bytes=request_bytes) as rig,
        Engine(AioConfig.of(SETTING)) as engine,
    ):
        rig.fill(SETTING, None, lambda done: None)
        assert rig.file_bytes == FILE_BYTES
        assert rig.run(SETTING, "mixed", 0.1).write_bytes > 0
        engine.write(b"\xff" * 8, rig.file("read"), request_bytes + 5 * 4096).wait()
        with pytest.raises(CorruptionError, match="differ from the data written") as caught:
            rig.run(SETTING, "read", 0.3)
        assert caught.value.offset == request_bytes + 5 * 4096


def test_a_stuck_drive_is_a_failure(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "STUCK_SECONDS", 0.05)
    monkeypatch.setattr(
        trial, "_counters", lambda engine: trial.Result(0, 0, trial.time.monotonic())
    )
    with pytest.raises(IOFailure, match="completed no request"):
        rig.run(SETTING, "read", 0.05)


def test_too_large_a_rig_leaves_nothing(disk: Path) -> None:
    with pytest.raises(NoSpaceError):
        Rig(disk, 1 << 40)
    assert list(disk.iterdir()) == []


def test_no_thread_stays(rig: Rig) -> None:
    before = set(threading.enumerate())
    rig.run(SETTING, "read", 0.05)
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive()
