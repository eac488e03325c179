"""The files and the memory that every side uses: the same ones, so that their place on the drive and in RAM favours nobody."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nvme_offload.config import AioConfig
from nvme_offload.engine import Engine, allocate
from nvme_offload.errors import CorruptionError, UnsupportedError

Bytes = NDArray[np.uint8]

_PAGE_BYTES = 4096
_FILL_BYTES = 64 << 20
_MADV_COLLAPSE = 25  # Linux 6.1; the mmap module does not know it


class Measurement(NamedTuple):
    """What a side did. *cpu_seconds* are those of all threads that it used; *submit_seconds* how long each request took to hand over, where known."""

    nbytes: int
    seconds: float
    cpu_seconds: float
    submit_seconds: tuple[float, ...] = ()


def cpu_seconds() -> float:
    """CPU time of this process so far, all threads, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Buffers:
    """Memory by its kind and a number, written to once so that every page is there; kept for the whole run.

    Every page of 4 KiB starts with a stamp, its number in the file, and the rest is random.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.locked: Callable[[int], Bytes] | None = None  # how DeepSpeed allocates, once its op is there
        self._buffers: dict[tuple[str, int], Bytes] = {}

    def get(self, kind: str, number: int) -> Bytes:
        """The memory of that kind and number. Raises: UnsupportedError where this machine lacks that kind."""
        if (kind, number) not in self._buffers:
            buffer = self._allocate(kind)
            pattern = np.random.default_rng(number).integers(0, 256, _FILL_BYTES, dtype=np.uint8)
            for begin in range(0, self.nbytes, _FILL_BYTES):
                part = buffer[begin : begin + _FILL_BYTES]
                part[:] = pattern[: part.size]
            if kind == "locked huge":
                _merge_pages(buffer)
            _stamps(buffer)[:] = _numbers(buffer.nbytes)
            self._buffers[kind, number] = buffer
        return self._buffers[kind, number]

    def _allocate(self, kind: str) -> Bytes:
        if kind == "huge":
            return np.frombuffer(allocate(self.nbytes), np.uint8)
        if kind == "small":
            mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
            return np.frombuffer(mapping, np.uint8)
        if self.locked is None:
            raise UnsupportedError(f"memory {kind!r} is DeepSpeed's, which is not there")
        return self.locked(self.nbytes)


class Rig:
    """A directory with a file to read and a file to write, as large as the buffers, every byte of them written.

    Lifetime: removed on `close`, so also when the command ends by an exception or a signal that it handles.
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


def spoil(buffer: Bytes) -> None:
    """Make every page of *buffer* wrong, so that a read that does not happen is noticed."""
    _stamps(buffer)[:] = 0


def require_read(buffer: Bytes, side: str) -> None:
    """Raises: CorruptionError where a page is none that belongs there; memory that was used again may hold any pass of the file over it."""
    numbers = _numbers(buffer.nbytes)
    stamps = _stamps(buffer)
    wrong = np.flatnonzero((stamps == 0) | ((stamps - numbers) % np.uint64(numbers.size) != 0))
    if wrong.size:
        offset = int(wrong[0]) * _PAGE_BYTES
        raise CorruptionError(f"{side} did not bring this page", operation="read", path="the file", offset=offset, nbytes=_PAGE_BYTES, done=0)


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
        raise UnsupportedError(f"the kernel did not merge the pages of DeepSpeed's memory: {os.strerror(ctypes.get_errno())} (MADV_COLLAPSE is Linux 6.1)")
