"""Facts of the machine for a report."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

from nvme_offload.hardware.drive import describe
from nvme_offload.hardware.machine import physical_bytes
from nvme_offload.units import format_bytes


def facts(directory: Path, module: str) -> dict[str, str]:
    """The facts of the machine and the command line of *module*, by name."""
    drive = describe(directory)
    disk = ", ".join(filter(None, (drive.model, *drive.physical_devices, *drive.layers)))
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "processor": f"{_processor()}, {os.cpu_count()} cores, {format_bytes(physical_bytes())} of memory",
        "kernel": f"{platform.system()} {platform.release()}",
        "drive": f"{disk or drive.device}; requests up to {drive.max_block_kib} KiB, scheduler {drive.scheduler}",
        "filesystem": f"{drive.filesystem} ({', '.join(drive.mount_options)}) at {drive.mount_point}, {format_bytes(drive.free_bytes)} free",
        "versions": f"{commit()}, torch {importlib.metadata.version('torch')}",
        "load at the start": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def commit() -> str:
    """The commit that this was run from."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        asked = ["git", "describe", "--always", "--dirty"]
        described = subprocess.run(
            asked, check=True, capture_output=True, text=True, cwd=Path(__file__).parent
        ).stdout.strip()
        return f"commit {described}"
    return "commit unknown"
