"""fio, as a side of a comparison: the ceiling."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from nvme_offload.errors import UnsupportedError
from nvme_offload.hardware.profile import Setting
from nvme_offload.tune import fio

from .buffers import Place
from .job import Job
from .stopwatch import Measurement

_POLL_SECONDS = 0.02


class Fio:
    """As many threads as the engine, with as many bytes in flight; each thread moves its part of the
    file sequentially.

    Time and CPU are fio's own figures, without its start-up; its clock has milliseconds. Raises:
    UnsupportedError where fio is not installed.
    """

    def __init__(self) -> None:
        version = fio.version()
        if version is None:
            raise UnsupportedError("fio is not installed: apt-get install fio")
        self.version = version

    def run(self, place: Place, job: Job) -> Measurement:
        """Move *job* once. Raises: UnsupportedError with fio's message."""
        tunables = [fio.PREFAULT, *([fio.HUGE_PAGES] if job.memory == "huge" else [])]
        with tempfile.TemporaryFile("w+") as output:
            errors = subprocess.STDOUT
            with subprocess.Popen(
                command(place, job),
                stdout=output,
                stderr=errors,
                env={**os.environ, "GLIBC_TUNABLES": ":".join(tunables)},
            ) as process:
                resident_bytes = _watch(process)
            output.seek(0)
            said = output.read()
        if process.returncode != 0:
            raise UnsupportedError(f"fio failed: {said.strip()[:500]}")
        return parse(json.loads(said[said.index("{") : said.rindex("}") + 1]), job)._replace(
            extra_bytes=resident_bytes
        )


def command(place: Place, job: Job) -> list[str]:
    """fio's command line for *job*: a fio job for each direction."""
    setting = Setting(job.block_size, job.queue_depth, job.thread_count, backend=job.backend)
    paths = {direction: [str(place.path(direction))] for direction in job.directions}
    return fio.command(paths, job.file_bytes, setting, None, place.direct)


def _watch(process: subprocess.Popen[Any]) -> int:
    """Wait for *process* and return its peak resident bytes, sampled."""
    most = 0
    while True:
        try:
            process.wait(_POLL_SECONDS)
            return most
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                most = max(
                    [
                        most,
                        *(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")),
                    ]
                )


def parse(output: dict[str, Any], job: Job) -> Measurement:
    """Read fio's JSON output. Concurrent jobs take as long as the longest. Raises: UnsupportedError
    when bytes are missing.
    """
    entries = [(entry, entry[entry["jobname"]]) for entry in output["jobs"]]
    nbytes = sum(moved["io_bytes"] for _, moved in entries)
    if nbytes != job.nbytes:
        raise UnsupportedError(f"fio moved {nbytes} of {job.nbytes} bytes")
    cpu = sum(
        (entry["usr_cpu"] + entry["sys_cpu"]) / 100 * entry["job_runtime"] / 1000
        for entry, _ in entries
    )
    return Measurement(nbytes, max(moved["runtime"] for _, moved in entries) / 1000, cpu)
