"""DeepSpeed's own op in a trial: `--engine deepspeed`.

Its `wait()` returns when all requests of a handle are done. So requests are submitted in batches,
larger than the queues of the kernel, and a trial that reads and writes waits for both handles
together, as DeepSpeed's pipelined optimizer swapper does.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import importlib.metadata
import logging
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvme_offload.errors import IOFailure, UnsupportedError
from nvme_offload.hardware.profile import Setting
from nvme_offload.io.engine import File

_MEMORY_BYTES = 512 << 20  # the most memory that a sweep locks
_BUILT = "async_io", "pin_memory", "utils"  # by the op's builder

_log = logging.getLogger(__name__)


class DeepSpeedOp:
    """The loaded op; made by `load`, once in a process."""

    version: str  # of DeepSpeed

    def __init__(self, module: Any, torch: Any) -> None:
        self._module, self._torch = module, torch
        self.version = importlib.metadata.version("deepspeed")
        self._example = torch.empty(0, dtype=torch.uint8)
        self._allocator = module.aio_handle(1 << 20, 1, False, True, 1)

    def locked(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory that the op transfers without a copy, kept until the process ends."""
        return np.asarray(self._allocator.new_cpu_locked_tensor(nbytes, self._example).numpy())

    @contextlib.contextmanager
    def engine(self, setting: Setting, paths: Mapping[File, str]) -> Iterator[DeepSpeedEngine]:
        """The op at *setting*, as far as a trial needs an `Engine`; *paths* leads to the files."""
        options = (
            *(setting.block_size, setting.queue_depth, setting.single_submit),
            *(setting.overlap_events, setting.thread_count),
        )
        reading, writing = (self._module.aio_handle(*options) for _ in range(2))
        made = DeepSpeedEngine(reading, writing, self._torch, paths)
        try:
            yield made
        finally:
            made.settle()


class DeepSpeedEngine:
    """Two handles, one for each direction, as in DeepSpeed's swappers."""

    def __init__(self, reading: Any, writing: Any, torch: Any, paths: Mapping[File, str]) -> None:
        self._handles = {"read": reading, "write": writing}
        self._torch, self._paths = torch, paths
        self._moved = {"read": 0, "write": 0}
        self._pending: dict[str, list[DeepSpeedTicket]] = {"read": [], "write": []}

    def read(self, buffer: Any, file: File, offset: int = 0) -> DeepSpeedTicket:
        """As `Engine.read`. Raises: IOFailure."""
        return self._submit("read", buffer, file, offset)

    def write(self, buffer: Any, file: File, offset: int = 0) -> DeepSpeedTicket:
        """As `Engine.write`. Raises: IOFailure."""
        return self._submit("write", buffer, file, offset)

    def stats(self) -> Any:
        """The bytes of the requests that were waited for, as in `EngineStats`."""
        moved = {way: SimpleNamespace(bytes=nbytes) for way, nbytes in self._moved.items()}
        return SimpleNamespace(**moved)

    def wait(self) -> None:
        """Return when everything is done. Raises: IOFailure when the op says that it did less."""
        for direction, pending in self._pending.items():
            if not pending:  # the op ends the process when nothing is pending
                continue
            done = self._handles[direction].wait()
            tickets, self._pending[direction] = pending, []
            if done != len(tickets):
                raise tickets[0].failure(f"DeepSpeed's op did {done} of {len(tickets)} requests")
            for ticket in tickets:
                ticket.finished = True
                self._moved[direction] += ticket.nbytes

    def settle(self) -> None:
        """Wait for pending requests and ignore their errors: freeing a handle with work pending
        ends the process.
        """
        for _ in self._handles:  # an error ends the wait for one direction
            with contextlib.suppress(IOFailure):
                self.wait()

    def _submit(self, direction: str, buffer: Any, file: File, offset: int) -> DeepSpeedTicket:
        tensor = self._torch.from_numpy(np.asarray(buffer))
        ticket = DeepSpeedTicket(self, direction, file.path, offset, tensor)
        handle = self._handles[direction]
        call = handle.async_pread if direction == "read" else handle.async_pwrite
        if call(tensor, self._paths[file], offset) != 0:
            raise ticket.failure("DeepSpeed's op refused the request")
        self._pending[direction].append(ticket)
        return ticket


class DeepSpeedTicket:
    """As `Ticket`, of a request that is done when its batch is. It holds the buffer until then."""

    def __init__(
        self, engine: DeepSpeedEngine, direction: str, path: str, offset: int, tensor: Any
    ) -> None:
        self._engine, self._tensor = engine, tensor
        self.nbytes: int = tensor.nbytes
        self.finished = False
        self._place: dict[str, Any] = {"operation": direction, "path": path, "offset": offset}

    def done(self) -> bool:
        """Whether its batch was waited for."""
        return self.finished

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the whole batch, however long it takes; returns the bytes asked for."""
        if not self.finished:
            self._engine.wait()
        return self.nbytes

    def failure(self, reason: str) -> IOFailure:
        """An error of this request; the op does not report errno."""
        return IOFailure(errno.EIO, reason, nbytes=self.nbytes, done=0, **self._place)


@functools.cache
def load() -> DeepSpeedOp:
    """DeepSpeed's op, which is built, in a minute, at its first use. Raises: UnsupportedError."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.geteuid() != 0 and soft != resource.RLIM_INFINITY and soft < _MEMORY_BYTES:
        raise UnsupportedError(
            f"DeepSpeed's op ends the process when it may not lock its memory: raise the limit (ulimit -l {_MEMORY_BYTES >> 10})"
        )
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        with standard_output_to_error():
            from deepspeed.ops.op_builder import AsyncIOBuilder

            warn_of_builds()
            module = AsyncIOBuilder().load(verbose=False)
    except ImportError as error:
        raise UnsupportedError(
            f"DeepSpeed is not installed here ({error}): pip install deepspeed, or leave out --engine deepspeed"
        ) from None
    # no compiler, no ninja, no libaio
    except (RuntimeError, OSError, AssertionError, SystemExit) as error:
        raise UnsupportedError(
            f"DeepSpeed's op cannot be built here: {' '.join(str(error).split())[:300]}; `ds_report` lists missing requirements"
        ) from None
    # its warning of wear at the first write goes to standard output as well
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return DeepSpeedOp(module, sys.modules["torch"])  # which DeepSpeed has loaded


def warn_of_builds() -> None:
    """Log a warning for each lock of a build that another process makes, or left as it was killed:
    torch waits until the lock is gone.
    """
    cpp_extension: Any = importlib.import_module("torch.utils.cpp_extension")
    for name in _BUILT:
        lock = Path(cpp_extension._get_build_directory(name, verbose=False)) / "lock"
        if lock.exists():
            _log.warning(
                "waiting for another process that compiles DeepSpeed's %s: if none does, a compilation was killed, so remove %s",
                *(name, lock),
            )


@contextlib.contextmanager
def standard_output_to_error() -> Iterator[None]:
    """Send the output of compilers and DeepSpeed to standard error: standard output is for results."""
    if sys.stdout is not None:
        sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
