"""Time, CPU, drive traffic and memory of a part of a run, from counters read before and after.

Source: proc_pid_status(5), proc_pid_io(5), proc_pid_clear_refs(5).
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nvme_offload.hardware.drive import describe

_SECTOR_BYTES = 512  # of /proc/diskstats, independent of the drive


class Traffic(NamedTuple):
    """Bytes read and written on all drives. busy: seconds with requests in flight, the mean over the
    drives. waiting: the sum of the seconds that requests were in flight.
    """

    read: int
    written: int
    busy: float
    waiting: float


class Disk:
    """The kernel's counters of the drives under a directory, for all processes. Source:
    Documentation/admin-guide/iostats.rst of the kernel.
    """

    def __init__(self, directory: Path) -> None:
        drive = describe(directory)
        self._names = {Path(name).name for name in drive.physical_devices} or {
            Path(drive.device).name
        }

    def read(self) -> Traffic:
        """Since the machine started."""
        return parse_diskstats(Path("/proc/diskstats").read_text(), self._names)


def parse_diskstats(text: str, names: set[str]) -> Traffic:
    """Sum the lines of /proc/diskstats with these names."""
    table = [fields for line in text.splitlines() if (fields := line.split())[2] in names]
    read, written, busy, waiting = (
        sum(int(fields[column]) for fields in table) for column in (5, 9, 12, 13)
    )
    return Traffic(
        read * _SECTOR_BYTES,
        written * _SECTOR_BYTES,
        busy / 1e3 / max(len(table), 1),
        waiting / 1e3,
    )


class Meter:
    """Counters of this process and of the drives under *directory*."""

    def __init__(self, directory: Path) -> None:
        self._disk = Disk(directory)

    @contextlib.contextmanager
    def stretch(self) -> Iterator[dict[str, float]]:
        """Measure the `with` block; the figures are there at its end, by name.

        "began" and "ended" are of the monotonic clock, which all processes of a machine share. The
        kernel counts "read_bytes" and "written_bytes" for this process, "disk_read_bytes" and
        "disk_written_bytes" for the drives; "disk_busy_seconds" and "disk_request_seconds" are of
        `Traffic`.
        """
        found: dict[str, float] = {}
        before, began = self._now(), time.monotonic()
        yield found
        ended, after = time.monotonic(), self._now()
        found |= {name: after[name] - value for name, value in before.items()}
        found |= {"began": began, "ended": ended, "seconds": ended - began}

    def _now(self) -> dict[str, float]:
        disk, (read, written) = self._disk.read(), traffic()
        return {
            "read_bytes": read,
            "written_bytes": written,
            "disk_read_bytes": disk.read,
            "disk_written_bytes": disk.written,
            "disk_busy_seconds": disk.busy,
            "disk_request_seconds": disk.waiting,
            "cpu_seconds": cpu_seconds(),
        }


def traffic() -> tuple[int, int]:
    """Bytes that this process has read from and written to drives."""
    try:
        return parse_io(Path("/proc/self/io").read_text())
    except OSError:  # a kernel without it
        return 0, 0


def parse_io(text: str) -> tuple[int, int]:
    """Bytes from and to drives, as /proc/PID/io says."""
    fields = dict(line.split(":") for line in text.splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def cpu_seconds() -> float:
    """CPU time of this process so far, all threads, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def status() -> dict[str, int]:
    """The sizes of /proc/self/status, in bytes: "VmRSS", resident, and "VmHWM", its peak."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value[:-3]) << 10
    return found


def restart_peak() -> bool:
    """Reset the peak to the current resident size; whether the kernel supports it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
