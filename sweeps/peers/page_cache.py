"""The page cache: measure how much of a file it has, and drop a file from it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import numpy as np

from nvme_offload.errors import IOFailure

_PAGE_BYTES = mmap.PAGESIZE
_ATTEMPTS = 3  # the kernel skips pages on another core's per-CPU list at the first


def sync(path: str | os.PathLike[str]) -> None:
    """Write the dirty pages of *path* to the drive. Source: fdatasync(2)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def cached_bytes(path: Path) -> int:
    """Bytes of *path* in the page cache. Source: mincore(2)."""
    nbytes = path.stat().st_size
    if nbytes == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    pages = np.zeros(-(-nbytes // _PAGE_BYTES), np.uint8)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), nbytes) as mapping:
        address = ctypes.c_char.from_buffer(mapping)
        result = libc.mincore(
            ctypes.byref(address), ctypes.c_size_t(nbytes), ctypes.c_void_p(int(pages.ctypes.data))
        )
        del address  # or the mapping cannot be closed
    if result != 0:
        raise _failed(path, "mincore", ctypes.get_errno(), nbytes)
    return int(np.count_nonzero(pages & 1)) * _PAGE_BYTES


def evict(path: Path) -> None:
    """Drop *path* from the page cache. Raises: IOFailure where the kernel keeps pages.

    Source: posix_fadvise(2), which does not drop dirty pages, so this syncs first.
    """
    sync(path)
    left = 0
    for _ in range(_ATTEMPTS):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        left = cached_bytes(path)
        if left == 0:
            return
    raise _failed(path, "evict", errno.EBUSY, left, "the kernel keeps pages of it")


def _failed(path: Path, operation: str, number: int, nbytes: int, message: str = "") -> IOFailure:
    facts = {"operation": operation, "path": str(path), "offset": 0, "nbytes": nbytes, "done": 0}
    return IOFailure(number, message or os.strerror(number), **facts)
