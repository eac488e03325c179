"""fio on the files of a sweep, if it is installed: an independent measurement of the drive's limit."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from nvme_offload.errors import UnsupportedError
from nvme_offload.hardware.profile import Setting

_ENGINES = {"libaio": "libaio", "io_uring": "io_uring", "posix": "psync"}
# fio leaves the memory that it reads into untouched until the drive needs it, on small pages. The C
# library fills it at allocation, before fio's clock starts, and takes huge pages where ours does.
# Source: glibc's manual, Memory Allocation Tunables.
PREFAULT, HUGE_PAGES = "glibc.malloc.perturb=165", "glibc.malloc.hugetlb=1"
_RAMP = "100ms"  # before it counts: the queues fill
# Work of fio other than transfers, switched off: stamping buffers, timing every block, keeping a map
# of the blocks that it touched.
_PLAIN = (
    "--gtod_reduce=1 --scramble_buffers=0 --norandommap=1 --fallocate=none --allow_file_create=0"
)


@functools.cache
def version() -> str | None:
    """fio's version; None if it is not installed."""
    if shutil.which("fio") is None:
        return None
    ran = subprocess.run(["fio", "--version"], capture_output=True, text=True)
    return ran.stdout.strip() or None if ran.returncode == 0 else None


def command(
    paths: Mapping[str, Sequence[str]],
    file_bytes: int,
    setting: Setting,
    seconds: float | None,
    direct: bool,
) -> list[str]:
    """fio's command line: *paths* by direction, each with a file of *file_bytes* for each rank, for
    *seconds*, or once and synced.
    """
    each = max(1, setting.thread_count // len(paths))
    depth = max(1, setting.queue_depth * setting.thread_count // (each * len(paths)))
    part = file_bytes // each // setting.block_size * setting.block_size
    words = [
        *("fio", "--output-format=json", f"--ioengine={_ENGINES[setting.backend]}"),
        *(f"--iodepth={depth}", f"--bs={setting.block_size}", f"--direct={int(direct)}"),
        *(f"--size={part}", f"--numjobs={each}", f"--offset_increment={part}", "--thread"),
        *("--iomem_align=2m", *_PLAIN.split()),
    ]
    if seconds is None:
        words.append("--end_fsync=1")
    else:
        words += ["--time_based", f"--runtime={round(1000 * seconds)}ms", f"--ramp_time={_RAMP}"]
    for direction, files in paths.items():
        for path in files:
            words += [f"--name={direction}", f"--filename={path}", f"--rw={direction}"]
    return words


def bytes_per_second(
    paths: Mapping[str, Sequence[str]],
    file_bytes: int,
    setting: Setting,
    seconds: float,
    direct: bool,
) -> list[float]:
    """The speeds that fio reaches in *seconds* with all files of each direction of *paths*. Raises:
    UnsupportedError.
    """
    words = command(paths, file_bytes, setting, seconds, direct)
    ran = subprocess.run(
        words,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "GLIBC_TUNABLES": f"{PREFAULT}:{HUGE_PAGES}"},
    )
    if ran.returncode != 0:
        raise UnsupportedError(f"fio failed: {' '.join((ran.stderr or ran.stdout).split())[:300]}")
    return [parse(ran.stdout, direction) for direction in paths]


def parse(output: str, direction: str) -> float:
    """Bytes per second in *direction* of all jobs in fio's JSON. Raises: UnsupportedError."""
    jobs = [one[direction] for one in json.loads(output[output.index("{") :])["jobs"]]
    total = sum(one["io_bytes"] / one["runtime"] * 1000 for one in jobs if one["runtime"])
    if not total:
        raise UnsupportedError("fio moved nothing")
    return float(total)
