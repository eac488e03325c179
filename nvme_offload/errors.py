"""The error family: everything that this package raises on purpose is an `OffloadError`."""

from __future__ import annotations

import operator
from errno import EDQUOT, EIO, ENOSPC

from .units import format_bytes


class OffloadError(Exception):
    """Base of every error of this package."""


class UsageError(OffloadError, ValueError):
    """The caller's fault; nothing was changed, nothing was started."""


class OutOfHostMemoryError(UsageError):
    """What is in use leaves no room in the budget of host memory for what was asked; it fits once
    some of that is released, or in a larger budget.
    """


class UnsupportedError(OffloadError):
    """This machine, filesystem or build lacks something; the message names it and says what
    to do.
    """


class WaitTimeout(OffloadError, TimeoutError):
    """The time given to a wait ran out; the request goes on, its memory stays held, and it can be
    waited for again.
    """


class _TransferError(OffloadError):
    """What every failed transfer says of itself.

    Attributes: *operation* is "read" or "write"; *path* the file; *offset* the place of the request
    in the file, *nbytes* the bytes asked for and *done* the bytes moved before the failure (in
    blocks that finish in any order, so not always the first ones), all in bytes.
    """

    def __init__(
        self, reason: str, *, operation: str, path: str, offset: int, nbytes: int, done: int
    ) -> None:
        self.reason = reason
        self.operation = operation
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.done = done
        super().__init__(reason)

    def __str__(self) -> str:
        if self.nbytes == 0:  # the file itself: opening, syncing
            return f"{self.operation} of {self.path}: {self.reason}"
        place = f"{format_bytes(self.nbytes)} at {format_bytes(self.offset)} in {self.path}"
        return f"{self.operation} of {place}: {self.reason} ({format_bytes(self.done)} done)"

    def __repr__(self) -> str:
        fields = [f"{name}={value!r}" for name, value in self._fields().items()]
        return f"{type(self).__name__}({', '.join([*map(repr, self._positional()), *fields])})"

    def _positional(self) -> tuple[object, ...]:
        return (self.reason,)

    def _fields(self) -> dict[str, object]:
        return {
            name: getattr(self, name) for name in ("operation", "path", "offset", "nbytes", "done")
        }

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self._positional(), self._fields())


class TruncatedError(_TransferError):
    """The file ended before the bytes asked for."""


class CorruptionError(_TransferError):
    """Bytes came back other than they were written."""


class BufferChangedError(_TransferError):
    """The tensor of a transfer was given other memory while it was under way: what was read is not
    in it, what was written may be other bytes.
    """


class CancelledError(_TransferError):
    """The transfer never started: it was cancelled, or one that it was to follow failed or was
    cancelled; no byte was moved.
    """


class IOFailure(_TransferError, OSError):
    """The kernel or the drive refused or failed a transfer; *errno* says why."""

    def __new__(cls, errno: int, reason: str, **fields: object) -> IOFailure:
        """A `NoSpaceError` where *errno* is of a full drive or quota, as Python makes a
        FileNotFoundError of an OSError.
        """
        kind = NoSpaceError if cls is IOFailure and errno in (ENOSPC, EDQUOT) else cls
        return super().__new__(kind, errno, reason)

    @classmethod
    def of(
        cls,
        error: OSError,
        *,
        operation: str,
        path: str,
        offset: int = 0,
        nbytes: int = 0,
        done: int = 0,
    ) -> IOFailure:
        """*error*, which Python raised, as one of these."""
        return cls(
            error.errno or EIO,
            error.strerror or str(error),
            operation=operation,
            path=path,
            offset=offset,
            nbytes=nbytes,
            done=done,
        )

    def __init__(
        self,
        errno: int,
        reason: str,
        *,
        operation: str,
        path: str,
        offset: int,
        nbytes: int,
        done: int,
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
    """The drive, a quota or a limit on it is full."""


def _rebuild(
    kind: type[_TransferError], positional: tuple[object, ...], fields: dict[str, object]
) -> _TransferError:
    return kind(*positional, **fields)  # type: ignore[arg-type]


def whole_number(name: str, value: int) -> int:
    """*value* as an int that a size or a place in a file can be. Raises: UsageError, which calls it
    *name*.
    """
    try:
        count = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} must be a whole number, not {value!r}") from None
    if not 0 <= count < 1 << 63:
        raise UsageError(f"{name} must be from 0 to 2**63 - 1, not {count}")
    return count


def time_limit(seconds: float | None) -> float | None:
    """*seconds* as the limit of a wait. Raises: UsageError for what is no number, such as nan."""
    if seconds is not None and (not isinstance(seconds, int | float) or seconds != seconds):
        raise UsageError(f"a timeout is a number of seconds, or None, not {seconds!r}")
    return seconds
