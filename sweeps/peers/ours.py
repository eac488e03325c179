"""Our own engine, as a side of a contest."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from nvme_offload import __version__
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine, File, Ticket

from .plan import Job
from .rig import Place, memory_of, require_read, spoil
from .stopwatch import Measurement, Stopwatch

OPTIONS = {"checksum", "single", "sync"}


class Ours:
    """All requests are submitted, then all are waited for. Engine, files and memory are ready
    before the clock starts.

    Options: "checksum" computes checksums; "single" is single_submit, which keeps the kernel from
    merging neighbouring blocks into larger ones; "sync" syncs the file before the clock stops.
    """

    def __init__(self, options: frozenset[str]) -> None:
        self._options = options
        self.version = f"nvme-offload {__version__}"

    def run(self, rig: Place, job: Job) -> Measurement:
        """Move *job* once. Raises: OffloadError."""
        config = AioConfig(
            job.block_size,
            job.queue_depth,
            job.thread_count,
            job.backend,
            "single" in self._options,
            direct=rig.direct,
        )
        buffers = memory_of(rig, job)
        with Engine(config) as engine:
            calls: list[tuple[Callable[..., Ticket], Any, Any, int]] = []
            verbs: dict[str, Callable[..., Ticket]] = {"read": engine.read, "write": engine.write}
            files = {
                direction: engine.open(rig.path(direction), direction[0])
                for direction in job.directions
            }
            for begin in range(0, job.file_bytes * job.passes, job.request_bytes):
                place = begin % job.footprint_bytes
                for direction, buffer in buffers.items():
                    calls.append(
                        (
                            verbs[direction],
                            buffer[place : place + job.request_bytes],
                            files[direction],
                            begin % job.file_bytes,
                        )
                    )
            if "read" in buffers:
                spoil(buffers["read"])
            to_sync = files.get("write") if "sync" in self._options else None
            measurement = self._time(calls, job.nbytes, to_sync)
        if "read" in buffers:
            require_read(buffers["read"], "the engine")
        return measurement

    def _time(
        self,
        calls: list[tuple[Callable[..., Ticket], Any, Any, int]],
        nbytes: int,
        to_sync: File | None,
    ) -> Measurement:
        tickets, moments = [], []
        checksum = "checksum" in self._options
        with Stopwatch() as watch:
            for verb, memory, file, offset in calls:
                moments.append(time.perf_counter())
                tickets.append(verb(memory, file, offset, checksum=checksum))
            moments.append(time.perf_counter())
            for ticket in tickets:
                ticket.wait()
            if to_sync is not None:
                to_sync.sync()
        submits = tuple(after - before for before, after in itertools.pairwise(moments))
        return watch.measurement(nbytes, submits)
