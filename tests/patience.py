"""How long a test waits for an event that must happen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

# Seconds. What hangs fails after it; a machine whose disk or cores are taken for minutes, as those
# that many share are, passes. Below the limit of a whole test in pyproject.toml. A test of how soon
# something ends has its own limit.
PATIENCE = float(os.environ.get("PATIENCE", "1200"))


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether *condition* becomes true in time, for actions of the kernel or of other threads."""
    end = time.monotonic() + PATIENCE
    while not (now := condition()) and time.monotonic() < end:
        os.sched_yield()
    return now
