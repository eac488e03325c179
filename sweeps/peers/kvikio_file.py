"""KvikIO, as a side of a comparison."""

from __future__ import annotations

import ctypes
import importlib.metadata
from typing import Any

from nvme_offload.errors import UnsupportedError

from .buffers import Shared, failed, memory_of, require_read, spoil
from .job import Job
from .page_cache import evict, sync
from .stopwatch import Measurement, Stopwatch


class KvikIO:
    """A future for each tensor, on its thread pool of the job's size, in tasks of the block size.
    Host memory, no GPU.

    Aligned ranges use direct I/O (its opportunistic mode, off for reads by default). Raises:
    UnsupportedError where KvikIO or CUDA's driver is not installed.
    """

    def __init__(self) -> None:
        try:
            import kvikio
            import kvikio.defaults
        except ImportError as error:
            raise UnsupportedError(f"KvikIO cannot be loaded: {error}") from None
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise UnsupportedError(
                "KvikIO queries CUDA's driver about every address, host memory included, and libcuda.so.1 is not installed"
            ) from None
        self._kvikio: Any = kvikio
        names = [name for name in ("kvikio-cu13", "kvikio-cu12", "kvikio") if _installed(name)]
        self.version = f"kvikio {importlib.metadata.version(names[0])}" if names else "kvikio"

    def run(self, place: Shared, job: Job) -> Measurement:
        """Move *job* once. Raises: IOFailure, CorruptionError."""
        buffers = memory_of(place, job)
        wanted = {
            "num_threads": job.thread_count,
            "task_size": job.block_size,
            "auto_direct_io_read": place.direct,
            "auto_direct_io_write": place.direct,
        }
        files = {
            direction: self._kvikio.CuFile(
                place.path(direction), "r" if direction == "read" else "r+"
            )
            for direction in job.directions
        }
        if "read" in buffers:
            evict(place.path("read"))
            spoil(buffers["read"])
        calls = [
            (
                files[direction].pread if direction == "read" else files[direction].pwrite,
                buffer[begin : begin + job.request_bytes],
                begin,
            )
            for begin in range(0, job.file_bytes, job.request_bytes)
            for direction, buffer in buffers.items()
        ]
        try:
            with self._kvikio.defaults.set(wanted), Stopwatch() as watch:
                futures = [
                    call(memory, job.request_bytes, offset) for call, memory, offset in calls
                ]
                moved = sum(future.get() for future in futures)
                if "write" in buffers:
                    sync(place.path("write"))
        finally:
            for file in files.values():
                file.close()
        if moved != job.nbytes:
            path = str(place.path(job.directions[0]))
            raise failed("KvikIO failed", job, done=moved, path=path)
        if "read" in buffers:
            require_read(buffers["read"], "KvikIO")
        return watch.measurement(job.nbytes)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
