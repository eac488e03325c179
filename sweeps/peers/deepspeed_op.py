"""DeepSpeed's own op, as a side of a comparison."""

from __future__ import annotations

import importlib.metadata
import os
import resource
from typing import Any

import numpy as np

from nvme_offload.errors import UnsupportedError
from nvme_offload.tune.deepspeed_op import standard_output_to_error, warn_of_builds

from .buffers import Bytes, Shared, failed, memory_of, require_read, spoil
from .job import Job
from .page_cache import sync
from .stopwatch import Measurement, Stopwatch

_SPARE_DESCRIPTORS = 256


class DeepSpeedOp:
    """An asynchronous call for each tensor at its offset in one file, then one wait. The first load
    compiles the op.

    The memory comes from DeepSpeed's allocator, because the op copies any other memory through an
    internal buffer. Reading and writing concurrently takes two handles, each with the whole depth, as in
    DeepSpeed's pipelined swapper. Raises: UnsupportedError where DeepSpeed, or a compiler or library for its op, is not installed.
    """

    def __init__(self) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        try:
            with standard_output_to_error():
                import torch
                from deepspeed.accelerator import get_accelerator
                from deepspeed.ops.op_builder import AsyncIOBuilder

                warn_of_builds()
                self._module: Any = AsyncIOBuilder().load(verbose=False)
        except ModuleNotFoundError as error:
            raise UnsupportedError(f"DeepSpeed is not installed: {error}") from None
        except (RuntimeError, OSError) as error:  # no compiler, no libaio
            raise UnsupportedError(f"DeepSpeed's op cannot be built: {str(error)[:500]}") from None
        self._torch = torch
        self.on_cpu = get_accelerator().device_name() == "cpu"
        self._handle = self.handle(1 << 20, 1, 1)
        self.version = (
            f"deepspeed {importlib.metadata.version('deepspeed')}, torch {torch.__version__}"
        )

    def handle(self, block_size: int, queue_depth: int, thread_count: int) -> Any:
        """A handle of the op with overlapping events, whose blocks are submitted together."""
        return self._module.aio_handle(block_size, queue_depth, False, True, thread_count)

    def locked(self, nbytes: int) -> Bytes:
        """Memory that the op moves without a copy."""
        tensor = self._handle.new_cpu_locked_tensor(
            nbytes, self._torch.empty(0, dtype=self._torch.uint8)
        )
        return np.asarray(tensor.numpy())

    def unlock(self, buffer: Bytes) -> None:
        """Free memory from `locked`; the caller must not use it afterwards."""
        self._handle.free_cpu_locked_tensor(self._torch.from_numpy(buffer))

    def run(self, place: Shared, job: Job) -> Measurement:
        """Move *job* once. Raises: IOFailure, UnsupportedError."""
        buffers = memory_of(place, job)
        handles = {
            direction: self.handle(job.block_size, job.queue_depth, job.thread_count)
            for direction in job.directions
        }
        calls: list[tuple[Any, Any, str, int]] = []
        paths = {direction: str(place.path(direction)) for direction in job.directions}
        for direction, buffer in buffers.items():
            pieces: Any = self._torch.from_numpy(buffer).reshape(job.requests, job.request_bytes)
            handle = handles[direction]
            if not handle.is_pinned(pieces[-1]):
                raise UnsupportedError("DeepSpeed's op does not recognise its own memory as pinned")
            call = handle.async_pread if direction == "read" else handle.async_pwrite
            calls += [
                (call, piece, paths[direction], index * job.request_bytes)
                for index, piece in enumerate(pieces)
            ]
        if "read" in buffers:
            spoil(buffers["read"])
        _allow_open_files(len(calls))
        with Stopwatch() as watch:
            refused = sum(call(piece, path, offset) != 0 for call, piece, path, offset in calls)
            finished = sum(handle.wait() for handle in handles.values())
            if "write" in paths:
                sync(paths["write"])
        if refused or finished != len(calls):
            raise failed("DeepSpeed's op failed", job, path=calls[0][2])
        if "read" in buffers:
            require_read(buffers["read"], "DeepSpeed's op")
        return watch.measurement(job.nbytes)


def _allow_open_files(count: int) -> None:
    """Raise the limit: the op keeps a descriptor open for every tensor until `wait`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _SPARE_DESCRIPTORS
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))
