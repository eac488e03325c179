"""Opening files: modes, rights, preallocation, alignment, anonymous files, and refusals."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from patience import PATIENCE
from processes import finished
from transfers import Configure, RandomBytes, on_disk

import nvme_offload
from nvme_offload.errors import IOFailure, OffloadError, UnsupportedError, UsageError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine


@pytest.mark.every_filesystem
def test_a_size_is_there_from_the_start(
    engine: Engine, directory: Path, random_bytes: RandomBytes
) -> None:
    path = directory / "data"
    size = 5_000_001
    with engine.open(path, "rw", size=size) as file:
        assert file.size == size
        assert path.stat().st_size == size
        assert path.stat().st_blocks * 512 >= size
        assert not on_disk(path).any()
        data = random_bytes(size)
        engine.write(data, file).wait(PATIENCE)
        assert file.size == size
        assert_array_equal(on_disk(path), data)


@pytest.mark.every_filesystem
def test_direct_means_direct(
    configure: Configure, directory: Path, filesystem: str, random_bytes: RandomBytes
) -> None:
    settings = configure()
    with Engine(settings) as engine, engine.open(directory / "data", "rw", size=1 << 20) as file:
        assert file.direct == (settings.direct is True)
        for alignment in (file.memory_alignment, file.offset_alignment):
            assert alignment >= 1
            assert alignment & (alignment - 1) == 0
        if filesystem == "ext4-4k":
            assert file.offset_alignment == 4096
        if filesystem in {"ext4", "xfs"}:
            assert file.offset_alignment == 512
        # The kernel agrees: it accepts transfers at the smallest alignment that is promised.
        data = random_bytes(file.offset_alignment)
        engine.write(data, file, file.offset_alignment).wait(PATIENCE)
        assert_array_equal(on_disk(directory / "data")[file.offset_alignment :][: data.size], data)


def test_a_filesystem_without_direct_io_is_refused_unless_asked_for(
    backend: str, mounted: Callable[[str], Path], random_bytes: RandomBytes
) -> None:
    path = mounted("tmpfs") / f"direct-{backend}"
    with (
        Engine(AioConfig(backend=backend, direct=True)) as engine,
        pytest.raises(UnsupportedError, match="direct"),
    ):
        engine.open(path, "rw")
    data = random_bytes(100_001)
    for config in (
        AioConfig(backend=backend, direct="auto"),
        AioConfig(backend=backend, direct=False),
    ):
        with Engine(config) as engine, engine.open(path, "rw") as file:
            assert not file.direct
            engine.write(data, file, 1).wait(PATIENCE)
        assert_array_equal(on_disk(path)[1:], data)
        path.unlink()


@pytest.mark.parametrize("mode", ["w", "rw"])
def test_opening_never_truncates(
    engine: Engine, directory: Path, random_bytes: RandomBytes, mode: str
) -> None:
    path = directory / "data"
    model = random_bytes(10_000)
    model.tofile(path)
    for size in (None, 0, 4096, 10_000):
        engine.open(path, mode, size=size).close()
        assert_array_equal(on_disk(path), model, f"opened with size={size}")
    with engine.open(path, mode, size=20_000) as file:
        assert file.size == 20_000
    model = np.concatenate([model, np.zeros(10_000, np.uint8)])
    assert_array_equal(on_disk(path), model)
    data = random_bytes(777)
    with engine.open(path, mode) as file:
        engine.write(data, file, 5001).wait(PATIENCE)
    model[5001:5778] = data
    assert_array_equal(on_disk(path), model)


@pytest.mark.parametrize("mode", ["w", "rw"])
def test_a_new_file_is_its_owners_alone(engine: Engine, directory: Path, mode: str) -> None:
    before = os.umask(0)
    try:
        engine.open(directory / "opened", mode).close()
        engine.write(b"data", directory / "written").wait(PATIENCE)
    finally:
        os.umask(before)
    for name in ("opened", "written"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600


def test_the_rights_of_a_file_that_is_there_stay(engine: Engine, directory: Path) -> None:
    path = directory / "data"
    path.write_bytes(b"before")
    path.chmod(0o644)
    engine.open(path, "rw").close()
    engine.write(b"after!", path).wait(PATIENCE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert path.read_bytes() == b"after!"


def test_a_mode_is_kept_to(engine: Engine, directory: Path, random_bytes: RandomBytes) -> None:
    path = directory / "data"
    model = random_bytes(10_000)
    model.tofile(path)
    target = np.zeros_like(model)
    with engine.open(path, "r") as file:
        with pytest.raises(UsageError):
            engine.write(target, file)
        engine.read(target, file).wait(PATIENCE)
    assert_array_equal(target, model)
    with engine.open(path, "w") as file, pytest.raises(UsageError):
        engine.read(target, file)
    assert_array_equal(on_disk(path), model)


@pytest.mark.parametrize("mode", ["", "x", "a", "rb", "wr", "RW", None])
def test_another_mode_is_refused(engine: Engine, directory: Path, mode: str) -> None:
    with pytest.raises(UsageError):
        engine.open(directory / "data", mode)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("size", [-1, 1 << 63, 1 << 64])
def test_a_size_that_no_file_has_is_refused(engine: Engine, directory: Path, size: int) -> None:
    with pytest.raises(UsageError):
        engine.open(directory / "data", "rw", size=size)
    assert list(directory.iterdir()) == []
    with pytest.raises(UsageError):
        engine.open_anonymous(directory, size)


@pytest.mark.parametrize(
    "name", ["plain", "with space", "ünïcode", "not utf-8 \udcff", "new\nline", "%s{}"]
)
def test_paths_of_every_kind(
    engine: Engine, directory: Path, random_bytes: RandomBytes, name: str
) -> None:
    path = directory / name
    data, target = random_bytes(5000), np.zeros(5000, np.uint8)
    engine.write(data, path).wait(PATIENCE)
    assert_array_equal(on_disk(path), data)
    engine.read(target, str(path)).wait(PATIENCE)
    assert_array_equal(target, data)
    with engine.open(str(path), "r") as file:
        assert file.path == str(path)
    with pytest.raises(IOFailure) as caught:
        engine.open(path / "below", "r")
    assert caught.value.path == str(path / "below")
    assert caught.value.errno == errno.ENOTDIR


def test_a_path_with_a_nul_is_refused(engine: Engine, directory: Path) -> None:
    with pytest.raises(UsageError):
        engine.open(f"{directory}/data\0.txt", "rw")
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("mode", ["r", "w", "rw"])
def test_a_missing_place_is_named(engine: Engine, directory: Path, mode: str) -> None:
    path = directory / "none" / "data" if "w" in mode else directory / "none"
    calls = [lambda: engine.open(path, mode)]
    if mode == "r":
        calls.append(lambda: engine.read(bytearray(10), path))
    for call in calls:
        with pytest.raises(IOFailure) as caught:
            call()
        found = caught.value.errno, caught.value.operation, caught.value.path
        assert found == (errno.ENOENT, "open", str(path))
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("mode", ["r", "w", "rw"])
def test_a_directory_is_no_file(engine: Engine, directory: Path, mode: str) -> None:
    with pytest.raises((IOFailure, UsageError)):
        engine.open(directory, mode)


@pytest.mark.parametrize("mode", ["r", "w", "rw"])
def test_a_fifo_is_refused_at_once(backend: str, directory: Path, mode: str) -> None:
    fifo = directory / "fifo"
    os.mkfifo(fifo)
    # In a separate process: an open of a FIFO that waits for the other end would never return.
    script = """
import sys
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine
from nvme_offload.errors import OffloadError
backend, mode, path = sys.argv[1:]
with Engine(AioConfig(backend=backend, direct="auto")) as engine:
    try:
        engine.open(path, mode)
    except OffloadError as error:
        print("refused:", error)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(nvme_offload.__file__).parents[1])}
    arguments = [sys.executable, "-c", script, backend, mode, str(fifo)]
    result = finished(arguments, env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("refused:")
    assert str(fifo) in result.stdout


@pytest.mark.parametrize("mode", ["w", "rw"])
def test_a_planted_symlink_is_not_written_through(
    engine: Engine, directory: Path, mode: str
) -> None:
    target, link, dangling = directory / "target", directory / "link", directory / "dangling"
    target.write_bytes(b"someone else's")
    link.symlink_to(target)
    dangling.symlink_to(directory / "none")
    for path in (link, dangling):
        with pytest.raises(OffloadError) as caught:
            engine.open(path, mode, size=4096)
        assert str(path) in str(caught.value)
        with pytest.raises(OffloadError):
            engine.write(b"ours", path)
    assert target.read_bytes() == b"someone else's"
    assert not (directory / "none").exists()


def test_a_symlink_on_the_way_is_followed_and_one_to_a_file_is_read_through(
    engine: Engine, directory: Path, random_bytes: RandomBytes
) -> None:
    (directory / "real").mkdir()
    (directory / "link").symlink_to(directory / "real")
    data, target = random_bytes(5000), np.zeros(5000, np.uint8)
    engine.write(data, directory / "link" / "data").wait(PATIENCE)
    assert_array_equal(on_disk(directory / "real" / "data"), data)
    (directory / "file").symlink_to(directory / "real" / "data")
    engine.read(target, directory / "file").wait(PATIENCE)
    assert_array_equal(target, data)


@pytest.mark.every_filesystem
def test_anonymous_files_have_no_name_and_their_own_bytes(
    engine: Engine, directory: Path, random_bytes: RandomBytes
) -> None:
    datas = [random_bytes(300_001) for _ in range(3)]
    files = [engine.open_anonymous(directory, data.size) for data in datas]
    assert list(directory.iterdir()) == []
    for ticket in [engine.write(data, file) for data, file in zip(datas, files, strict=True)]:
        ticket.wait(PATIENCE)
    for data, file in zip(datas, files, strict=True):
        assert file.size == data.size
        assert str(directory) in file.path
        target = np.zeros_like(data)
        engine.read(target, file).wait(PATIENCE)
        assert_array_equal(target, data)
        file.close()
    assert list(directory.iterdir()) == []


def test_anonymous_files_need_a_directory(engine: Engine, directory: Path) -> None:
    with pytest.raises(IOFailure) as caught:
        engine.open_anonymous(directory / "none", 4096)
    assert caught.value.errno == errno.ENOENT
    assert str(directory / "none") in caught.value.path
    (directory / "file").write_bytes(b"")
    with pytest.raises(IOFailure) as caught:
        engine.open_anonymous(directory / "file", 4096)
    assert caught.value.errno == errno.ENOTDIR


def test_a_closed_file_finishes_what_was_asked_and_takes_no_more(
    engine: Engine, directory: Path, random_bytes: RandomBytes
) -> None:
    path = directory / "data"
    data = random_bytes(16 << 20)
    with engine.open(path, "rw") as file:
        ticket = engine.write(data, file)
    file.close()
    for call in (
        lambda: engine.write(data, file),
        lambda: engine.read(data, file),
        file.sync,
        lambda: file.size,
    ):
        with pytest.raises(UsageError):
            call()
    assert ticket.wait(PATIENCE) == data.size
    assert_array_equal(on_disk(path), data)


def test_a_file_that_is_renamed_or_unlinked_is_still_the_one_that_was_opened(
    engine: Engine, directory: Path, random_bytes: RandomBytes
) -> None:
    path, moved = directory / "data", directory / "moved"
    data, target = random_bytes(50_001), np.zeros(50_001, np.uint8)
    with engine.open(path, "rw") as file:
        path.rename(moved)
        path.write_bytes(b"another")
        # odd, so that it also goes by the way of unaligned bytes
        engine.write(data, file, 1).wait(PATIENCE)
        assert_array_equal(on_disk(moved)[1:], data)
        moved.unlink()
        engine.read(target, file, 1).wait(PATIENCE)
        assert_array_equal(target, data)
    assert path.read_bytes() == b"another"
    assert [entry.name for entry in directory.iterdir()] == ["data"]
