"""The manifest of a checkpoint, `nvme_offload.json`: its files and the checksums of all their
bytes.

Pieces that the engine wrote were checksummed as they were written; other bytes are read once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zipfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import CorruptionError, IOFailure, OffloadError, UnsupportedError
from ..files import commit, sealed
from ..hardware.config import AioConfig
from .archive import PIECE_BYTES, Piece
from .engine import Engine, File, Ticket, allocate

NAME = "nvme_offload.json"
_FORMAT = "nvme_offload checkpoint"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file of *nbytes*, relative to the manifest's directory, that *rank* wrote. Its pieces cover
    it.
    """

    name: str
    nbytes: int
    rank: int
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of one checkpoint."""

    generation: str  # a random name, new for each save
    step: int  # of the training
    ranks: int
    checksum: str  # "xxh3" or "crc32"
    files: tuple[Entry, ...]  # of all ranks

    def write(self, directory: Path) -> None:
        """Write it to *directory*. Raises: OSError."""
        data: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, **dataclasses.asdict(self)}
        commit.write_file(directory / NAME, sealed.dumps(data), mode=None)

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """The manifest in *directory*; None if there is none. Raises: CorruptionError,
        UnsupportedError, IOFailure.
        """
        path = directory / NAME
        try:
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise IOFailure.of(error, operation="read", path=str(path)) from None
        try:
            data = sealed.loads(text)
            if not sealed.unseal(data) or data.pop("format") != _FORMAT:
                raise ValueError
            if (version := data.pop("version")) != _VERSION:
                raise UnsupportedError(
                    f"{path} is of version {version!r}, and this package reads version {_VERSION}: install the release that wrote it"
                )
            files = tuple(
                Entry(**{**entry, "pieces": tuple(Piece(*piece) for piece in entry["pieces"])})
                for entry in data.pop("files")
            )
            return cls(**data, files=files)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise corrupt(path, "it is not as it was written") from None


@functools.cache
def has_checksums() -> bool:
    """Whether the engine can compute checksums, which needs a build with XXH3."""
    with Engine(AioConfig(backend="posix", direct=False)) as engine:
        try:
            engine.read(bytearray(), __file__, checksum=True)
        except UnsupportedError:
            return False
    return True


def entry_of(
    path: Path, name: str, rank: int, known: Iterable[Piece], engine: Engine, checksum: str
) -> Entry:
    """The entry *name* for the file *path*. *known* pieces have their checksums; the rest is read.
    Raises: IOFailure, TruncatedError.
    """
    pieces: list[Piece] = []
    with _reader(engine, path) as (reading, file):
        size = file.size
        for piece in [*sorted(known), Piece(size, 0, 0)]:
            start = pieces[-1].offset + pieces[-1].nbytes if pieces else 0
            gaps = [
                (at, min(PIECE_BYTES, piece.offset - at))
                for at in range(start, piece.offset, PIECE_BYTES)
            ]
            pieces += [
                Piece(at, nbytes, found)
                for (at, nbytes), found in zip(
                    gaps, _sums(reading, file, gaps, checksum), strict=True
                )
            ]
            if piece.nbytes:
                pieces.append(piece)
    return Entry(name, size, rank, tuple(pieces))


def verify(directory: Path, entry: Entry, engine: Engine, checksum: str) -> None:
    """Read the file of *entry* and compare checksums. Raises: CorruptionError, UnsupportedError,
    IOFailure.
    """
    path = directory / entry.name
    try:
        size = path.stat().st_size
    except OSError as error:
        raise corrupt(path, f"it cannot be found: {error.strerror}") from None
    if size != entry.nbytes:
        raise corrupt(path, f"it has {size} bytes rather than {entry.nbytes}")
    if checksum == "xxh3" and not has_checksums():
        raise UnsupportedError(
            f"{path} has XXH3 checksums, and this build none: install libxxhash-dev or xxhash-devel, and nvme-offload again"
        )
    with _reader(engine, path) as (reading, file):
        ranges = [(piece.offset, piece.nbytes) for piece in entry.pieces]
        for piece, found in zip(entry.pieces, _sums(reading, file, ranges, checksum), strict=True):
            if found != piece.checksum:
                reason = "the bytes do not have the checksum that they were written with"
                raise CorruptionError(
                    reason,
                    operation="load",
                    path=str(path),
                    offset=piece.offset,
                    nbytes=piece.nbytes,
                    done=piece.nbytes,
                )


def verify_archive(path: Path) -> None:
    """Compare the checksums in the file of torch.save *path*; `archive.write` leaves them out, as
    0. Raises: CorruptionError, OSError.
    """
    if not zipfile.is_zipfile(path):
        return  # of a PyTorch before 1.6
    try:
        with zipfile.ZipFile(path) as archive:
            for record in filter(lambda record: record.CRC, archive.infolist()):
                with archive.open(record) as file:
                    while file.read(PIECE_BYTES):
                        pass
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
        raise corrupt(path, f"its checksums do not match: {error}") from None


def _sums(engine: Engine, file: File, ranges: list[tuple[int, int]], checksum: str) -> list[int]:
    """The checksums of *ranges* of *file*. The next range is read while one is summed."""
    buffers = [allocate(max((nbytes for _, nbytes in ranges), default=1)) for _ in range(2)]
    reading: deque[tuple[memoryview, Ticket]] = deque()
    found: list[int] = []
    try:
        for number in range(len(ranges) + 1):
            if number < len(ranges):
                offset, nbytes = ranges[number]
                memory = buffers[number % 2][:nbytes]
                reading.append(
                    (memory, engine.read(memory, file, offset, checksum=checksum == "xxh3"))
                )
            if number:
                memory, ticket = reading.popleft()
                ticket.wait()
                found.append(zlib.crc32(memory) if ticket.checksum is None else ticket.checksum)
    finally:
        # On failure, wait for reads in flight. The first failure is the one to raise.
        for _, ticket in reading:
            with contextlib.suppress(OffloadError):
                ticket.wait()
    return found


@contextlib.contextmanager
def _reader(engine: Engine, path: Path) -> Iterator[tuple[Engine, File]]:
    """Open *path* with *engine*, or through the page cache where the filesystem has no O_DIRECT."""
    with contextlib.ExitStack() as stack:
        try:
            file = engine.open(path, "r")
        except UnsupportedError:
            engine = stack.enter_context(Engine(dataclasses.replace(engine.config, direct="auto")))
            file = engine.open(path, "r")
        yield engine, stack.enter_context(file)


def corrupt(path: Path, reason: str) -> CorruptionError:
    """The error of a checkpoint's file *path*."""
    return CorruptionError(reason, operation="load", path=str(path))
