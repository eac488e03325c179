"""Drives that go away, or turn read-only, while values are on them, and machines that hide what
Linux usually shows: typed errors, exact bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import PATIENCE
from processes import finished

import nvme_offload
from nvme_offload.errors import IOFailure, NoSpaceError, OffloadError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.optim import NVMeOptimizer
from nvme_offload.store.store import TensorStore

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "optim")]

from recorded_drive import Drive, command, recorded
from reference import parameters, smallest, train

ROOT = Path(nvme_offload.__file__).parents[1]


@pytest.fixture
def drive(mount_namespace: None, tmp_path: Path) -> Iterator[Drive]:
    with recorded(tmp_path / "drive") as made:
        yield made


def value(fill: int, nbytes: int = 40_000) -> np.ndarray:
    return np.full(nbytes, fill, np.uint8)


def test_a_drive_that_goes_away_in_the_middle(backend: str, drive: Drive) -> None:
    """The drive answers no request after its last flush: no write succeeds, no read returns bytes."""
    out = value(0)
    store = TensorStore(drive.place, AioConfig(backend=backend))
    for number in range(8):
        store.put(f"{number}", value(number)).wait(PATIENCE)
    store.get("3", out).wait(PATIENCE)
    assert (out == 3).all()
    drive.go()
    tickets = [store.put(f"{number}", value(100 + number)) for number in range(8)]
    for ticket in tickets:
        with pytest.raises(IOFailure, match=r"slab|drive") as caught:
            ticket.wait(PATIENCE)
        assert caught.value.errno in (errno.EIO, errno.EROFS)
    for number in range(8):
        with pytest.raises(OffloadError):
            store.get(f"{number}", out).wait(PATIENCE)
    store.close()


def test_a_drive_that_goes_away_in_the_middle_of_training(drive: Drive) -> None:
    params = parameters(torch.bfloat16)
    optimizer = smallest(lambda cap: NVMeOptimizer(params, paths=drive.place, host_memory=cap))
    train(params, optimizer, steps=2)
    assert optimizer.stats().bytes_read > 0
    drive.go()
    for _ in range(3):
        with pytest.raises(IOFailure):
            train(params, optimizer, steps=1)
    with pytest.raises(OffloadError):
        optimizer.state_dict()
    optimizer.close()


def test_a_filesystem_that_turns_read_only(backend: str, drive: Drive) -> None:
    """As ext4 does after an error: existing files are readable, and every write fails."""
    out = value(0)
    store = TensorStore(drive.place, AioConfig(backend=backend))
    for number in range(4):
        store.put(f"{number}", value(number)).wait(PATIENCE)
    store.put("0", value(9)).wait(PATIENCE)
    command("mount", "-o", "remount,abort", drive.place)
    codes = set()
    for number in range(4):
        try:
            store.put(f"{number}", value(50 + number)).wait(PATIENCE)
        except IOFailure as error:
            codes.add(error.errno)
        else:
            store.get(f"{number}", out).wait(PATIENCE)
            assert (out == 50 + number).all()
    assert codes
    assert codes <= {errno.EROFS, errno.EIO}
    store.close()


@pytest.fixture
def limited(mount_namespace: None, tmp_path: Path) -> Iterator[Path]:
    """A directory of which a quota allows 24 MB; the drive has 150 MB more."""
    for tool in ("mkfs.btrfs", "btrfs"):
        if shutil.which(tool) is None:
            pytest.skip(
                f"{tool} is not installed: the quotas of other filesystems take options of the kernel that few have"
            )
    image, place = tmp_path / "image", tmp_path / "place"
    image.touch()
    os.truncate(image, 200 << 20)
    place.mkdir()
    try:
        command("mkfs.btrfs", "-q", image)
        command("mount", "-o", "loop", image, place)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no btrfs here: {error.stderr.strip()}")
    try:
        command("btrfs", "quota", "enable", place)
        command("btrfs", "subvolume", "create", place / "limited")
        command("btrfs", "qgroup", "limit", "24M", place / "limited")
        yield place / "limited"
    finally:
        command("umount", "--lazy", place)


def test_a_quota_is_a_full_drive(backend: str, limited: Path) -> None:
    """Every write that it refuses is a NoSpaceError; existing values stay, and freed space is usable
    again.
    """
    out = value(0, 2 << 20)

    def fill(store: TensorStore) -> int:
        number = 0
        with contextlib.suppress(NoSpaceError):
            for number in range(64):
                store.put(f"{number}", value(number, 2 << 20)).wait(PATIENCE)
        return number

    with TensorStore(limited, AioConfig(backend=backend, direct="auto")) as store:
        kept = fill(store)
        assert 4 <= kept < 63
        store.delete("0")
        try:  # the filesystem copies the blocks that it overwrites, and may have no space for that
            store.put("again", value(99, 2 << 20)).wait(PATIENCE)
        except NoSpaceError:
            pass
        else:
            store.get("again", out).wait(PATIENCE)
            assert (out == 99).all()
        for number in range(1, kept):
            store.get(f"{number}", out).wait(PATIENCE)
            assert (out == number).all()
    os.sync()
    with TensorStore(limited, AioConfig(backend=backend, direct="auto")) as store:
        assert fill(store) >= kept - 1


# of which torch takes 300 MB, weights and gradients 320 MB: the optimizer's states, 320 MB, have no
# room
GROUP_BYTES = 800 << 20
IN_A_GROUP = """
import sys, torch
from nvme_offload.hardware.machine import available_bytes
from nvme_offload.optim import NVMeOptimizer
weights = [torch.nn.Parameter(torch.full((1 << 20,), 1.0)) for _ in range(40)]
for weight in weights:
    weight.grad = torch.ones_like(weight)
assert 0 < available_bytes() < int(sys.argv[2]) // 2, available_bytes()
optimizer = NVMeOptimizer(weights, torch.optim.AdamW, paths=sys.argv[1], lr=0.1)
for _ in range(2):
    optimizer.step()
assert len({weight[0].item() for weight in weights}) == 1
assert optimizer.stats().bytes_read > 0
optimizer.close()
"""


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group with a limit of memory, of the version that is here."""
    if "san.so" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("a sanitizer takes more memory than the limit")
    for top, limit in (
        (Path("/sys/fs/cgroup"), "memory.max"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    ):
        group = top / f"nvme_offload_test_{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                (group / limit).write_text(str(GROUP_BYTES))
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip(
        "a control group with a limit of memory needs root, and a cgroup filesystem that can be written"
    )


@pytest.mark.slow
def test_auto_is_within_the_control_groups_limit(memory_group: Path, tmp_path: Path) -> None:
    """Its kernel would kill a process that took what the machine has."""
    join = f'echo $$ >"{memory_group / "cgroup.procs"}" && exec "$@"'
    arguments = [sys.executable, "-c", IN_A_GROUP, str(tmp_path), str(GROUP_BYTES)]
    done = finished(["bash", "-c", join, "bash", *arguments], cwd=ROOT)
    assert done.returncode == 0, done.stderr
