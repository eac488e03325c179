"""fio, as a side of a comparison: the ceiling."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from nvme_offload.errors import UnsupportedError

from .buffers import Place
from .job import Job
from .stopwatch import Measurement

_ENGINES = {"libaio": "libaio", "io_uring": "io_uring", "posix": "psync"}
# By default fio's read buffers are on small pages that the first read faults in. These tunables make
# the C library fill them at allocation, before fio's clock starts, and use huge pages as the engine
# does. Source: glibc's manual, Memory Allocation Tunables.
_PREFAULT = "glibc.malloc.perturb=165"
_HUGE = "glibc.malloc.hugetlb=1"
# Switch off work that other sides do not do: stamping buffers, timing every block.
_POLL_SECONDS = 0.02
_PLAIN = (
    "--gtod_reduce=1",
    "--scramble_buffers=0",
    "--norandommap=1",
    "--fallocate=none",
    "--allow_file_create=0",
)


class Fio:
    """As many threads as the engine, with as many bytes in flight; each thread moves its part of the
    file sequentially.

    Time and CPU are fio's own figures, without its start-up; its clock has milliseconds. Raises:
    UnsupportedError where fio is not installed.
    """

    def __init__(self) -> None:
        if shutil.which("fio") is None:
            raise UnsupportedError("fio is not installed: apt-get install fio")
        self.version = subprocess.run(
            ["fio", "--version"], check=True, capture_output=True, text=True
        ).stdout.strip()

    def run(self, place: Place, job: Job) -> Measurement:
        """Move *job* once. Raises: UnsupportedError with fio's message."""
        tunables = f"{_PREFAULT}:{_HUGE}" if job.memory == "huge" else _PREFAULT
        with tempfile.TemporaryFile("w+") as output:
            errors = subprocess.STDOUT
            with subprocess.Popen(
                self.command(place, job),
                stdout=output,
                stderr=errors,
                env={**os.environ, "GLIBC_TUNABLES": tunables},
            ) as process:
                resident_bytes = _watch(process)
            output.seek(0)
            said = output.read()
        if process.returncode != 0:
            raise UnsupportedError(f"fio failed: {said.strip()[:500]}")
        return parse(json.loads(said[said.index("{") : said.rindex("}") + 1]), job)._replace(
            extra_bytes=resident_bytes
        )

    def command(self, place: Place, job: Job) -> list[str]:
        """fio's command line for *job*: a fio job for each direction."""
        each = max(1, job.thread_count // len(job.directions))
        depth = max(1, job.queue_depth * job.thread_count // (each * len(job.directions)))
        part = job.file_bytes // each
        settings = [
            f"--ioengine={_ENGINES[job.backend]}",
            f"--iodepth={depth}",
            f"--bs={job.block_size}",
            f"--direct={int(place.direct)}",
            "--end_fsync=1",
        ]
        places = [
            f"--size={part}",
            f"--numjobs={each}",
            f"--offset_increment={part}",
            "--iomem_align=2m",
            "--thread",
        ]
        # Options before the first --name apply to all jobs.
        command = ["fio", "--output-format=json", *settings, *places, *_PLAIN]
        for direction in job.directions:
            command += [
                f"--name={direction}",
                f"--filename={place.path(direction)}",
                f"--rw={direction}",
            ]
        return command


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
