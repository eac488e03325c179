"""`Heartbeat`: logs every minute what moves to and from the drives, during long steps that log
nothing themselves.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

from ..units import format_bytes

if TYPE_CHECKING:
    from ..swap.tier import Tier

_SECONDS = 60.0

_log = logging.getLogger(__name__)
_beating: weakref.WeakKeyDictionary[Tier, Heartbeat] = weakref.WeakKeyDictionary()


class Heartbeat:
    """Logs what moved to and from *tier* since the last `beat`, if anything did and no step has
    ended since.

    A step of a large model takes minutes, and so does its checkpoint; an inference has no steps.
    The log shows that it is not stuck.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = weakref.ref(tier)
        self._before = tier.counters()
        self._at = time.monotonic()
        self._rested = False

    def rest(self) -> None:
        """A step has ended: the next beat logs nothing."""
        self._rested = True

    def beat(self) -> None:
        """Log what moved, if that is due."""
        tier = self._tier()
        counted = tier.counters() if tier is not None else None
        if counted is None:  # nothing is kept there yet, or any more
            return
        now, before = time.monotonic(), self._before or counted
        seconds, self._at, self._before = now - self._at, now, counted
        read, written = (
            counted.bytes_read - before.bytes_read,
            counted.bytes_written - before.bytes_written,
        )
        due, self._rested = not self._rested and bool(read or written), False
        if due:
            waited = (
                counted.read_wait_seconds
                + counted.room_wait_seconds
                - before.read_wait_seconds
                - before.room_wait_seconds
            )
            speed = (read + written) / seconds / 1e9
            _log.info(
                "still going: in the last %.0f s read %s and wrote %s, %.2f GB/s; waited %.0f s for the drive",
                *(seconds, format_bytes(read), format_bytes(written), speed, waited),
            )


def watch(tier: Tier) -> None:
    """Let *tier* beat every minute for as long as it lives."""
    if tier in _beating:
        return
    heartbeat = _beating[tier] = Heartbeat(tier)
    stopped = threading.Event()
    weakref.finalize(tier, stopped.set)
    threading.Thread(
        target=_run,
        args=(weakref.ref(heartbeat), stopped),
        name="nvme_offload heartbeat",
        daemon=True,
    ).start()


def rest(tier: Tier) -> None:
    """A step with *tier* has ended, and was logged."""
    if tier in _beating:
        _beating[tier].rest()


def _run(reference: weakref.ref[Heartbeat], stopped: threading.Event) -> None:
    while not stopped.wait(_SECONDS):
        heartbeat = reference()
        if heartbeat is None:
            return
        heartbeat.beat()
        del heartbeat  # or the tier's end would have to wait for the next beat
