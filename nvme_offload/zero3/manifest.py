"""The manifest of a checkpoint, `nvme_offload.json`: which files it has, and the checksums of all their bytes, piece by piece.

A file is not read again to be summed: pieces that the engine wrote have their sums from then. What others wrote, such as the layout of
torch.save, is read once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .. import commit
from ..config import AioConfig
from ..engine import Engine, File, Ticket, allocate
from ..errors import CorruptionError, IOFailure, OffloadError, UnsupportedError

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
    """A file of *nbytes*, below the directory of the manifest, that *rank* wrote; its pieces follow each other from begin to end."""

    name: str
    nbytes: int
    rank: int
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """*generation* is drawn for each save; *step* and *ranks* are the training's; *checksum* is "xxh3" or "crc32"."""

    generation: str
    step: int
    ranks: int
    checksum: str
    files: tuple[Entry, ...]

    def write(self, directory: Path) -> None:
        """Make it that of *directory*. Raises: OSError."""
        data: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, **dataclasses.asdict(self)}
        commit.write_file(directory / NAME, json.dumps({**data, "sha256": _digest(data)}), mode=None)

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """That of *directory*; None where there is none. Raises: CorruptionError; UnsupportedError for one of a later version; IOFailure."""
        path = directory / NAME
        try:
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise IOFailure(error.errno or errno.EIO, str(error.strerror), operation="read", path=str(path), offset=0, nbytes=0, done=0) from None
        try:
            data = json.loads(text)
            if data["version"] != _VERSION and data.pop("sha256") == _digest(data):
                raise UnsupportedError(f"{path} is of version {data['version']!r}, and this package reads version {_VERSION}: install the one that wrote it")
            if data.pop("sha256") != _digest(data) or data.pop("format") != _FORMAT or data.pop("version") != _VERSION:
                raise ValueError
            files = tuple(Entry(**{**entry, "pieces": tuple(Piece(*piece) for piece in entry["pieces"])}) for entry in data.pop("files"))
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


def entry_of(path: Path, name: str, rank: int, known: Iterable[Piece], engine: Engine, checksum: str) -> Entry:
    """The entry *name* of the file *path*, of which *known* pieces have their sums; the others are read. Raises: IOFailure, TruncatedError."""
    pieces: list[Piece] = []
    with _reader(engine, path) as (reading, file):
        size = file.size
        for piece in [*sorted(known), Piece(size, 0, 0)]:
            start = pieces[-1].offset + pieces[-1].nbytes if pieces else 0
            gaps = [(at, min(PIECE_BYTES, piece.offset - at)) for at in range(start, piece.offset, PIECE_BYTES)]
            pieces += [Piece(at, nbytes, found) for (at, nbytes), found in zip(gaps, _sums(reading, file, gaps, checksum), strict=True)]
            if piece.nbytes:
                pieces.append(piece)
    return Entry(name, size, rank, tuple(pieces))


def verify(directory: Path, entry: Entry, engine: Engine, checksum: str) -> None:
    """Read the file of *entry*. Raises: CorruptionError when it is missing, or not as it was written; IOFailure."""
    path = directory / entry.name
    try:
        size = path.stat().st_size
    except OSError as error:
        raise _corrupt(path, f"it cannot be found: {error.strerror}") from None
    if size != entry.nbytes:
        raise _corrupt(path, f"it has {size} bytes rather than {entry.nbytes}")
    if checksum == "xxh3" and not has_checksums():
        raise UnsupportedError(f"{path} has XXH3 checksums, and this build none: install libxxhash-dev or xxhash-devel, and nvme-offload again")
    with _reader(engine, path) as (reading, file):
        ranges = [(piece.offset, piece.nbytes) for piece in entry.pieces]
        for piece, found in zip(entry.pieces, _sums(reading, file, ranges, checksum), strict=True):
            if found != piece.checksum:
                reason = "the checksum is not that of what was written"
                raise CorruptionError(reason, operation="load", path=str(path), offset=piece.offset, nbytes=piece.nbytes, done=piece.nbytes)


def _sums(engine: Engine, file: File, ranges: list[tuple[int, int]], checksum: str) -> Iterator[int]:
    """The checksums of *ranges* of *file*, one being read while the one before it is summed."""
    if not ranges:
        return
    largest = max(nbytes for _, nbytes in ranges)
    buffers = [allocate(largest) for _ in range(min(2, len(ranges)))]

    def start(number: int) -> tuple[memoryview, Ticket]:
        offset, nbytes = ranges[number]
        memory = buffers[number % 2][:nbytes]
        return memory, engine.read(memory, file, offset, checksum=checksum == "xxh3")

    reading = start(0)
    for number in range(len(ranges)):
        memory, ticket = reading
        if number + 1 < len(ranges):
            reading = start(number + 1)
        ticket.wait()
        found = ticket.checksum
        yield zlib.crc32(memory) if found is None else found


@contextlib.contextmanager
def _reader(engine: Engine, path: Path) -> Iterator[tuple[Engine, File]]:
    """*path*, opened with *engine*, or with one that goes through the page cache where the filesystem has no O_DIRECT."""
    with contextlib.ExitStack() as stack:
        try:
            file = engine.open(path, "r")
        except UnsupportedError:
            engine = stack.enter_context(Engine(dataclasses.replace(engine.config, direct="auto")))
            file = engine.open(path, "r")
        yield engine, stack.enter_context(file)


def _corrupt(path: Path, reason: str) -> OffloadError:
    return CorruptionError(reason, operation="load", path=str(path), offset=0, nbytes=0, done=0)


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode("ascii")).hexdigest()
