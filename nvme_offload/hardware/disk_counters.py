"""The kernel's counters of the disks under a path: busy time and bytes written."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from pathlib import Path

from . import sysfs
from .drive import describe

_SECTOR_BYTES = 512  # of these counters, whatever the disk's own sectors are


@dataclasses.dataclass(frozen=True)
class DiskCounters:
    """Counters since boot: seconds in which each disk was busy, and bytes written to all."""

    busy_seconds: tuple[float, ...]
    written_bytes: int


class Disks:
    """The disks under some paths. Source: the kernel's block/stat.rst."""

    def __init__(self, paths: Iterable[str], *, sys: Path = Path("/sys")) -> None:
        devices: list[str] = []
        with contextlib.suppress(OSError):  # a path is gone
            devices = [device for path in paths for device in describe(path).physical_devices]
        self._files = [
            sys / "class/block" / device.removeprefix("/dev/").replace("/", "!") / "stat"
            for device in dict.fromkeys(devices)
        ]

    def counters(self) -> DiskCounters | None:
        """The counters now; None where the kernel lacks them for a disk."""
        fields = [(sysfs.read(file) or "").split() for file in self._files]
        if not fields or min(map(len, fields)) < 10:
            return None
        return DiskCounters(
            tuple(int(each[9]) / 1e3 for each in fields),
            sum(int(each[6]) for each in fields) * _SECTOR_BYTES,
        )


def busy_share(
    before: DiskCounters | None, now: DiskCounters | None, seconds: float
) -> float | None:
    """The share of *seconds* in which the busiest of the disks had requests, at most 1; None without
    counters.
    """
    if before is None or now is None:
        return None
    spent = zip(before.busy_seconds, now.busy_seconds, strict=True)
    return min(max(after - earlier for earlier, after in spent) / seconds, 1.0)
