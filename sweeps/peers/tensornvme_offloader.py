"""TensorNVMe, as a side of a comparison."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np

from nvme_offload.errors import UnsupportedError

from .buffers import Bytes, Shared, memory_of, require_read, spoil
from .job import Job
from .page_cache import evict, sync
from .stopwatch import Measurement, Stopwatch

_BACKENDS = {"libaio": "aio", "io_uring": "uring", "posix": "pthread"}


class TensorNVMe:
    """Its offloader: an asynchronous call for each tensor, then one wait. It makes its own file and
    assigns offsets to tensors.

    This calls the class below the public one, which also frees and allocates the memory of tensors.
    The offloader reuses an offset once its tensor was read, so the file is written whole before
    the clock starts, and written tensors are read back afterwards. Its libaio backend drops calls
    when its queue is full and then waits forever, so its queue gets the size of the number of tensors. Raises:
    UnsupportedError where TensorNVMe is not installed.
    """

    def __init__(self) -> None:
        try:
            import torch
            from tensornvme import _C
        except ImportError as error:
            raise UnsupportedError(f"TensorNVMe cannot be loaded: {error}") from None
        self._torch: Any = torch
        self._core: Any = _C
        self._made: dict[tuple[str, str, int, str], Any] = {}
        self.version = f"tensornvme {importlib.metadata.version('tensornvme')}"

    def run(self, place: Shared, job: Job) -> Measurement:
        """Move *job* once. Raises: UnsupportedError, CorruptionError."""
        if job.thread_count > 1:
            raise UnsupportedError("TensorNVMe has one thread")
        buffers = memory_of(place, job)
        made = {direction: self._offloader(place, job, direction) for direction in job.directions}
        tensors = {direction: self._tensors(buffer, job) for direction, buffer in buffers.items()}
        if "read" in buffers:
            offloader, path = made["read"]
            self._write(offloader, tensors["read"])
            evict(path)
            spoil(buffers["read"])
        if "write" in buffers:
            evict(made["write"][1])
        with Stopwatch() as watch:
            for index in range(job.requests):
                for direction, (offloader, _) in made.items():
                    call = offloader.async_read if direction == "read" else offloader.async_write
                    call(tensors[direction][index], str(index))
            for direction, (offloader, path) in made.items():
                offloader.synchronize()
                if direction == "write":
                    sync(path)
        if "read" in buffers:
            require_read(buffers["read"], "TensorNVMe")
        if "write" in buffers:
            offloader, path = made["write"]
            evict(path)
            spoil(buffers["write"])
            self._read(offloader, tensors["write"])
            require_read(buffers["write"], "TensorNVMe")
        return watch.measurement(job.nbytes)

    def _offloader(self, place: Shared, job: Job, direction: str) -> tuple[Any, Path]:
        path = place.path(direction).with_name(f"tensornvme-{direction}")
        depth = max(job.queue_depth, job.requests) if job.backend == "libaio" else job.queue_depth
        key = (str(path), job.backend, depth, f"{job.requests} x {job.request_bytes}")
        if key not in self._made:
            # An offloader removes its file when it is freed.
            self._made = {
                other: offloader for other, offloader in self._made.items() if other[0] != key[0]
            }
            offloader = self._core.Offloader(str(path), depth, _BACKENDS[job.backend])
            self._made[key] = offloader
            tensors = self._tensors(np.zeros(job.file_bytes, np.uint8), job)
            self._write(offloader, tensors)
            self._read(offloader, tensors)
        return self._made[key], path

    def _tensors(self, buffer: Bytes, job: Job) -> list[Any]:
        # It moves the whole storage of a tensor, so each tensor needs its own storage.
        return [
            self._torch.from_numpy(buffer[begin : begin + job.request_bytes])
            for begin in range(0, job.file_bytes, job.request_bytes)
        ]

    def _write(self, offloader: Any, tensors: list[Any]) -> None:
        for index, tensor in enumerate(tensors):
            offloader.async_write(tensor, str(index))
        offloader.synchronize()

    def _read(self, offloader: Any, tensors: list[Any]) -> None:
        for index, tensor in enumerate(tensors):
            offloader.async_read(tensor, str(index))
        offloader.synchronize()
