"""No write completes while its bytes are only in the page cache: a write that the drive refuses
raises its error.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from processes import finished

from nvme_offload._aio import FaultKind
from nvme_offload.errors import IOFailure, OffloadError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine
from nvme_offload.store.store import TensorStore

HOST_BYTES, THIN_BYTES = 48 << 20, 256 << 20
SMALL_BYTES = 3072


def command(*arguments: str) -> str:
    return finished(arguments, check=True).stdout


@pytest.fixture
def thin(mount_namespace: None, tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 256 MiB on a file of a filesystem that has 48: it says that there is room, and the
    drive below has none.
    """
    host, point, image = tmp_path / "host", tmp_path / "thin", tmp_path / "host" / "image"
    for directory in (host, point):
        directory.mkdir()
    command("mount", "-t", "tmpfs", "-o", f"size={HOST_BYTES}", "tmpfs", str(host))
    with contextlib.ExitStack() as stack:
        stack.callback(command, "umount", "--lazy", str(host))
        image.touch()
        os.truncate(image, THIN_BYTES)
        try:
            device = command("losetup", "--show", "--find", str(image)).strip()
            try:
                command(
                    "mkfs.ext4",
                    "-q",
                    "-O",
                    "^has_journal",
                    "-E",
                    "lazy_itable_init=0,nodiscard",
                    device,
                )
                command("mount", "-o", "errors=continue", device, str(point))
            finally:
                command("losetup", "--detach", device)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no thin volume here: {error}")
        stack.callback(command, "umount", "--lazy", str(point))
        yield point


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


@pytest.mark.parametrize("direct", [True, False])
def test_small_tensors_on_a_volume_that_cannot_keep_them(thin: Path, direct: bool) -> None:
    config = AioConfig(block_size=64 << 10, direct=direct)
    kept: dict[str, bytes] = {}
    refused = 0
    generator = np.random.default_rng(3)
    with contextlib.suppress(OffloadError), TensorStore(thin, config) as store:
        store.reserve(128 << 20)
        for number in range(3 * HOST_BYTES // 4096 // 2):
            data = generator.integers(0, 256, SMALL_BYTES, dtype=np.uint8)
            try:
                store.put(str(number), data).wait()
                kept[str(number)] = data.tobytes()
            except OffloadError as error:
                assert isinstance(error, IOFailure)  # noqa: PT017 - a refusal has this class
                refused += 1
                if refused == 50:
                    break
        drop_caches()
        assert refused == 50
        assert len(kept) > 1000
        back = np.empty(SMALL_BYTES, np.uint8)
        for name, data in kept.items():
            # the filesystem's own blocks may be lost, which it says
            with contextlib.suppress(IOFailure):
                store.get(name, back).wait()
                assert back.tobytes() == data, name


def test_unaligned_ends_of_a_file_on_a_volume_that_cannot_keep_them(thin: Path) -> None:
    data = np.random.default_rng(4).integers(0, 256, SMALL_BYTES, dtype=np.uint8)
    step = 4096
    with Engine(AioConfig()) as engine, engine.open(thin / "file", "rw", 128 << 20) as file:
        kept = []
        error: OffloadError | None = None
        while error is None and len(kept) < HOST_BYTES // step * 2:
            try:
                engine.write(data, file, len(kept) * step).wait()
                kept.append(len(kept))
            except OffloadError as refusal:
                error = refusal
        assert isinstance(error, IOFailure)
        drop_caches()
        assert len(kept) > 1000
        back = np.empty(SMALL_BYTES, np.uint8)
        for number in kept:
            # the filesystem's own blocks may be lost, which it says
            with contextlib.suppress(IOFailure):
                engine.read(back, file, number * step).wait()
                assert (back == data).all(), number


def test_a_store_writes_nothing_through_the_page_cache(mounted: Callable[[str], Path]) -> None:
    """Which a file shows by the pages that the kernel keeps of it: sizes of every kind,
    overwritten, and their neighbours whole.
    """
    sizes = [1, 511, 512, 3072, 4095, 4096, 4097, 70_001, (1 << 20) + 5]
    generator = np.random.default_rng(5)
    with TensorStore(mounted("ext4"), AioConfig(block_size=16 << 10)) as store:
        (slabs,) = store._space.drives
        for _ in range(3):
            values = {str(size): generator.integers(0, 256, size, dtype=np.uint8) for size in sizes}
            for ticket in [store.put(name, value) for name, value in values.items()]:
                ticket.wait()
            for name, value in values.items():
                back = np.empty_like(value)
                store.get(name, back).wait()
                assert (back == value).all(), name
        assert all(file._live().direct for file in slabs._files)
    with (
        Engine(AioConfig()) as engine,
        engine.open_anonymous(mounted("ext4"), 8192, padded=True) as file,
    ):
        engine.write(b"\xff" * 8192, file).wait()
        engine.write(b"x" * 10, file).wait()
        back = np.empty(8192, np.uint8)
        engine.read(back, file).wait()
        padding = file.offset_alignment
        assert back.tobytes() == b"x" * 10 + bytes(padding - 10) + b"\xff" * (8192 - padding)


@pytest.mark.parametrize("cut", [513, 1001, 1535, 2047])
def test_a_padded_end_is_whole_whatever_a_drive_claims_of_it(cut: int, tmp_path: Path) -> None:
    """Every other transfer ends early, with an odd number of bytes, of which only whole sectors
    were moved.
    """
    faults = [(at, 1, FaultKind.CUT, cut) for at in range(0, 4000, 2)]
    generator = np.random.default_rng(5)
    values = {
        f"{size}": generator.integers(0, 256, size, dtype=np.uint8)
        for size in (1, 100, 512, 600, 1000, 1001, 1024, 1500, 3072, 4095, 5001, 70_001)
    }
    with (
        Engine(AioConfig(direct="auto"), _faults=faults) as engine,
        TensorStore(tmp_path, engine=engine) as store,
    ):
        for _ in range(2):
            for name, value in values.items():
                value += 1  # stale bytes would be noticed
                store.put(name, value).wait()
            for name, value in values.items():
                out = np.zeros_like(value)
                store.get(name, out).wait()
                np.testing.assert_array_equal(out, value, err_msg=name)
