"""fio, as a side of a comparison: the ceiling."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from nvme_offload.errors import UnsupportedError
from nvme_offload.hardware.profile import Setting

from .. import fio
from .buffers import Shared
from .job import Job
from .stopwatch import Measurement


class Fio:
    """As many threads as the engine, with as many bytes in flight; each thread moves its part of the
    file sequentially.

    The time is fio's own figure, without its start-up; its clock has milliseconds. Raises:
    UnsupportedError where fio is not installed.
    """

    def __init__(self) -> None:
        version = fio.version()
        if version is None:
            raise UnsupportedError("fio is not installed: apt-get install fio")
        self.version = version

    def run(self, place: Shared, job: Job) -> Measurement:
        """Move *job* once. Raises: UnsupportedError with fio's message."""
        tunables = [fio.PREFAULT, *([fio.HUGE_PAGES] if job.memory == "huge" else [])]
        done = subprocess.run(
            command(place, job),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "GLIBC_TUNABLES": ":".join(tunables)},
        )
        said = done.stdout
        if done.returncode != 0:
            raise UnsupportedError(f"fio failed: {said.strip()[:500]}")
        return parse(json.loads(said[said.index("{") : said.rindex("}") + 1]), job)


def command(place: Shared, job: Job) -> list[str]:
    """fio's command line for *job*: a fio job for each direction."""
    setting = Setting(job.block_size, job.queue_depth, job.thread_count, backend=job.backend)
    paths = {direction: [str(place.path(direction))] for direction in job.directions}
    return fio.command(paths, job.file_bytes, setting, None, place.direct)


def parse(output: dict[str, Any], job: Job) -> Measurement:
    """Read fio's JSON output. Concurrent jobs take as long as the longest. Raises: UnsupportedError
    when bytes are missing.
    """
    entries = [entry[entry["jobname"]] for entry in output["jobs"]]
    nbytes = sum(moved["io_bytes"] for moved in entries)
    if nbytes != job.nbytes:
        raise UnsupportedError(f"fio moved {nbytes} of {job.nbytes} bytes")
    return Measurement(nbytes, max(moved["runtime"] for moved in entries) / 1000)
