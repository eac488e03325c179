"""`DriveUse`: the transfers of a step to and from the drives of a tier, and its wait for them.
`Meter` counts them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from ..errors import OffloadError
from ..hardware import profile_shelf
from ..hardware.disk_counters import Disks, busy_share
from ..units import format_gb, format_speed
from . import live

if TYPE_CHECKING:
    from .tier import Tier

__all__ = ["DriveUse"]


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
        The most host memory that the pool has used so far.
    tuned_bytes_per_second : float or None
        Mixed read and write speed of the drives by their profile; None without a profile.
    total_written_bytes : int
        Bytes that this process has written to the drives so far.
    busy_share : float or None
        Share of the time since the previous step ended in which the busiest disk had requests of
        any process; None if the kernel does not report it.
    disk_written_bytes : int or None
        Bytes that all processes have written to the disks since boot; None if the kernel does not
        report it.
    """

    step: int
    seconds: float
    bytes_read: int
    bytes_written: int
    waited_seconds: float
    resident_bytes: int
    peak_bytes: int
    tuned_bytes_per_second: float | None
    total_written_bytes: int = 0
    busy_share: float | None = None
    disk_written_bytes: int | None = None

    @property
    def bytes_per_second(self) -> float:
        """Reads and writes together, over the whole step."""
        return (self.bytes_read + self.bytes_written) / self.seconds

    def __str__(self) -> str:
        text = (
            f"step {self.step}: {self._duration()}; read {format_gb(self.bytes_read)} and wrote {format_gb(self.bytes_written)}, "
            f"{format_speed(self.bytes_per_second / 1e9)} GB/s; waited {self.waited_seconds:.2f} s for the drive ({self.waited_seconds / self.seconds:.0%})"
        )
        if self.tuned_bytes_per_second is not None:
            text += f", which does {format_speed(self.tuned_bytes_per_second / 1e9)} GB/s by its profile"
        if self.busy_share is not None:
            text += f"; the drive was busy {self.busy_share:.0%} of the time"
        text += f"; {format_gb(self.resident_bytes)} in host memory; written so far {format_gb(self.total_written_bytes)}"
        if self.disk_written_bytes is not None:
            text += f" of the {format_gb(self.disk_written_bytes)} to the disk since the machine was started"
        return text

    def _duration(self) -> str:
        return f"{self.seconds:.2f} s"


class Meter:
    """Counts all transfers of *tier*, and makes `live` log during long steps. Raises: UsageError before
    the first `Tier.require`.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._before = tier.swapper.stats()
        self._tuned: float | None = None
        with contextlib.suppress(OffloadError, OSError):  # never swept
            profiles = map(profile_shelf.find, tier.paths)
            drives = {each.drive["identity"]: each for each in profiles}.values()
            self._tuned = sum(each.performance["mixed"].gb_per_s for each in drives) * 1e9
        self._disks = Disks(tier.paths)
        self._disks_before, self._took = self._disks.counters(), time.monotonic()
        live.watch(tier)

    def waited_seconds(self) -> float:
        """Seconds that callers of the tier have waited for a drive since the last `take`, or since
        creation.
        """
        return self._tier.swapper.stats().waited_seconds - self._before.waited_seconds

    def take(self, *, ended: bool = True) -> dict[str, Any]:
        """End a step, or if it has not *ended*, start it now. Returns: the fields of its `DriveUse`
        except *step* and *seconds*.
        """
        before, now = self._before, self._tier.swapper.stats()
        disks, taken = self._disks.counters(), time.monotonic()
        busy = busy_share(self._disks_before, disks, taken - self._took)
        self._before, self._disks_before, self._took = now, disks, taken
        live.watch(self._tier).begin(disks, ended=ended)
        return {
            "bytes_read": now.bytes_read - before.bytes_read,
            "bytes_written": now.bytes_written - before.bytes_written,
            "waited_seconds": now.waited_seconds - before.waited_seconds,
            "resident_bytes": now.resident_bytes,
            "peak_bytes": now.peak_bytes,
            "tuned_bytes_per_second": self._tuned,
            "total_written_bytes": now.bytes_written,
            "busy_share": busy,
            "disk_written_bytes": disks.written_bytes if disks is not None else None,
        }
