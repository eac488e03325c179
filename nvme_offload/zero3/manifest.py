"""The manifest of a checkpoint, `nvme_offload.json`: which files it has, and the checksums of all
their bytes, piece by piece.

A file is not read again to be summed: pieces that the engine wrote have their sums from then. What
others wrote, such as the layout of torch.save, is read once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CorruptionError, IOFailure, OffloadError, UnsupportedError
from ..files import commit, sealed
from ..hardware.config import AioConfig
from ..io.engine import Engine, File, Ticket, allocate

NAME = "nvme_offload.json"
PIECE_BYTES = 4 << 20  # what one checksum covers at most
_FORMAT = "nvme_offload checkpoint"
_VERSION = 1


class Piece(NamedTuple):
    """*nbytes* of a file, from *offset* on, and their checksum."""

    offset: int
    nbytes: int
    checksum: int


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file of *nbytes*, below the directory of the manifest, that *rank* wrote; its pieces follow
    each other from begin to end.
    """

    name: str
    nbytes: int
    rank: int
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """*generation* is drawn for each save; *step* and *ranks* are the training's; *checksum* is
    "xxh3" or "crc32".
    """

    generation: str
    step: int
    ranks: int
    checksum: str
    files: tuple[Entry, ...]

    def write(self, directory: Path) -> None:
        """Make it that of *directory*. Raises: OSError."""
        data: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, **dataclasses.asdict(self)}
        commit.write_file(directory / NAME, sealed.dumps(data), mode=None)

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """That of *directory*; None where there is none. Raises: CorruptionError; UnsupportedError
        for one of a later version; IOFailure.
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
                    f"{path} is of version {version!r}, and this package reads version {_VERSION}: install the one that wrote it"
                )
            files = tuple(
                Entry(**{**entry, "pieces": tuple(Piece(*piece) for piece in entry["pieces"])})
                for entry in data.pop("files")
            )
            return cls(**data, files=files)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise _corrupt(path, "it is not as it was written") from None


@functools.cache
def has_checksums() -> bool:
    """Whether the engine can sum what it moves, which takes a build with XXH3."""
    with Engine(AioConfig(backend="posix", direct=False)) as engine:
        try:
            engine.read(bytearray(), __file__, checksum=True)
        except UnsupportedError:
            return False
    return True


def entry_of(
    path: Path, name: str, rank: int, known: Iterable[Piece], engine: Engine, checksum: str
) -> Entry:
    """The entry *name* of the file *path*, of which *known* pieces have their sums; the others are
    read. Raises: IOFailure, TruncatedError.
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
    """Read the file of *entry*. Raises: CorruptionError when it is missing, or not as it was
    written; IOFailure.
    """
    path = directory / entry.name
    try:
        size = path.stat().st_size
    except OSError as error:
        raise _corrupt(path, f"it cannot be found: {error.strerror}") from None
    if size != entry.nbytes:
        raise _corrupt(path, f"it has {size} bytes rather than {entry.nbytes}")
    if checksum == "xxh3" and not has_checksums():
        raise UnsupportedError(
            f"{path} has XXH3 checksums, and this build none: install libxxhash-dev or xxhash-devel, and nvme-offload again"
        )
    with _reader(engine, path) as (reading, file):
        ranges = [(piece.offset, piece.nbytes) for piece in entry.pieces]
        for piece, found in zip(entry.pieces, _sums(reading, file, ranges, checksum), strict=True):
            if found != piece.checksum:
                reason = "the checksum is not that of what was written"
                raise CorruptionError(
                    reason,
                    operation="load",
                    path=str(path),
                    offset=piece.offset,
                    nbytes=piece.nbytes,
                    done=piece.nbytes,
                )


def _sums(engine: Engine, file: File, ranges: list[tuple[int, int]], checksum: str) -> list[int]:
    """The checksums of *ranges* of *file*, one being read while the one before it is summed.
    Raises: IOFailure, TruncatedError.
    """
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
        # of a call that fails: that is what is told, and not what comes of the next
        for _, ticket in reading:
            with contextlib.suppress(OffloadError):
                ticket.wait()
    return found


@contextlib.contextmanager
def _reader(engine: Engine, path: Path) -> Iterator[tuple[Engine, File]]:
    """*path*, opened with *engine*, or with one that goes through the page cache where the
    filesystem has no O_DIRECT.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = engine.open(path, "r")
        except UnsupportedError:
            engine = stack.enter_context(Engine(dataclasses.replace(engine.config, direct="auto")))
            file = engine.open(path, "r")
        yield engine, stack.enter_context(file)


def _corrupt(path: Path, reason: str) -> OffloadError:
    return CorruptionError(reason, operation="load", path=str(path), offset=0, nbytes=0, done=0)
