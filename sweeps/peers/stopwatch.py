"""`Stopwatch`: seconds, CPU time and memory growth of a `with` block."""

from __future__ import annotations

import time
from types import TracebackType
from typing import NamedTuple

from ..meter import cpu_seconds, restart_peak, status


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
        self._resident_bytes = status()["VmRSS"] if restart_peak() else 0
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
        after = status()
        self._extra_bytes = (
            max(0, after["VmHWM"] - self._resident_bytes) if self._resident_bytes else 0
        )
        self._locked_bytes = after.get("VmLck", 0) + after.get("VmPin", 0)

    def measurement(self, nbytes: int) -> Measurement:
        """The figures for *nbytes* moved."""
        return Measurement(nbytes, self._seconds, self._cpu, self._extra_bytes, self._locked_bytes)
