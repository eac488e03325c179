"""Memory that processes can still allocate, from files of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvme_offload.hardware.machine import available_bytes, physical_bytes

GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(
        tmp_path / "proc/meminfo",
        f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {40 * GIB // 1024} kB\n",
    )
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def member(root: Path, text: str) -> None:
    write(root / "proc/self/cgroup", text)


def v2(root: Path, group: str, limit: object, current: int, inactive_file: int = 0) -> None:
    place = root / "sys/fs/cgroup" / group
    write(place / "memory.max", f"{limit}\n")
    write(place / "memory.current", f"{current}\n")
    write(place / "memory.stat", f"anon 5\nfile 7\ninactive_file {inactive_file}\n")


def v1(root: Path, group: str, limit: int, usage: int, inactive_file: int = 0) -> None:
    place = root / "sys/fs/cgroup/memory" / group
    write(place / "memory.limit_in_bytes", f"{limit}\n")
    write(place / "memory.usage_in_bytes", f"{usage}\n")
    write(place / "memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive_file}\n")


def test_no_groups(root):
    assert available_bytes(root) == 40 * GIB


def test_without_proc_free_memory_counts_and_the_limit_of_the_mounted_group(root):
    (root / "proc/meminfo").unlink()
    assert 0 < available_bytes(root) < physical_bytes()
    v2(root, "", GIB // 1024, 1000, 24)
    assert available_bytes(root) == GIB // 1024 - 976


def test_a_limit_of_v2(root):
    member(root, "0::/user.slice/job\n")
    v2(root, "user.slice/job", 8 * GIB, 3 * GIB)
    assert available_bytes(root) == 5 * GIB


def test_a_group_without_a_limit(root):
    member(root, "0::/job\n")
    v2(root, "job", "max", 3 * GIB)
    assert available_bytes(root) == 40 * GIB


def test_the_limit_of_a_group_above(root):
    member(root, "0::/user.slice/job\n")
    v2(root, "user.slice/job", "max", 1 * GIB)
    v2(root, "user.slice", 8 * GIB, 6 * GIB)
    assert available_bytes(root) == 2 * GIB


def test_pages_of_files_that_were_read_are_free(root):
    """A data set that was read fills a group up to its limit, and the kernel takes those pages
    first.
    """
    member(root, "0::/job\n")
    v2(root, "job", 8 * GIB, 8 * GIB, inactive_file=5 * GIB)
    assert available_bytes(root) == 5 * GIB


def test_a_limit_of_v1_next_to_v2(root):
    member(
        root,
        "9:name=systemd:/docker/1\n5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/system.slice\n",
    )
    v1(root, "docker/1", 4 * GIB, 3 * GIB, inactive_file=2 * GIB)
    v1(root, "", UNLIMITED_V1, 20 * GIB)
    assert available_bytes(root) == 3 * GIB


def test_a_container_that_sees_its_group_as_the_top(root):
    """/proc/self/cgroup has the host's path, and of that only the last is mounted."""
    member(root, "4:memory:/docker/1\n")
    v1(root, "", 4 * GIB, 3 * GIB)
    assert available_bytes(root) == 1 * GIB


def test_more_is_used_than_the_limit(root):
    member(root, "0::/job\n")
    v2(root, "job", 2 * GIB, 3 * GIB)
    assert available_bytes(root) == 0


@pytest.mark.parametrize("text", ["", "0::/gone\n", "1:name=systemd:/\n"])
def test_groups_that_cannot_be_looked_at(root, text):
    member(root, text)
    assert available_bytes(root) == 40 * GIB
