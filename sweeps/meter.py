"""Time, CPU, drive traffic, memory and planning time of a part of a run, from counters read before
and after.

Source: proc_pid_status(5), proc_pid_io(5), proc_pid_clear_refs(5).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nvme_offload.hardware.drive import describe
from nvme_offload.swap.swapper import TensorSwapper

from .peers.stopwatch import cpu_seconds

_SECTOR_BYTES = 512  # of /proc/diskstats, independent of the drive
_STATUS_FIELDS = ("VmRSS", "VmHWM")
_CALLS = ("create", "swap_in", "release", "swap_out", "prefetch", "discard", "step")


class Traffic(NamedTuple):
    """Bytes read and written on all drives, and seconds in which the busiest had requests in flight."""

    read: int
    written: int
    busy_seconds: float


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
    found = Traffic(0, 0, 0.0)
    for line in text.splitlines():
        fields = line.split()
        if fields[2] in names:
            read, written, busy = (int(fields[number]) for number in (5, 9, 12))
            found = Traffic(
                found.read + read * _SECTOR_BYTES,
                found.written + written * _SECTOR_BYTES,
                max(found.busy_seconds, busy / 1e3),
            )
    return found


class Planning:
    """CPU seconds of the calling thread in the methods of every `TensorSwapper`, and the number of
    uses. A nested call counts once.
    """

    def __init__(self) -> None:
        self.seconds, self.uses, self._depth = 0.0, 0, 0
        for name in _CALLS:
            setattr(
                TensorSwapper,
                name,
                self._counted(getattr(TensorSwapper, name), name in ("create", "swap_in")),
            )

    def _counted(self, method: Callable[..., Any], is_use: bool) -> Callable[..., Any]:
        @functools.wraps(method)
        def counted(*arguments: Any, **options: Any) -> Any:
            self.uses += is_use
            self._depth += 1
            began = time.thread_time()
            try:
                return method(*arguments, **options)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.thread_time() - began

        return counted


class Meter:
    """Counters of this process and of the drives under *directory*."""

    def __init__(self, directory: Path) -> None:
        self._disk, self._planning = Disk(directory), Planning()

    @contextlib.contextmanager
    def stretch(self) -> Iterator[dict[str, float]]:
        """Measure the `with` block; the figures are there at its end, by name.

        "began" and "ended" are of the monotonic clock, which all processes of a machine share. The
        kernel counts "read_bytes" and "written_bytes" for this process, "disk_read_bytes" and
        "disk_written_bytes" for the drives.
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
            "busy_seconds": disk.busy_seconds,
            "planning_seconds": self._planning.seconds,
            "uses": self._planning.uses,
            "cpu_seconds": cpu_seconds(),
        }


class Memory(NamedTuple):
    """Resident bytes of a process, now and at the peak."""

    resident: int
    peak: int


def parse_status(text: str) -> Memory | None:
    """What /proc/PID/status says; None of a process that has ended."""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    if "VmRSS" not in fields:
        return None
    return Memory(*(int(fields.get(name, "0 kB").split()[0]) * 1024 for name in _STATUS_FIELDS))


def parse_io(text: str) -> tuple[int, int]:
    """Bytes from and to drives, as /proc/PID/io says."""
    fields = dict(line.split(":") for line in text.splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def memory_of(process: int | str) -> Memory | None:
    """Of a process by its number, or "self"; None when it has ended."""
    try:
        return parse_status(Path(f"/proc/{process}/status").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def traffic() -> tuple[int, int]:
    """Bytes that this process has read from and written to drives."""
    try:
        return parse_io(Path("/proc/self/io").read_text())
    except OSError:  # a kernel without it
        return 0, 0


def restart_peak() -> None:
    """Reset the peak to the current resident size, where the kernel supports it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
