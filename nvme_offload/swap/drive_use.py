"""`DriveUse`: what a step transferred to and from the drives of a tier, and its wait for them;
`Meter` counts it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from ..errors import OffloadError
from ..hardware import profile_shelf

if TYPE_CHECKING:
    from .tier import Tier


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriveUse:
    """The transfers of one step.

    Attributes
    ----------
    step : int
        Counted from 1.
    seconds : float
        Duration of the step.
    bytes_read, bytes_written : int
        From and to the drives.
    waited_seconds : float
        Time in which the step was blocked on a drive.
    resident_bytes : int
        Offloaded bytes in host memory at the end of the step.
    peak_bytes : int
        The most host memory of the pool used so far.
    tuned_bytes_per_second : float or None
        Mixed read and write speed of the drives by their profile; None without a profile.
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
        """Reads and writes together, over the whole step."""
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
    """Counts the transfers of *tier*, whoever starts them."""

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
        return self._tier.swapper.stats().wait_seconds - self._before.wait_seconds

    def take(self) -> dict[str, Any]:
        """The fields of `DriveUse` but for step and seconds, since the last call or since creation."""
        before, now = self._before, self._tier.swapper.stats()
        self._before = now
        return {
            "bytes_read": now.bytes_read - before.bytes_read,
            "bytes_written": now.bytes_written - before.bytes_written,
            "waited_seconds": now.wait_seconds - before.wait_seconds,
            "resident_bytes": now.resident_bytes,
            "peak_bytes": now.peak_bytes,
            "tuned_bytes_per_second": self._tuned,
        }
