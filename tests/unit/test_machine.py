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


@pytest.mark.parametrize(
    ("groups", "available"),
    [
        ({"user.slice/job": (8, 3)}, 5),
        ({"user.slice/job": ("max", 3)}, 40),
        ({"user.slice/job": ("max", 1), "user.slice": (8, 6)}, 2),
        ({"user.slice/job": (2, 3)}, 0),
        # a data set that was read fills the group, and the kernel takes those pages first
        ({"user.slice/job": (8, 8, 5)}, 5),
    ],
    ids=str,
)
def test_limits_of_v2(root, groups, available):
    """In GiB: the limit of each group, its use, and its inactive pages of files."""
    member(root, "0::/user.slice/job\n")
    for group, (limit, *used) in groups.items():
        limit = limit if limit == "max" else limit * GIB
        v2(root, group, limit, *(one * GIB for one in used))
    assert available_bytes(root) == available * GIB


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


@pytest.mark.parametrize("text", ["", "0::/gone\n", "1:name=systemd:/\n"])
def test_groups_that_cannot_be_looked_at(root, text):
    member(root, text)
    assert available_bytes(root) == 40 * GIB
