"""The engine: asynchronous transfers between memory and files."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Union

from ..errors import OffloadError, UsageError
from ..extension import _aio
from ..hardware.config import AioConfig
from .arguments import time_limit, whole_number
from .closing import Closing, fail_at_exit

if TYPE_CHECKING:
    import numpy
    import torch
    from _typeshed import ReadableBuffer

    # a contiguous CPU tensor, or an object with the buffer protocol
    Buffer = torch.Tensor | numpy.ndarray[Any, Any] | ReadableBuffer

__all__ = [
    "DirectionStats",
    "Engine",
    "EngineStats",
    "File",
    "PendingRequest",
    "Ticket",
    "allocate",
    "cancel_all",
]

Memory = _aio.Memory  # for the pool
Request = _aio.Request  # for the store, whose transfers are several
cancel_requests = _aio.cancel
StrPath = Union[str, "os.PathLike[str]"]

_ACCESS = {"r": _aio.Access.READ, "w": _aio.Access.WRITE, "rw": _aio.Access.READ_WRITE}
_DIRECT = {True: _aio.Direct.REQUIRED, "auto": _aio.Direct.AUTOMATIC, False: _aio.Direct.OFF}


def allocate(nbytes: int) -> memoryview:
    """Allocate memory that suits direct I/O: zeroed, page-aligned, on huge pages where the kernel
    grants them. Raises: MemoryError. Source: mmap(2), madvise(2) for MADV_HUGEPAGE.

    Parameters
    ----------
    nbytes : int
        Size in bytes.

    Returns
    -------
    memoryview
        Unsigned bytes, of which `numpy.frombuffer` and `torch.frombuffer` make arrays. The memory is
        freed with the last view, array or request on it.
    """
    return memoryview(_aio.Memory(whole_number("nbytes", nbytes)))


class File(Closing):
    """An open file, shared by many requests; made by `Engine.open` and `Engine.open_anonymous`.

    After `close` further requests are refused; requests in flight finish, and the last of them
    closes the descriptor. Usable as a context manager.

    Parameters
    ----------
    opened : _aio.File
        The open file of the C++ core.

    Attributes
    ----------
    path : str
        The path as given to `Engine.open`.
    """

    def __init__(self, opened: _aio.File) -> None:
        self._opened: _aio.File | None = opened
        self.path = opened.path

    @property
    def size(self) -> int:
        """Size in bytes, from the kernel. Raises `IOFailure`, and `UsageError` after `close`."""
        return self._live().size

    @property
    def direct(self) -> bool:
        """Whether transfers use O_DIRECT, bypassing the page cache."""
        return self._live().direct

    @property
    def memory_alignment(self) -> int:
        """Alignment of buffer addresses, in bytes, for transfers without a bounce buffer; 1 without
        O_DIRECT.
        """
        return self._live().memory_alignment

    @property
    def offset_alignment(self) -> int:
        """Alignment of offsets and sizes, in bytes, for transfers that bypass the page cache; 1
        without O_DIRECT.
        """
        return self._live().offset_alignment

    def sync(self) -> None:
        """Make everything that finished requests wrote durable. Raises: IOFailure for a write
        error; UsageError after `close`. Source: fdatasync(2).
        """
        self._live().sync()

    def close(self) -> None:
        """Refuse further requests. A second call does nothing."""
        self._opened = None

    def __repr__(self) -> str:
        return f"<File {self.path!r}{'' if self._opened else ' closed'}>"

    def _live(self) -> _aio.File:
        if self._opened is None:
            raise UsageError(f"{self.path} is closed")
        return self._opened


class Ticket:
    """A handle on one read or write; made by `Engine.read` and `Engine.write`. Dropping it neither
    cancels the transfer nor releases its buffer.

    Parameters
    ----------
    request : _aio.Request
        The request of the C++ core.
    """

    __slots__ = ("_request",)

    def __init__(self, request: _aio.Request) -> None:
        self._request = request

    @property
    def nbytes(self) -> int:
        """Size of the request in bytes."""
        return self._request.nbytes

    @property
    def checksum(self) -> int | None:
        """The 64-bit checksum of the bytes moved; None unless the request asked for one and has
        succeeded. It depends on the bytes and on the offset modulo 4096. Source: XXH3.
        """
        return self._request.checksum

    def done(self) -> bool:
        """Whether the request has finished, successfully or not. Never blocks."""
        return self._request.done()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until every byte has been moved; return the size of the request in bytes. A second
        call has the same outcome.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None waits without a limit.

        Raises
        ------
        IOFailure, NoSpaceError
            The kernel or the drive failed the transfer.
        TruncatedError
            The file ended before the requested bytes.
        CorruptionError
            The checksum differs.
        BufferChangedError
            The memory of the tensor was replaced meanwhile.
        CancelledError
            The request never started.
        WaitTimeout
            *timeout* passed. The request continues, and can be waited for again.
        UsageError
            The process was forked since the request was made, or *timeout* is not a number.
        """
        return self._request.wait(time_limit(timeout))

    def cancel(self) -> bool:
        """Cancel the request before it starts. It and the requests that wait for it (*after*) fail
        with `CancelledError`, which `Engine.close` does not report. Returns False where the request
        has finished, or a part of it has been submitted to the drive: it then continues.
        """
        return _aio.cancel([self._request])


def cancel_all(tickets: Sequence[Ticket]) -> bool:
    """Cancel several requests before they start: all, or none where one has finished or started.
    See `Ticket.cancel`.

    Parameters
    ----------
    tickets : sequence of Ticket
        Of one engine. The result is False where there is none.
    """
    return _aio.cancel([ticket._request for ticket in tickets])


@dataclasses.dataclass(frozen=True)
class DirectionStats:
    """Counters of one direction, since the engine was made.

    Attributes
    ----------
    requests, bytes : int
        Requests submitted; bytes moved, counted block by block.
    in_flight : int
        Requests started and not finished.
    retries : int
        Transfers resubmitted to the kernel after a short transfer, EINTR or EAGAIN.
    busy_seconds : float
        Time with at least one request in flight.
    """

    requests: int
    bytes: int
    in_flight: int
    retries: int
    busy_seconds: float


@dataclasses.dataclass(frozen=True)
class PendingRequest:
    """An unfinished request.

    Attributes
    ----------
    operation, path : str
        "read" or "write", and the file.
    offset, nbytes : int
        Range in the file, in bytes.
    age_seconds : float
        Time since it was submitted, or since the last request that it waited for (*after*) finished.
    """

    operation: str
    path: str
    offset: int
    nbytes: int
    age_seconds: float


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counters of an engine.

    Attributes
    ----------
    read, write : DirectionStats
        By direction.
    oldest : PendingRequest or None
        The unfinished request that started first. An age of several seconds means a stalled drive.
    """

    read: DirectionStats
    write: DirectionStats
    oldest: PendingRequest | None


class Engine(Closing):
    """Worker threads that move requests between memory and files, block by block.

    Requests are independent: they finish in any order, and a read that overlaps an unfinished write
    returns old or new bytes. A request with the tickets of earlier ones as *after* starts when all
    of these have succeeded, and fails with `CancelledError` when one fails.

    All methods are thread-safe. A forked child cannot use the engine, and makes its own.

    Parameters
    ----------
    config : AioConfig, optional
        Settings; the defaults of `AioConfig` unless given. The attribute has the settings in use.

    Raises
    ------
    UnsupportedError
        The kernel lacks the backend, or has no resources for its queues.

    Notes
    -----
    `close`, or the end of a `with` block, waits for every request. An engine that is dropped, or
    still open when the interpreter exits, is closed the same way; the failure of an unawaited
    transfer is then printed to standard error, and the process exits with status 1 instead of 0.
    """

    def __init__(
        self,
        config: AioConfig | None = None,
        *,
        _faults: Sequence[tuple[int, int, _aio.FaultKind, int]] = (),
    ) -> None:
        self.config = config or AioConfig()
        self._core = _aio.Engine(
            self.config.backend,
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
        """Open a file for many requests, to be closed by the caller. Source: open(2), statx(2) for
        the alignment, fallocate(2).

        Parameters
        ----------
        path : str or os.PathLike
            The file. For writing, a missing file is created with mode 0600, an existing one keeps
            its contents, and a symbolic link as last component is refused.
        mode : {"r", "w", "rw"}
            Access.
        size : int, optional
            Bytes to preallocate. Writes are faster then, and a full drive is reported here.

        Raises
        ------
        IOFailure
            The file cannot be opened; with the errno.
        NoSpaceError
            *size* does not fit on the drive.
        UsageError
            The path is neither a regular file nor a block device.
        UnsupportedError
            The filesystem has no O_DIRECT and the configuration requires it.
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
        """Open an unnamed temporary file for reading and writing. Its space is freed when it is
        closed or the process ends, also after kill -9. Source: open(2) for O_TMPFILE. Raises: as
        `open`.

        Parameters
        ----------
        directory : str or os.PathLike
            A directory on the drive.
        size : int
            Bytes to preallocate.
        padded : bool
            Allow a write that starts at a multiple of 4096 bytes to fill the file with zeros from
            its end to the next multiple: the whole write then uses O_DIRECT.
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
        """Start reading from a file into a buffer; return its ticket.

        Parameters
        ----------
        buffer : torch.Tensor or buffer
            A contiguous CPU tensor, or a contiguous writable object with the buffer protocol. As many bytes are
            read as it holds. Its memory is held until the request finishes; do not use its contents before.
        file : File or path
            The source; a path is opened for this request alone.
        offset : int
            Offset in the file, in bytes.
        checksum : bool, int or Ticket
            True computes the checksum of the bytes read (`Ticket.checksum`). A number is the
            checksum that they must have. The ticket of a write with a checksum means the bytes of
            that write; the read then starts after it.
        after : iterable of Ticket
            Requests of this engine that must succeed before this one starts.

        Raises
        ------
        UsageError
            An argument is invalid, or the engine or the file is closed.
        IOFailure
            The path cannot be opened.
        UnsupportedError
            This build has no checksums.

        Notes
        -----
        The engine holds the memory that the tensor's storage has at the call. While the request is
        in flight, torch refuses to resize or free the storage (RuntimeError), and after
        `share_memory_` the read ends with `BufferChangedError`. A tensor that is given another
        storage (`set_`, `data =`) does not see the bytes. A torch without
        `UntypedStorage._swap_data_ptr_` cannot refuse: a change is detected at the end, and
        reported. Source: io_submit(2).
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
        """Start writing a buffer to a file; return its ticket. Other bytes of the file are
        unchanged. After `Ticket.wait` every reader sees the bytes; they are durable after
        `File.sync`. Raises: as `read`.

        Parameters
        ----------
        buffer : torch.Tensor or buffer
            As for `read`. Do not change its contents before the request finishes. Where the storage of a tensor is
            given other memory meanwhile, the bytes are those of the memory that it had at the call.
        file : File or path
            The target; a path is opened for this request alone, and created where it is missing.
        offset : int
            Offset in the file, in bytes.
        checksum : bool
            Compute the checksum of the bytes written (`Ticket.checksum`).
        after : iterable of Ticket
            Requests of this engine that must succeed before this one starts.
        """
        return self._submit(True, buffer, file, offset, bool(checksum), after)

    def stats(self) -> EngineStats:
        """A snapshot of the counters. Cheap enough to poll. Raises: UsageError after `close`."""
        read, write, oldest = self._core.stats()
        return EngineStats(
            DirectionStats(*read),
            DirectionStats(*write),
            oldest and PendingRequest(*oldest),
        )

    def close(self) -> None:
        """Wait for every request and stop the threads. A second call does nothing, nor does one in
        a forked child. Raises: the first failure of an unawaited request.
        """
        _open_engines.discard(self)
        self._core.close()

    def __del__(self) -> None:
        core = getattr(self, "_core", None)  # unset where __init__ raised
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
        sums = checksum._request if isinstance(checksum, Ticket) else checksum
        earlier = [ticket._request for ticket in after]
        if not isinstance(file, File):
            end = offset + checked_nbytes(buffer, writable=not write)
            whole_number("the end of the range", end)  # a refused request creates no file
            file = self.open(file, "w" if write else "r")
        if not is_tensor(buffer):
            return Ticket(self._core.submit(write, buffer, file._live(), offset, sums, earlier))
        nbytes = checked_nbytes(buffer, writable=not write)
        # Not the tensor, which can be given another storage (`tensor.data = ...`).
        owner = buffer.untyped_storage()
        return Ticket(
            self._submit_at(write, buffer.data_ptr(), nbytes, owner, file, offset, sums, earlier)
        )

    def _submit_at(
        self,
        write: bool,
        address: int,
        nbytes: int,
        owner: object,
        file: File,
        offset: int,
        checksum: bool | int | Request,
        after: list[Request],
    ) -> Request:
        """Start a transfer of memory that is valid at *address* while *owner* lives."""
        return self._core.submit_at(
            write, address, nbytes, owner, file._live(), offset, checksum, after
        )


def _path(path: StrPath) -> bytes:
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise UsageError(f"a path cannot have a null byte in it: {path!r}")
    return encoded


def is_tensor(buffer: Any) -> bool:
    """Whether *buffer* is a tensor: torch is imported then, and otherwise perhaps half imported."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(buffer, kind)


def checked_nbytes(buffer: Any, writable: bool) -> int:
    """Bytes of a buffer that the engine can read into, where it is *writable*, or write from.
    Raises: UsageError.
    """
    if not is_tensor(buffer):
        return _aio.buffer_nbytes(buffer, writable)
    import torch

    if not buffer.is_cpu:
        raise UsageError(f"the tensor is on {buffer.device}: copy it to the CPU first")
    if buffer.layout is not torch.strided or not buffer.is_contiguous():
        raise UsageError(
            "the tensor is not contiguous: pass tensor.contiguous(), or read into a contiguous one and copy"
        )
    if buffer.is_conj() or buffer.is_neg():
        raise UsageError(
            "the tensor is a conjugate or negative view, whose memory holds other numbers: pass tensor.resolve_conj().resolve_neg()"
        )
    return int(buffer.nbytes)


_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def close_at_exit(opened: weakref.WeakSet[Any]) -> None:
    """Close the members that *opened* has when the interpreter exits: after the finalizers of their
    users, and before the members of earlier calls.
    """

    def close() -> None:
        for one in list(opened):
            _close_at_last(one)

    # weakref finalizers run in reverse order of creation, all from one atexit handler. An atexit
    # handler would run before every finalizer: torch has created finalizers already.
    weakref.finalize(opened, close)


def _close_at_last(opened: Any) -> None:
    """Close what the program left open: print a failure, and make the process exit with status 1."""
    try:
        opened.close()
    except OffloadError as error:
        fail_at_exit("unawaited transfer", error)


# every transfer must finish before the interpreter frees its memory
close_at_exit(_open_engines)
