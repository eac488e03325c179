"""What an engine moves: every size, offset, buffer and setting, on every backend; contents compared
whole, with the bytes around them.
"""

from __future__ import annotations

import array
import errno
import itertools
import mmap
import os
import resource
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from patience import PATIENCE
from transfers import Bytes, Configure, RandomBytes, on_disk

from nvme_offload.errors import IOFailure, NoSpaceError, TruncatedError, UsageError
from nvme_offload.io.engine import Engine, File, allocate

BLOCK = 16 << 10
OFFSETS = (0, 1, 511, 512, 513, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1)
SIZES = (*OFFSETS, 3 * BLOCK + 1)


def memory_at(misalignment: int, count: int) -> tuple[Bytes, slice]:
    """Zeros, and the place in them of *count* bytes that begin *misalignment* bytes after a page;
    at least 512 bytes are on either side.
    """
    around = np.zeros(count + 3 * mmap.PAGESIZE, np.uint8)
    start = -(around.ctypes.data + 512) % mmap.PAGESIZE + 512 + misalignment
    return around, slice(start, start + count)


# Sizes, offsets, addresses


@pytest.mark.every_filesystem
def test_every_size_at_every_offset_arrives_and_nothing_around_it_changes(
    configure: Configure, directory: Path, random_bytes: RandomBytes
) -> None:
    path = directory / "data"
    model = random_bytes(6 * BLOCK)
    model.tofile(path)
    with (
        Engine(configure(block_size=BLOCK, queue_depth=4, thread_count=2)) as engine,
        engine.open(path, "rw") as file,
    ):
        for case, (offset, size) in enumerate(itertools.product(OFFSETS, SIZES)):
            misalignment = (0, 1, 512)[case % 3]
            around, place = memory_at(misalignment, size)
            around[place] = model[offset : offset + size] = random_bytes(size)
            assert engine.write(around[place], file, offset).wait(PATIENCE) == size
            assert_array_equal(on_disk(path), model, f"after writing {size} at {offset}")
            around, place = memory_at(misalignment, size)
            assert engine.read(around[place], file, offset).wait(PATIENCE) == size
            expected = np.zeros_like(around)
            expected[place] = model[offset : offset + size]
            assert_array_equal(around, expected, f"after reading {size} at {offset}")


# Buffers


def dtypes() -> list[torch.dtype]:
    """Every dtype that this torch can view bytes as: all but the quantised ones, which carry a
    scale compared with their bytes.
    """
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantised = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    return sorted(found - quantised, key=str)


def test_tensors_of_every_dtype(engine: Engine, directory: Path, random_bytes: RandomBytes) -> None:
    path = directory / "data"
    for dtype in dtypes():
        data, target = random_bytes(96_000), np.zeros(96_000, np.uint8)
        assert engine.write(torch.from_numpy(data).view(dtype), path).wait(PATIENCE) == 96_000
        assert_array_equal(on_disk(path), data, str(dtype))
        assert engine.read(torch.from_numpy(target).view(dtype), path).wait(PATIENCE) == 96_000
        assert_array_equal(target, data, str(dtype))


def test_tensors_of_every_shape_and_kind(engine: Engine, directory: Path) -> None:
    torch.manual_seed(0)
    odd_view = torch.randn(100_003)[3:-7]
    assert odd_view.storage_offset() == 3
    sources = {
        "matrix": torch.randn(17, 19, 23),
        "scalar": torch.tensor(3.25, dtype=torch.float64),
        "empty": torch.empty(0),
        "empty of three dimensions": torch.empty(3, 0, 5),
        "view": odd_view,
        "bytes at an odd address": torch.arange(255, dtype=torch.uint8)[1:],
        "parameter": torch.nn.Parameter(torch.randn(1000)),
        "result with a history": torch.nn.Parameter(torch.randn(1000)) * 2,
        "bfloat16": torch.randn(1001, dtype=torch.bfloat16),
        "bool": torch.rand(1001) > 0.5,
        "one column": torch.randn(50, 1).t(),
    }
    for name, source in sources.items():
        path = directory / name
        nbytes = source.numel() * source.element_size()
        assert engine.write(source, path).wait(PATIENCE) == nbytes, name
        target = torch.zeros_like(source, requires_grad=source.requires_grad)
        if nbytes:
            assert (
                path.read_bytes()
                == source.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            ), name
            assert engine.read(target, path).wait(PATIENCE) == nbytes, name
        assert torch.equal(source, target), name


def assert_refused(engine: Engine, directory: Path, buffer: Any, offset: int = 0) -> None:
    """That nothing is read or written at *offset*, and no file is made."""
    path = directory / "data"
    path.write_bytes(b"before")
    calls: list[Callable[[], object]] = [
        lambda: engine.write(buffer, path, offset),
        lambda: engine.read(buffer, path, offset),
        lambda: engine.write(buffer, directory / "new", offset),
    ]
    for call in calls:
        with pytest.raises(UsageError):
            call()
    assert path.read_bytes() == b"before"
    assert not (directory / "new").exists()


REFUSED: dict[str, Any] = {
    # tensors whose bytes are not their values
    "strided": torch.arange(100)[::2],
    "transposed": torch.arange(100).reshape(10, 10).t(),
    "expanded": torch.zeros(1).expand(100),
    "channels last": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "sparse": torch.zeros(10, 10).to_sparse(),
    "meta": torch.zeros(10, device="meta"),
    "lazily conjugate": torch.tensor([1 + 2j, 3 + 4j]).conj(),
    "lazily negative": torch.tensor([1 + 2j, 3 + 4j]).conj().imag.contiguous()._neg_view(),
    # no plain memory
    "strided ndarray": np.zeros(100)[::2],
    "transposed ndarray": np.zeros((10, 10)).T[:, 1:],
    "columns": np.zeros((10, 10))[:, 1:],
    "strided memoryview": memoryview(bytearray(100))[::2],
    "objects": np.array([object(), object()]),
    "text": "text",
    "list": [1, 2, 3],
    "number": 7,
    "none": None,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_plain_memory_is_refused(engine: Engine, directory: Path, kind: str) -> None:
    assert_refused(engine, directory, REFUSED[kind])


def buffers(count: int) -> dict[str, Any]:
    """Zeros of *count* bytes, as everything that can be read into."""
    return {
        "ndarray": np.zeros(count, np.uint8),
        "ndarray of floats": np.zeros(count // 8),
        "structured ndarray": np.zeros(count // 8, [("a", "i4"), ("b", "f4")]),
        "matrix": np.zeros((count // 80, 10), np.float64),
        "bytearray": bytearray(count),
        "memoryview": memoryview(bytearray(count)),
        "part of a memoryview": memoryview(bytearray(count + 7))[3:-4],
        "memoryview of doubles": memoryview(array.array("d", bytes(count))),
        "array": array.array("q", bytes(count)),
        "mmap": mmap.mmap(-1, count),
        "allocate": allocate(count),
        "tensor": torch.zeros(count, dtype=torch.uint8),
    }


@pytest.mark.parametrize("kind", sorted(buffers(80)))
def test_buffers_of_every_kind(
    engine: Engine, directory: Path, random_bytes: RandomBytes, kind: str
) -> None:
    path = directory / "data"
    data = random_bytes(160_000)
    data.tofile(path)
    buffer = buffers(data.size)[kind]
    assert engine.read(buffer, path).wait(PATIENCE) == data.size
    assert_array_equal(
        np.frombuffer(
            memoryview(buffer.numpy() if kind == "tensor" else buffer).cast("B"), np.uint8
        ),
        data,
    )
    path.unlink()
    assert engine.write(buffer, path).wait(PATIENCE) == data.size
    assert_array_equal(on_disk(path), data)


def test_read_only_buffers_can_be_written_and_not_read_into(
    engine: Engine, directory: Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(10_001)
    frozen = data.copy()
    frozen.flags.writeable = False
    buffers_without_write: list[Any] = [data.tobytes(), memoryview(data.tobytes()), frozen]
    for case, buffer in enumerate(buffers_without_write):
        path = directory / str(case)
        assert engine.write(buffer, path).wait(PATIENCE) == data.size
        assert_array_equal(on_disk(path), data)
        random_bytes(10_001).tofile(path)
        with pytest.raises(UsageError):
            engine.read(buffer, path)
        assert_array_equal(np.frombuffer(buffer, np.uint8), data)


@pytest.mark.parametrize("offset", [-1, -(1 << 62), (1 << 63) - 1, 1 << 63, 1 << 64, 1 << 100])
def test_an_offset_that_no_file_has_is_refused(
    engine: Engine, directory: Path, offset: int
) -> None:
    assert_refused(engine, directory, bytearray(5), offset)


def test_allocated_memory_is_aligned_writable_and_of_exactly_the_size_asked_for() -> None:
    for count in (1, 4095, 4096, 4097, 3 << 20):
        view = allocate(count)
        assert (view.nbytes, view.format, view.readonly) == (count, "B", False)
        values = np.frombuffer(view, np.uint8)
        assert values.ctypes.data % mmap.PAGESIZE == 0
        del view
        values[:] = 7
        assert values.sum() == 7 * count
    assert allocate(0).nbytes == 0


# Many concurrent requests


def test_one_ticket_waited_for_by_many_threads(
    engine: Engine, directory: Path, random_bytes: RandomBytes
) -> None:
    data = random_bytes(8 << 20)
    barrier = threading.Barrier(9)

    def work(_: int) -> int:
        barrier.wait(PATIENCE)
        return ticket.wait(PATIENCE)

    with ThreadPoolExecutor(8) as pool:
        results = pool.map(work, range(8))
        ticket = engine.write(data, directory / "data")
        barrier.wait(PATIENCE)
        assert list(results) == [data.size] * 8
    assert_array_equal(on_disk(directory / "data"), data)


# Failures


@pytest.mark.every_filesystem
@pytest.mark.parametrize("length", [0, 1, 512, 4096, 5000, BLOCK, 2 * BLOCK + 513])
def test_a_read_past_the_end_says_how_far_it_came(
    configure: Configure, directory: Path, random_bytes: RandomBytes, length: int
) -> None:
    path = directory / "data"
    data = random_bytes(length)
    data.tofile(path)
    # One block at a time, so that what came is what comes first.
    with Engine(configure(block_size=BLOCK, queue_depth=1)) as engine:
        for offset in {0, length // 2, length, length + 1, length + 100_000}:
            target = np.full(4 * BLOCK, 7, np.uint8)
            ticket = engine.read(target, path, offset)
            with pytest.raises(TruncatedError) as caught:
                ticket.wait(PATIENCE)
            error = caught.value
            there = data[offset:]
            assert (error.operation, error.path, error.offset, error.nbytes, error.done) == (
                "read",
                str(path),
                offset,
                target.size,
                there.size,
            )
            assert_array_equal(target[: there.size], there)
        assert engine.read(np.zeros(0), path, length + 1).wait(PATIENCE) == 0


def test_a_result_is_the_same_each_time_it_is_asked_for(engine: Engine, directory: Path) -> None:
    path = directory / "data"
    good = engine.write(bytes(10_000), path)
    assert [good.wait(PATIENCE), good.wait(0), good.wait()] == [10_000] * 3
    assert good.done()
    assert good.nbytes == 10_000
    bad = engine.read(bytearray(10_001), path)
    for timeout in (PATIENCE, 0, None):
        with pytest.raises(TruncatedError) as caught:
            bad.wait(timeout)
        assert caught.value.nbytes == 10_001
    assert bad.done()
    assert bad.nbytes == 10_001


def test_a_file_size_limit_stops_a_write_where_it_is(
    configure: Configure,
    directory: Path,
    random_bytes: RandomBytes,
    limit: Callable[[int, int], AbstractContextManager[None]],
) -> None:
    path = directory / "data"
    data, before = random_bytes(4 << 20), random_bytes(4 << 20)
    before.tofile(path)
    most = 1 << 20
    with (
        Engine(configure(block_size=64 << 10, queue_depth=1)) as engine,
        engine.open(path, "rw") as file,
    ):
        with limit(resource.RLIMIT_FSIZE, most):
            ticket = engine.write(data, file)
            with pytest.raises(IOFailure) as caught:
                ticket.wait(PATIENCE)
        error = caught.value
        assert (error.errno, error.operation, error.path, error.offset, error.nbytes) == (
            errno.EFBIG,
            "write",
            str(path),
            0,
            data.size,
        )
        assert error.done == most
        assert_array_equal(on_disk(path), np.concatenate([data[:most], before[most:]]))
        assert engine.stats().write.bytes == most
        assert engine.write(data, file).wait(PATIENCE) == data.size
    assert_array_equal(on_disk(path), data)


def test_a_full_filesystem_costs_nothing_that_was_there(
    configure: Configure, mounted: Callable[[str], Path], random_bytes: RandomBytes
) -> None:
    place = mounted("ext4-full")
    path = place / "data"
    kept, huge = random_bytes(1_000_001), random_bytes(32 << 20)

    def free_bytes() -> int:
        status = os.statvfs(place)
        return status.f_bavail * status.f_frsize

    try:
        with Engine(configure(block_size=256 << 10, queue_depth=8)) as engine:
            engine.write(kept, path).wait(PATIENCE)
            before = free_bytes()
            with pytest.raises(NoSpaceError) as caught:
                engine.write(huge, path, kept.size).wait(PATIENCE)
            assert (caught.value.errno, caught.value.operation, caught.value.path) == (
                errno.ENOSPC,
                "write",
                str(path),
            )
            assert 0 <= caught.value.done < huge.size
            assert_array_equal(on_disk(path)[: kept.size], kept)
            with pytest.raises(NoSpaceError):
                engine.open(path, "rw", size=64 << 20)
            assert_array_equal(on_disk(path)[: kept.size], kept)
            # Bytes written before the drive was full may stay; space that was only preallocated may
            # not.
            assert free_bytes() >= before - caught.value.done - (64 << 10)
            engine.write(kept[::-1].copy(), path).wait(PATIENCE)
            engine.write(kept, place / "another").wait(PATIENCE)
            assert_array_equal(on_disk(path)[: kept.size], kept[::-1])
            assert_array_equal(on_disk(place / "another"), kept)
    finally:
        for file in (path, place / "another"):
            file.unlink(missing_ok=True)


def test_a_process_without_file_descriptors_is_reported_so(
    engine: Engine,
    configure: Configure,
    directory: Path,
    random_bytes: RandomBytes,
    limit: Callable[[int, int], AbstractContextManager[None]],
) -> None:
    path = directory / "data"
    data = random_bytes(100_001)
    with engine.open(path, "rw") as file:
        opened: list[File] = []
        os.close(lowest_free := os.dup(0))
        with limit(resource.RLIMIT_NOFILE, lowest_free + 8):
            with pytest.raises(IOFailure) as caught:
                opened.extend(engine.open(directory / str(place), "rw") for place in range(100))
            assert (caught.value.errno, caught.value.operation) == (errno.EMFILE, "open")
            ticket = engine.write(data[:4096], file)
            ticket.wait(PATIENCE)
            with pytest.raises(IOFailure) as caught:
                engine.read(bytearray(10), path)
            assert caught.value.errno == errno.EMFILE
            if file.offset_alignment > 1:  # an end that is not aligned takes a second descriptor
                with pytest.raises(IOFailure) as caught:
                    engine.write(data, file)
                assert (caught.value.errno, caught.value.operation) == (errno.EMFILE, "open")
        for one in opened:
            one.close()
        engine.write(data, file).wait(PATIENCE)
    assert_array_equal(on_disk(path), data)


def test_transfers_while_another_thread_imports_torch(
    engine: Engine, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))  # empty at first
    engine.write(b"some bytes", directory / "data").wait(PATIENCE)
    into = bytearray(10)
    engine.read(into, directory / "data").wait(PATIENCE)
    assert into == b"some bytes"
