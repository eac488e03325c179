"""The progress lines of a long step: their text, when they are logged, and that they end with the
tier.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import types

import pytest
import torch
from patience import PATIENCE
from profiles import profile

from nvme_offload.hardware import profile_shelf
from nvme_offload.hardware.config import AioConfig
from nvme_offload.hardware.disk_counters import DiskCounters, Disks, busy_share
from nvme_offload.swap import live
from nvme_offload.swap.drive_use import DriveUse, Meter
from nvme_offload.swap.tier import Tier

MIB = 1 << 20


@pytest.fixture
def tier(tmp_path):
    """A tier whose memory holds one of the values that `use` moves."""
    made = Tier([str(tmp_path)], AioConfig(backend="posix", direct="auto"), host_memory=MIB)
    made.require(4 * MIB)
    yield made
    made.close()


def test_a_drive_with_several_paths_has_its_speed_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    paths = tmp_path / "one", tmp_path / "two"
    for path in paths:
        path.mkdir()
    profile_shelf.keep(profile(2.0, at=tmp_path))
    tier = Tier([*map(str, paths)], AioConfig(backend="posix", direct="auto"), host_memory=MIB)
    tier.require(MIB)
    assert Meter(tier).take()["tuned_bytes_per_second"] == 2e9
    tier.close()


def use(tier, *names):
    for name in names:
        if name not in tier.swapper:
            tier.swapper.swap_out(name, torch.zeros(MIB, dtype=torch.uint8))
        tier.swapper.swap_in(name)
        tier.swapper.release(name, changed=False)
    tier.swapper.flush()


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "nvme_offload")
    return lambda: [message for message in caplog.messages if message.startswith("still going")]


def test_what_moved_is_reported_once(tier, said):
    lines = live.Live(tier)
    use(tier, "a", "b", "a")
    lines.log_line()
    assert len(said()) == 1
    assert "read 1 MiB and wrote 2 MiB" in said()[0]
    lines.log_line()
    assert len(said()) == 1


def test_a_step_that_ended_has_logged_already(tier, said):
    live.watch(tier)
    lines = live._live[tier]
    use(tier, "a", "b")
    live.watch(tier).begin(None, ended=True)
    lines.log_line()
    assert said() == []
    use(tier, "a")
    lines.log_line()
    assert len(said()) == 1
    assert "read 1 MiB and wrote 0 bytes" in said()[0]


def test_a_tier_that_keeps_nothing_yet_is_quiet(tmp_path, said):
    tier = Tier([str(tmp_path)], AioConfig(backend="posix", direct="auto"), host_memory=MIB)
    lines = live.Live(tier)
    lines.log_line()
    tier.require(4 * MIB)
    lines.log_line()
    use(tier, "a", "b")
    lines.log_line()
    assert len(said()) == 1
    tier.close()
    lines.log_line()
    assert len(said()) == 1


def test_the_lines_come_by_themselves_and_end_with_the_tier(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "nvme_offload")
    monkeypatch.setattr(live, "_SECONDS", 0.01)
    tier = Tier([str(tmp_path)], AioConfig(backend="posix", direct="auto"), host_memory=MIB)
    tier.require(4 * MIB)
    before = set(threading.enumerate())
    live.watch(tier)
    live.watch(tier)
    (thread,) = set(threading.enumerate()) - before
    reported = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: reported.set()
    live._log.addHandler(handler)
    try:
        use(tier, "a", "b")
        assert reported.wait(PATIENCE)
    finally:
        live._log.removeHandler(handler)
    tier.close()
    del tier
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_nothing_runs_where_the_log_takes_no_such_lines(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "nvme_offload")
    tier = Tier([str(tmp_path)], AioConfig(backend="posix", direct="auto"), host_memory=MIB)
    tier.require(4 * MIB)
    before = set(threading.enumerate())
    meter = Meter(tier)
    meter.take()
    assert set(threading.enumerate()) == before
    caplog.set_level(logging.INFO, "nvme_offload")
    meter.take()
    (thread,) = set(threading.enumerate()) - before
    tier.close()
    del tier, meter
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.fixture
def clock(monkeypatch):
    """What `time.monotonic` says in `live`, to be set."""
    now = types.SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(live.time, "monotonic", lambda: now.seconds)
    return now


def test_a_line_says_how_the_step_goes(tier, said, clock, monkeypatch):
    busy = iter([10.0, 23.0])
    monkeypatch.setattr(Disks, "counters", lambda self: DiskCounters((5.0, next(busy)), 0))
    lines = live.Live(tier)
    use(tier, "a", "b")
    clock.seconds += 40
    lines.begin(DiskCounters((5.0, 20.0), 0), ended=True)  # a step of 40 s that wrote 2 MiB
    use(tier, "a")
    clock.seconds += 10
    lines.log_line()
    moved = tier.counters().bytes_moved
    (line,) = said()
    assert line.startswith(
        "still going: in the last 10 s read 1 MiB and wrote 0 bytes, 0.00 GB/s; waited "
    )
    assert line.endswith(
        " s for the drive, busy 30% of the time; about 30 s to the end of the step"
    )
    assert moved == 3 * MIB


def test_a_step_that_moves_more_or_takes_longer_than_the_last_has_no_estimate(tier, said, clock):
    lines = live.Live(tier)
    use(tier, "a")
    clock.seconds += 40
    lines.begin(None, ended=True)
    use(tier, "b")
    clock.seconds += 41
    lines.log_line()
    lines.begin(None, ended=True)
    use(tier, "a", "b", "a")
    clock.seconds += 10
    lines.log_line()
    assert len(said()) == 2
    assert not any("to the end of the step" in line for line in said())


def test_lines_come_after_ten_seconds_and_then_ten_to_a_step(tier, clock):
    lines = live.Live(tier)
    assert lines.due_in() == 10
    clock.seconds += 600
    lines.begin(None, ended=True)  # a step of 600 s
    assert lines.due_in() == 10
    clock.seconds += 10
    lines.log_line()
    assert lines.due_in() == 60
    lines.begin(None, ended=True)
    clock.seconds += 10
    lines.log_line()
    assert lines.due_in() == 10


def test_what_the_kernel_counts_of_disks(tmp_path):
    described = Disks([str(tmp_path)])
    files = []
    for name, ticks, sectors in (("a", 5000, 10), ("b", 1000, 20)):
        files.append(tmp_path / name)
        files[-1].write_text(f"1 2 3 4 5 6 {sectors} 8 0 {ticks} 11\n")
    described._files = files
    before = described.counters()
    assert before == DiskCounters((5.0, 1.0), 30 * 512)
    files[1].write_text("1 2 3 4 5 6 40 8 0 3000 11\n")
    now = described.counters()
    assert now.written_bytes - before.written_bytes == 20 * 512
    assert busy_share(before, now, 4.0) == 0.5
    assert busy_share(before, now, 1.0) == 1.0
    files[0].unlink()
    assert described.counters() is None


def test_the_disk_under_a_path_is_found(tmp_path):
    """The counters grow with bytes written and synced there, where the kernel has counters."""
    disks = Disks([str(tmp_path)])
    before = disks.counters()
    if before is None:
        pytest.skip("no disk with counters is under the temporary directory")
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(8 * MIB))
        file.flush()
        os.fsync(file.fileno())
    assert disks.counters().written_bytes - before.written_bytes >= 8 * MIB


def test_a_step_s_use_has_what_was_written_and_how_busy_the_disk_was(tier, monkeypatch):
    counted = DiskCounters((1.0,), 10**9)
    monkeypatch.setattr(Disks, "counters", lambda self: counted)
    meter = Meter(tier)
    use(tier, "a", "b")
    counted = DiskCounters((1.0,), 3 * 10**9)
    used = DriveUse(step=1, seconds=1.0, **meter.take())
    assert used.total_written_bytes == used.bytes_written == 2 * MIB
    assert (used.busy_share, used.disk_written_bytes) == (0.0, 3 * 10**9)
    assert "the drive was busy 0% of the time" in str(used)
    assert str(used).endswith(
        "written so far 0.0021 GB of the 3 GB to the disk since the machine was started"
    )
    use(tier, "a")
    counted = None
    used = DriveUse(step=2, seconds=1.0, **meter.take())
    assert (used.bytes_written, used.total_written_bytes) == (0, 2 * MIB)
    assert (used.busy_share, used.disk_written_bytes) == (None, None)
    assert str(used).endswith("in host memory; written so far 0.0021 GB")
