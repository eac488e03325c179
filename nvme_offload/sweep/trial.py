"""A trial: one setting under one load on the drive itself, with every byte accounted for.

Training streams tensors through long requests: optimizer states in and out at once, parameters in. So a trial keeps requests of 16 MiB under way,
one behind the other through a file that is there already, and never lets the queues run dry in the time that it measures.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nvme_offload.config import AioConfig
from nvme_offload.engine import Engine, Ticket, allocate
from nvme_offload.errors import CorruptionError, IOFailure, WaitTimeout
from nvme_offload.profile import Setting

from .verdict import Result

REQUEST_BYTES = 16 << 20
PAGE_BYTES = 4096
LEAST_REQUESTS = 4  # in each file
FILLERS = 3  # requests under way while the files are filled
RAMP_SECONDS = 0.04
SAMPLES = 8  # in a window
STUCK_SECONDS = 30.0
READ_BACK_SHARE = 0.05  # of what a trial wrote; one request at the least

_PAGES = REQUEST_BYTES // PAGE_BYTES
_POLL_SECONDS = 0.002  # a request takes longer than this on any one drive, and there is always another one behind it

Bytes = NDArray[np.uint8]


class Rig:
    """Two anonymous files on the drive of *directory*, one to read and one to write, of *file_bytes* each, and the memory that trials move.

    Every page of them starts with a stamp: the number of the request that wrote it and the page's place in the file; the rest is random.

    Lifetime: the space is free again after `close`, and when the process ends in any way. At most 0.4 GiB of memory.
    Raises: UnsupportedError where the filesystem has no O_DIRECT and *direct* is True; NoSpaceError; IOFailure.
    """

    def __init__(self, directory: Path, file_bytes: int, direct: bool | Literal["auto"] = True) -> None:
        self._direct = direct
        # Reads back what trials wrote, by another path through the kernel than libaio's.
        self._reader = Engine(AioConfig(block_size=1 << 20, queue_depth=1, thread_count=1, backend="posix", direct=direct))
        with contextlib.ExitStack() as undo:
            undo.callback(self._reader.close)
            self.requests = file_bytes // REQUEST_BYTES
            self._source = self._reader.open_anonymous(directory, self.requests * REQUEST_BYTES)
            self._sink = self._reader.open_anonymous(directory, self.requests * REQUEST_BYTES)
            self._random = np.random.default_rng()
            self._pattern = self._random_buffer()
            self._scratch = _buffer()
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
        return self.requests * REQUEST_BYTES

    def memory_bytes_per_second(self) -> float:
        """How fast one thread copies memory."""
        fastest = 0.0
        for _ in range(4):
            began = time.monotonic()
            np.copyto(self._scratch, self._pattern)
            fastest = max(fastest, REQUEST_BYTES / (time.monotonic() - began))
        return fastest

    def fill(self, setting: Setting, seconds: float | None, report: Callable[[int], None]) -> float:
        """Write both files from end to end, or as far as one gets in *seconds*; what is not reached is not used.

        *report* is called with the bytes written so far. Returns bytes per second. Raises: NoSpaceError, IOFailure.
        """
        ring = self._ring("read", FILLERS)
        for buffer in ring:
            np.copyto(buffer, self._pattern)
        under_way: list[Ticket] = []
        began = time.monotonic()
        done = 0
        with Engine(setting.config(direct=self._direct)) as engine:
            for index in range(self.requests):
                if seconds is not None and index >= LEAST_REQUESTS and time.monotonic() - began > seconds:
                    self.requests = index
                    break
                if len(under_way) == 2 * FILLERS:
                    for ticket in (under_way.pop(0), under_way.pop(0)):
                        done += _wait(ticket)
                    report(done)
                buffer = ring[index % FILLERS]
                _stamps(buffer)[:] = _stamp(0, index)
                under_way += [engine.write(buffer.data, self._source, index * REQUEST_BYTES), engine.write(buffer.data, self._sink, index * REQUEST_BYTES)]
            done += sum(_wait(ticket) for ticket in under_way)
        return done / (time.monotonic() - began)

    def run(self, setting: Setting, phase: str, seconds: float) -> Result:
        """Move requests with *setting* for a window of *seconds*, somewhat longer where the drive moved nothing in it.

        Phase is "read", "write" or "mixed", which is both at once. Raises: CorruptionError when what was read is not what was written;
        IOFailure, TruncatedError; UnsupportedError when the kernel has no room for the queues.
        """
        directions = ("read", "write") if phase == "mixed" else (phase,)
        # Enough behind what the kernel holds that a queue never waits for this loop.
        count = max(2, -(-setting.bytes_in_flight // len(directions) // REQUEST_BYTES) + 1)
        with contextlib.ExitStack() as undo:
            engine = undo.enter_context(Engine(setting.config(direct=self._direct)))
            lanes = [_Lane(self, engine, direction, min(count, self.requests)) for direction in directions]
            start = self._pump(engine, lanes, RAMP_SECONDS)[-1]
            points = self._pump(engine, lanes, seconds)
            for lane in lanes:
                lane.drain()
            undo.pop_all()
        # io_destroy(2) waits 30 ms for a grace period of the kernel's. The engine has nothing under way, so that disturbs no other trial.
        threading.Thread(target=engine.close).start()
        for lane in lanes:
            lane.verify()
        end = points[-1]
        began, read, written = start
        samples = tuple((moment - began, r + w - read - written) for moment, r, w in points)
        return Result(end[1] - read, end[2] - written, end[0] - began, samples)

    def close(self) -> None:
        """Give the space back."""
        self._source.close()
        self._sink.close()
        self._reader.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _pump(self, engine: Engine, lanes: list[_Lane], seconds: float) -> list[tuple[float, int, int]]:
        """Keep requests under way for *seconds*, and until each direction has moved something; returns (moment, bytes read, bytes written) points."""
        began, *moved_before = _counters(engine)
        every = seconds / SAMPLES
        points: list[tuple[float, int, int]] = []
        turns = self._turns(lanes)
        while True:
            for lane in lanes:
                lane.refill()
            next(turns).pause()
            now = time.monotonic()
            if now - began < min(seconds, every * (len(points) + 1)):
                continue
            points.append(_counters(engine))
            moved = [after - before for before, after in zip(moved_before, points[-1][1:], strict=True)]
            if points[-1][0] - began >= seconds and all(moved[lane.column] for lane in lanes):
                return points
            if now - began > seconds + STUCK_SECONDS:
                idle = next(lane for lane in lanes if not moved[lane.column])
                raise idle.failure()

    @staticmethod
    def _turns(lanes: list[_Lane]) -> Iterator[_Lane]:
        while True:
            yield from lanes

    def _ring(self, direction: str, count: int) -> list[Bytes]:
        ring = self._rings[direction]
        while len(ring) < count:
            ring.append(self._random_buffer() if direction == "write" else _buffer())
        return ring[:count]

    def _random_buffer(self) -> Bytes:
        buffer = _buffer()
        buffer.view(np.uint64)[:] = self._random.integers(0, 1 << 64, REQUEST_BYTES // 8, dtype=np.uint64)
        return buffer


class _Lane:
    """One direction of a trial: requests on and on through a file, one for each buffer under way."""

    def __init__(self, rig: Rig, engine: Engine, direction: str, count: int) -> None:
        self.column = 0 if direction == "read" else 1
        self._rig = rig
        self._engine = engine
        self._direction = direction
        self._file = rig._source if direction == "read" else rig._sink
        self._free = rig._ring(direction, count)
        self._under_way: list[tuple[Ticket, Bytes, int]] = []
        self._last: dict[int, tuple[Bytes, int]] = {}  # by buffer: what was last moved with it, and where
        self._moved = 0

    def refill(self) -> None:
        """Take what is finished, in any order, and put as much under way again."""
        for entry in [entry for entry in self._under_way if entry[0].done()]:
            self._under_way.remove(entry)
            self._finish(*entry)
        while self._free:
            self._submit(self._free.pop(0))

    def pause(self) -> None:
        """Wait for the oldest request, but not for long."""
        with contextlib.suppress(WaitTimeout):
            self._under_way[0][0].wait(_POLL_SECONDS)

    def drain(self) -> None:
        """Wait for everything."""
        for entry in self._under_way:
            _wait(entry[0])
            self._finish(*entry)
        self._under_way = []

    def verify(self) -> None:
        """Compare in full a sample of what was last moved: for reads with what the file was filled with, for writes by reading it back."""
        sample = list(self._last.values())[-max(1, int(READ_BACK_SHARE * self._moved / REQUEST_BYTES)) :]
        for buffer, index in sample:
            offset = index * REQUEST_BYTES
            if self._direction == "write":
                _wait(self._rig._reader.read(self._rig._scratch.data, self._file, offset))
                self._compare(self._rig._scratch, buffer, offset)
            else:
                _stamps(self._rig._pattern)[:] = _stamp(0, index)
                self._compare(buffer, self._rig._pattern, offset)

    def failure(self) -> IOFailure:
        """Of a drive that hangs."""
        offset = self._under_way[0][2] * REQUEST_BYTES
        reason = f"the drive moved nothing for {STUCK_SECONDS:.0f} seconds"
        return IOFailure(errno.ETIMEDOUT, reason, operation=self._direction, path=self._file.path, offset=offset, nbytes=REQUEST_BYTES, done=0)

    def _submit(self, buffer: Bytes) -> None:
        index = self._rig._positions[self._direction]
        self._rig._positions[self._direction] = (index + 1) % self._rig.requests
        if self._direction == "read":
            ticket = self._engine.read(buffer.data, self._file, index * REQUEST_BYTES)
        else:
            self._rig._writes += 1
            _stamps(buffer)[:] = _stamp(self._rig._writes, index)
            ticket = self._engine.write(buffer.data, self._file, index * REQUEST_BYTES)
        self._under_way.append((ticket, buffer, index))

    def _finish(self, ticket: Ticket, buffer: Bytes, index: int) -> None:
        self._moved += ticket.wait()
        if self._direction == "read" and not np.array_equal(_stamps(buffer), _stamp(0, index)):
            page = int(np.flatnonzero(_stamps(buffer) != _stamp(0, index))[0])
            raise self._corruption(index * REQUEST_BYTES + page * PAGE_BYTES)
        self._last.pop(id(buffer), None)
        self._last[id(buffer)] = buffer, index
        self._free.append(buffer)

    def _compare(self, found: Bytes, wanted: Bytes, offset: int) -> None:
        if not np.array_equal(found, wanted):
            raise self._corruption(offset + int(np.flatnonzero(found != wanted)[0]))

    def _corruption(self, offset: int) -> CorruptionError:
        reason = "what came back is not what was written: do not keep data on this drive before it is checked"
        return CorruptionError(reason, operation="read", path=self._file.path, offset=offset, nbytes=PAGE_BYTES, done=PAGE_BYTES)


def _buffer() -> Bytes:
    return np.frombuffer(allocate(REQUEST_BYTES), dtype=np.uint8)


def _stamps(buffer: Bytes) -> NDArray[np.uint64]:
    """The first eight bytes of each page."""
    return buffer.view(np.uint64)[:: PAGE_BYTES // 8]


_PAGE_NUMBERS: NDArray[np.uint64] = np.arange(_PAGES, dtype=np.uint64)


def _stamp(write: int, index: int) -> NDArray[np.uint64]:
    """The stamps of request *index* of a file, written by the write with that number: places in 32 bits reach 16 TiB far."""
    stamps: NDArray[np.uint64] = _PAGE_NUMBERS + np.uint64(write << 32 | index * _PAGES)
    return stamps


def _wait(ticket: Ticket) -> int:
    """Wait in small parts: a signal's handler runs between them."""
    while True:
        with contextlib.suppress(WaitTimeout):
            return ticket.wait(0.1)


def _counters(engine: Engine) -> tuple[float, int, int]:
    stats = engine.stats()
    return time.monotonic(), stats.read.bytes, stats.write.bytes
