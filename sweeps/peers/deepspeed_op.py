"""DeepSpeed's own op, as a side of a contest."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from nvme_offload.errors import IOFailure, UnsupportedError

from .plan import Job
from .rig import Bytes, Measurement, Rig, cpu_seconds, require_read, spoil

OPTIONS = {"offsets"}
_SPARE_DESCRIPTORS = 256


class DeepSpeedOp:
    """An asynchronous call for each tensor, then one wait; each tensor is a file of its own, as its swapper has it. Loading builds the op once.

    Its memory comes from its own allocator, since it copies everything else through a buffer of its own.
    Options: "offsets" moves the tensors of one file instead.
    Raises: UnsupportedError where DeepSpeed, or what its op is built with, is not there.
    """

    def __init__(self, options: frozenset[str]) -> None:
        self._offsets = "offsets" in options
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        try:
            with _standard_output_to_error():
                import torch
                from deepspeed.ops.op_builder import AsyncIOBuilder

                self._module: Any = AsyncIOBuilder().load(verbose=False)
        except ModuleNotFoundError as error:
            raise UnsupportedError(f"DeepSpeed is not installed: {error}") from None
        except (RuntimeError, OSError) as error:  # no compiler, no libaio
            raise UnsupportedError(f"DeepSpeed's op cannot be built: {str(error)[:500]}") from None
        self._torch = torch
        self._handle = self._module.aio_handle(1 << 20, 1, False, True, 1)
        self.version = f"deepspeed {importlib.metadata.version('deepspeed')}, torch {torch.__version__}"

    def locked(self, nbytes: int) -> Bytes:
        """Memory that the op moves without a copy; never freed, as in its swapper."""
        tensor = self._handle.new_cpu_locked_tensor(nbytes, self._torch.empty(0, dtype=self._torch.uint8))
        return np.asarray(tensor.numpy())

    def run(self, rig: Rig, job: Job) -> Measurement:
        """Move *job* once. Raises: IOFailure, UnsupportedError."""
        if job.backend != "libaio" or len(job.directions) > 1 or job.passes > 1 or job.footprint_bytes != job.file_bytes:
            raise UnsupportedError("DeepSpeed's op is only asked for plain reads and writes, which it does by libaio")
        memory = job.memory if job.memory.startswith("locked") else "locked"
        buffer = rig.buffers.get(memory, 0)[: job.file_bytes]
        pieces: Any = self._torch.from_numpy(buffer).reshape(job.requests, job.request_bytes)
        if self._offsets:
            places = [(str(rig.path(job.direction)), index * job.request_bytes) for index in range(job.requests)]
        else:
            places = [(str(path), 0) for path in rig.tensor_paths(job.request_bytes, job.requests)]
        handle = self._module.aio_handle(job.block_size, job.queue_depth, False, True, job.thread_count)
        if not handle.is_pinned(pieces[-1]):
            raise UnsupportedError("DeepSpeed's op does not take its own memory for pinned")
        call = handle.async_pread if job.direction == "read" else handle.async_pwrite
        if job.direction == "read":
            spoil(buffer)
        _allow_open_files(job.requests)
        cpu, began = cpu_seconds(), time.perf_counter()
        refused = sum(call(piece, path, offset) != 0 for piece, (path, offset) in zip(pieces, places, strict=True))
        finished = handle.wait()
        seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu
        if refused or finished != job.requests:
            raise IOFailure(5, "DeepSpeed's op failed", operation=job.direction, path=places[0][0], offset=0, nbytes=job.nbytes, done=0)
        if job.direction == "read":
            require_read(buffer, "DeepSpeed's op")
        return Measurement(job.nbytes, seconds, cpu)


def _allow_open_files(count: int) -> None:
    """The op keeps a descriptor open for every tensor that nobody has waited for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _SPARE_DESCRIPTORS
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))


@contextlib.contextmanager
def _standard_output_to_error() -> Iterator[None]:
    """Compilers and DeepSpeed talk on standard output, where the report goes."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
