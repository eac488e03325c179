"""The engine: moves tensors and buffers between memory and files, asynchronously."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Union

from .. import _aio
from .._aio import Memory as Memory  # for the pool: this module alone knows the extension
from ..errors import OffloadError, UsageError, time_limit, whole_number
from ..hardware.config import AioConfig
from .closing import Closing

if TYPE_CHECKING:
    import numpy
    import torch
    from _typeshed import ReadableBuffer, WriteableBuffer

    # a contiguous tensor on the CPU, or whatever has the buffer protocol
    Buffer = torch.Tensor | numpy.ndarray[Any, Any] | ReadableBuffer

StrPath = Union[str, "os.PathLike[str]"]

_log = logging.getLogger(__name__)
_ACCESS = {"r": _aio.Access.READ, "w": _aio.Access.WRITE, "rw": _aio.Access.READ_WRITE}
_DIRECT = {True: _aio.Direct.REQUIRED, "auto": _aio.Direct.AUTOMATIC, False: _aio.Direct.OFF}


def allocate(nbytes: int) -> memoryview:
    """Memory that a drive likes: zeroed, aligned to pages, on huge pages where the kernel grants
    them.

    Shapes: one dimension of *nbytes* unsigned bytes; `numpy.frombuffer` and `torch.frombuffer` make
    arrays of it. Lifetime: freed when the last view, array or request on it is gone. Raises:
    MemoryError; UsageError when *nbytes* is negative. Source: mmap(2), madvise(2) for
    MADV_HUGEPAGE.
    """
    return memoryview(_aio.Memory(whole_number("nbytes", nbytes)))


def release_buffers() -> None:
    """Let go of the memory of finished requests, on every engine of this process.

    Engines do that by themselves at each call on them or on a ticket; who waits for memory
    meanwhile, as the pool does, calls this.
    """
    for engine in list(_open_engines):
        engine._core.release_buffers()


class File(Closing):
    """A file opened once and used by many requests; made by `Engine.open` and
    `Engine.open_anonymous`.

    Lifetime: `close` refuses further requests; those under way finish, and the descriptor closes
    after the last of them.
    """

    def __init__(self, opened: _aio.File) -> None:
        self._opened: _aio.File | None = opened
        self._path = opened.path

    @property
    def path(self) -> str:
        """The path as it was given."""
        return self._path

    @property
    def size(self) -> int:
        """Bytes, as the kernel says now."""
        return self._live().size

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self._live().direct

    @property
    def memory_alignment(self) -> int:
        """Bytes that a buffer's address should be a multiple of, to be moved without a copy; 1
        where O_DIRECT is not used.
        """
        return self._live().memory_alignment

    @property
    def offset_alignment(self) -> int:
        """Bytes that offsets and sizes should be multiples of, to bypass the page cache whole; 1
        where O_DIRECT is not used.
        """
        return self._live().offset_alignment

    def sync(self) -> None:
        """Return when everything written by finished requests would survive a loss of power.

        Raises: IOFailure. Source: fdatasync(2).
        """
        self._live().sync()

    def close(self) -> None:
        """Refuse further requests; a second call does nothing."""
        self._opened = None

    def __repr__(self) -> str:
        return f"<File {self._path!r}{'' if self._opened else ' closed'}>"

    def _live(self) -> _aio.File:
        if self._opened is None:
            raise UsageError(f"{self._path} is closed")
        return self._opened


class Ticket:
    """The caller's handle on one read or write.

    Lifetime: the request does not need it: dropping a ticket neither cancels the transfer nor frees
    its buffer early.
    """

    __slots__ = ("_request",)

    def __init__(self, request: _aio.Request) -> None:
        self._request = request

    @property
    def nbytes(self) -> int:
        """The bytes asked for."""
        return self._request.nbytes

    @property
    def checksum(self) -> int | None:
        """The 64-bit checksum of the bytes moved, once a request that was to sum them is finished
        well; else None.

        It depends on the bytes and on the offset's remainder by 4096, and not on the engine's
        settings. Source: XXH3.
        """
        return self._request.checksum

    def done(self) -> bool:
        """Whether the request is finished, well or not; never blocks."""
        return self._request.done()

    def wait(self, timeout: float | None = None) -> int:
        """Return the bytes asked for once every one of them has been moved; a second call answers
        the same.

        Units: *timeout* in seconds, None for as long as it takes. Raises: IOFailure, NoSpaceError
        or TruncatedError when the transfer failed; CancelledError when it never started;
        WaitTimeout when it is not finished in time, which leaves it going on and able to be waited
        for; UsageError in a process forked since.
        """
        return self._request.wait(time_limit(timeout))

    def cancel(self) -> bool:
        """End the request before it starts, and with it those that are to follow it: they fail with
        CancelledError, which `Engine.close` is silent of.

        Returns whether it was ended so; False where it is finished, or where the drive was asked
        for some of it already: then it goes on. Raises: UsageError in a process forked since.
        """
        return _aio.cancel([self._request])


def cancel_all(tickets: Sequence[Ticket]) -> bool:
    """Cancel all of *tickets*, which are of one engine, or none where one of them has started: see
    `Ticket.cancel`.
    """
    return _aio.cancel([ticket._request for ticket in tickets])


@dataclasses.dataclass(frozen=True)
class DirectionStats:
    """What went one way since the engine was made.

    requests: submitted. bytes: moved, counted block by block. in_flight: requests started and not
    yet finished. retries: transfers that had to be handed to the kernel again (short, interrupted,
    refused for the moment). busy_seconds: during which at least one request was in flight.
    """

    requests: int
    bytes: int
    in_flight: int
    retries: int
    busy_seconds: float


@dataclasses.dataclass(frozen=True)
class PendingRequest:
    """An unfinished request: *offset* and *nbytes* in bytes, *age_seconds* since it was submitted,
    or since the last that it follows ended.
    """

    operation: str
    path: str
    offset: int
    nbytes: int
    age_seconds: float


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counters by direction; registered_bytes of memory that the kernel has pinned for good
    (`Engine.register`); and the unfinished request that was started first: an age of seconds is a
    drive that is stuck.
    """

    read: DirectionStats
    write: DirectionStats
    registered_bytes: int
    oldest: PendingRequest | None


class Engine(Closing):
    """Worker threads that move requests block by block between memory and files.

    Requests are independent: they finish in any order, and one that reads bytes which another still
    writes gets either. A request that is to start after others names their tickets (*after*): the
    engine's threads start it when all of them ended well, and end it with CancelledError as soon as
    one failed. All methods may be called from any thread. A process forked while an engine is live
    can go on without it, and makes its own if it needs one.

    Lifetime: `close`, or the end of a `with` block, waits for every request. An engine that is
    dropped or still open when the interpreter ends is closed likewise; a failure that nobody waited
    for is then a line on standard error, and the process ends with status 1 rather than 0. Raises:
    UnsupportedError when the kernel lacks the backend or has no room for its queues.
    """

    def __init__(
        self,
        config: AioConfig | None = None,
        *,
        _faults: Sequence[tuple[int, int, _aio.FaultKind, int]] = (),
        _backend: str | None = None,
    ) -> None:
        self.config = config or AioConfig()
        self._core = _aio.Engine(
            _backend or self.config.backend,
            self.config.block_size,
            self.config.queue_depth,
            self.config.thread_count,
            self.config.single_submit,
            self.config.overlap_events,
            [_aio.Fault(*fault) for fault in _faults],
        )
        self._process_id = os.getpid()
        _open_engines.add(self)

    def open(self, path: StrPath, mode: str = "r", size: int | None = None) -> File:
        """Open a file for many requests.

        *mode* is "r", "w" or "rw". For writing, a missing file is created with mode 0600, an
        existing one keeps its contents, and a symbolic link is refused in the path's last place.
        *size* (bytes) allocates that much on the drive now, which makes writes faster and a full
        drive known early. Raises: IOFailure, with the errno, when the file cannot be opened;
        NoSpaceError when *size* does not fit; UsageError for what is neither a file nor a block
        device; UnsupportedError when the filesystem has no O_DIRECT and the configuration wants it.
        Source: open(2), statx(2) for the alignment, fallocate(2).
        """
        if mode not in _ACCESS:
            raise UsageError(f'mode must be "r", "w" or "rw", not {mode!r}')
        if mode == "r" and size is not None:
            raise UsageError('a file that is opened with mode "r" cannot be given a size')
        self._core.require_live()
        return File(
            _aio.File.open(
                _path(path),
                _ACCESS[mode],
                _DIRECT[self.config.direct],
                whole_number("size", size or 0),
            )
        )

    def open_anonymous(self, directory: StrPath, size: int = 0, *, padded: bool = False) -> File:
        """Open a file without a name on the drive of *directory*, for reading and writing, with
        *size* bytes allocated.

        With *padded* a write that begins at a multiple of 4096 bytes may fill the file with zeros
        from its end up to the next multiple, so that all of it goes direct.

        Lifetime: its space is free again when the file is closed or the process ends, also after
        kill -9. Raises: as `open`. Source: open(2) for O_TMPFILE.
        """
        self._core.require_live()
        return File(
            _aio.File.open_anonymous(
                _path(directory), _DIRECT[self.config.direct], whole_number("size", size), padded
            )
        )

    def read(
        self,
        buffer: Buffer,
        file: File | StrPath,
        offset: int = 0,
        *,
        checksum: bool | int | Ticket = False,
        after: Iterable[Ticket] = (),
    ) -> Ticket:
        """Start reading into *buffer*, from *offset* bytes into *file*, as many bytes as it holds;
        once all of *after* ended well.

        *checksum* is True to sum the bytes on their way (`Ticket.checksum`), or the sum that they
        must have, or the ticket of the write, with a checksum, whose bytes they must be; the read
        follows that one, too.

        Shapes: *buffer* is a contiguous tensor on the CPU, or has the buffer protocol and is
        contiguous and writable. Lifetime: the buffer's memory is held until the request is
        finished; do not use its contents before. Of a tensor that is the memory which its storage
        has now: torch refuses to resize or free it meanwhile (RuntimeError), and after
        `share_memory_` the read ends with BufferChangedError. A tensor that is pointed elsewhere
        (`set_`, `data =`) leaves the bytes in the memory that it had. A torch without
        `UntypedStorage._swap_data_ptr_` refuses nothing: there a change is only seen at the end,
        and told. Raises: UsageError at once; IOFailure at once when a path cannot be opened;
        UnsupportedError for a checksum in a build without; from `Ticket.wait` IOFailure,
        TruncatedError where the file ends too early, CorruptionError where the checksum differs,
        CancelledError, BufferChangedError. Source: io_submit(2).
        """
        return self._submit(False, buffer, file, offset, checksum, after)

    def write(
        self,
        buffer: Buffer,
        file: File | StrPath,
        offset: int = 0,
        *,
        checksum: bool = False,
        after: Iterable[Ticket] = (),
    ) -> Ticket:
        """Start writing *buffer* to *file*, from *offset* bytes into it, once all of *after* ended
        well; other bytes of the file stay as they are.

        *checksum* sums the bytes on their way: see `Ticket.checksum`.

        Shapes: *buffer* is a contiguous tensor on the CPU, or has the buffer protocol and is
        contiguous. Lifetime: the buffer's memory is held until the request is finished, as by
        `read`; do not change its contents before. Where the tensor has other memory by then, what
        was written is what the memory held. Finished means that every reader sees the bytes; that
        they survive a loss of power takes `File.sync`. Raises: as `read`; from `Ticket.wait` also
        NoSpaceError. Source: io_submit(2).
        """
        return self._submit(True, buffer, file, offset, bool(checksum), after)

    def register(self, buffer: WriteableBuffer) -> None:
        """Let the kernel pin *buffer* once rather than at every transfer to and from it; only
        io_uring can, other backends take no notice.

        Lifetime: the memory is held until the engine is closed. How much the kernel took (it counts
        against RLIMIT_MEMLOCK) is in `EngineStats.registered_bytes`. Raises: UsageError. Source:
        io_uring_register(2).
        """
        if self.config.backend != "io_uring":
            return
        torch = sys.modules.get("torch")  # there where there is a tensor
        if torch is not None and isinstance(buffer, torch.Tensor):
            _require_plain(buffer, torch.strided)
            self._core.register_at(buffer.data_ptr(), buffer.nbytes, buffer.untyped_storage())
        else:
            self._core.register(buffer)

    def stats(self) -> EngineStats:
        """Counters since the engine was made; cheap enough to poll. Raises: UsageError when the
        engine is closed.
        """
        read, write, registered_bytes, oldest = self._core.stats()
        return EngineStats(
            DirectionStats(*read),
            DirectionStats(*write),
            registered_bytes,
            oldest and PendingRequest(*oldest),
        )

    def close(self) -> None:
        """Wait for every request and end the threads; a second call does nothing, nor does one in a
        forked child.

        Raises: the first error of a request that nobody waited for.
        """
        _open_engines.discard(self)
        self._core.close()

    def __del__(self) -> None:
        core = getattr(self, "_core", None)  # absent where __init__ raised
        if core is not None and not core.closed and os.getpid() == self._process_id:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2, source=self)
            _close_at_last(self)

    def __repr__(self) -> str:
        return f"<Engine {self.config}{' closed' if self._core.closed else ''}>"

    def _submit(
        self,
        write: bool,
        buffer: Any,
        file: File | StrPath,
        offset: int,
        checksum: bool | int | Ticket,
        after: Iterable[Ticket],
    ) -> Ticket:
        offset = whole_number("offset", offset)
        torch = sys.modules.get("torch")  # there where there is a tensor
        if torch is not None and isinstance(buffer, torch.Tensor):
            _require_plain(buffer, torch.strided)
            nbytes = buffer.nbytes
            opened = file if isinstance(file, File) else self._open_for(write, file, offset, nbytes)
            # The storage and its memory are kept, since the tensor itself can be pointed elsewhere
            # (`tensor.data = ...`).
            return self._submit_at(
                write,
                buffer.data_ptr(),
                nbytes,
                buffer.untyped_storage(),
                opened,
                offset,
                checksum,
                [ticket._request for ticket in after],
            )
        opened = (
            file
            if isinstance(file, File)
            else self._open_for(write, file, offset, _aio.buffer_nbytes(buffer, not write))
        )
        sums = checksum._request if isinstance(checksum, Ticket) else checksum
        return Ticket(
            self._core.submit(
                write, buffer, opened._live(), offset, sums, [ticket._request for ticket in after]
            )
        )

    def _submit_at(
        self,
        write: bool,
        address: int,
        nbytes: int,
        owner: object,
        file: File,
        offset: int,
        checksum: bool | int | Ticket,
        after: list[_aio.Request],
    ) -> Ticket:
        """`read` or `write` of memory that was looked at before: it stays at *address* as long as
        *owner* does.
        """
        sums = checksum._request if isinstance(checksum, Ticket) else checksum
        return Ticket(
            self._core.submit_at(write, address, nbytes, owner, file._live(), offset, sums, after)
        )

    def _open_for(self, write: bool, path: StrPath, offset: int, nbytes: int) -> File:
        whole_number("the end of the range", offset + nbytes)  # what is refused has created no file
        return self.open(path, "w" if write else "r")


def _path(path: StrPath) -> bytes:
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise UsageError(f"a path cannot have a null byte in it: {path!r}")
    return encoded


def _require_plain(tensor: torch.Tensor, strided: torch.layout) -> None:
    """Raises: UsageError where the bytes at *tensor*'s address are not its elements, one after the
    other.
    """
    if not tensor.is_cpu:
        raise UsageError(f"the tensor is on {tensor.device}: copy it to the CPU first")
    if tensor.layout is not strided or not tensor.is_contiguous():
        raise UsageError(
            "the tensor is not contiguous: pass tensor.contiguous(), or read into a contiguous one and copy"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError(
            "the tensor is a conjugate or negative view, whose memory holds other numbers: pass tensor.resolve_conj().resolve_neg()"
        )


_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def close_at_exit(opened: weakref.WeakSet[Any]) -> None:
    """Close what is in *opened* when the interpreter ends: after the finalizers of what uses it,
    and before that of earlier calls.
    """

    def close() -> None:
        for one in list(opened):
            _close_at_last(one)

    # Finalizers run in the reverse order of their making, which `atexit` would cut across: torch
    # has registered theirs there already.
    weakref.finalize(opened, close)


def _close_at_last(opened: Any) -> None:
    """Close what nobody closed; a failure cannot be raised to anyone any more, so it is told, and
    the process' status says so.
    """
    try:
        opened.close()
    except OffloadError as error:
        if sys.stderr is not None:
            print(
                f"nvme_offload: nobody waited for a transfer that failed: {type(error).__name__}: {error}",
                file=sys.stderr,
                flush=True,
            )
        _aio.fail_at_exit()


# so that every transfer is finished before the interpreter takes its memory away
close_at_exit(_open_engines)
