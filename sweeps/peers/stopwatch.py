"""`Stopwatch`: seconds, CPU time and memory growth of a `with` block."""

from __future__ import annotations

import contextlib
import resource
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"  # proc(5), clear_refs


class Measurement(NamedTuple):
    """One run of a side. cpu_seconds: of all threads. extra_bytes: peak resident memory above the
    level at the start. locked_bytes: locked or pinned at the end. cached_bytes: of the file in the
    page cache at the end.
    """

    nbytes: int
    seconds: float
    cpu_seconds: float
    extra_bytes: int = 0
    locked_bytes: int = 0
    cached_bytes: int = 0


class Stopwatch:
    """Use `with Stopwatch() as watch:` around the transfer alone, then `watch.measurement(nbytes)`.

    Writing to clear_refs resets the kernel's peak (proc(5)); where that is refused, extra_bytes
    is 0.
    """

    def __enter__(self) -> Stopwatch:
        self._resident_bytes = _reset_peak()
        self._cpu = cpu_seconds()
        self._began = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._seconds = time.perf_counter() - self._began
        self._cpu = cpu_seconds() - self._cpu
        status = _status()
        self._extra_bytes = (
            max(0, status.get("VmHWM", 0) - self._resident_bytes) if self._resident_bytes else 0
        )
        self._locked_bytes = status.get("VmLck", 0) + status.get("VmPin", 0)

    def measurement(self, nbytes: int) -> Measurement:
        """The figures for *nbytes* moved."""
        return Measurement(nbytes, self._seconds, self._cpu, self._extra_bytes, self._locked_bytes)


def cpu_seconds() -> float:
    """CPU time of this process so far, all threads, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _reset_peak() -> int:
    """Reset the peak and return the bytes resident now; 0 where the kernel refuses."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        return _status().get("VmRSS", 0)
    return 0


def _status() -> dict[str, int]:
    """The sizes of proc(5), status, in bytes."""
    found = {}
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value[:-3]) << 10
    return found
