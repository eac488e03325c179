"""The memory that every side moves bytes from or to, its contents, and the checks of the contents."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvme_offload.errors import CorruptionError, IOFailure, UnsupportedError
from nvme_offload.io.engine import allocate

from .job import Job

Bytes = NDArray[np.uint8]

_PAGE_BYTES = 4096
_FILL_BYTES = 64 << 20


def allocated(kind: str, nbytes: int, locked: Callable[[int], Bytes] | None = None) -> Bytes:
    """Allocate memory of that kind; *locked* is DeepSpeed's allocator. Raises: UnsupportedError
    where the kind needs an allocator that is missing.
    """
    if kind == "huge":
        return np.frombuffer(allocate(nbytes), np.uint8)
    if locked is None:
        raise UnsupportedError(f"memory {kind!r} is DeepSpeed's, which is not installed")
    return locked(nbytes)


def fill(buffer: Bytes, seed: int) -> None:
    """Fill *buffer* from *seed*: each 4 KiB page starts with its number, the rest is random."""
    for begin, pattern in _patterns(buffer.nbytes, seed):
        buffer[begin : begin + pattern.size] = pattern
    _stamps(buffer)[:] = _numbers(buffer.nbytes)


def require_filled(buffer: Bytes, seed: int, side: str) -> None:
    """Raises: CorruptionError where a byte differs from the output of `fill`."""
    require_read(buffer, side)
    stamps = _stamps(buffer)
    for begin, pattern in _patterns(buffer.nbytes, seed):
        _stamps(pattern)[:] = stamps[begin // _PAGE_BYTES :][: pattern.size // _PAGE_BYTES]
        differing = np.flatnonzero(buffer[begin : begin + pattern.size] != pattern)
        if differing.size:
            raise wrong(f"{side} did not move this byte", begin + int(differing[0]), 1)


class Loans:
    """Buffers by kind and number, of the size of the current task; kept until `release`."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.seed = 1
        self.to_fill: set[int] = set()
        self.op: Any = None  # DeepSpeed's, which allocates locked memory
        self._lent: dict[tuple[str, int], Bytes] = {}
        self._seeds: dict[tuple[str, int], int] = {}

    def get(self, kind: str, number: int) -> Bytes:
        """Return that buffer; the numbers in `to_fill` are filled from seed + number. Raises:
        UnsupportedError.
        """
        buffer = self._lent.get((kind, number))
        if buffer is None or buffer.nbytes != self.nbytes:
            self._free((kind, number))
            buffer = allocated(kind, self.nbytes, self.op.locked if self.op else None)
            self._lent[kind, number] = buffer
        if self._seeds.get((kind, number)) != self.seed:
            if number in self.to_fill:
                fill(buffer, self.seed + number)
            else:
                buffer[:: mmap.PAGESIZE] = 0  # fault in every page
            self._seeds[kind, number] = self.seed
        return buffer

    def release(self) -> None:
        """Free all buffers."""
        for key in list(self._lent):
            self._free(key)

    def _free(self, key: tuple[str, int]) -> None:
        buffer = self._lent.pop(key, None)
        self._seeds.pop(key, None)
        if buffer is not None and key[0].startswith("locked") and self.op is not None:
            self.op.unlock(buffer)


class Shared:
    """The directory of a comparison; all sides share its file to read and its file to write."""

    def __init__(self, directory: Path, direct: bool) -> None:
        self.directory = directory
        self.direct = direct
        self.buffers = Loans()

    def path(self, direction: str) -> Path:
        """The file to read or the file to write; both have all their blocks on the drive."""
        return self.directory / direction


def spoil(buffer: Bytes) -> None:
    """Overwrite the number of every page, so that `require_read` detects a missing read."""
    _stamps(buffer)[:] = 0


def require_read(buffer: Bytes, side: str) -> None:
    """Raises: CorruptionError where a page does not have its number."""
    pages = np.flatnonzero(_stamps(buffer) != _numbers(buffer.nbytes))
    if pages.size:
        raise wrong(f"{side} did not read this page", int(pages[0]) * _PAGE_BYTES, _PAGE_BYTES)


def wrong(
    message: str, offset: int, nbytes: int, path: str = "the file", operation: str = "read"
) -> CorruptionError:
    """The error of a side that moved wrong bytes."""
    return CorruptionError(
        message, operation=operation, path=path, offset=offset, nbytes=nbytes, done=0
    )


def failed(message: str, job: Job, done: int = 0, path: str = "the file") -> IOFailure:
    """The error of a side that did not move all bytes of *job*."""
    facts = {"operation": job.direction, "path": path, "offset": 0}
    return IOFailure(errno.EIO, message, nbytes=job.nbytes, done=done, **facts)


def memory_of(place: Shared, job: Job) -> dict[str, Bytes]:
    """The buffer of each direction of *job*."""
    return {
        direction: place.buffers.get(job.memory, number)[: job.file_bytes]
        for number, direction in enumerate(job.directions)
    }


def _patterns(nbytes: int, seed: int) -> Iterator[tuple[int, Bytes]]:
    pattern = np.random.default_rng(seed).integers(0, 256, min(_FILL_BYTES, nbytes), dtype=np.uint8)
    for begin in range(0, nbytes, _FILL_BYTES):
        yield begin, pattern[: nbytes - begin]


def _stamps(buffer: Bytes) -> NDArray[Any]:
    return buffer.view(np.uint64)[:: _PAGE_BYTES // 8]


def _numbers(nbytes: int) -> NDArray[Any]:
    return np.arange(1, nbytes // _PAGE_BYTES + 1, dtype=np.uint64)
