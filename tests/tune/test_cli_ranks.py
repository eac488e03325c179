"""`nvme-sweep --ranks`: the command says how many there were, and none outlives it, however it
ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE
from processes import finished

from nvme_offload.hardware.profile import Profile

SWEEP = [sys.executable, "-m", "nvme_offload.tune"]


def end_of(process_ids: list[int]) -> Iterator[bool]:
    """Whether each process has ended, or does so soon."""
    for process_id in process_ids:
        try:
            descriptor = os.pidfd_open(process_id)
        except ProcessLookupError:
            yield True
            continue
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        yield bool(poll.poll(PATIENCE * 1000))
        os.close(descriptor)


def arguments(disk: Path, reports: Path, seconds: int = 60) -> list[str]:
    return [
        *(str(disk), "--report-dir", str(reports), "--size", "256MiB", "--ranks", "2"),
        *("--seconds", str(seconds)),
    ]


@contextlib.contextmanager
def sweeping(
    disk: Path, reports: Path, topic: str
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A sweep in a separate process group, once its progress is at *topic*; and its ranks."""
    command = [*SWEEP, *arguments(disk, reports)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_in_front
    ) as process:
        try:
            assert process.stderr is not None
            assert any(line.startswith(topic) for line in process.stderr)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            assert len(children) == 2
            yield process, [int(child) for child in children]
        finally:
            process.kill()


def _in_front() -> None:
    """As a terminal's job: a separate group, and Ctrl-C ends it, which a shell's background jobs
    ignore.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_a_sweep_with_ranks_says_so_and_leaves_nothing(disk: Path, tmp_path: Path) -> None:
    command = [*SWEEP, *arguments(disk, tmp_path, 1), "--engine", "native"]
    result = finished(command)
    assert result.returncode == 0, result.stderr
    assert "screen: read by 2 ranks with 1 MiB x 8" in result.stderr
    assert result.stdout.splitlines()[0].endswith("; 2 ranks at the same time; speeds are sums")
    (report,) = tmp_path.iterdir()
    profile = Profile.load(report / "profile.json")
    assert profile.workload["ranks"] == 2
    assert profile.workload["file_bytes"] == {"read": 128 << 20, "write": 128 << 20}
    assert profile.engine["name"] == "native"
    page = (report / "report.html").read_text(encoding="utf-8")
    for text in (profile.reasons[1], result.stdout, page):
        assert "2 ranks, which are processes, ran each setting at the same time" in text
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("topic", "number", "code"),
    [
        ("filling", signal.SIGTERM, 143),
        ("screen", signal.SIGINT, 130),
        ("screen", signal.SIGKILL, -9),
    ],
)
def test_ranks_end_with_their_parent(
    disk: Path, tmp_path: Path, topic: str, number: signal.Signals, code: int
) -> None:
    with sweeping(disk, tmp_path, topic) as (process, children):
        if number == signal.SIGINT:  # what a terminal does
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        # comes to an end when no process has these pipes any more
        out, rest = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (code, "")
    lines = [
        line for line in rest.splitlines() if not line.startswith(("filling", "screen", "narrow"))
    ]
    assert lines == (
        [f"nvme-sweep: stopped by {number.name}; nothing was left on the drive"] if code > 0 else []
    )
    assert all(end_of(children))
    assert list(disk.iterdir()) == list(tmp_path.iterdir()) == []


def test_a_rank_that_is_killed_fails_the_sweep_with_one_line(disk: Path, tmp_path: Path) -> None:
    with sweeping(disk, tmp_path, "screen") as (process, children):
        os.kill(children[1], signal.SIGKILL)
        out, rest = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (1, "")
    last = [line for line in rest.splitlines() if not line.startswith("screen")]
    assert last == [
        "nvme-sweep: rank 1 of 2 was ended by SIGKILL: is there the memory for so many?"
    ]
    assert all(end_of(children))
    assert list(disk.iterdir()) == list(tmp_path.iterdir()) == []
