"""The files and the memory that every side uses: the same ones, so that their place on the drive
and in RAM favours nobody.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nvme_offload.errors import CorruptionError, IOFailure, UnsupportedError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine, allocate

from .plan import Job

Bytes = NDArray[np.uint8]

_PAGE_BYTES = 4096
_FILL_BYTES = 64 << 20
_MADV_COLLAPSE = 25  # Linux 6.1; the mmap module does not know it


class Place(Protocol):
    """Where a side finds what it moves. direct: whether the filesystem has O_DIRECT."""

    direct: bool

    @property
    def buffers(self) -> Memory:
        """The memory."""

    def path(self, direction: str) -> Path:
        """The file that is read, or the one that is written; both are on the drive whole."""

    def tensor_paths(self, nbytes: int, count: int) -> list[Path]:
        """*count* files of *nbytes* each."""


class Memory(Protocol):
    """Memory for sides, filled with what `fill` writes."""

    def get(self, kind: str, number: int) -> Bytes:
        """The memory of that kind and number. Raises: UnsupportedError where this machine lacks
        that kind.
        """


class Buffers:
    """Memory by its kind and a number, written to once so that every page is there; kept for the
    whole run.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # how DeepSpeed allocates, once its op is there
        self.locked: Callable[[int], Bytes] | None = None
        self._buffers: dict[tuple[str, int], Bytes] = {}

    def get(self, kind: str, number: int) -> Bytes:
        """The memory of that kind and number. Raises: UnsupportedError where this machine lacks
        that kind.
        """
        if (kind, number) not in self._buffers:
            buffer = allocated(kind, self.nbytes, self.locked)
            fill(buffer, number)
            self._buffers[kind, number] = buffer
        return self._buffers[kind, number]


class Rig:
    """A directory with a file to read and a file to write, as large as the buffers, every byte of
    them written.

    Lifetime: removed on `close`, so also when the command ends by an exception or a signal that it
    handles.
    """

    def __init__(self, directory: Path, nbytes: int, buffers: Buffers) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.nbytes = nbytes
        self.buffers = buffers
        self._directory = Path(tempfile.mkdtemp(prefix="sweeps-peers-", dir=directory))
        self._tensors: dict[int, list[Path]] = {}
        try:
            with Engine(AioConfig(direct="auto")) as engine:
                for name in ("read", "write"):
                    self._fill(engine, self.path(name), nbytes)
                with engine.open(self.path("read")) as file:
                    self.direct = file.direct
        except BaseException:
            self.close()
            raise

    def path(self, direction: str) -> Path:
        """The file that is read, or the one that is written."""
        return self._directory / direction

    def tensor_paths(self, nbytes: int, count: int) -> list[Path]:
        """*count* files of *nbytes* each."""
        paths = self._tensors.setdefault(nbytes, [])
        if len(paths) < count:
            with Engine(AioConfig(direct="auto")) as engine:
                for index in range(len(paths), count):
                    paths.append(self._directory / f"{nbytes}-{index}")
                    self._fill(engine, paths[-1], nbytes, index * nbytes)
        return paths[:count]

    def _fill(self, engine: Engine, path: Path, nbytes: int, begin: int = 0) -> None:
        with engine.open(path, "w", nbytes) as file:
            engine.write(self.buffers.get("huge", 0)[begin : begin + nbytes], file).wait()

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._directory, ignore_errors=True)


def allocated(kind: str, nbytes: int, locked: Callable[[int], Bytes] | None = None) -> Bytes:
    """Memory of that kind; *locked* is how DeepSpeed allocates. Raises: UnsupportedError where this
    machine lacks that kind.
    """
    if kind == "huge":
        return np.frombuffer(allocate(nbytes), np.uint8)
    if kind == "small":
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
        return np.frombuffer(mapping, np.uint8)
    if locked is None:
        raise UnsupportedError(f"memory {kind!r} is DeepSpeed's, which is not there")
    buffer = locked(nbytes)
    if kind == "locked huge":
        buffer[::_PAGE_BYTES] = 0
        _merge_pages(buffer)
    return buffer


def fill(buffer: Bytes, seed: int) -> None:
    """Make *buffer* what *seed* says: every page of 4 KiB starts with a stamp, its number in the
    file, and the rest is random.
    """
    for begin, pattern in _patterns(buffer.nbytes, seed):
        buffer[begin : begin + pattern.size] = pattern
    _stamps(buffer)[:] = _numbers(buffer.nbytes)


def require_filled(buffer: Bytes, seed: int, side: str) -> None:
    """Raises: CorruptionError where a byte is not the one that `fill` puts there. The buffer is as
    it was, then.
    """
    stamps = _stamps(buffer)
    if not np.array_equal(stamps, _numbers(buffer.nbytes)):
        require_read(buffer, side)
        raise wrong(f"{side} brought pages of another place", 0, buffer.nbytes)
    for begin, pattern in _patterns(buffer.nbytes, seed):
        _stamps(pattern)[:] = stamps[begin // _PAGE_BYTES :][: pattern.size // _PAGE_BYTES]
        differing = np.flatnonzero(buffer[begin : begin + pattern.size] != pattern)
        if differing.size:
            offset = begin + int(differing[0])
            raise wrong(f"{side} did not bring this byte", offset, 1)


def _patterns(nbytes: int, seed: int) -> Iterator[tuple[int, Bytes]]:
    pattern = np.random.default_rng(seed).integers(0, 256, min(_FILL_BYTES, nbytes), dtype=np.uint8)
    for begin in range(0, nbytes, _FILL_BYTES):
        yield begin, pattern[: nbytes - begin]


def spoil(buffer: Bytes) -> None:
    """Make every page of *buffer* wrong, so that a read that does not happen is noticed."""
    _stamps(buffer)[:] = 0


def require_read(buffer: Bytes, side: str) -> None:
    """Raises: CorruptionError where a page is none that belongs there; memory that was used again
    may hold any pass of the file over it.
    """
    numbers = _numbers(buffer.nbytes)
    stamps = _stamps(buffer)
    pages = np.flatnonzero((stamps == 0) | ((stamps - numbers) % np.uint64(numbers.size) != 0))
    if pages.size:
        offset = int(pages[0]) * _PAGE_BYTES
        raise wrong(f"{side} did not bring this page", offset, _PAGE_BYTES)


def wrong(
    said: str, offset: int, nbytes: int, path: str = "the file", operation: str = "read"
) -> CorruptionError:
    """The error of a side that brought other bytes than it should."""
    return CorruptionError(
        said, operation=operation, path=path, offset=offset, nbytes=nbytes, done=0
    )


def failed(
    said: str, job: Job, number: int = errno.EIO, done: int = 0, path: str = "the file"
) -> IOFailure:
    """The error of a side that did not move all bytes of *job*."""
    facts = {"operation": job.direction, "path": path, "offset": 0}
    return IOFailure(number, said, nbytes=job.nbytes, done=done, **facts)


def memory_of(rig: Place, job: Job, kind: str | None = None) -> dict[str, Bytes]:
    """The memory of each direction of *job*, of that *kind* or of the job's."""
    return {
        direction: rig.buffers.get(kind or job.memory, number)[: job.footprint_bytes]
        for number, direction in enumerate(job.directions)
    }


def _stamps(buffer: Bytes) -> NDArray[Any]:
    return buffer.view(np.uint64)[:: _PAGE_BYTES // 8]


def _numbers(nbytes: int) -> NDArray[Any]:
    return np.arange(1, nbytes // _PAGE_BYTES + 1, dtype=np.uint64)


def _merge_pages(buffer: Bytes) -> None:
    huge = 2 << 20
    address = int(buffer.ctypes.data)
    begin, end = -(-address // huge) * huge, (address + buffer.nbytes) // huge * huge
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_COLLAPSE) != 0:
        raise UnsupportedError(
            f"the kernel did not merge the pages of DeepSpeed's memory: {os.strerror(ctypes.get_errno())} (MADV_COLLAPSE is Linux 6.1)"
        )
