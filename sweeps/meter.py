"""What a stretch of a run does to the drive, and what planning it takes: counters that are read
before and after.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nvme_offload.hardware.drive import describe
from nvme_offload.swap.swapper import TensorSwapper

_SECTOR_BYTES = 512  # of /proc/diskstats, whatever the drive's own are
_CALLS = ("create", "swap_in", "release", "swap_out", "prefetch", "discard", "step")


class Traffic(NamedTuple):
    """Bytes read and written, of all drives, and seconds in which anything was in flight, of the
    busiest; and the seconds that all requests took, summed, so that over a second they are how many
    are in flight.
    """

    read: int
    written: int
    busy_seconds: float
    read_seconds: float = 0.0
    write_seconds: float = 0.0


class Disk:
    """The drives under a directory, as the kernel counts them, whoever uses them. Source:
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
    """What /proc/diskstats says of the drives with these names."""
    found = Traffic(0, 0, 0.0)
    for line in text.splitlines():
        fields = line.split()
        if fields[2] in names:
            read, written, reading, writing, busy = (
                int(fields[number]) for number in (5, 9, 6, 10, 12)
            )
            found = Traffic(
                found.read + read * _SECTOR_BYTES,
                found.written + written * _SECTOR_BYTES,
                max(found.busy_seconds, busy / 1e3),
                found.read_seconds + reading / 1e3,
                found.write_seconds + writing / 1e3,
            )
    return found


class Planning:
    """CPU seconds of the calling thread in the calls of every `TensorSwapper`, and how often a
    value was asked for. A call within a call counts once.
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
