"""`Stopwatch`: the seconds of a `with` block."""

from __future__ import annotations

import time
from typing import NamedTuple


class Measurement(NamedTuple):
    """One run of a side."""

    nbytes: int
    seconds: float


class Stopwatch:
    """Use `with Stopwatch() as watch:` around the transfer alone, then `watch.measurement(nbytes)`."""

    def __enter__(self) -> Stopwatch:
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds = time.perf_counter() - self._began

    def measurement(self, nbytes: int) -> Measurement:
        """The figures for *nbytes* moved."""
        return Measurement(nbytes, self._seconds)
