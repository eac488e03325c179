"""DeepSpeed's `async_io` op on our engine: what DeepSpeed would compile at the first step, it finds here.

The calls are those of deepspeed 0.19.8, with its names and defaults, its whole numbers for answers, and its order: the operations of a handle
take effect one after another where they touch the same bytes. What differs is that a failure is an exception (of `errors`) where DeepSpeed
prints, returns -1 or ends the process; that every size, offset and alignment works; and that CPU tensors move without a copy, pinned or not:
leave a buffer alone from an asynchronous call until `wait`.

Source: deepspeed/ops/csrc/aio/py_lib/py_ds_aio.cpp, deepspeed/ops/csrc/pin_memory/py_ds_pin_memory.cpp.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import operator
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import AioConfig
from ..engine import Engine, File, Memory, Ticket
from ..errors import CorruptionError, IOFailure, NoSpaceError, OffloadError, UsageError
from ..pool import PinnedPool

if TYPE_CHECKING:
    import torch

    StrPath = str | bytes | os.PathLike[str]

_DIRECT_ALIGNMENT_BYTES = 512  # for each thread; what deepspeed.io.FastFileWriter cuts its writes by
_VALIDATION_BYTES = 64 << 20  # read back at a time
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

_log = logging.getLogger(__name__)


class aio_handle:
    """A queue of operations on files, to be waited for together.

    Settings are those of the "aio" section of a DeepSpeed configuration; *intra_op_parallelism* is our thread_count. Flags may also be the
    strings "true" and "false", which ds_nvme_tune prints. Files are opened with O_DIRECT wherever the filesystem has it; where it has not
    (tmpfs), they go through the page cache and a warning is logged once. Handles with equal settings share an engine.

    A *buffer* is any tensor: one that is on a GPU or not contiguous goes through a copy, which is taken back in `wait`. A missing file is
    created for writing, with mode 0600; an existing one keeps its length and its other bytes. *validate* reads the bytes back and compares.

    Lifetime: a handle that is dropped leaves its operations to be finished, except that nothing is copied back; a failure among them is logged.
    Raises: UsageError; UnsupportedError when the kernel has no room for the queues; from every method that starts an operation UsageError
    and IOFailure at once; from those that wait the first failure of IOFailure, NoSpaceError, TruncatedError (the file ends before the bytes
    asked for) and CorruptionError, once all operations are finished. The handle can be used after any of them.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool | str = False,
        overlap_events: bool | str = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        try:
            self._config = AioConfig(
                block_size=_index("block_size", block_size),
                queue_depth=_index("queue_depth", queue_depth),
                thread_count=_index("intra_op_parallelism", intra_op_parallelism),
                single_submit=_flag("single_submit", single_submit),
                overlap_events=_flag("overlap_events", overlap_events),
                direct="auto",
            )
        except UsageError as error:
            raise UsageError(str(error).replace("thread_count", "intra_op_parallelism")) from None
        self._shared = _share_engine(self._config)
        self._pending: list[_Operation] = []
        self._lock = threading.Lock()

    def get_block_size(self) -> int:
        """Bytes handed to the kernel at a time."""
        return self._config.block_size

    def get_queue_depth(self) -> int:
        """Blocks in flight for one thread."""
        return self._config.queue_depth

    def get_single_submit(self) -> bool:
        """Whether blocks are handed over one by one."""
        return self._config.single_submit

    def get_overlap_events(self) -> bool:
        """Whether the queue is refilled before it has run empty."""
        return self._config.overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Worker threads."""
        return self._config.thread_count

    def get_alignment(self) -> int:
        """Bytes that callers cut their buffers by; DeepSpeed's own value, which this op does not need."""
        return _DIRECT_ALIGNMENT_BYTES * self._config.thread_count

    def read(self, buffer: torch.Tensor, filename: StrPath, validate: bool, file_offset: int = 0) -> int:
        """Fill *buffer* from *filename* and return 0; earlier operations need not be finished."""
        return self._complete(False, buffer, filename, validate, file_offset)

    def write(self, buffer: torch.Tensor, filename: StrPath, validate: bool, file_offset: int = 0) -> int:
        """Write *buffer* to *filename* and return 0; earlier operations need not be finished."""
        return self._complete(True, buffer, filename, validate, file_offset)

    def pread(self, buffer: torch.Tensor, filename: StrPath, validate: bool, *rest: Any, **named: Any) -> int:
        """`pread(buffer, filename, validate, async, file_offset=0)`: start reading; with *async* return 0, otherwise as `wait` does."""
        asynchronous, file_offset = _async_and_offset(rest, named)
        return self._queue(False, buffer, filename, validate, asynchronous, file_offset)

    def pwrite(self, buffer: torch.Tensor, filename: StrPath, validate: bool, *rest: Any, **named: Any) -> int:
        """`pwrite(buffer, filename, validate, async, file_offset=0)`: start writing; with *async* return 0, otherwise as `wait` does."""
        asynchronous, file_offset = _async_and_offset(rest, named)
        return self._queue(True, buffer, filename, validate, asynchronous, file_offset)

    def sync_pread(self, buffer: torch.Tensor, filename: StrPath, file_offset: int = 0) -> int:
        """Read, and return as `wait` does."""
        return self._queue(False, buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: StrPath, file_offset: int = 0) -> int:
        """Write, and return as `wait` does."""
        return self._queue(True, buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: StrPath, file_offset: int = 0) -> int:
        """Start reading, and return 0."""
        return self._queue(False, buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: torch.Tensor, filename: StrPath | int | None = None, file_offset: int = 0, *, fd: int | None = None) -> int:
        """Start writing to a file, or to the open descriptor *fd*, and return 0.

        The descriptor may be closed at once, and is not closed here; its file position and an O_APPEND on it do not matter.
        A file that has no name by which it can be opened for writing (deleted, O_TMPFILE, without permission) is written through the page cache,
        before this returns.
        """
        if (filename is None) == (fd is None):
            raise TypeError("async_pwrite() needs either filename or fd")
        where = fd if filename is None else filename
        return self._queue(True, buffer, where, False, True, file_offset)  # type: ignore[arg-type]

    def wait(self) -> int:
        """Finish all operations and return their number, which is 0 where there are none.

        After an exception other than theirs (Ctrl-C) the operations are still there to be waited for.
        """
        with self._lock:
            for operation in self._pending:
                operation.settle()
            finished, self._pending = self._pending, []
        failures = [operation.failure for operation in finished if operation.failure is not None]
        for failure in failures[1:]:
            _log.error("beside the exception that wait raises: %s", failure)
        if failures:
            raise failures[0]
        return len(finished)

    def new_cpu_locked_tensor(self, num_elem: int, example_tenosr: torch.Tensor) -> torch.Tensor:
        """A tensor of *num_elem* zeros with the example's dtype, page-aligned and pinned as `PinnedPool` does, also for CUDA.

        Lifetime: the memory is given back when the tensor and its views are gone, whether it was freed or not.
        """
        return _locked_tensor(num_elem, example_tenosr, lambda nbytes: PinnedPool(nbytes).memory)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Forget that *tensor* is pinned; False where it is not the whole of what `new_cpu_locked_tensor` returned."""
        return _locked.pop(tensor.data_ptr(), None) is not None

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether all of *buffer* is pinned, by torch or as a locked tensor or a view of one."""
        return _is_pinned(buffer)

    def _queue(self, writing: bool, buffer: torch.Tensor, where: StrPath | int, validate: bool, asynchronous: bool, file_offset: int) -> int:
        asynchronous = _flag("async", asynchronous)
        with self._lock:
            self._pending.append(self._start(writing, buffer, where, validate, file_offset))
        return 0 if asynchronous else self.wait()

    def _complete(self, writing: bool, buffer: torch.Tensor, where: StrPath, validate: bool, file_offset: int) -> int:
        with self._lock:
            operation = self._start(writing, buffer, where, validate, file_offset)
        operation.settle()
        if operation.failure is not None:
            raise operation.failure
        return 0

    def _start(self, writing: bool, buffer: torch.Tensor, where: StrPath | int, validate: bool, file_offset: int) -> _Operation:
        _require_movable(buffer)
        validate = _flag("validate", validate)
        offset = _index("file_offset", file_offset)
        if offset < 0:
            raise UsageError(f"file_offset must not be negative: {offset}")
        if self._shared.process_id != os.getpid():  # forked since
            self._shared = _share_engine(self._config)
        # A tensor of its own on the same memory: DeepSpeed points tensors elsewhere while they are in flight (`tensor.data = ...`).
        buffer = buffer.detach()
        try:
            return self._submit(writing, buffer, where, validate, offset)
        except IOFailure as error:
            if error.errno not in _OUT_OF_DESCRIPTORS or not self._pending:
                raise
        # Every operation holds a descriptor, and there may be more of them than a process may have.
        for pending in self._pending:
            pending.settle()
        return self._submit(writing, buffer, where, validate, offset)

    def _submit(self, writing: bool, buffer: torch.Tensor, where: StrPath | int, validate: bool, offset: int) -> _Operation:
        import torch

        engine = self._shared.engine
        place = _open_descriptor(engine, where, writing) if isinstance(where, int) else _open_path(engine, where, writing)
        operation = _Operation(engine, writing, buffer, place, offset, validate)
        for pending in self._pending:
            if pending.conflicts(operation):
                pending.settle()
        if not _moves_as_it_is(buffer):
            # Pinned memory comes from torch's own allocator, which keeps it for the next time.
            operation.staging = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=buffer.is_cuda)
            if writing:
                operation.staging.copy_(buffer)
        if place.file is not None:
            operation.ticket = (engine.write if writing else engine.read)(operation.staging, place.file, offset)
        else:
            try:
                _write_to_descriptor(operator.index(where), operation.staging, offset)  # type: ignore[arg-type]
            except IOFailure as error:
                operation.failure = error
        return operation


class pin_handle:
    """Page-locked memory for the rest of DeepSpeed (`DS_PIN_MEMORY_BACKEND=native`), which registers it with CUDA by itself."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of *num_elem* zeros with the example's dtype, page-aligned and locked in memory as far as the limit allows."""
        return _locked_tensor(num_elem, example_tensor, _locked_memory)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """As `aio_handle.free_cpu_locked_tensor`."""
        return self.free_cpu_locked_tensor_by_ptr(locked_tensor.data_ptr())

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """The same for the tensor that starts at *address*."""
        return _locked.pop(address, None) is not None

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """As `aio_handle.is_pinned`."""
        return _is_pinned(buffer)


def aio_read(buffer: torch.Tensor, filename: StrPath, block_size: int, queue_depth: int, single_submit: bool, overlap_events: bool, validate: bool) -> int:
    """Fill *buffer* from the start of *filename* and return 0. Raises: as `aio_handle`."""
    return _keep(aio_handle(block_size, queue_depth, single_submit, overlap_events)).read(buffer, filename, validate)


def aio_write(buffer: torch.Tensor, filename: StrPath, block_size: int, queue_depth: int, single_submit: bool, overlap_events: bool, validate: bool) -> int:
    """Write *buffer* to the start of *filename* and return 0. Raises: as `aio_handle`."""
    return _keep(aio_handle(block_size, queue_depth, single_submit, overlap_events)).write(buffer, filename, validate)


def deepspeed_memcpy(dst: torch.Tensor, src: torch.Tensor) -> int:
    """Copy *src* to *dst*, which has as many elements of the same dtype, and return 0. Raises: UsageError."""
    if dst.dtype != src.dtype or dst.numel() != src.numel():
        raise UsageError(f"{src.numel()} elements of {src.dtype} cannot be copied to {dst.numel()} of {dst.dtype}")
    dst.detach().copy_(src.detach().reshape(dst.shape))
    return 0


def install() -> None:
    """Have DeepSpeed find this op, and the memory that goes with it, instead of compiling its own; a second call does nothing.

    Source: deepspeed/ops/op_builder/builder.py, pin_memory_load.py; deepspeed/ops/__init__.py.
    """
    if _undo:
        return
    import deepspeed.ops
    from deepspeed.ops.op_builder import AsyncIOBuilder

    cache = next(vars(kind)["_loaded_ops"] for kind in AsyncIOBuilder.__mro__ if "_loaded_ops" in vars(kind))
    pin_module = types.ModuleType(f"{__name__}.pin_memory", pin_handle.__doc__)  # without __file__, so that nobody looks for symbols in it
    pin_module.__dict__["pin_handle"] = pin_handle
    _replace(cache, AsyncIOBuilder.NAME, sys.modules[__name__])
    _replace(vars(sys), "_deepspeed_pin_memory_op_module", pin_module)
    _replace_attribute(AsyncIOBuilder, "is_compatible", lambda self, verbose=False: True)
    # Made when first asked for, by running compilers; it then asks the builder.
    compatible = vars(deepspeed.ops).get("__compatible_ops__")
    if compatible is None:
        _undo.append(lambda: vars(deepspeed.ops).pop("__compatible_ops__", None))
    else:
        _replace(compatible, AsyncIOBuilder.NAME, True)


def remove() -> None:
    """Put back what was there before `install`; what is in use goes on working."""
    while _undo:
        _undo.pop()()


_undo: list[Callable[[], object]] = []
_absent = object()


def _replace(namespace: dict[str, Any], name: str, value: object) -> None:
    before = namespace.get(name, _absent)
    namespace[name] = value
    _undo.append(lambda: namespace.pop(name, None) if before is _absent else namespace.__setitem__(name, before))


def _replace_attribute(owner: type, name: str, value: object) -> None:
    before = vars(owner).get(name, _absent)
    setattr(owner, name, value)
    _undo.append(lambda: delattr(owner, name) if before is _absent else setattr(owner, name, before))


class _SharedEngine:
    """The engine of all handles with the same settings; closed when the last of them goes. One that is left at the end, the engine's module closes."""

    def __init__(self, config: AioConfig) -> None:
        self.engine = Engine(config)
        self.process_id = os.getpid()
        weakref.finalize(self, _close, self.engine).atexit = False


_shared_engines: weakref.WeakValueDictionary[tuple[int, AioConfig], _SharedEngine] = weakref.WeakValueDictionary()
_sharing = threading.Lock()
_kept: aio_handle | None = None


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
        _log.error("in an operation that nobody waited for: %s", failure)


def _keep(handle: aio_handle) -> aio_handle:
    """Keep the engine of *handle* for the next call: making and closing one takes the kernel tens of milliseconds."""
    global _kept
    _kept = handle
    return handle


class _Place:
    """An open file, how to call it and how to recognise it; *file* is None where the engine cannot open it."""

    __slots__ = ("file", "identity", "path")

    def __init__(self, file: File | None, path: str, status: os.stat_result) -> None:
        self.file = file
        self.path = path
        self.identity = (status.st_dev, status.st_ino)


class _Operation:
    """A read or write of a handle: what it touches, and how it ended."""

    __slots__ = ("begin", "buffer", "end", "engine", "failure", "memory", "memory_end", "place", "staging", "ticket", "validate", "writing")

    def __init__(self, engine: Engine, writing: bool, buffer: torch.Tensor, place: _Place, offset: int, validate: bool) -> None:
        self.engine = engine
        self.writing = writing
        self.buffer = buffer
        self.staging = buffer  # what the engine moves
        self.place = place
        self.begin, self.end = offset, offset + buffer.nbytes
        self.memory, self.memory_end = _extent(buffer)
        self.validate = validate
        self.ticket: Ticket | None = None  # while it is under way
        self.failure: Exception | None = None

    def conflicts(self, later: _Operation) -> bool:
        """Whether *later* must not begin before this one has ended: they share bytes, in memory or in a file, that one of them changes."""
        if self.ticket is None:
            return False
        if self.memory < later.memory_end and later.memory < self.memory_end and not (self.writing and later.writing):
            return True
        same_file = self.place.identity == later.place.identity
        return same_file and self.begin < later.end and later.begin < self.end and (self.writing or later.writing)

    def settle(self) -> None:
        """Wait until it is finished, and keep what went wrong."""
        if self.ticket is None:
            return
        try:
            self.ticket.wait()
            if self.validate:
                self._compare()
            if self.staging is not self.buffer and not self.writing:
                self.buffer.copy_(self.staging)
        except Exception as error:
            self.failure = error
        self.ticket = None
        self.buffer = self.staging = self.buffer.new_empty(0)  # whoever holds the exception does not hold the memory
        self.place.file = None

    def _compare(self) -> None:
        import torch

        moved = _bytes_of(self.staging)
        again = torch.empty(min(moved.numel(), _VALIDATION_BYTES), dtype=torch.uint8)
        for start in range(0, moved.numel(), _VALIDATION_BYTES):
            part = moved[start : start + _VALIDATION_BYTES]
            self.engine.read(again[: part.numel()], self.place.path, self.begin + start).wait()
            if not torch.equal(part, again[: part.numel()]):
                raise CorruptionError(
                    "the bytes that were read back differ",
                    operation="write" if self.writing else "read",
                    path=self.place.path,
                    offset=self.begin,
                    nbytes=moved.numel(),
                    done=moved.numel(),
                )


def _open_path(engine: Engine, path: StrPath, writing: bool) -> _Place:
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise UsageError(f"filename must be a path, not {path!r}") from None
    file = engine.open(name, "w" if writing else "r")
    place = _Place(file, name, Path(name).stat())
    _tell_of_page_cache(place)
    return place


def _open_descriptor(engine: Engine, descriptor: int, writing: bool) -> _Place:
    """Open the file of *descriptor* once more, for the engine.

    By its name, if it still has it: the engine refuses links for writing, also those of /proc/self/fd.
    """
    if not writing:
        raise UsageError(f"filename must be a path, not {descriptor}")
    path = f"/proc/self/fd/{descriptor}"
    try:
        readable_only = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        status = os.fstat(descriptor)
        name = str(Path(path).readlink())
    except OSError as error:
        raise _failure(error, path) from None
    if readable_only:
        raise _failure(OSError(errno.EBADF, "the descriptor is not open for writing"), path)
    nameless = _Place(None, name, status)
    try:
        if not os.path.samestat(Path(name).stat(), status):
            return nameless
        place = _Place(engine.open(name, "w"), name, Path(name).stat())
    except OSError as error:
        if error.errno in _OUT_OF_DESCRIPTORS:
            raise
        return nameless
    if place.identity != nameless.identity:  # replaced this moment
        return nameless
    _tell_of_page_cache(place)
    return place


def _write_to_descriptor(descriptor: int, staging: torch.Tensor, offset: int) -> None:
    """Write all of *staging* before this returns."""
    path = f"/proc/self/fd/{descriptor}"
    memory = memoryview(_bytes_of(staging).numpy())  # type: ignore[arg-type]  # until numpy 2 its arrays have no __buffer__
    done = 0
    try:
        try:
            own = os.open(path, os.O_WRONLY)  # without O_DIRECT, which would want everything aligned, and without O_APPEND
        except PermissionError:
            own = os.dup(descriptor)
        try:
            while done < len(memory):
                done += os.pwrite(own, memory[done:], offset + done)
        finally:
            os.close(own)
    except OSError as error:
        raise _failure(error, path, offset, len(memory), done) from None


def _failure(error: OSError, path: str, offset: int = 0, nbytes: int = 0, done: int = 0) -> IOFailure:
    kind = NoSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else IOFailure
    return kind(error.errno or errno.EIO, error.strerror or str(error), operation="write", path=path, offset=offset, nbytes=nbytes, done=done)


_told_of: set[int] = set()


def _tell_of_page_cache(place: _Place) -> None:
    device = place.identity[0]
    if place.file is not None and not place.file.direct and device not in _told_of:
        _told_of.add(device)
        _log.warning("the filesystem of %s has no O_DIRECT: offloading to it goes through the page cache", place.path)


# Locked memory that is in use: first address -> bytes. Entries also go when the memory does, in the middle of anything, so iterate over a copy.
_locked: dict[int, int] = {}


def _locked_tensor(num_elem: int, example: torch.Tensor, lock: Callable[[int], memoryview]) -> torch.Tensor:
    import numpy as np
    import torch

    count = _index("num_elem", num_elem)
    if count < 0:
        raise UsageError(f"num_elem must not be negative: {count}")
    if example.is_quantized:
        raise UsageError(f"a tensor of {example.dtype} has no fixed scale in memory")
    if count == 0:
        return torch.empty(0, dtype=example.dtype)
    nbytes = count * example.dtype.itemsize
    # The storage of a tensor made from an array holds that very array until it goes itself.
    array = np.frombuffer(lock(nbytes), np.uint8, nbytes)
    address = array.ctypes.data
    _locked[address] = nbytes
    weakref.finalize(array, _locked.pop, address, None).atexit = False
    # Not a view of a tensor of bytes: deepspeed.utils.pin_memory takes the end of this very tensor for the end of all views of it.
    return torch.empty(0, dtype=example.dtype).set_(torch.from_numpy(array).untyped_storage(), 0, (count,), (1,))


def _locked_memory(nbytes: int) -> memoryview:
    memory = Memory(nbytes)  # there in forked children too, as other memory is
    if (count := memory.lock()) < nbytes:
        _log.info("%d of %d bytes could be locked in memory; the rest may be swapped out", count, nbytes)
    return memoryview(memory)


def _is_pinned(buffer: torch.Tensor) -> bool:
    if not buffer.is_cpu:
        return False
    begin, end = _extent(buffer)
    if any(first <= begin and end <= first + nbytes for first, nbytes in _locked.copy().items()):
        return True
    return buffer.is_pinned()


def _extent(buffer: torch.Tensor) -> tuple[int, int]:
    """The first address of *buffer* and the one behind its last byte. Addresses on GPUs are none of the CPU's."""
    begin = buffer.data_ptr()
    if buffer.is_contiguous():
        return begin, begin + buffer.nbytes
    last = sum((count - 1) * stride for count, stride in zip(buffer.shape, buffer.stride(), strict=True))
    return begin, begin + (last + 1) * buffer.itemsize


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def _moves_as_it_is(buffer: torch.Tensor) -> bool:
    return buffer.is_cpu and buffer.is_contiguous() and not buffer.is_conj() and not buffer.is_neg()


def _require_movable(buffer: torch.Tensor) -> None:
    import torch

    if not isinstance(buffer, torch.Tensor):
        raise UsageError(f"buffer must be a tensor, not {type(buffer).__name__}")
    if buffer.layout is not torch.strided or buffer.is_meta or (buffer.is_quantized and not _moves_as_it_is(buffer)):
        raise UsageError(f"buffer must be a dense tensor with memory of its own, not {buffer.layout} of {buffer.dtype} on {buffer.device}")


def _index(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"{name} must be a whole number, not {value!r}") from None


def _flag(name: str, value: bool | str) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    with contextlib.suppress(ValueError, RuntimeError):  # what has no single truth: arrays, tensors
        if value in (False, True):
            return bool(value)
    raise UsageError(f"{name} must be true or false, not {value!r}")


def _async_and_offset(rest: tuple[Any, ...], named: dict[str, Any]) -> tuple[bool, int]:
    """The arguments `async, file_offset=0`, the first of which no function of Python can be declared with."""

    def bind(asynchronous: bool, file_offset: int = 0) -> tuple[bool, int]:
        return asynchronous, file_offset

    return bind(*rest, **{"asynchronous" if name == "async" else name: value for name, value in named.items()})
