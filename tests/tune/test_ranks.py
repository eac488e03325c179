"""Several processes on one drive: they measure in one window, and an error of one is the error of
all.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvme_offload.errors import CorruptionError, IOFailure, NoSpaceError
from nvme_offload.hardware.machine import gpu_count
from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS, PHASES, Setting
from nvme_offload.tune import ranks, space
from nvme_offload.tune.ranks import Ranks, request_bytes
from nvme_offload.tune.trial import REQUEST_BYTES, Result

FILE_BYTES = 2 * REQUEST_BYTES
SETTING = Setting(block_size=1 << 20, queue_depth=4, thread_count=1)

# What a rank runs before it starts. The engines that fill the files do not fail.
EIO = """
import errno, nvme_offload._aio as aio, nvme_offload.tune.trial as trial
def faulty(config, engine=trial.Engine):
    return engine(config, _faults=[(2, 1000, aio.FaultKind.FAIL, errno.EIO)] if config.queue_depth == 4 else [])
trial.Engine = faulty
"""
DAMAGE = """
import nvme_offload.tune.trial as trial
def damaged(lane, verify=trial._Lane.verify):
    for buffer, _ in lane._last.values():
        buffer[70_000] ^= 1
    verify(lane)
trial._Lane.verify = damaged
"""


def start_with(patch: str) -> str:
    return ranks._START.replace("from nvme", f"exec({patch!r}); from nvme")


def children_of(process_id: int) -> list[int]:
    return [
        int(child)
        for child in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    ]


@pytest.fixture(scope="module")
def two(disk: Path) -> Iterator[Ranks]:
    """Two ranks with two filled files of two requests each."""
    with Ranks(2, disk, FILE_BYTES) as made:
        reports: list[int] = []
        assert made.fill(SETTING, None, reports.append) > 0
        assert reports == sorted(reports)
        yield made


@pytest.mark.parametrize("phase", PHASES)
def test_all_ranks_count_in_one_window_and_are_added_up(
    two: Ranks, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pumped: list[tuple[float, float, list[list[Result]]]] = []

    def seen(name: str, *arguments: Any, order: Any = two._order, **options: Any) -> Any:
        answers = order(name, *arguments, **options)
        if name == "pump":
            pumped.append((*arguments, answers))
        return answers

    monkeypatch.setattr(two, "_order", seen)
    result = two.run(SETTING, phase, 0.3)
    begin, seconds, by_rank = next(entry for entry in pumped if entry[1] == 0.3)
    windows = [(points[0].seconds, points[-1].seconds) for points in by_rank]
    assert len(windows) == 2
    assert all(first >= begin and last >= begin + seconds for first, last in windows)
    assert min(last for _, last in windows) - max(first for first, _ in windows) > 0.5 * seconds
    if pumped[-1][1:] == (seconds, by_rank):  # the first window had something in it
        for direction, total in (("read", result.read_bytes), ("write", result.write_bytes)):
            moved = [points[-1].moved(direction) - points[0].moved(direction) for points in by_rank]
            assert sum(moved) == total
            assert all((count > 0) == (phase in (direction, "mixed")) for count in moved)


def test_their_files_are_all_in_use(two: Ranks) -> None:
    assert two.file_bytes == 2 * FILE_BYTES
    assert two.direct


def test_what_none_has_room_for_is_an_error_and_leaves_none(disk: Path) -> None:
    before = children_of(os.getpid())
    with pytest.raises(NoSpaceError):
        Ranks(2, disk, 1 << 40)
    assert children_of(os.getpid()) == before
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("patch", "kind", "message"),
    [
        (EIO, IOFailure, os.strerror(errno.EIO)),
        (DAMAGE, CorruptionError, "differ from the data written"),
    ],
)
def test_an_error_in_a_rank_is_raised_here(
    disk: Path, monkeypatch: pytest.MonkeyPatch, patch: str, kind: type[Exception], message: str
) -> None:
    monkeypatch.setattr(ranks, "_START", start_with(patch))
    with Ranks(2, disk, FILE_BYTES) as made:
        processes = list(made._ranks.values())
        made.fill(Setting(1 << 20, 16, 1), None, lambda done: None)
        with pytest.raises(kind, match=message):
            made.run(SETTING, "read", 0.1)
    assert all(process.poll() is not None for process in processes)


# The shares of many ranks


@pytest.mark.parametrize("count", range(1, space.MOST_RANKS + 1))
def test_what_each_rank_has_fits_what_it_moves(count: int) -> None:
    settings = space.grid("libaio", 128, 100e9, ranks=count)
    assert {setting.thread_count for setting in settings} == {1, 2, 4, 8}
    assert max(setting.block_size for setting in settings) <= request_bytes(count) <= REQUEST_BYTES
    assert DEEPSPEED_DEFAULTS in settings
    deepest = count * max(setting.bytes_in_flight for setting in settings)
    assert (64 << 20) < deepest <= 128 << 20
    # A ring for each direction, the pattern, the buffer for reading back; 24 MiB for the
    # interpreter and its libraries (20 measured).
    assert 2 * deepest + count * (4 * request_bytes(count) + (24 << 20)) < 10**9


def test_ranks_share_the_processors_and_what_a_slow_drive_needs() -> None:
    assert {setting.thread_count for setting in space.grid("libaio", 8, 10e9, ranks=4)} == {1, 2, 4}
    assert {setting.thread_count for setting in space.grid("libaio", 2, 10e9, ranks=16)} == {1}
    assert (
        max(setting.bytes_in_flight for setting in space.grid("libaio", 8, 800e6, ranks=2))
        == 32 << 20
    )
    assert (
        max(setting.bytes_in_flight for setting in space.grid("libaio", 8, 1e6, ranks=4)) == 8 << 20
    )


@pytest.mark.parametrize(
    ("entries", "devices", "visible", "expected"),
    [
        (0, 0, None, 0),
        (0, 0, "0,1", 0),  # named, but no driver
        (8, 8, None, 8),
        (8, 0, None, 8),  # nothing has used the devices yet
        (8, 2, None, 2),  # a container that was given two
        (0, 4, None, 4),
        (8, 8, "2,5,7", 3),
        (8, 8, "", 0),
        (8, 8, "1,-1,2", 1),  # CUDA ignores what follows an invalid one
    ],
)
def test_gpus_are_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    entries: int,
    devices: int,
    visible: str | None,
    expected: int,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    for number in range(devices):
        (tmp_path / f"dev/nvidia{number}").touch()
    for number in range(entries):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:{number}").mkdir(parents=True)
    assert gpu_count(tmp_path) == expected
