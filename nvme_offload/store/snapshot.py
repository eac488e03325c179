"""`Snapshot`: the tensors of a store in a directory. A crash leaves the old snapshot or the new
one.

The directory has a data file, `tensors-` and a random number, and `snapshot.json`, which names the
data file and the range of each tensor in it. A new snapshot writes its own data file next to the
old one, then renames its `snapshot.json` over the old one: that commits it. A data file that
`snapshot.json` does not name is left from a killed process; the next snapshot removes it.

The data file holds the tensors, each at a multiple of 4096 bytes. It is moved in windows, each with
a checksum.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import re
import secrets
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CorruptionError, IOFailure, OffloadError, UnsupportedError, UsageError
from ..files import commit, sealed
from ..io.engine import Engine, File, StrPath, Ticket, allocate
from .slabs import GRANULE_BYTES, Extent

WINDOW_BYTES = 8 << 20  # moved at a time; the most that one checksum covers
_BUFFERS = 4
_FORMAT = "nvme_offload snapshot"
_VERSION = 1
_MANIFEST = "snapshot.json"
_DATA = re.compile(r"tensors-[0-9a-f]{32}")
_TEMPORARY = re.compile(r"snapshot\.json\.tmp-[0-9a-f]{32}")  # written by earlier versions


@dataclasses.dataclass
class Segment:
    """A piece of a stored tensor: *nbytes* from byte *start* of it, at *offset* of the extent's
    file, with a *checksum* where the store keeps them.
    """

    extent: Extent
    offset: int
    start: int
    nbytes: int
    checksum: int | None = None


class _Piece(NamedTuple):
    """*nbytes* of a tensor: from byte *skip* of *segment*, at byte *begin* of a window."""

    name: str
    segment: Segment
    skip: int
    begin: int
    nbytes: int


class _Window(NamedTuple):
    nbytes: int
    pieces: list[_Piece]


def name_tensor(error: OffloadError, name: str) -> None:
    """Add the tensor's name to the message of a failed transfer."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, str) and not reason.endswith(suffix := f", of tensor {name!r}"):
        error.reason = reason + suffix  # type: ignore[attr-defined]


class Snapshot:
    """The snapshot in *directory*, which may not exist yet."""

    def __init__(self, engine: Engine, directory: StrPath) -> None:
        self.directory = Path(directory)
        self._engine = engine

    def save(self, tensors: Mapping[str, Sequence[Segment]]) -> None:
        """Replace the snapshot by one of *tensors*. Raises: OffloadError; the old snapshot is
        intact then.
        """
        directory = self.directory
        with _system_errors("snapshot", directory):
            commit.make_directory(directory)
        with _locked(directory, fcntl.LOCK_EX):
            self._remove_all_but(self._named_data())
            windows, offsets = _windows_of(tensors)
            nbytes = sum(window.nbytes for window in windows)
            data = directory / f"tensors-{secrets.token_hex(16)}"
            sums: dict[int, int] = {}
            try:
                with _opened(self._engine, data, "rw", nbytes) as (engine, file):
                    summed = _has_checksums(engine, file)
                    self._copy_out(engine, file, windows, summed, sums)
                    file.sync()
                self._write_manifest(
                    {
                        "format": _FORMAT,
                        "version": _VERSION,
                        "data": data.name,
                        "nbytes": nbytes,
                        "checksum": "xxh3" if summed else "crc32",
                        "windows": [
                            [window.nbytes, sums[number]] for number, window in enumerate(windows)
                        ],
                        "tensors": [
                            [name, offsets[name], sum(segment.nbytes for segment in segments)]
                            for name, segments in tensors.items()
                        ],
                    }
                )
            finally:
                # Removes the new data file after a failure, the old one after success.
                with contextlib.suppress(OffloadError):
                    named = self._named_data()
                    self._remove_all_but(named)
                    if named != data.name:
                        data.unlink(missing_ok=True)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Saved]:
        """Open the snapshot for reading, with its manifest checked. Raises: OffloadError."""
        if not self.directory.is_dir():
            raise UsageError(f"{self.directory} is not a directory: no snapshot is there")
        with _locked(self.directory, fcntl.LOCK_SH), contextlib.ExitStack() as stack:
            manifest = self._manifest()
            if manifest is None:
                raise UsageError(f"no snapshot is in {self.directory}: it has no {_MANIFEST}")
            path = self.directory / manifest["data"]
            try:
                engine, file = stack.enter_context(_opened(self._engine, path, "r"))
            except IOFailure as error:
                if error.errno == errno.ENOENT:
                    raise self._corrupt(f"its data, {path.name}, are missing") from None
                raise
            if file.size != manifest["nbytes"]:
                raise self._corrupt(
                    f"{path.name} has {file.size} bytes rather than {manifest['nbytes']}"
                )
            yield Saved(manifest, file, engine, self._engine)

    def _copy_out(
        self,
        engine: Engine,
        file: File,
        windows: Sequence[_Window],
        summed: bool,
        sums: dict[int, int],
    ) -> None:
        starts = _starts(windows)

        def read(number: int, buffer: memoryview, tickets: list[tuple[str, Ticket]]) -> None:
            for name, segment, skip, begin, nbytes in windows[number].pieces:
                # a segment with a checksum is in one piece
                expected = False if segment.checksum is None else segment.checksum
                transfer = self._engine.read(
                    buffer[begin : begin + nbytes],
                    segment.extent.file,
                    segment.offset + skip,
                    checksum=expected,
                )
                tickets.append((name, transfer))
                padding = -nbytes % GRANULE_BYTES
                buffer[begin + nbytes : begin + nbytes + padding] = bytes(padding)

        def write(number: int, buffer: memoryview, tickets: list[tuple[str, Ticket]]) -> None:
            memory = buffer[: windows[number].nbytes]
            if not summed:
                sums[number] = zlib.crc32(memory)
            tickets.append(("", engine.write(memory, file, starts[number], checksum=summed)))

        def finished(number: int, tickets: list[tuple[str, Ticket]]) -> None:
            checksum = tickets[0][1].checksum
            if checksum is not None:
                sums[number] = checksum

        _pump(len(windows), read, write, finished)

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        path = self.directory / _MANIFEST
        with _system_errors("snapshot", path):
            # the entry of the data file is durable before the manifest names it
            commit.sync_directory(self.directory)
            commit.write_file(path, sealed.dumps(manifest))

    def _named_data(self) -> str | None:
        """The current data file. Raises: UsageError where `snapshot.json` is not a snapshot's."""
        try:
            manifest = self._manifest()
        except (CorruptionError, UnsupportedError):
            return None
        return None if manifest is None else str(manifest["data"])

    def _remove_all_but(self, data: str | None) -> None:
        with _system_errors("snapshot", self.directory):
            # a damaged snapshot keeps its data, for recovery by hand
            broken = data is None and (self.directory / _MANIFEST).exists()
            for entry in list(self.directory.iterdir()):
                stale = _TEMPORARY.fullmatch(entry.name) or (
                    _DATA.fullmatch(entry.name) and entry.name != data and not broken
                )
                if stale:
                    entry.unlink(missing_ok=True)

    def _manifest(self) -> dict[str, Any] | None:
        path = self.directory / _MANIFEST
        with _system_errors("restore", path):
            try:
                text = path.read_bytes()
            except FileNotFoundError:
                return None
        try:
            manifest = sealed.loads(text)
        except ValueError:
            raise self._corrupt(f"{_MANIFEST} is not JSON") from None
        whole = sealed.unseal(manifest)
        if manifest.get("format") != _FORMAT:
            raise UsageError(f"{path} is not of a snapshot of this package")
        if manifest.get("version") != _VERSION:
            raise UnsupportedError(
                f"{path} is of version {manifest.get('version')!r} and this package reads version {_VERSION}: install the one that wrote it"
            )
        if not whole or not _is_sound(manifest):
            raise self._corrupt(f"{_MANIFEST} is not as it was written")
        return manifest

    def _corrupt(self, reason: str) -> CorruptionError:
        return CorruptionError(
            reason, operation="restore", path=str(self.directory), offset=0, nbytes=0, done=0
        )


class Saved:
    """A snapshot that is open for reading."""

    def __init__(
        self, manifest: dict[str, Any], file: File, engine: Engine, store_engine: Engine
    ) -> None:
        self._manifest = manifest
        self._file = file
        self._engine = engine
        self._store_engine = store_engine

    def sizes(self) -> dict[str, int]:
        """Bytes by name."""
        return {name: nbytes for name, _, nbytes in self._manifest["tensors"]}

    def load(
        self, places: Mapping[str, Sequence[Extent]], summed: bool
    ) -> dict[str, list[Segment]]:
        """Copy every tensor to its extents in *places*; the segments there, with checksums if
        *summed*. Raises: OffloadError.
        """
        manifest, engine = self._manifest, self._engine
        crc = manifest["checksum"] == "crc32"
        if not crc and not _has_checksums(engine, self._file):
            raise UnsupportedError(
                f"{self._file.path} has XXH3 checksums, and this build none: install libxxhash-dev or xxhash-devel, and nvme-offload again"
            )
        windows = [_Window(nbytes, []) for nbytes, _ in manifest["windows"]]
        starts = _starts(windows)
        segments: dict[str, list[Segment]] = {}
        for name, offset, _ in manifest["tensors"]:
            segments[name] = []
            start = 0
            for extent in places[name]:
                done = 0
                while done < extent.nbytes:
                    number = bisect_right(starts, offset + start) - 1
                    begin = offset + start - starts[number]
                    segment = Segment(
                        extent,
                        extent.offset + done,
                        start,
                        min(extent.nbytes - done, windows[number].nbytes - begin),
                    )
                    segments[name].append(segment)
                    windows[number].pieces.append(_Piece(name, segment, 0, begin, segment.nbytes))
                    done += segment.nbytes
                    start += segment.nbytes

        def read(number: int, buffer: memoryview, tickets: list[tuple[str, Ticket]]) -> None:
            nbytes, checksum = manifest["windows"][number]
            tickets.append(
                (
                    "",
                    engine.read(
                        buffer[:nbytes],
                        self._file,
                        starts[number],
                        checksum=False if crc else checksum,
                    ),
                )
            )

        def write(number: int, buffer: memoryview, tickets: list[tuple[str, Ticket]]) -> None:
            nbytes, checksum = manifest["windows"][number]
            if crc and zlib.crc32(buffer[:nbytes]) != checksum:
                reason = "the checksum is not that of what was written"
                raise CorruptionError(
                    reason,
                    operation="read",
                    path=self._file.path,
                    offset=starts[number],
                    nbytes=nbytes,
                    done=nbytes,
                )
            for name, segment, _, begin, size in windows[number].pieces:
                tickets.append(
                    (
                        name,
                        self._store_engine.write(
                            buffer[begin : begin + size],
                            segment.extent.file,
                            segment.offset,
                            checksum=summed,
                        ),
                    )
                )

        def finished(number: int, tickets: list[tuple[str, Ticket]]) -> None:
            for piece, (_, ticket) in zip(windows[number].pieces, tickets, strict=True):
                piece.segment.checksum = ticket.checksum

        _pump(len(windows), read, write, finished)
        return segments


_Start = Callable[[int, memoryview, "list[tuple[str, Ticket]]"], None]


def _pump(
    count: int,
    read: _Start,
    write: _Start,
    finished: Callable[[int, list[tuple[str, Ticket]]], None],
) -> None:
    """Move windows 0 to *count* through a few buffers, reading into some while others are written
    from. *read* and *write* append their tickets to a list.

    Raises: what they raise, and what their tickets do, after all transfers have finished.
    """
    free = [allocate(WINDOW_BYTES) for _ in range(min(_BUFFERS, count))]
    reading: deque[tuple[int, memoryview, list[tuple[str, Ticket]]]] = deque()
    writing: deque[tuple[int, memoryview, list[tuple[str, Ticket]]]] = deque()
    started = 0
    try:
        while started < count or reading or writing:
            tickets: list[tuple[str, Ticket]] = []
            if started < count and free:
                reading.append((started, free[-1], tickets))
                read(started, free.pop(), tickets)
                started += 1
            elif reading and len(writing) < _BUFFERS // 2:
                number, buffer, finishing = reading[0]
                _wait(finishing)
                reading.popleft()
                writing.append((number, buffer, tickets))
                write(number, buffer, tickets)
            else:
                number, buffer, finishing = writing[0]
                _wait(finishing)
                writing.popleft()
                finished(number, finishing)
                free.append(buffer)
    finally:
        for _, _, left in (*reading, *writing):
            for _, ticket in left:
                with contextlib.suppress(OffloadError):
                    ticket.wait()


def _wait(tickets: Sequence[tuple[str, Ticket]]) -> None:
    for name, ticket in tickets:
        try:
            ticket.wait()
        except OffloadError as error:
            if name:
                name_tensor(error, name)
            raise


def _windows_of(tensors: Mapping[str, Sequence[Segment]]) -> tuple[list[_Window], dict[str, int]]:
    """Lay *tensors* out in windows, with the offset of each in the data file. A segment with a
    checksum is never split between windows.
    """
    windows: list[_Window] = []
    offsets: dict[str, int] = {}
    pieces: list[_Piece] = []
    before = filled = 0

    def close_window() -> None:
        nonlocal pieces, before, filled
        windows.append(_Window(filled, pieces))
        before += filled
        pieces, filled = [], 0

    for name, segments in tensors.items():
        offsets[name] = before + filled
        for segment in segments:
            done = 0
            while done < segment.nbytes:
                left = WINDOW_BYTES - filled
                if left == 0 or (segment.checksum is not None and segment.nbytes > left):
                    close_window()
                    continue
                nbytes = min(left, segment.nbytes - done)
                pieces.append(_Piece(name, segment, done, filled, nbytes))
                done += nbytes
                filled += nbytes
        filled += -filled % GRANULE_BYTES
    if filled:
        close_window()
    return windows, offsets


def _starts(windows: Sequence[_Window]) -> list[int]:
    starts = [0]
    for window in windows:
        starts.append(starts[-1] + window.nbytes)
    return starts[:-1]


def _is_sound(manifest: dict[str, Any]) -> bool:
    """Whether the manifest is consistent: every range lies within the data file."""
    try:
        end = 0
        for nbytes, checksum in manifest["windows"]:
            if not (
                _is_count(checksum)
                and _is_count(nbytes)
                and 0 < nbytes <= WINDOW_BYTES
                and nbytes % GRANULE_BYTES == 0
            ):
                return False
            end += nbytes
        if not (
            _DATA.fullmatch(manifest["data"])
            and manifest["nbytes"] == end
            and manifest["checksum"] in ("xxh3", "crc32")
        ):
            return False
        reached, names = 0, set()
        for name, offset, nbytes in manifest["tensors"]:
            if not (
                isinstance(name, str)
                and _is_count(offset)
                and _is_count(nbytes)
                and reached <= offset
                and offset % GRANULE_BYTES == 0
            ):
                return False
            reached = offset + nbytes
            names.add(name)
        return reached <= end and len(names) == len(manifest["tensors"])
    except (KeyError, TypeError, ValueError):
        return False


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64


def _has_checksums(engine: Engine, file: File) -> bool:
    try:
        engine.read(bytearray(), file, checksum=True)
    except UnsupportedError:
        return False
    return True


@contextlib.contextmanager
def _opened(
    engine: Engine, path: Path, mode: str, nbytes: int | None = None
) -> Iterator[tuple[Engine, File]]:
    """Open the file with *engine*; without O_DIRECT where the filesystem lacks it and the engine
    requires it.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = engine.open(path, mode, nbytes)
        except UnsupportedError:
            engine = stack.enter_context(Engine(dataclasses.replace(engine.config, direct="auto")))
            file = engine.open(path, mode, nbytes)
        yield engine, stack.enter_context(file)


@contextlib.contextmanager
def _locked(directory: Path, mode: int) -> Iterator[None]:
    """Lock the directory for one writer, or for readers. The lock ends with the process, however
    that ends.
    """
    with _system_errors("open", directory):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{directory} is in use: a snapshot is being written to it or restored from it"
            ) from None
        except OSError:
            pass  # a network filesystem without locks on directories
        yield
    finally:
        with contextlib.suppress(OSError):
            # a child forked meanwhile shares the descriptor
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@contextlib.contextmanager
def _system_errors(operation: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, OffloadError):
            raise
        raise IOFailure.of(error, operation=operation, path=str(path)) from None
