"""How long a test waits for what surely comes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

# Seconds. What hangs fails after it; a machine whose disk or cores are taken for minutes, as those
# that many share are, passes. Below the limit of a whole test in pyproject.toml.
PATIENCE = float(os.environ.get("PATIENCE", "1200"))
# Seconds in which what is told to end has ended, where nobody is to be left waiting: less than any
# time-out of a program's own, of which gloo's are 600.
SOON = 300.0


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether *condition* comes true in time, for what the kernel or other threads do when they like."""
    end = time.monotonic() + PATIENCE
    while not (now := condition()) and time.monotonic() < end:
        os.sched_yield()
    return now
