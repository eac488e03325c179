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
    """An open file with its path and identity."""

    def __init__(self, file: File, path: str, status: os.stat_result) -> None:
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
        del self.place.file

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
    """Open the file of *descriptor* again, by its name: the engine does not follow links for writing,
    and the entries of /proc/self/fd are links. Raises: UsageError, IOFailure.
    """
    if not writing:
        raise UsageError(f"filename must be a path, not {descriptor}")
    link = Path(f"/proc/self/fd/{descriptor}")
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "the descriptor is not open for writing")
        status, name = os.fstat(descriptor), link.readlink()
        if not os.path.samestat(name.stat(), status):
            raise FileNotFoundError(errno.ENOENT, "the file of the descriptor has no name")
    except OSError as error:
        raise IOFailure.of(
            error, operation="write", path=str(link), offset=0, nbytes=0, done=0
        ) from None
    return open_path(engine, name, writing)


_warned_devices: set[int] = set()


def _warn_of_page_cache(place: OpenFile) -> None:
    device = place.identity[0]
    if not place.file.direct and device not in _warned_devices:
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
