"""DeepSpeed's `async_io` op on this package's engine. DeepSpeed uses it instead of compiling its
own.

It has the interface of DeepSpeed 0.19.8: the same names, defaults and integer results. Operations
of one handle that touch the same bytes take effect in order. A failure raises an exception
(`nvme_offload.errors`), where DeepSpeed prints, returns -1 or ends the process. Every size, offset
and alignment works. CPU tensors are moved without a copy, pinned or not, so do not touch a buffer
between an asynchronous call and `wait`.

Source: deepspeed/ops/csrc/aio/py_lib/py_ds_aio.cpp,
deepspeed/ops/csrc/pin_memory/py_ds_pin_memory.cpp.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import IOFailure, OffloadError, UsageError
from ..hardware.config import MIN_BLOCK_SIZE, AioConfig
from ..io.engine import Engine
from ..io.pool import PinnedPool
from .locked_memory import forget, is_pinned, locked_memory, locked_tensor
from .operation import (
    OUT_OF_DESCRIPTORS,
    OpenFile,
    Operation,
    moves_as_it_is,
    open_descriptor,
    open_path,
    require_movable,
)
from .replacing import Replacements

if TYPE_CHECKING:
    import torch

    StrPath = str | bytes | os.PathLike[str]

# Alignment per thread: deepspeed.io.FastFileWriter splits its writes at multiples of it.
_DIRECT_ALIGNMENT_BYTES = 512

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)
_replaced = Replacements()


class aio_handle:
    """A queue of file operations; `wait` finishes them together.

    *block_size* bytes go to the kernel at a time, and *queue_depth* blocks are in flight in each of
    *intra_op_parallelism* threads. With *single_submit* they are submitted one by one; with
    *overlap_events* the queue is refilled before it is empty. These two may also be the strings
    "true" and "false", which ds_nvme_tune prints. Handles with equal settings share an engine.

    A *buffer* may be any dense tensor. A buffer that is on a GPU or not contiguous goes through a
    staging copy, which a read copies back in `wait`. A write creates a missing file with mode 0600;
    an existing file keeps its length and its other bytes. *validate* reads the bytes back and
    compares them. Files are opened with O_DIRECT if the filesystem supports it. Otherwise (tmpfs)
    their data goes through the page cache, and a warning is logged once.

    Raises: UsageError and UnsupportedError if a setting is wrong, or the kernel has no room for the
    queues. Methods that start an operation raise UsageError and IOFailure. Methods that wait raise
    the first failure once all operations are finished: IOFailure, NoSpaceError, TruncatedError (the
    file ends before the requested bytes) or CorruptionError. The handle can be used after any of
    them.

    Lifetime: the operations of a dropped handle still finish, but staging copies are not copied
    back, and failures are only logged.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool | str = False,
        overlap_events: bool | str = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._block_size = _index("block_size", block_size)
        try:
            self._config = AioConfig(
                block_size=-(-self._block_size // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE,
                queue_depth=_index("queue_depth", queue_depth),
                thread_count=_index("intra_op_parallelism", intra_op_parallelism),
                single_submit=_flag("single_submit", single_submit),
                overlap_events=_flag("overlap_events", overlap_events),
                direct="auto",
            )
        except UsageError as error:
            raise UsageError(str(error).replace("thread_count", "intra_op_parallelism")) from None
        self._shared = _share_engine(self._config)
        self._pending: list[Operation] = []
        self._lock = threading.Lock()

    def get_block_size(self) -> int:
        """*block_size*, as given. The engine rounds it up to a multiple that drives accept."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """Blocks in flight for each thread."""
        return self._config.queue_depth

    def get_single_submit(self) -> bool:
        """Whether blocks are submitted one by one."""
        return self._config.single_submit

    def get_overlap_events(self) -> bool:
        """Whether the queue is refilled before it is empty."""
        return self._config.overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Worker threads."""
        return self._config.thread_count

    def get_alignment(self) -> int:
        """The alignment in bytes that DeepSpeed's callers use. This op does not need it."""
        return _DIRECT_ALIGNMENT_BYTES * self._config.thread_count

    def read(
        self, buffer: torch.Tensor, filename: StrPath, validate: bool, file_offset: int = 0
    ) -> int:
        """Read *filename* into *buffer* and return 0, after earlier operations on which it depends."""
        return self._complete(False, buffer, filename, validate, file_offset)

    def write(
        self, buffer: torch.Tensor, filename: StrPath, validate: bool, file_offset: int = 0
    ) -> int:
        """Write *buffer* to *filename* and return 0, after earlier operations on which it depends."""
        return self._complete(True, buffer, filename, validate, file_offset)

    def pread(
        self, buffer: torch.Tensor, filename: StrPath, validate: bool, *rest: Any, **named: Any
    ) -> int:
        """`pread(buffer, filename, validate, async, file_offset=0)`: start a read. Returns 0 with
        *async*, otherwise as `wait`.
        """
        return self._queue(False, buffer, filename, validate, *rest, **_renamed(named))

    def pwrite(
        self, buffer: torch.Tensor, filename: StrPath, validate: bool, *rest: Any, **named: Any
    ) -> int:
        """`pwrite(buffer, filename, validate, async, file_offset=0)`: start a write. Returns 0 with
        *async*, otherwise as `wait`.
        """
        return self._queue(True, buffer, filename, validate, *rest, **_renamed(named))

    def sync_pread(self, buffer: torch.Tensor, filename: StrPath, file_offset: int = 0) -> int:
        """Read. Returns as `wait`."""
        return self._queue(False, buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: StrPath, file_offset: int = 0) -> int:
        """Write. Returns as `wait`."""
        return self._queue(True, buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: StrPath, file_offset: int = 0) -> int:
        """Start a read, and return 0."""
        return self._queue(False, buffer, filename, False, True, file_offset)

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: StrPath | int | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Start a write to a file, or to the open descriptor *fd*, and return 0.

        The caller may close the descriptor immediately. Its file position and O_APPEND are ignored.
        Raises: IOFailure if the file has no name by which it can be opened for writing.
        """
        if (filename is None) == (fd is None):
            raise TypeError("async_pwrite() needs either filename or fd")
        where = fd if filename is None else filename
        return self._queue(True, buffer, where, False, True, file_offset)  # type: ignore[arg-type]

    def wait(self) -> int:
        """Finish all operations and return their number.

        If another exception interrupts it, such as KeyboardInterrupt, the operations are still
        pending; call `wait` again.
        """
        with self._lock:
            for operation in self._pending:
                operation.settle()
            finished, self._pending = self._pending, []
        failures = [operation.failure for operation in finished if operation.failure is not None]
        for failure in failures[1:]:
            _log.error("besides the exception that wait raises: %s", failure)
        if failures:
            raise failures[0]
        return len(finished)

    def new_cpu_locked_tensor(self, num_elem: int, example_tenosr: torch.Tensor) -> torch.Tensor:
        """A tensor of *num_elem* zeros with the example's dtype, page-aligned, and pinned as
        `PinnedPool` does, for CUDA too.

        Lifetime: the memory is freed with the tensor and its views, whether
        `free_cpu_locked_tensor` was called or not.
        """
        return locked_tensor(
            _index("num_elem", num_elem), example_tenosr, lambda nbytes: PinnedPool(nbytes).memory
        )

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Stop counting *tensor* as pinned; False unless it is a whole locked tensor."""
        return forget(tensor.data_ptr())

    is_pinned = staticmethod(is_pinned)

    def _queue(
        self,
        writing: bool,
        buffer: torch.Tensor,
        where: StrPath | int,
        validate: bool,
        asynchronous: bool,
        file_offset: int = 0,
    ) -> int:
        asynchronous = _flag("async", asynchronous)
        with self._lock:
            self._pending.append(self._start(writing, buffer, where, validate, file_offset))
        return 0 if asynchronous else self.wait()

    def _complete(
        self, writing: bool, buffer: torch.Tensor, where: StrPath, validate: bool, file_offset: int
    ) -> int:
        with self._lock:
            operation = self._start(writing, buffer, where, validate, file_offset)
        operation.settle()
        if operation.failure is not None:
            raise operation.failure
        return 0

    def _start(
        self,
        writing: bool,
        buffer: torch.Tensor,
        where: StrPath | int,
        validate: bool,
        file_offset: int,
    ) -> Operation:
        import torch

        require_movable(buffer)
        validate = _flag("validate", validate)
        offset = _index("file_offset", file_offset)
        if offset < 0:
            raise UsageError(f"file_offset must not be negative: {offset}")
        if self._shared.process_id != os.getpid():  # forked since
            self._shared = _share_engine(self._config)
        engine = self._shared.engine
        open_file: Callable[..., OpenFile] = (
            open_descriptor if isinstance(where, int) else open_path
        )
        place = self._with_descriptors(lambda: open_file(engine, where, writing))
        # A separate tensor on the same memory: DeepSpeed assigns `tensor.data` while the tensor is
        # in flight.
        buffer = buffer.detach()
        operation = Operation(engine, writing, buffer, place, offset, validate)
        for pending in self._pending:
            if pending.conflicts(operation):
                pending.settle()
        if not moves_as_it_is(buffer):
            # torch's allocator caches pinned memory.
            operation.staging = torch.empty(
                buffer.shape, dtype=buffer.dtype, device="cpu", pin_memory=buffer.is_cuda
            )
            if writing:
                operation.staging.copy_(buffer)
        move = engine.write if writing else engine.read
        operation.ticket = self._with_descriptors(
            lambda: move(operation.staging, place.file, offset)
        )
        return operation

    def _with_descriptors(self, action: Callable[[], _Result]) -> _Result:
        """The result of *action*, before which all operations end if the process has no descriptor
        left: each holds one, and a second one for unaligned ends.
        """
        try:
            return action()
        except IOFailure as error:
            if error.errno not in OUT_OF_DESCRIPTORS or not self._pending:
                raise
        for pending in self._pending:
            pending.settle()
        return action()


class pin_handle:
    """Page-locked memory for DS_PIN_MEMORY_BACKEND=native, which registers it with CUDA."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of zeros, page-aligned, and locked as far as RLIMIT_MEMLOCK allows."""
        return locked_tensor(_index("num_elem", num_elem), example_tensor, locked_memory)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """As `aio_handle.free_cpu_locked_tensor`."""
        return forget(locked_tensor.data_ptr())

    free_cpu_locked_tensor_by_ptr = staticmethod(forget)
    is_pinned = staticmethod(is_pinned)


def _move_start(
    writing: bool,
    buffer: torch.Tensor,
    filename: StrPath,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    handle = _handle(block_size, queue_depth, single_submit, overlap_events)
    return handle._complete(writing, buffer, filename, validate, 0)


# Read the start of a file into a buffer, and write a buffer there. Return 0; raise as `aio_handle`.
aio_read = functools.partial(_move_start, False)
aio_write = functools.partial(_move_start, True)


def deepspeed_memcpy(dst: torch.Tensor, src: torch.Tensor) -> int:
    """Copy *src* to *dst* and return 0. Raises: UsageError if dtypes or sizes differ."""
    if dst.dtype != src.dtype or dst.numel() != src.numel():
        raise UsageError(
            f"{src.numel()} elements of {src.dtype} cannot be copied to {dst.numel()} of {dst.dtype}"
        )
    dst.detach().copy_(src.detach().reshape(dst.shape))
    return 0


def install() -> None:
    """Register this op, and its page-locked memory, where DeepSpeed looks before it compiles its
    own. A second call does nothing.

    Source: deepspeed/ops/op_builder/builder.py, pin_memory_load.py; deepspeed/ops/__init__.py.
    """
    if _replaced:
        return
    import deepspeed.ops
    from deepspeed.ops.op_builder import AsyncIOBuilder

    cache = next(
        vars(kind)["_loaded_ops"] for kind in AsyncIOBuilder.__mro__ if "_loaded_ops" in vars(kind)
    )
    # The module has no __file__, so DeepSpeed does not look for symbols in it.
    pin_module = types.ModuleType(f"{__name__}.pin_memory", pin_handle.__doc__)
    pin_module.__dict__["pin_handle"] = pin_handle
    _replaced.put(cache, AsyncIOBuilder.NAME, sys.modules[__name__])
    _replaced.put(sys, "_deepspeed_pin_memory_op_module", pin_module)
    _replaced.put(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: True)
    # DeepSpeed builds this table on first use by running compilers. Then it asks the builder.
    compatible = vars(deepspeed.ops).get("__compatible_ops__")
    if compatible is None:
        _replaced.append(lambda: vars(deepspeed.ops).pop("__compatible_ops__", None))
    else:
        _replaced.put(compatible, AsyncIOBuilder.NAME, True)


def remove() -> None:
    """Undo `install`. Existing handles and memory keep working."""
    _replaced.restore()


class _SharedEngine:
    """The engine of all handles with the same settings, which is closed with the last one."""

    def __init__(self, config: AioConfig) -> None:
        self.engine = Engine(config)
        self.process_id = os.getpid()
        weakref.finalize(self, _close, self.engine).atexit = False


_shared_engines: weakref.WeakValueDictionary[tuple[int, AioConfig], _SharedEngine] = (
    weakref.WeakValueDictionary()
)
_sharing = threading.Lock()
# The kernel takes tens of milliseconds to open the queues of an engine, so the last one is kept.
_handle = functools.lru_cache(1)(aio_handle)


def _share_engine(config: AioConfig) -> _SharedEngine:
    key = (os.getpid(), config)
    with _sharing:
        shared = _shared_engines.get(key)
        if shared is None:
            shared = _shared_engines[key] = _SharedEngine(config)
        return shared


def _close(engine: Engine) -> None:
    try:
        engine.close()
    except OffloadError as failure:
        _log.error("an operation that was never waited for failed: %s", failure)


def _index(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"{name} must be a whole number, not {value!r}") from None


def _flag(name: str, value: bool | str) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    # The truth value of an array or tensor may be undefined, which raises.
    with contextlib.suppress(ValueError, RuntimeError):
        if value in (False, True):
            return bool(value)
    raise UsageError(f"{name} must be true or false, not {value!r}")


def _renamed(named: dict[str, Any]) -> dict[str, Any]:
    """*named* without the name `async`, which is a keyword of Python."""
    return {"asynchronous" if name == "async" else name: value for name, value in named.items()}
