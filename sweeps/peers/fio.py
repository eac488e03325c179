"""fio, as a side of a contest: the ceiling."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

from nvme_offload.errors import UnsupportedError

from .plan import Job
from .rig import Measurement, Rig

OPTIONS = {"registered"}
_ENGINES = {"libaio": "libaio", "io_uring": "io_uring", "posix": "psync"}
# fio leaves the memory that it reads into untouched until the drive needs it, on small pages. The C library fills it at allocation, before fio's
# clock starts, and takes huge pages where ours does. Source: glibc's manual, Memory Allocation Tunables.
_PREFAULT = "glibc.malloc.perturb=165"
_HUGE = "glibc.malloc.hugetlb=1"
# What fio does beside moving bytes, switched off: stamping buffers, timing every block.
_PLAIN = ("--gtod_reduce=1", "--scramble_buffers=0", "--norandommap=1", "--fallocate=none", "--allow_file_create=0")


class Fio:
    """As many threads as ours, with as many bytes in flight; each reads or writes its part of the file from end to end.

    Time and CPU are fio's own, of the time in which it moves bytes: starting up counts for nothing. Its clock ticks in milliseconds.
    Options: "registered" registers files and memory with io_uring.
    Raises: UnsupportedError where fio is not installed.
    """

    def __init__(self, options: frozenset[str]) -> None:
        self._options = options
        if shutil.which("fio") is None:
            raise UnsupportedError("fio is not installed: apt-get install fio")
        self.version = subprocess.run(["fio", "--version"], check=True, capture_output=True, text=True).stdout.strip()

    def run(self, rig: Rig, job: Job) -> Measurement:
        """Move *job* once. Raises: UnsupportedError with what fio says."""
        tunables = f"{_PREFAULT}:{_HUGE}" if job.memory == "huge" else _PREFAULT
        ran = subprocess.run(self.command(rig, job), capture_output=True, text=True, env={**os.environ, "GLIBC_TUNABLES": tunables})
        if ran.returncode != 0:
            raise UnsupportedError(f"fio failed: {(ran.stderr or ran.stdout).strip()[:500]}")
        return parse(json.loads(ran.stdout[ran.stdout.index("{") :]), job)

    def command(self, rig: Rig, job: Job) -> list[str]:
        """fio's command line for *job*: a fio job for each direction."""
        each = max(1, job.thread_count // len(job.directions))
        depth = max(1, job.queue_depth * job.thread_count // (each * len(job.directions)))
        part = job.file_bytes // each
        settings = [f"--ioengine={_ENGINES[job.backend]}", f"--iodepth={depth}", f"--bs={job.block_size}", f"--direct={int(rig.direct)}"]
        if "registered" in self._options:
            settings += ["--registerfiles=1", "--fixedbufs=1"]
        places = [f"--size={part}", f"--io_size={part * job.passes}", f"--numjobs={each}", f"--offset_increment={part}", "--iomem_align=2m", "--thread"]
        # What stands before the first --name holds for all.
        command = ["fio", "--output-format=json", *settings, *places, *_PLAIN]
        for direction in job.directions:
            command += [f"--name={direction}", f"--filename={rig.path(direction)}", f"--rw={direction}"]
        return command


def parse(output: dict[str, Any], job: Job) -> Measurement:
    """What fio's JSON says. Jobs that ran at once took as long as the longest of them. Raises: UnsupportedError when bytes are missing."""
    entries = [(entry, entry[entry["jobname"]]) for entry in output["jobs"]]
    nbytes = sum(moved["io_bytes"] for _, moved in entries)
    if nbytes != job.nbytes:
        raise UnsupportedError(f"fio moved {nbytes} of {job.nbytes} bytes")
    cpu = sum((entry["usr_cpu"] + entry["sys_cpu"]) / 100 * entry["job_runtime"] / 1000 for entry, _ in entries)
    return Measurement(nbytes, max(moved["runtime"] for _, moved in entries) / 1000, cpu)
