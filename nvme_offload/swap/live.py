"""`Live` logs the progress of a long step while it runs."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING

from ..hardware.disk_counters import DiskCounters, Disks, busy_share
from ..units import format_bytes

if TYPE_CHECKING:
    from .swapper import SwapperStats
    from .tier import Tier

# A step is logged after this time. It is also the shortest time between two lines.
_SECONDS = 10.0
# Approximate number of lines of a step.
_LINES = 10

_log = logging.getLogger(__name__)
_live: weakref.WeakKeyDictionary[Tier, Live] = weakref.WeakKeyDictionary()
_threads: weakref.WeakKeyDictionary[Tier, threading.Thread] = weakref.WeakKeyDictionary()


class Live:
    """Logs the transfers of *tier* while a step lasts for more than ten seconds, if there are any:
    how busy the drives are, how long the step waited for them, and when it will end, judging by the
    step before.

    A step of a large model takes minutes, its checkpoint too, and an inference has no steps. The
    lines show the user that work is making progress.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = weakref.ref(tier)
        self._disks = Disks(tier.paths)
        self._lock = threading.RLock()  # see `Catalog.lock`
        self._last = 0, 0.0  # the bytes moved and the seconds of the last whole step
        self._begin(tier.counters(), self._disks.counters())

    def _begin(self, counted: SwapperStats | None, disks: DiskCounters | None) -> None:
        self._began = self._logged = time.monotonic()
        self._before, self._disks_before = counted, disks
        self._bytes_at_begin = counted.bytes_moved if counted is not None else 0

    def begin(self, disks: DiskCounters | None, *, ended: bool) -> None:
        """Begin a step, with the counters *disks*. *ended*: it follows the previous step."""
        tier = self._tier()
        counted = tier.counters() if tier is not None else None
        with self._lock:
            if ended and counted is not None:
                moved = counted.bytes_moved - self._bytes_at_begin
                self._last = moved, time.monotonic() - self._began
            self._begin(counted, disks)

    def due_in(self) -> float:
        """Seconds until the next line."""
        now = time.monotonic()
        with self._lock:
            expected = max(self._last[1], now - self._began)
            is_first = self._logged == self._began
            return self._logged + (_SECONDS if is_first else max(_SECONDS, expected / _LINES)) - now

    def log_line(self) -> None:
        """Log a line, if any bytes moved since the last line."""
        tier = self._tier()
        counted = tier.counters() if tier is not None else None
        if counted is None:  # the tier has no swapper, or no longer has one
            return
        disks = self._disks.counters()
        with self._lock:
            moved = counted.bytes_moved - self._bytes_at_begin
            if moved < 0:  # the step ended meanwhile
                return
            now, before, disks_before = time.monotonic(), self._before, self._disks_before
            seconds, elapsed = now - self._logged, now - self._began
            self._logged, self._before, self._disks_before = now, counted, disks
            last_moved, last_seconds = self._last
        if before is None or counted.bytes_moved == before.bytes_moved:
            return
        read = counted.bytes_read - before.bytes_read
        written = counted.bytes_written - before.bytes_written
        share = busy_share(disks_before, disks, seconds)
        busy = f", busy {share:.0%} of the time" if share is not None else ""
        left = last_seconds - elapsed
        expected = left > 0 and moved <= last_moved
        end = f"; about {left:.0f} s to the end of the step" if expected else ""
        _log.info(
            "still going: in the last %.0f s read %s and wrote %s, %.2f GB/s; waited %.1f s for the drive%s%s",
            *(seconds, format_bytes(read), format_bytes(written), (read + written) / seconds / 1e9),
            *(counted.waited_seconds - before.waited_seconds, busy, end),
        )


def watch(tier: Tier) -> Live:
    """The object that logs the steps of *tier* for as long as it lives, at level INFO."""
    if tier not in _live:
        _live[tier] = Live(tier)
    if _log.isEnabledFor(logging.INFO) and tier not in _threads:
        stopped: queue.SimpleQueue[None] = queue.SimpleQueue()  # a finalizer may put to it
        weakref.finalize(tier, stopped.put, None)
        thread = threading.Thread(
            target=_run,
            args=(weakref.ref(_live[tier]), stopped),
            name="nvme_offload live progress",
            daemon=True,
        )
        _threads[tier] = thread
        thread.start()
    return _live[tier]


def _run(reference: weakref.ref[Live], stopped: queue.SimpleQueue[None]) -> None:
    wait = _SECONDS
    while True:
        with contextlib.suppress(queue.Empty):
            stopped.get(timeout=wait)
            return
        live = reference()
        if live is None:
            return
        if live.due_in() <= 0:
            live.log_line()
        # Wake up often enough to log the first line of a step that begins meanwhile in time.
        wait = min(max(live.due_in(), 0.0), _SECONDS)
        del live  # otherwise the tier could not be freed before the next line
