"""DeepSpeed's own op, as a side of a contest."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

from nvme_offload.errors import UnsupportedError
from nvme_offload.sweep.deepspeed_op import standard_output_to_error

from .page_cache import sync
from .plan import Job
from .rig import Bytes, Place, failed, memory_of, require_read, spoil
from .stopwatch import Measurement, Stopwatch

OPTIONS = {"offsets", "sync"}
_SPARE_DESCRIPTORS = 256
_OPS = ("async_io", "pin_memory", "utils")
_LONGEST_BUILD_SECONDS = 900.0


class DeepSpeedOp:
    """An asynchronous call for each tensor, then one wait; each tensor is a file of its own, as its
    swapper has it. Loading builds the op once.

    Its memory comes from its own allocator, since it copies everything else through a buffer of its
    own. Both ways at once are two handles, each with the whole depth, as its pipelined swapper has
    them. Options: "offsets" moves the tensors of one file instead; "sync" has what is written on
    the drive to stay before the clock stops. Raises: UnsupportedError where DeepSpeed, or what its
    op is built with, is not there.
    """

    def __init__(self, options: frozenset[str]) -> None:
        self._offsets, self._sync = "offsets" in options, "sync" in options
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        try:
            with standard_output_to_error():
                import torch
                from deepspeed.accelerator import get_accelerator
                from deepspeed.ops.op_builder import AsyncIOBuilder

                _require_no_stale_lock()
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
        """Memory that the op moves without a copy; never freed, as in its swapper."""
        tensor = self._handle.new_cpu_locked_tensor(
            nbytes, self._torch.empty(0, dtype=self._torch.uint8)
        )
        return np.asarray(tensor.numpy())

    def unlock(self, buffer: Bytes) -> None:
        """Free what `locked` gave; the memory must not be touched after."""
        self._handle.free_cpu_locked_tensor(self._torch.from_numpy(buffer))

    def run(self, rig: Place, job: Job) -> Measurement:
        """Move *job* once. Raises: IOFailure, UnsupportedError."""
        if job.backend != "libaio" or job.passes > 1 or job.footprint_bytes != job.file_bytes:
            raise UnsupportedError(
                "DeepSpeed's op is only asked for plain reads and writes, which it does by libaio"
            )
        memory = job.memory if job.memory.startswith("locked") else "locked"
        buffers = memory_of(rig, job, memory)
        handles = {
            direction: self.handle(job.block_size, job.queue_depth, job.thread_count)
            for direction in job.directions
        }
        calls: list[tuple[Any, Any, str, int]] = []
        for direction, buffer in buffers.items():
            pieces: Any = self._torch.from_numpy(buffer).reshape(job.requests, job.request_bytes)
            handle = handles[direction]
            if not handle.is_pinned(pieces[-1]):
                raise UnsupportedError("DeepSpeed's op does not take its own memory for pinned")
            call = handle.async_pread if direction == "read" else handle.async_pwrite
            calls += [
                (call, piece, path, offset)
                for piece, (path, offset) in zip(
                    pieces, self._places(rig, job, direction), strict=True
                )
            ]
        written = (
            sorted({path for call, _, path, _ in calls if call.__name__ == "async_pwrite"})
            if self._sync
            else []
        )
        if "read" in buffers:
            spoil(buffers["read"])
        _allow_open_files(len(calls))
        with Stopwatch() as watch:
            refused = sum(call(piece, path, offset) != 0 for call, piece, path, offset in calls)
            finished = sum(handle.wait() for handle in handles.values())
            for path in written:
                sync(path)
        if refused or finished != len(calls):
            raise failed("DeepSpeed's op failed", job, path=calls[0][2])
        if "read" in buffers:
            require_read(buffers["read"], "DeepSpeed's op")
        return watch.measurement(job.nbytes)

    def _places(self, rig: Place, job: Job, direction: str) -> list[tuple[str, int]]:
        if self._offsets:
            return [
                (str(rig.path(direction)), index * job.request_bytes)
                for index in range(job.requests)
            ]
        return [(str(path), 0) for path in rig.tensor_paths(job.request_bytes, job.requests)]


def _require_no_stale_lock() -> None:
    """Raises: UnsupportedError where a build that was killed has left its lock, for which every
    later one waits for ever.
    """
    from torch.utils import cpp_extension

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    for name in _OPS:
        for lock in root.glob(f"**/{name}/lock"):
            if time.time() - lock.stat().st_mtime > _LONGEST_BUILD_SECONDS:
                raise UnsupportedError(
                    f"a build of DeepSpeed's op that was killed has left a lock, for which every later one waits: remove {lock}"
                )


def _allow_open_files(count: int) -> None:
    """The op keeps a descriptor open for every tensor that nobody has waited for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _SPARE_DESCRIPTORS
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))
