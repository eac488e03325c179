"""A trial: one setting under one load on the drive, with verified data. As training streams
tensors, it submits requests of 16 MiB, one after another through a preallocated file, and keeps the
queues full.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
from nvme_offload.io.closing import Closing
from nvme_offload.io.engine import Engine, File, Ticket, allocate

from .latency import RAMP_SECONDS, block_seconds
from .verdict import Result

if TYPE_CHECKING:
    from .deepspeed_op import DeepSpeedEngine, DeepSpeedOp, DeepSpeedTicket

REQUEST_BYTES = 16 << 20
PAGE_BYTES = 4096
LEAST_REQUESTS = 4  # in each file
FILLERS = 3  # requests under way while the files are filled
STUCK_SECONDS = 30.0
READ_BACK_SHARE = 0.05  # of the written requests; one request at least

# less than a request takes on any single drive, and another request is always queued
_POLL_SECONDS = 0.002

Bytes = NDArray[np.uint8]


class Rig(Closing):
    """Unnamed files on the drive of *directory*, of *file_bytes* each, one for each of *ways*, "read"
    and "write", and the buffers of trials, at most 0.4 GiB.

    Every page starts with a stamp: the number of the request that wrote it and the page's place in
    the file; the rest is random. With *engine* "deepspeed" trials run DeepSpeed's op; this
    package's engine fills the files and reads them back. Raises: UnsupportedError; NoSpaceError;
    IOFailure.
    """

    def __init__(
        self,
        directory: Path,
        file_bytes: int,
        direct: bool | Literal["auto"] = True,
        request_bytes: int = REQUEST_BYTES,
        engine: str = "native",
        ways: Sequence[str] = ("read", "write"),
    ) -> None:
        self.request_bytes = request_bytes
        self._op: DeepSpeedOp | None = None
        if engine == "deepspeed":
            from .deepspeed_op import load

            self._op = load()
        self._page_numbers = np.arange(request_bytes // PAGE_BYTES, dtype=np.uint64)
        self._direct = direct
        # Reads back written data by another path through the kernel than libaio's.
        self._reader = Engine(AioConfig(1 << 20, 1, 1, backend="posix", direct=direct))
        with contextlib.ExitStack() as undo:
            undo.callback(self._reader.close)
            self.requests = file_bytes // request_bytes
            self._paths: dict[File, str] = {}
            self._files = {way: self._open(directory) for way in ways}
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
        return self.file("write").direct

    @property
    def file_bytes(self) -> int:
        """The bytes of each file that are in use."""
        return self.requests * self.request_bytes

    def fill(self, setting: Setting, seconds: float | None, report: Callable[[int], None]) -> float:
        """Write both files completely, or as much as possible in *seconds*: the rest is then not
        used. *report* is called with the bytes written so far. Returns bytes per second. Raises:
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
                over = seconds is not None and time.monotonic() - began > seconds
                if over and index >= LEAST_REQUESTS:
                    self.requests = index
                    break
                if len(under_way) == 2 * FILLERS:
                    done += sum(under_way.pop(0).wait() for _ in range(2))
                    report(done)
                buffer, offset = ring[index % FILLERS], index * self.request_bytes
                _stamps(buffer)[:] = self._stamp(0, index)
                under_way += [
                    engine.write(buffer.data, file, offset) for file in self._files.values()
                ]
            done += sum(ticket.wait() for ticket in under_way)
        return done / (time.monotonic() - began)

    def run(self, setting: Setting, phase: str, seconds: float) -> Result:
        """Run requests with *setting* for a window of *seconds*, or longer if none completes in it.
        Raises: CorruptionError, IOFailure, TruncatedError; UnsupportedError without space for the
        queues.
        """
        with Load(self, setting, phase) as load:
            result = measure(lambda window: load.pump(None, window), phase, seconds)
            load.finish()
        return result

    def block_seconds(self, setting: Setting, phase: str, seconds: float) -> list[float]:
        """The latency of single blocks with *setting*: see `latency.block_seconds`."""
        return block_seconds(self, setting, phase, seconds)

    def close(self) -> None:
        """Free the space."""
        for file in self._files.values():
            file.close()
        self._reader.close()

    def file(self, direction: str) -> File:
        """The file of one of the rig's ways."""
        return self._files[direction]

    def open_engine(
        self, setting: Setting
    ) -> contextlib.AbstractContextManager[Engine | DeepSpeedEngine]:
        """The engine of a trial with *setting*. Raises: UnsupportedError."""
        if self._op is None:
            return _engine(AioConfig.of(setting, direct=self._direct))
        return self._op.engine(setting, self._paths)

    def _open(self, directory: Path) -> File:
        file = self._reader.open_anonymous(directory, self.file_bytes)
        if self._op is None:
            return file
        # DeepSpeed's op opens files by their names. An unnamed file is reached through its descriptor: of the only unnamed file of this process
        # that is not known yet.
        known = {Path(path).stat().st_ino for path in self._paths.values()}
        try:
            descriptors = list(Path("/proc/self/fd").iterdir())
        except OSError as error:
            raise UnsupportedError(
                f"nvme-sweep finds its files by /proc, which cannot be read here ({error.strerror}): mount it"
            ) from None
        device = directory.stat().st_dev
        for path in descriptors:
            with contextlib.suppress(OSError):
                found = path.stat()
                unnamed = found.st_nlink == 0 and found.st_ino not in known
                if unnamed and (found.st_size, found.st_dev) == (self.file_bytes, device):
                    self._paths[file] = f"/proc/{os.getpid()}/fd/{path.name}"
        return file

    def ring(self, direction: str, count: int) -> list[Bytes]:
        """*count* buffers of a request each for *direction*; the same buffers in each call."""
        ring = self._rings[direction]
        while len(ring) < count:
            ring.append(self._random_buffer() if direction == "write" else self._buffer())
        return ring[:count]

    def _buffer(self) -> Bytes:
        locked = self._op.locked if self._op else _native_buffer
        return locked(self.request_bytes)

    def _random_buffer(self) -> Bytes:
        buffer = self._buffer()
        # page by page: malloc would keep the memory of one large array of random numbers
        for page in buffer.view(np.uint64).reshape(-1, PAGE_BYTES // 8):
            page[:] = self._random.integers(0, 1 << 64, len(page), dtype=np.uint64)
        return buffer

    def _stamp(self, write: int, index: int) -> NDArray[np.uint64]:
        """The stamps of request *index* in write number *write*, for files up to 16 TiB."""
        stamps: NDArray[np.uint64] = self._page_numbers + np.uint64(
            write << 32 | index * len(self._page_numbers)
        )
        return stamps


class Load(Closing):
    """Requests with one setting on a rig's files, from the first `pump` on; its user keeps them
    going with `pump` and `turn`, and ends them with `finish`. All methods raise as `Rig.run`.
    """

    def __init__(self, rig: Rig, setting: Setting, phase: str) -> None:
        ways = directions(phase)
        # more than the kernel holds, so that a queue never waits for this loop
        count = max(2, -(-setting.bytes_in_flight // len(ways) // rig.request_bytes) + 1)
        with contextlib.ExitStack() as undo:
            self._engine = undo.enter_context(rig.open_engine(setting))
            self._lanes = [
                _Lane(rig, self._engine, direction, min(count, rig.requests)) for direction in ways
            ]
            self._undo = undo.pop_all()
        self._turns = itertools.cycle(self._lanes)

    def pump(self, begin: float | None, seconds: float) -> tuple[Result, Result]:
        """Keep requests pending until *seconds* after *begin*, by default now; returns the points
        at both.
        """
        if begin is not None:
            self._turn_until(begin)
        first = _counters(self._engine)
        self._turn_until((begin or first.seconds) + seconds)
        last = _counters(self._engine)
        for lane in self._lanes:
            lane.watch(last)
        return first, last

    def _turn_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            self.turn(left)

    def turn(self, seconds: float = _POLL_SECONDS) -> None:
        """Fill the queues and wait for one request, at most *seconds* or `_POLL_SECONDS`."""
        for lane in self._lanes:
            lane.refill()
        next(self._turns).pause(min(seconds, _POLL_SECONDS))

    def finish(self) -> None:
        """Wait for pending requests, and verify a sample of the data."""
        for lane in self._lanes:
            lane.drain()
        # io_destroy(2) waits 30 ms for a grace period of the kernel. No request is pending, so this
        # does not disturb the next trial.
        threading.Thread(target=self._undo.pop_all().close).start()
        for lane in self._lanes:
            lane.verify()

    def close(self) -> None:
        """Wait for pending requests and free the engine."""
        self._undo.close()


def measure(pump: Callable[[float], tuple[Result, Result]], phase: str, seconds: float) -> Result:
    """Fill the queues, then count for *seconds*, or until each direction of *phase* has transferred
    data. *pump* keeps requests pending in its window and between its calls.
    """
    ways = directions(phase)

    def counted(window: float) -> tuple[Result, Result]:
        first, last = pump(window)
        while any(first.moved(way) == last.moved(way) for way in ways):
            last = pump(window)[1]
        return first, last

    counted(RAMP_SECONDS)
    first, last = counted(seconds)
    read_bytes, write_bytes = (last.moved(way) - first.moved(way) for way in ("read", "write"))
    return Result(read_bytes, write_bytes, last.seconds - first.seconds)


class _Lane:
    """One direction of a load: requests through a file again and again, one for each buffer."""

    def __init__(
        self, rig: Rig, engine: Engine | DeepSpeedEngine, direction: str, count: int
    ) -> None:
        self._rig, self._engine, self._direction = rig, engine, direction
        self._file = rig.file(direction)
        self._free = rig.ring(direction, count)
        self._under_way: list[tuple[Ticket | DeepSpeedTicket, Bytes, int]] = []
        self._last: dict[int, tuple[Bytes, int]] = {}  # the last request of each buffer
        self._moved = 0
        # the last time of progress, and the bytes until then
        self._progress = time.monotonic(), 0

    def refill(self) -> None:
        """Replace finished requests, in any order, by new ones."""
        for entry in [entry for entry in self._under_way if entry[0].done()]:
            self._under_way.remove(entry)
            self._finish(*entry)
        # Never two pending requests to one place: their order would be undefined.
        while self._free and self._rig._positions[self._direction] not in {
            index for _, _, index in self._under_way
        }:
            self._submit(self._free.pop(0))

    def pause(self, seconds: float) -> None:
        """Wait for the oldest request, but no longer than *seconds*."""
        with contextlib.suppress(WaitTimeout):
            self._under_way[0][0].wait(seconds)

    def watch(self, point: Result) -> None:
        """Record progress. Raises: IOFailure when *point* shows that the drive hangs."""
        moved = point.moved(self._direction)
        if moved != self._progress[1]:
            self._progress = point.seconds, moved
        elif point.seconds - self._progress[0] > STUCK_SECONDS:
            nbytes = self._rig.request_bytes
            raise IOFailure(
                errno.ETIMEDOUT,
                f"the drive completed no request for {STUCK_SECONDS:.0f} seconds",
                operation=self._direction,
                path=self._file.path,
                offset=self._under_way[0][2] * nbytes,
                nbytes=nbytes,
                done=0,
            )

    def drain(self) -> None:
        for entry in self._under_way:
            self._finish(*entry)
        self._under_way = []

    def verify(self) -> None:
        """Compare the last requests completely: reads with the file's first contents, writes by
        reading them back.
        """
        sample = list(self._last.values())[
            -max(1, int(READ_BACK_SHARE * self._moved / self._rig.request_bytes)) :
        ]
        for buffer, index in sample:
            offset = index * self._rig.request_bytes
            if self._direction == "write":
                self._rig._reader.read(self._rig._scratch.data, self._file, offset).wait()
                self._compare(self._rig._scratch, buffer, offset)
            else:
                _stamps(self._rig._pattern)[:] = self._rig._stamp(0, index)
                self._compare(buffer, self._rig._pattern, offset)

    def _submit(self, buffer: Bytes) -> None:
        rig = self._rig
        index, read = rig._positions[self._direction], self._direction == "read"
        rig._positions[self._direction] = (index + 1) % rig.requests
        if not read:
            rig._writes += 1
            _stamps(buffer)[:] = rig._stamp(rig._writes, index)
        move = self._engine.read if read else self._engine.write
        ticket = move(buffer.data, self._file, index * rig.request_bytes)
        self._under_way.append((ticket, buffer, index))

    def _finish(self, ticket: Ticket | DeepSpeedTicket, buffer: Bytes, index: int) -> None:
        self._moved += ticket.wait()
        if self._direction == "read":
            wrong = np.flatnonzero(_stamps(buffer) != self._rig._stamp(0, index))
            if len(wrong):
                page = int(wrong[0]) * PAGE_BYTES
                raise self._corruption(index * self._rig.request_bytes + page)
        others = self._last.items()
        self._last = {key: of for key, of in others if key != id(buffer) and of[1] != index}
        self._last[id(buffer)] = buffer, index
        self._free.append(buffer)

    def _compare(self, found: Bytes, wanted: Bytes, offset: int) -> None:
        if not np.array_equal(found.view(np.uint64), wanted.view(np.uint64)):
            raise self._corruption(offset + int(np.flatnonzero(found != wanted)[0]))

    def _corruption(self, offset: int) -> CorruptionError:
        return CorruptionError(
            "the data read differ from the data written: do not keep data on this drive before it is checked",
            operation="read",
            path=self._file.path,
            offset=offset,
            nbytes=PAGE_BYTES,
            done=PAGE_BYTES,
        )


@contextlib.contextmanager
def _engine(config: AioConfig) -> Iterator[Engine]:
    """An engine whose pending requests are waited for at the end, without raising their errors."""
    engine = Engine(config)
    try:
        yield engine
    finally:
        with contextlib.suppress(OffloadError):
            engine.close()


def directions(phase: str) -> tuple[str, ...]:
    """The directions of transfers under *phase*."""
    return ("read", "write") if phase == "mixed" else (phase,)


def _native_buffer(nbytes: int) -> Bytes:
    return np.frombuffer(allocate(nbytes), dtype=np.uint8)


def _stamps(buffer: Bytes) -> NDArray[np.uint64]:
    """The first eight bytes of each page."""
    return buffer.view(np.uint64)[:: PAGE_BYTES // 8]


def _counters(engine: Engine | DeepSpeedEngine) -> Result:
    stats = engine.stats()
    return Result(stats.read.bytes, stats.write.bytes, time.monotonic())
