"""What a small request costs: the way to a worker and back, waking up, and asking for statistics.
For the engine alone, as no peer has these.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine

from .rig import Rig

_BYTES = 4096
_BUSY_BYTES = 256 << 20


class Latencies(NamedTuple):
    """Seconds, one entry for each time, all interleaved.

    pread: the same read as a system call. polled: a request whose `done()` was asked until it said
    yes. waited: one that was waited for. stats: `Engine.stats()` while a large read was under way.
    """

    backend: str
    place: str
    pread: list[float]
    polled: list[float]
    waited: list[float]
    stats: list[float]


def measure(rig: Rig, backend: str, count: int) -> Latencies:
    """Read 4 KiB *count* times in each way. Raises: OffloadError, OSError."""
    everywhere = os.sched_getaffinity(0)
    here = {min(everywhere)}
    try:
        # Worker threads inherit where they may run. Apart, or a caller that polls keeps the worker
        # from the core that both were put on.
        os.sched_setaffinity(0, everywhere - here or here)
        with Engine(AioConfig(queue_depth=8, backend=backend, direct=rig.direct)) as engine:
            os.sched_setaffinity(0, here)
            return _measure(rig, engine, count)
    finally:
        os.sched_setaffinity(0, everywhere)


def _measure(rig: Rig, engine: Engine, count: int) -> Latencies:
    backend = engine.config.backend
    found = Latencies(backend, str(rig.path("read").parent.parent), [], [], [], [])
    path, buffer = rig.path("read"), rig.buffers.get("huge", 0)
    block = buffer[:_BYTES].data
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if rig.direct else 0))
    clock = time.perf_counter
    try:
        with engine.open(path) as file:
            for index in range(count):
                offset = index * _BYTES % rig.nbytes
                began = clock()
                os.preadv(descriptor, [block], offset)
                found.pread.append(clock() - began)

                began = clock()
                ticket = engine.read(block, file, offset)
                while not ticket.done():
                    pass
                found.polled.append(clock() - began)

                began = clock()
                engine.read(block, file, offset).wait()
                found.waited.append(clock() - began)
            large = engine.read(buffer[: min(_BUSY_BYTES, rig.nbytes)], file)
            while not large.done() and len(found.stats) < count:
                began = clock()
                engine.stats()
                found.stats.append(clock() - began)
            large.wait()
    finally:
        os.close(descriptor)
    return found
