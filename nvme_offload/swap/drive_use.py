"""`DriveUse`: what a step moved to and from the drives of a tier, and how long it waited for them;
a `Meter` reads it off.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from ..errors import OffloadError
from ..hardware import profile_shelf

if TYPE_CHECKING:
    from .swapper import SwapperStats
    from .tier import Tier


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriveUse:
    """One step.

    step: counted from 1. seconds: all of it. bytes_read, bytes_written: from and to the drives.
    waited_seconds: in which the step stood still for a drive. resident_bytes: of what is offloaded,
    those that are in host memory at the end. peak_bytes: the most host memory of the pool that was
    ever in use. tuned_bytes_per_second: what the drive's profile promises for reads and writes at
    once; None where the drive has no profile.
    """

    step: int
    seconds: float
    bytes_read: int
    bytes_written: int
    waited_seconds: float
    resident_bytes: int
    peak_bytes: int
    tuned_bytes_per_second: float | None

    @property
    def bytes_per_second(self) -> float:
        """Both directions together, over the whole step."""
        return (self.bytes_read + self.bytes_written) / self.seconds

    def __str__(self) -> str:
        text = (
            f"step {self.step}: {self._duration()}; read {self.bytes_read / 1e9:.2f} GB and wrote {self.bytes_written / 1e9:.2f} GB, "
            f"{self.bytes_per_second / 1e9:.2f} GB/s; waited {self.waited_seconds:.2f} s for the drive ({self.waited_seconds / self.seconds:.0%})"
        )
        if self.tuned_bytes_per_second is not None:
            text += f", which does {self.tuned_bytes_per_second / 1e9:.2f} GB/s by its profile"
        return f"{text}; {self.resident_bytes / 1e9:.2f} GB in host memory"

    def _duration(self) -> str:
        return f"{self.seconds:.2f} s"


class Meter:
    """Counts what moves in and out of *tier*, whoever moves it."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._before = tier.swapper.stats()
        self._tuned: float | None = None
        with contextlib.suppress(OffloadError, OSError):  # never swept
            self._tuned = (
                sum(profile_shelf.find(path).performance["mixed"].gb_per_s for path in tier.paths)
                * 1e9
            )

    def waited_seconds(self) -> float:
        """How long callers of the tier have waited for a drive since the last `take`."""
        return self._waited_until(self._tier.swapper.stats())

    def take(self) -> dict[str, Any]:
        """The fields of `DriveUse` that are no times of the caller's, since the last call or since
        this was made.
        """
        before, now = self._before, self._tier.swapper.stats()
        waited = self._waited_until(now)
        self._before = now
        return {
            "bytes_read": now.bytes_read - before.bytes_read,
            "bytes_written": now.bytes_written - before.bytes_written,
            "waited_seconds": waited,
            "resident_bytes": now.resident_bytes,
            "peak_bytes": now.peak_bytes,
            "tuned_bytes_per_second": self._tuned,
        }

    def _waited_until(self, now: SwapperStats) -> float:
        before = self._before
        return (
            now.read_wait_seconds
            + now.room_wait_seconds
            - before.read_wait_seconds
            - before.room_wait_seconds
        )
