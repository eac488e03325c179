"""fio, as a side of a contest: the ceiling."""

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

from .plan import Job
from .rig import Place
from .stopwatch import Measurement

OPTIONS = {"sync"}
_ENGINES = {"libaio": "libaio", "io_uring": "io_uring", "posix": "psync"}
# fio leaves the memory that it reads into untouched until the drive needs it, on small pages. The C
# library fills it at allocation, before fio's clock starts, and takes huge pages where ours does.
# Source: glibc's manual, Memory Allocation Tunables.
_PREFAULT = "glibc.malloc.perturb=165"
_HUGE = "glibc.malloc.hugetlb=1"
# What fio does beside moving bytes, switched off: stamping buffers, timing every block.
_LOOK_SECONDS = 0.02
_PLAIN = (
    "--gtod_reduce=1",
    "--scramble_buffers=0",
    "--norandommap=1",
    "--fallocate=none",
    "--allow_file_create=0",
)


class Fio:
    """As many threads as ours, with as many bytes in flight; each reads or writes its part of the
    file from end to end.

    Time and CPU are fio's own, of the time in which it moves bytes: starting up counts for nothing.
    Its clock ticks in milliseconds. Option: "sync" syncs the file before its clock stops.
    Raises: UnsupportedError where fio is not installed.
    """

    def __init__(self, options: frozenset[str]) -> None:
        self._options = options
        if shutil.which("fio") is None:
            raise UnsupportedError("fio is not installed: apt-get install fio")
        self.version = subprocess.run(
            ["fio", "--version"], check=True, capture_output=True, text=True
        ).stdout.strip()

    def run(self, rig: Place, job: Job) -> Measurement:
        """Move *job* once. Raises: UnsupportedError with what fio says."""
        tunables = f"{_PREFAULT}:{_HUGE}" if job.memory == "huge" else _PREFAULT
        with tempfile.TemporaryFile("w+") as output:
            errors = subprocess.STDOUT
            with subprocess.Popen(
                self.command(rig, job),
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

    def command(self, rig: Place, job: Job) -> list[str]:
        """fio's command line for *job*: a fio job for each direction."""
        each = max(1, job.thread_count // len(job.directions))
        depth = max(1, job.queue_depth * job.thread_count // (each * len(job.directions)))
        part = job.file_bytes // each
        settings = [
            f"--ioengine={_ENGINES[job.backend]}",
            f"--iodepth={depth}",
            f"--bs={job.block_size}",
            f"--direct={int(rig.direct)}",
        ]
        if "sync" in self._options:
            settings.append("--end_fsync=1")
        places = [
            f"--size={part}",
            f"--io_size={part * job.passes}",
            f"--numjobs={each}",
            f"--offset_increment={part}",
            "--iomem_align=2m",
            "--thread",
        ]
        # What stands before the first --name holds for all.
        command = ["fio", "--output-format=json", *settings, *places, *_PLAIN]
        for direction in job.directions:
            command += [
                f"--name={direction}",
                f"--filename={rig.path(direction)}",
                f"--rw={direction}",
            ]
        return command


def _watch(process: subprocess.Popen[Any]) -> int:
    """Wait for *process*; the most that it had resident, as far as it was seen."""
    most = 0
    while True:
        try:
            process.wait(_LOOK_SECONDS)
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
    """What fio's JSON says. Jobs that ran at once took as long as the longest of them. Raises:
    UnsupportedError when bytes are missing.
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
