"""`Operation`: one read or write of an `aio_handle`, and its file."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CorruptionError, IOFailure, UsageError
from ..io.engine import Engine, File, Ticket
from .locked_memory import extent

if TYPE_CHECKING:
    import torch

    StrPath = str | bytes | os.PathLike[str]

_VALIDATION_BYTES = 64 << 20  # read back at a time
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

_log = logging.getLogger(__name__)


class OpenFile:
    """An open file with its path and identity. *file* is None if the engine cannot open it."""

    def __init__(self, file: File | None, path: str, status: os.stat_result) -> None:
        self.file = file
        self.path = path
        self.identity = (status.st_dev, status.st_ino)


@dataclasses.dataclass(eq=False)
class Operation:
    """A read or write of a handle: the bytes that it touches, and its failure, if any."""

    engine: Engine
    writing: bool
    buffer: torch.Tensor
    place: OpenFile
    begin: int  # the offset in the file
    validate: bool
    ticket: Ticket | None = None  # set while the operation is in flight
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self.staging = self.buffer  # the memory that the engine reads or writes
        self.end = self.begin + self.buffer.nbytes
        self.memory, self.memory_end = extent(self.buffer)

    def conflicts(self, later: Operation) -> bool:
        """Whether *later* must wait for this operation: both touch the same bytes, in memory or in
        a file, and at least one operation changes them.
        """
        same_memory = self.memory < later.memory_end and later.memory < self.memory_end
        same_file = (
            self.place.identity == later.place.identity
            and self.begin < later.end
            and later.begin < self.end
        )
        return self.ticket is not None and (
            (same_memory and not (self.writing and later.writing))
            or (same_file and (self.writing or later.writing))
        )

    def settle(self) -> None:
        """Wait until the operation is finished, and keep its failure."""
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
        # A caught exception must not keep the memory alive.
        self.buffer = self.staging = self.buffer.new_empty(0)
        self.place.file = None

    def _compare(self) -> None:
        import torch

        moved = _bytes_of(self.staging)
        size = min(moved.numel(), _VALIDATION_BYTES)
        again = torch.empty(size, dtype=torch.uint8, device="cpu")
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


def open_path(engine: Engine, path: StrPath, writing: bool) -> OpenFile:
    """Open *path* for the engine. Raises: UsageError, IOFailure."""
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise UsageError(f"filename must be a path, not {path!r}") from None
    file = engine.open(name, "w" if writing else "r")
    place = OpenFile(file, name, Path(name).stat())
    _warn_of_page_cache(place)
    return place


def open_descriptor(engine: Engine, descriptor: int, writing: bool) -> OpenFile:
    """Open the file of *descriptor* again, by its name if it still has one: the engine does not
    follow links for writing, and the entries of /proc/self/fd are links.
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
    nameless = OpenFile(None, name, status)
    try:
        if not os.path.samestat(Path(name).stat(), status):
            return nameless
        place = OpenFile(engine.open(name, "w"), name, Path(name).stat())
    except OSError as error:
        if error.errno in OUT_OF_DESCRIPTORS:
            raise
        return nameless
    if place.identity != nameless.identity:  # replaced in between
        return nameless
    _warn_of_page_cache(place)
    return place


def write_to_descriptor(descriptor: int, staging: torch.Tensor, offset: int) -> None:
    """Write all of *staging*, synchronously."""
    path = f"/proc/self/fd/{descriptor}"
    memory = memoryview(_bytes_of(staging).numpy())  # type: ignore[arg-type]  # until numpy 2 its arrays have no __buffer__
    done = 0
    try:
        try:
            # Without O_DIRECT, which needs alignment, and without O_APPEND.
            own = os.open(path, os.O_WRONLY)
        except PermissionError:
            own = os.dup(descriptor)
        try:
            while done < len(memory):
                done += os.pwrite(own, memory[done:], offset + done)
        finally:
            os.close(own)
    except OSError as error:
        raise _failure(error, path, offset, len(memory), done) from None


def _failure(
    error: OSError, path: str, offset: int = 0, nbytes: int = 0, done: int = 0
) -> IOFailure:
    return IOFailure.of(
        error, operation="write", path=path, offset=offset, nbytes=nbytes, done=done
    )


_warned_devices: set[int] = set()


def _warn_of_page_cache(place: OpenFile) -> None:
    device = place.identity[0]
    if place.file is not None and not place.file.direct and device not in _warned_devices:
        _warned_devices.add(device)
        _log.warning(
            "the filesystem of %s has no O_DIRECT: offloading to it goes through the page cache",
            place.path,
        )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def moves_as_it_is(buffer: torch.Tensor) -> bool:
    """Whether the engine can move *buffer* without a copy."""
    return buffer.is_cpu and buffer.is_contiguous() and not buffer.is_conj() and not buffer.is_neg()


def require_movable(buffer: torch.Tensor) -> None:
    """Check that *buffer* has bytes to move. Raises: UsageError."""
    import torch

    if not isinstance(buffer, torch.Tensor):
        raise UsageError(f"buffer must be a tensor, not {type(buffer).__name__}")
    if (
        buffer.layout is not torch.strided
        or buffer.is_meta
        or (buffer.is_quantized and not moves_as_it_is(buffer))
    ):
        raise UsageError(
            f"buffer must be a dense tensor with memory of its own, not {buffer.layout} of {buffer.dtype} on {buffer.device}"
        )
