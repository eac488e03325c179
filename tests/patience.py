"""How long a test waits for what surely comes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

# Seconds. What hangs fails after it; a machine whose disk or cores are taken for minutes, as those
# that many share are, passes. Below the limit of a whole test in pyproject.toml. A test of how soon
# something ends has a limit of its own.
PATIENCE = float(os.environ.get("PATIENCE", "1200"))


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether *condition* comes true in time, for what the kernel or other threads do when they like."""
    end = time.monotonic() + PATIENCE
    while not (now := condition()) and time.monotonic() < end:
        os.sched_yield()
    return now
