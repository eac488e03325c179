"""Waits for another thread, which Ctrl-C ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

# A signal that comes just before a thread blocks does not wake it. Source: acquire_timed of
# CPython's Modules/_threadmodule.c, which looks at signals once the lock is taken or a signal has
# cut the wait short.
_LOOK_SECONDS = 0.5


def wait_for(condition: threading.Condition, is_true: Callable[[], bool]) -> None:
    """As `threading.Condition.wait_for`, looking up now and then for signals."""
    while not condition.wait_for(is_true, _LOOK_SECONDS):
        pass
