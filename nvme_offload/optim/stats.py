"""`UpdateStats`: what an optimizer step spent on the drive and what on everything else."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

from .. import profile_shelf
from ..errors import OffloadError
from ..tier import Tier


@dataclasses.dataclass(frozen=True)
class UpdateStats:
    """One step of an `NVMeOptimizer`.

    step: counted from 1. seconds: in `step` and, with step_in_backward, in the updates before it. bytes_read, bytes_written: from and to the drives,
    since the end of the step before. waited_seconds: in which the step stood still for a drive.
    resident_bytes: of states that are in host memory at the end. peak_bytes: the most of the pinned memory that was ever in use.
    tuned_bytes_per_second: what the drive's profile promises for reads and writes at once; None where the drive has no profile.
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
        """Both directions together."""
        return (self.bytes_read + self.bytes_written) / self.seconds

    def __str__(self) -> str:
        text = (
            f"step {self.step}: {self.seconds:.2f} s; read {self.bytes_read / 1e9:.2f} GB and wrote {self.bytes_written / 1e9:.2f} GB, "
            f"{self.bytes_per_second / 1e9:.2f} GB/s; waited {self.waited_seconds:.2f} s for the drive ({self.waited_seconds / self.seconds:.0%})"
        )
        if self.tuned_bytes_per_second is not None:
            text += f", which does {self.tuned_bytes_per_second / 1e9:.2f} GB/s by its profile"
        return f"{text}; {self.resident_bytes / 1e9:.2f} GB in host memory"


class UpdateClock:
    """Makes the `UpdateStats` of one optimizer: updates are in `running`, and `end_step` ends a step."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._seconds = 0.0
        self._before = tier.swapper.stats()
        self._tuned: float | None = None
        with contextlib.suppress(OffloadError, OSError):  # never swept
            self._tuned = sum(profile_shelf.find(path).performance["mixed"].gb_per_s for path in tier.paths) * 1e9

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Time that an update takes."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds += time.monotonic() - began

    def end_step(self, step: int) -> UpdateStats:
        """The step is over."""
        before, now = self._before, self._tier.swapper.stats()
        result = UpdateStats(
            step=step,
            seconds=self._seconds,
            bytes_read=now.bytes_read - before.bytes_read,
            bytes_written=now.bytes_written - before.bytes_written,
            waited_seconds=now.read_wait_seconds + now.room_wait_seconds - before.read_wait_seconds - before.room_wait_seconds,
            resident_bytes=now.resident_bytes,
            peak_bytes=now.peak_bytes,
            tuned_bytes_per_second=self._tuned,
        )
        self._seconds, self._before = 0.0, now
        return result
