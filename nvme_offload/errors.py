"""The error family: every error that this package raises on purpose is an `OffloadError`."""

from __future__ import annotations

import functools
from errno import EDQUOT, EIO, ENOSPC
from typing import Any, TypeVar

from .units import format_bytes

_Value = TypeVar("_Value")


class OffloadError(Exception):
    """Base class of all errors of this package."""


class UsageError(OffloadError, ValueError):
    """The call was wrong: nothing was changed and nothing was started. Also a `ValueError`."""


class OutOfHostMemoryError(UsageError):
    """The values in use leave no room in the host memory budget for the request.

    It succeeds after some of them are released, or with a larger budget; the message gives the size
    that is enough.
    """


class TooLittleMemoryError(UsageError):
    """A budget of host memory is too small.

    Attributes
    ----------
    reason : str
        What does not fit.
    enough_bytes : int
        A budget that suffices.
    """

    def __init__(self, reason: str, enough_bytes: int) -> None:
        self.reason = reason
        self.enough_bytes = enough_bytes
        super().__init__(
            f"{reason}: allow at least {enough_bytes} bytes ({format_bytes(enough_bytes)})"
        )


class InvariantError(OffloadError, RuntimeError):
    """A state that must not exist was found: a fault of this package. Also a `RuntimeError`.

    The changed tables are refused from then on, until a checkpoint is loaded.
    """


class UnsupportedError(OffloadError):
    """The machine, the filesystem or this build lacks a feature.

    The message names the missing feature and says what to do.
    """


class WaitTimeout(OffloadError, TimeoutError):
    """A wait ran into its timeout. Also a `TimeoutError`.

    The request continues, its memory stays held, and it can be waited for again.
    """


class _TransferError(OffloadError):
    """Base class of the errors of a transfer.

    Attributes
    ----------
    reason : str
        What went wrong.
    operation : str
        "read" or "write"; outside of a request the operation that failed, such as "open" or "sync".
    path : str
        The file.
    offset : int
        Offset of the request in the file, in bytes.
    nbytes : int
        Size of the request in bytes; 0 for an error outside of a request.
    done : int
        Bytes moved before the failure. Blocks complete in any order, so these are not always the
        first bytes of the request.
    """

    def __init__(
        self,
        reason: str,
        *,
        operation: str,
        path: str,
        offset: int = 0,
        nbytes: int = 0,
        done: int = 0,
    ) -> None:
        self.reason = reason
        self.operation = operation
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.done = done
        super().__init__(reason)

    def __str__(self) -> str:
        if self.nbytes == 0:  # not a request: open, sync
            return f"{self.operation} of {self.path}: {self.reason}"
        place = f"{format_bytes(self.nbytes)} at {format_bytes(self.offset)} in {self.path}"
        return f"{self.operation} of {place}: {self.reason} ({format_bytes(self.done)} done)"

    def __repr__(self) -> str:
        fields = [f"{name}={value!r}" for name, value in self._fields().items()]
        return f"{type(self).__name__}({', '.join([*map(repr, self._positional()), *fields])})"

    def _positional(self) -> tuple[object, ...]:
        return (self.reason,)

    def _fields(self) -> dict[str, Any]:
        return {
            name: getattr(self, name) for name in ("operation", "path", "offset", "nbytes", "done")
        }

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), **self._fields()), self._positional()


class TruncatedError(_TransferError):
    """The file ended before the requested bytes (a short read at the end of the file).

    Attributes
    ----------
    reason, operation, path : str
        As of `IOFailure`.
    offset, nbytes, done : int
        As of `IOFailure`, in bytes.
    """


class CorruptionError(_TransferError):
    """The checksum of the bytes read differs from the checksum of the bytes written.

    Attributes
    ----------
    reason, operation, path : str
        As of `IOFailure`.
    offset, nbytes, done : int
        As of `IOFailure`, in bytes.
    """


class BufferChangedError(_TransferError):
    """The memory of the tensor was replaced while its transfer was in flight.

    Bytes that were read are not in the tensor; bytes that were written may not be the tensor's.

    Attributes
    ----------
    reason, operation, path : str
        As of `IOFailure`.
    offset, nbytes, done : int
        As of `IOFailure`, in bytes.
    """


class CancelledError(_TransferError):
    """The transfer never started, and no byte was moved.

    It was cancelled, or a transfer that it waited for failed or was cancelled.

    Attributes
    ----------
    reason, operation, path : str
        As of `IOFailure`.
    offset, nbytes, done : int
        As of `IOFailure`, in bytes.
    """


class IOFailure(_TransferError, OSError):
    """The kernel or the drive refused or failed a transfer. Also an `OSError`.

    Every parameter is an attribute, too. `strerror` is *reason*, and `filename` is *path*.

    Parameters
    ----------
    errno : int
        The reason, as in errno(3).
    reason : str
        The same as text.
    operation : str
        "read" or "write"; outside of a request the operation that failed, such as "open" or "sync".
    path : str
        The file.
    offset : int
        Offset of the request in the file, in bytes.
    nbytes : int
        Size of the request in bytes; 0 for an error outside of a request.
    done : int
        Bytes moved before the failure. Blocks complete in any order, so these are not always the
        first bytes of the request.
    """

    def __new__(cls, errno: int, reason: str, **fields: object) -> IOFailure:
        """Return a `NoSpaceError` where *errno* means a full drive or quota, as Python makes a
        `FileNotFoundError` of an `OSError`.
        """
        kind = NoSpaceError if cls is IOFailure and errno in (ENOSPC, EDQUOT) else cls
        return super().__new__(kind, errno, reason)

    @classmethod
    def of(cls, error: OSError, **fields: Any) -> IOFailure:
        """Convert an `OSError` of Python's.

        Parameters
        ----------
        error : OSError
            The error to convert.
        **fields
            The other attributes.

        Returns
        -------
        IOFailure
            A `NoSpaceError` where the drive or a quota is full.
        """
        return cls(error.errno or EIO, error.strerror or str(error), **fields)

    def __init__(
        self,
        errno: int,
        reason: str,
        *,
        operation: str,
        path: str,
        offset: int = 0,
        nbytes: int = 0,
        done: int = 0,
    ) -> None:
        _TransferError.__init__(
            self, reason, operation=operation, path=path, offset=offset, nbytes=nbytes, done=done
        )
        self.errno = errno
        self.strerror = reason
        self.filename = path

    def _positional(self) -> tuple[object, ...]:
        return self.errno, self.reason


class NoSpaceError(IOFailure):
    """The drive, a quota or a file size limit leaves no space for the write.

    Parameters
    ----------
    errno, offset, nbytes, done : int
        As of `IOFailure`.
    reason, operation, path : str
        As of `IOFailure`.
    """


def known(value: _Value | None) -> _Value:
    """Return *value*, which is not None where the package's own tables are right. Raises:
    InvariantError.
    """
    if value is None:
        raise InvariantError("a table of nvme_offload lacks an entry: please report it as a fault")
    return value


def check(holds: bool, fault: str) -> None:
    """Check the invariant *holds*. Raises: InvariantError with the *fault* if it is False."""
    if not holds:
        raise InvariantError(f"{fault}: please report it as a fault of nvme_offload")
