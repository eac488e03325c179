"""A trial: one setting under one load on the drive itself, with every byte accounted for.

Training streams tensors through long requests: optimizer states in and out at once, parameters in.
So a trial keeps requests of 16 MiB under way, one behind the other through a file that is there
already, and never lets the queues run dry in the time that it measures.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nvme_offload.errors import (
    CorruptionError,
    IOFailure,
    OffloadError,
    UnsupportedError,
    WaitTimeout,
)
from nvme_offload.hardware.config import AioConfig
from nvme_offload.hardware.profile import Setting
from nvme_offload.io.engine import Engine, File, Ticket, allocate

from .latency import RAMP_SECONDS, block_seconds
from .verdict import Result

if TYPE_CHECKING:
    from .deepspeed_op import DeepSpeedEngine, DeepSpeedOp

REQUEST_BYTES = 16 << 20
PAGE_BYTES = 4096
LEAST_REQUESTS = 4  # in each file
FILLERS = 3  # requests under way while the files are filled
SAMPLES = 8  # in a window
STUCK_SECONDS = 30.0
READ_BACK_SHARE = 0.05  # of what a trial wrote; one request at the least

# a request takes longer than this on any one drive, and there is always another one behind it
_POLL_SECONDS = 0.002

Bytes = NDArray[np.uint8]


class _Ticket(Protocol):
    """As `Ticket`, of either engine."""

    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> int: ...


class Point(NamedTuple):
    """What had been moved at a moment of CLOCK_MONOTONIC."""

    seconds: float
    read_bytes: int
    write_bytes: int

    def moved(self, direction: str) -> int:
        """The bytes of one direction."""
        return self.read_bytes if direction == "read" else self.write_bytes


class Rig:
    """Two anonymous files on the drive of *directory*, one to read and one to write, of
    *file_bytes* each, and the memory that trials move.

    Every page of them starts with a stamp: the number of the request that wrote it and the page's
    place in the file; the rest is random.

    Lifetime: the space is free again after `close`, and when the process ends in any way. Its
    memory is twice what the deepest setting has in flight and some requests more, 0.4 GiB at the
    most. With *engine* "deepspeed" DeepSpeed's op moves what trials move, from memory of its own;
    the files are filled and read back by this package's. Raises: UnsupportedError where the
    filesystem has no O_DIRECT and *direct* is True, or DeepSpeed's op is not to be had;
    NoSpaceError; IOFailure.
    """

    def __init__(
        self,
        directory: Path,
        file_bytes: int,
        direct: bool | Literal["auto"] = True,
        request_bytes: int = REQUEST_BYTES,
        engine: str = "native",
    ) -> None:
        self.request_bytes = request_bytes
        self._op = _deepspeed_op() if engine == "deepspeed" else None
        self._page_numbers: NDArray[np.uint64] = np.arange(
            request_bytes // PAGE_BYTES, dtype=np.uint64
        )
        self._direct = direct
        # Reads back what trials wrote, by another path through the kernel than libaio's.
        self._reader = Engine(
            AioConfig(
                block_size=1 << 20, queue_depth=1, thread_count=1, backend="posix", direct=direct
            )
        )
        with contextlib.ExitStack() as undo:
            undo.callback(self._reader.close)
            self.requests = file_bytes // request_bytes
            self._paths: dict[File, str] = {}
            self._source, self._sink = self._open(directory), self._open(directory)
            self._random = np.random.default_rng()
            self._pattern = self._random_buffer()
            self._scratch = _native_buffer(request_bytes)
            self._rings: dict[str, list[Bytes]] = {"read": [], "write": []}
            self._positions = {"read": 0, "write": 0}
            self._writes = 0
            undo.pop_all()

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self._sink.direct

    @property
    def file_bytes(self) -> int:
        """The bytes of each file that are in use."""
        return self.requests * self.request_bytes

    def paths(self, direction: str) -> list[str]:
        """A path, the only one in the list, to the file that is read or the one that is written, by
        which another process may open it.
        """
        return [self._paths[self.file(direction)]]

    def memory_bytes_per_second(self) -> float:
        """How fast one thread copies memory."""
        fastest = 0.0
        for _ in range(16):  # others use the processors too, now and then
            began = time.monotonic()
            np.copyto(self._scratch, self._pattern)
            fastest = max(fastest, self.request_bytes / (time.monotonic() - began))
        return fastest

    def fill(self, setting: Setting, seconds: float | None, report: Callable[[int], None]) -> float:
        """Write both files from end to end, or as far as one gets in *seconds*; what is not reached
        is not used.

        *report* is called with the bytes written so far. Returns bytes per second. Raises:
        NoSpaceError, IOFailure.
        """
        ring = self.ring("read", FILLERS)
        for buffer in ring:
            np.copyto(buffer, self._pattern)
        under_way: list[Ticket] = []
        began = time.monotonic()
        done = 0
        with _engine(AioConfig.of(setting, direct=self._direct)) as engine:
            for index in range(self.requests):
                if (
                    seconds is not None
                    and index >= LEAST_REQUESTS
                    and time.monotonic() - began > seconds
                ):
                    self.requests = index
                    break
                if len(under_way) == 2 * FILLERS:
                    for ticket in (under_way.pop(0), under_way.pop(0)):
                        done += _wait(ticket)
                    report(done)
                buffer = ring[index % FILLERS]
                _stamps(buffer)[:] = self._stamp(0, index)
                under_way += [
                    engine.write(buffer.data, file, index * self.request_bytes)
                    for file in (self._source, self._sink)
                ]
            done += sum(_wait(ticket) for ticket in under_way)
        return done / (time.monotonic() - began)

    def run(self, setting: Setting, phase: str, seconds: float) -> Result:
        """Move requests with *setting* for a window of *seconds*, somewhat longer where the drive
        moved nothing in it.

        Phase is "read", "write" or "mixed", which is both at once. Raises: CorruptionError when
        what was read is not what was written; IOFailure, TruncatedError; UnsupportedError when the
        kernel has no room for the queues.
        """
        with self.load(setting, phase) as load:
            result = measure(lambda window: load.pump(None, window), phase, seconds)
            load.finish()
        return result

    def block_seconds(self, setting: Setting, phase: str, seconds: float) -> list[float]:
        """The latency of single blocks with *setting*: see `latency.block_seconds`."""
        return block_seconds(self, setting, phase, seconds)

    def load(self, setting: Setting, phase: str) -> Load:
        """Make what it takes to move requests with *setting*; nothing moves yet. Raises:
        UnsupportedError.
        """
        return Load(self, setting, phase)

    def close(self) -> None:
        """Give the space back."""
        self._source.close()
        self._sink.close()
        self._reader.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def file(self, direction: str) -> File:
        """The file that is read, or the one that is written."""
        return self._source if direction == "read" else self._sink

    def open_engine(
        self, setting: Setting
    ) -> contextlib.AbstractContextManager[Engine | DeepSpeedEngine]:
        """What moves the bytes of a trial with *setting*. Raises: UnsupportedError."""
        if self._op is None:
            return _engine(AioConfig.of(setting, direct=self._direct))
        return self._op.engine(setting, self._paths)

    def _open(self, directory: Path) -> File:
        file = self._reader.open_anonymous(directory, self.file_bytes)
        # The way to a file without a name is by its descriptor, which is that of the only such file
        # here that is not known yet.
        known = {Path(path).stat().st_ino for path in self._paths.values()}
        try:
            descriptors = list(Path("/proc/self/fd").iterdir())
        except OSError as error:
            raise UnsupportedError(
                f"nvme-sweep finds its files by /proc, which cannot be read here ({error.strerror}): mount it"
            ) from None
        for path in descriptors:
            with contextlib.suppress(OSError):
                found, place = path.stat(), Path(f"/proc/{os.getpid()}/fd/{path.name}")
                if (found.st_nlink, found.st_size, found.st_dev) == (
                    0,
                    self.file_bytes,
                    directory.stat().st_dev,
                ) and found.st_ino not in known:
                    self._paths[file] = str(place)
        return file

    def ring(self, direction: str, count: int) -> list[Bytes]:
        """*count* buffers of a request each for moving that way, the same ones every time."""
        ring = self._rings[direction]
        while len(ring) < count:
            ring.append(self._random_buffer() if direction == "write" else self._buffer())
        return ring[:count]

    def _buffer(self) -> Bytes:
        return (
            self._op.locked(self.request_bytes) if self._op else _native_buffer(self.request_bytes)
        )

    def _random_buffer(self) -> Bytes:
        buffer = self._buffer()
        # page by page, as malloc would keep what it takes for all at once
        for page in buffer.view(np.uint64).reshape(-1, PAGE_BYTES // 8):
            page[:] = self._random.integers(0, 1 << 64, len(page), dtype=np.uint64)
        return buffer

    def _stamp(self, write: int, index: int) -> NDArray[np.uint64]:
        """The stamps of request *index* of a file, written by the write with that number: places in
        32 bits reach 16 TiB far.
        """
        stamps: NDArray[np.uint64] = self._page_numbers + np.uint64(
            write << 32 | index * len(self._page_numbers)
        )
        return stamps


class Load:
    """One setting at work on a rig's files, from the first `pump` on; its user keeps it going with
    `pump` and `turn`, and ends it with `finish`.

    Lifetime: a context whose end waits for what is under way. Raises (all of it): as `Rig.run`.
    """

    def __init__(self, rig: Rig, setting: Setting, phase: str) -> None:
        directions = _directions(phase)
        # Enough behind what the kernel holds that a queue never waits for this loop.
        count = max(2, -(-setting.bytes_in_flight // len(directions) // rig.request_bytes) + 1)
        with contextlib.ExitStack() as undo:
            self._engine = undo.enter_context(rig.open_engine(setting))
            self._lanes = [
                _Lane(rig, self._engine, direction, min(count, rig.requests))
                for direction in directions
            ]
            self._undo = undo.pop_all()
        self._turns = itertools.cycle(self._lanes)

    def pump(self, begin: float | None, seconds: float) -> list[Point]:
        """Keep requests under way until *seconds* after *begin*; returns a point at *begin* and
        `SAMPLES` more at even distances, the last at the end. It begins with the first point where
        *begin* is None, however late a busy machine comes to that.
        """
        points: list[Point] = []
        for sample in range(SAMPLES + 1):
            if begin is not None:
                self._turn_until(begin + seconds * sample / SAMPLES)
            points.append(_counters(self._engine))
            if begin is None:
                begin = points[0].seconds
            for lane in self._lanes:
                lane.watch(points[-1])
        return points

    def _turn_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            self.turn(left)

    def turn(self, seconds: float = _POLL_SECONDS) -> None:
        """Fill the queues up and wait for one request to finish, but no longer than *seconds*, and
        not long.
        """
        for lane in self._lanes:
            lane.refill()
        next(self._turns).pause(min(seconds, _POLL_SECONDS))

    def finish(self) -> None:
        """Wait for what is under way, and verify a sample of what was moved."""
        for lane in self._lanes:
            lane.drain()
        # io_destroy(2) waits 30 ms for a grace period of the kernel's. The engine has nothing under
        # way, so that disturbs no other trial.
        threading.Thread(target=self._undo.pop_all().close).start()
        for lane in self._lanes:
            lane.verify()

    def __enter__(self) -> Load:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()


def measure(pump: Callable[[float], list[Point]], phase: str, seconds: float) -> Result:
    """Let the queues fill, then count for a window of *seconds*, and on until each direction of
    *phase* has moved something.

    *pump* keeps requests under way for so many seconds and between its calls, and returns the
    points that it passed.
    """

    def counted(window: float) -> list[Point]:
        points = pump(window)
        while any(
            points[0].moved(direction) == points[-1].moved(direction)
            for direction in _directions(phase)
        ):
            points += pump(window)
        return points

    counted(RAMP_SECONDS)
    first, *points = counted(seconds)
    last = points[-1]
    samples = tuple(
        (at - first.seconds, read + written - first.read_bytes - first.write_bytes)
        for at, read, written in points
    )
    return Result(
        last.read_bytes - first.read_bytes,
        last.write_bytes - first.write_bytes,
        last.seconds - first.seconds,
        samples,
    )


class _Lane:
    """One direction of a load: requests on and on through a file, one for each buffer under way."""

    def __init__(
        self, rig: Rig, engine: Engine | DeepSpeedEngine, direction: str, count: int
    ) -> None:
        self._rig = rig
        self._engine = engine
        self._direction = direction
        self._file = rig.file(direction)
        self._free = rig.ring(direction, count)
        self._under_way: list[tuple[_Ticket, Bytes, int]] = []
        # by buffer: what was last moved with it, and where
        self._last: dict[int, tuple[Bytes, int]] = {}
        self._moved = 0
        # when it was last seen to move, and the bytes until then
        self._progress = time.monotonic(), 0

    def refill(self) -> None:
        """Take what is finished, in any order, and put as much under way again."""
        for entry in [entry for entry in self._under_way if entry[0].done()]:
            self._under_way.remove(entry)
            self._finish(*entry)
        # Never two at once to one place: which of them the file has in the end nobody could tell.
        while self._free and self._rig._positions[self._direction] not in {
            index for _, _, index in self._under_way
        }:
            self._submit(self._free.pop(0))

    def pause(self, seconds: float) -> None:
        """Wait for the oldest request, but no longer than *seconds*."""
        with contextlib.suppress(WaitTimeout):
            self._under_way[0][0].wait(seconds)

    def watch(self, point: Point) -> None:
        """Raises: IOFailure when *point* shows that the drive hangs."""
        moved = point.moved(self._direction)
        if moved != self._progress[1]:
            self._progress = point.seconds, moved
        elif point.seconds - self._progress[0] > STUCK_SECONDS:
            raise self._failure()

    def drain(self) -> None:
        """Wait for everything."""
        for entry in self._under_way:
            _wait(entry[0])
            self._finish(*entry)
        self._under_way = []

    def verify(self) -> None:
        """Compare in full a sample of what was last moved: for reads with what the file was filled
        with, for writes by reading it back.
        """
        sample = list(self._last.values())[
            -max(1, int(READ_BACK_SHARE * self._moved / self._rig.request_bytes)) :
        ]
        for buffer, index in sample:
            offset = index * self._rig.request_bytes
            if self._direction == "write":
                _wait(self._rig._reader.read(self._rig._scratch.data, self._file, offset))
                self._compare(self._rig._scratch, buffer, offset)
            else:
                _stamps(self._rig._pattern)[:] = self._rig._stamp(0, index)
                self._compare(buffer, self._rig._pattern, offset)

    def _submit(self, buffer: Bytes) -> None:
        index = self._rig._positions[self._direction]
        self._rig._positions[self._direction] = (index + 1) % self._rig.requests
        if self._direction == "read":
            ticket = self._engine.read(buffer.data, self._file, index * self._rig.request_bytes)
        else:
            self._rig._writes += 1
            _stamps(buffer)[:] = self._rig._stamp(self._rig._writes, index)
            ticket = self._engine.write(buffer.data, self._file, index * self._rig.request_bytes)
        self._under_way.append((ticket, buffer, index))

    def _finish(self, ticket: _Ticket, buffer: Bytes, index: int) -> None:
        self._moved += ticket.wait()
        if self._direction == "read" and not np.array_equal(
            _stamps(buffer), self._rig._stamp(0, index)
        ):
            page = int(np.flatnonzero(_stamps(buffer) != self._rig._stamp(0, index))[0])
            raise self._corruption(index * self._rig.request_bytes + page * PAGE_BYTES)
        self._last = {
            key: moved
            for key, moved in self._last.items()
            if key != id(buffer) and moved[1] != index
        }
        self._last[id(buffer)] = buffer, index
        self._free.append(buffer)

    def _compare(self, found: Bytes, wanted: Bytes, offset: int) -> None:
        if not np.array_equal(found.view(np.uint64), wanted.view(np.uint64)):
            raise self._corruption(offset + int(np.flatnonzero(found != wanted)[0]))

    def _failure(self) -> IOFailure:
        nbytes = self._rig.request_bytes
        reason = f"the drive moved nothing for {STUCK_SECONDS:.0f} seconds"
        offset = self._under_way[0][2] * nbytes
        return IOFailure(
            errno.ETIMEDOUT,
            reason,
            operation=self._direction,
            path=self._file.path,
            offset=offset,
            nbytes=nbytes,
            done=0,
        )

    def _corruption(self, offset: int) -> CorruptionError:
        reason = "what came back is not what was written: do not keep data on this drive before it is checked"
        return CorruptionError(
            reason,
            operation="read",
            path=self._file.path,
            offset=offset,
            nbytes=PAGE_BYTES,
            done=PAGE_BYTES,
        )


@contextlib.contextmanager
def _engine(config: AioConfig) -> Iterator[Engine]:
    """An engine whose requests are all waited for, up to the first failure: the others that a
    broken drive then has are not told as well.
    """
    engine = Engine(config)
    try:
        yield engine
    finally:
        with contextlib.suppress(OffloadError):
            engine.close()


def _directions(phase: str) -> tuple[str, ...]:
    return ("read", "write") if phase == "mixed" else (phase,)


def _deepspeed_op() -> DeepSpeedOp:
    from .deepspeed_op import load

    return load()


def _native_buffer(nbytes: int) -> Bytes:
    return np.frombuffer(allocate(nbytes), dtype=np.uint8)


def _stamps(buffer: Bytes) -> NDArray[np.uint64]:
    """The first eight bytes of each page."""
    return buffer.view(np.uint64)[:: PAGE_BYTES // 8]


def _wait(ticket: _Ticket) -> int:
    """Wait in small parts: a signal's handler runs between them."""
    while True:
        with contextlib.suppress(WaitTimeout):
            return ticket.wait(0.1)


def _counters(engine: Engine | DeepSpeedEngine) -> Point:
    stats = engine.stats()
    return Point(time.monotonic(), stats.read.bytes, stats.write.bytes)
