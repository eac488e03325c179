"""`Stopwatch`: seconds and CPU time of a `with` block."""

from __future__ import annotations

import time
from typing import NamedTuple

from ..meter import cpu_seconds


class Measurement(NamedTuple):
    """One run of a side. cpu_seconds: of all threads."""

    nbytes: int
    seconds: float
    cpu_seconds: float


class Stopwatch:
    """Use `with Stopwatch() as watch:` around the transfer alone, then `watch.measurement(nbytes)`."""

    def __enter__(self) -> Stopwatch:
        self._cpu, self._began = cpu_seconds(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds = time.perf_counter() - self._began
        self._cpu = cpu_seconds() - self._cpu

    def measurement(self, nbytes: int) -> Measurement:
        """The figures for *nbytes* moved."""
        return Measurement(nbytes, self._seconds, self._cpu)
