"""The clock of a side: seconds, CPU time, and the memory that the process took meanwhile."""

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
    """What a side did. *cpu_seconds* are those of all threads that it used; *submit_seconds* how
    long each request took to hand over, where known.

    extra_bytes: the most that was resident beyond what was before the clock started. locked_bytes:
    locked or pinned when it stopped, all in all. cached_bytes: of the file in the page cache then,
    where the side looked.
    """

    nbytes: int
    seconds: float
    cpu_seconds: float
    submit_seconds: tuple[float, ...] = ()
    extra_bytes: int = 0
    locked_bytes: int = 0
    cached_bytes: int = 0


class Stopwatch:
    """`with Stopwatch() as watch:` around what moves the bytes, and nothing else; then
    `watch.measurement(nbytes)`.

    Source: proc(5), clear_refs, which lets the kernel forget the peak so far; where it is refused
    the memory is 0.
    """

    def __enter__(self) -> Stopwatch:
        self._resident_bytes = _forget_peak()
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

    def measurement(self, nbytes: int, submit_seconds: tuple[float, ...] = ()) -> Measurement:
        """What was measured, for *nbytes* moved."""
        return Measurement(
            nbytes, self._seconds, self._cpu, submit_seconds, self._extra_bytes, self._locked_bytes
        )


def cpu_seconds() -> float:
    """CPU time of this process so far, all threads, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _forget_peak() -> int:
    """Bytes resident now, from which on the kernel counts the peak anew; 0 where it does not."""
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
