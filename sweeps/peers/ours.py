"""This package's engine, as a side of a comparison."""

from __future__ import annotations

from nvme_offload import __version__
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine

from .buffers import Shared, memory_of, require_read, spoil
from .job import Job
from .stopwatch import Measurement, Stopwatch


class Ours:
    """Submits all requests, then waits for all. Engine, files and memory are ready before the clock
    starts.
    """

    def __init__(self) -> None:
        self.version = f"nvme-offload {__version__}"

    def run(self, place: Shared, job: Job) -> Measurement:
        """Move *job* once. Raises: OffloadError."""
        config = AioConfig(
            job.block_size, job.queue_depth, job.thread_count, job.backend, direct=place.direct
        )
        buffers = memory_of(place, job)
        with Engine(config) as engine:
            verbs = {"read": engine.read, "write": engine.write}
            files = {way: engine.open(place.path(way), way[0]) for way in job.directions}
            calls = [
                (verbs[way], buffer[begin : begin + job.request_bytes], files[way], begin)
                for begin in range(0, job.file_bytes, job.request_bytes)
                for way, buffer in buffers.items()
            ]
            if "read" in buffers:
                spoil(buffers["read"])
            with Stopwatch() as watch:
                tickets = [call(memory, file, begin) for call, memory, file, begin in calls]
                for ticket in tickets:
                    ticket.wait()
                if "write" in files:
                    files["write"].sync()
        if "read" in buffers:
            require_read(buffers["read"], "the engine")
        return watch.measurement(job.nbytes)
