"""numpy.memmap, as a side of a comparison."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from nvme_offload.errors import UnsupportedError

from .buffers import Shared, require_read, spoil
from .job import Job
from .page_cache import evict
from .stopwatch import Measurement, Stopwatch


class MemoryMap:
    """Copies each tensor out of a map of the file, or into it, through the page cache. Pages of the
    file to read are dropped before the clock starts.

    The map is flushed before the clock stops. Source: madvise(2), msync(2).
    """

    def __init__(self) -> None:
        self.version = f"numpy {np.__version__}"

    def run(self, place: Shared, job: Job) -> Measurement:
        """Move *job* once. Raises: UnsupportedError, IOFailure."""
        if job.direction == "mixed":
            raise UnsupportedError("a memory map cannot read and write concurrently")
        path, reads = place.path(job.direction), job.direction == "read"
        buffer = place.buffers.get(job.memory, 0)[: job.file_bytes]
        evict(path)
        if reads:
            spoil(buffer)
        with Stopwatch() as watch:
            mapped: Any = np.memmap(path, np.uint8, "r" if reads else "r+", shape=(job.file_bytes,))
            if job.sequential:
                mapped._mmap.madvise(mmap.MADV_SEQUENTIAL)
            source, target = (mapped, buffer) if reads else (buffer, mapped)
            for begin in range(0, job.file_bytes, job.request_bytes):
                part = slice(begin, begin + job.request_bytes)
                target[part] = source[part]
            mapped.flush()
        del mapped, source, target
        if reads:
            require_read(buffer, "the memory map")
        return watch.measurement(job.nbytes)
