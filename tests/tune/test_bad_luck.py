"""Bad luck: one clear line, the right exit status, and nothing left behind."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import finished

from nvme_offload.hardware.profile import Profile

SWEEP = [sys.executable, "-m", "nvme_offload.tune"]
SHORT = ["--seconds", "1", "--size", "128MiB"]


def run(*arguments: str | Path, command: list[str] = SWEEP) -> subprocess.CompletedProcess[str]:
    return finished([*command, *map(str, arguments)])


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """*directory* shown read-only, in this test session's own mount namespace."""
    subprocess.run(["mount", "--bind", str(directory), str(directory)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(directory)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_read_only_mount_is_refused_for_the_drive_and_for_the_report(
    disk: Path, mounted: Callable[[str], Path], tmp_path: Path, refused: Callable[..., str]
) -> None:
    place = mounted("ext4") / "read-only"
    place.mkdir()
    with read_only(place):
        for arguments, message in (
            ([place, "--report-dir", tmp_path], "is not writable"),
            ([disk, "--report-dir", place / "reports"], "no report can be written"),
        ):
            assert message in refused(*arguments, *SHORT)
    place.rmdir()
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_what_may_be_written_is_reported(disk: Path, tmp_path: Path) -> None:
    """As a quota: the allocation is refused."""
    command = ["bash", "-c", 'ulimit -f 10000; exec "$@"', "-", *SWEEP]
    result = run(disk, "--report-dir", tmp_path, *SHORT, command=command)
    assert (result.returncode, result.stdout) == (2, "")
    assert (
        "is too small: 128 MiB cannot be allocated there (a quota, a limit?); --size takes less"
        in result.stderr.splitlines()[-1]
    )
    assert list(disk.iterdir()) == list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_planted_link_is_neither_followed_nor_replaced(disk: Path, tmp_path: Path) -> None:
    """The name of the new report is a symlink: the report takes another name, and the target of the
    link stays.
    """
    first = run(disk, "--report-dir", tmp_path, *SHORT)
    assert first.returncode == 0, first.stderr
    (report,) = tmp_path.iterdir()
    elsewhere = tmp_path / "elsewhere"
    report.rename(elsewhere)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in elsewhere.iterdir())
    report.symlink_to(elsewhere)
    second = run(disk, "--report-dir", tmp_path, *SHORT)
    assert second.returncode == 0, second.stderr
    assert sorted((path.name, path.stat().st_mtime_ns) for path in elsewhere.iterdir()) == before
    assert report.is_symlink()
    assert (tmp_path / f"{report.name}-2" / "profile.json").exists()


def test_a_sustained_write_is_in_the_profile_and_a_closed_output_is_no_failure(
    disk: Path, tmp_path: Path
) -> None:
    result = run(
        *(disk, "--report-dir", tmp_path, *SHORT, "--sustained", "1GiB"),
        command=["bash", "-c", 'exec "$@" >&-', "-", *SWEEP],
    )
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    (report,) = tmp_path.iterdir()
    found = Profile.load(report / "profile.json").sustained
    assert found is not None
    assert 1 << 30 <= found.bytes <= (2 << 30) + (64 << 20)
    assert len(found.samples) >= 32
    assert list(disk.iterdir()) == []
