"""numpy.memmap, as a side of a contest: what one has without any library."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from nvme_offload.errors import UnsupportedError

from .page_cache import evict
from .plan import Job
from .rig import Place, require_read, spoil
from .stopwatch import Measurement, Stopwatch

OPTIONS = {"sequential", "sync"}


class MemoryMap:
    """Each tensor is copied out of a map of the file, or into it; through the page cache, whose
    pages of the file to read are dropped before.

    Options: "sequential" tells the kernel that the map is read from end to end; "sync" flushes the
    map before the clock stops. Source: madvise(2), msync(2).
    """

    def __init__(self, options: frozenset[str]) -> None:
        self._options = options
        self.version = f"numpy {np.__version__}"

    def run(self, rig: Place, job: Job) -> Measurement:
        """Move *job* once. Raises: UnsupportedError, IOFailure."""
        if len(job.directions) > 1 or job.passes > 1 or job.footprint_bytes != job.file_bytes:
            raise UnsupportedError("a memory map is only asked for plain reads and writes")
        path = rig.path(job.direction)
        buffer = rig.buffers.get(job.memory, 0)[: job.file_bytes]
        evict(path)
        if job.direction == "read":
            spoil(buffer)
        with Stopwatch() as watch:
            mapped: Any = np.memmap(
                path, np.uint8, "r" if job.direction == "read" else "r+", shape=(job.file_bytes,)
            )
            if "sequential" in self._options:
                mapped._mmap.madvise(mmap.MADV_SEQUENTIAL)
            for begin in range(0, job.file_bytes, job.request_bytes):
                place = slice(begin, begin + job.request_bytes)
                if job.direction == "read":
                    buffer[place] = mapped[place]
                else:
                    mapped[place] = buffer[place]
            if "sync" in self._options:
                mapped.flush()
        del mapped
        if job.direction == "read":
            require_read(buffer, "the memory map")
        return watch.measurement(job.nbytes)
