"""`StepStats`: what a training step spent on the drive and what on everything else."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from ..errors import OffloadError, UsageError
from . import heartbeat

if TYPE_CHECKING:
    from ..tier import Tier


@dataclasses.dataclass(frozen=True)
class StepStats:
    """One training step: from the end of the optimizer step before it to the end of its own.

    step: counted from 1, skipped ones too. seconds: all of it; update_seconds: the optimizer's part.
    bytes_read, bytes_written: from and to the drives. waited_seconds: in which training stood still for a drive; update_waited_seconds: those of the
    optimizer's part.
    resident_bytes: parameters, gradients and states that are in host memory at the end. peak_bytes: the most host memory of the pool that was ever in use.
    tuned_bytes_per_second: what the drive's profile promises for reads and writes at once; None where the drive has no profile.
    """

    step: int
    seconds: float
    update_seconds: float
    bytes_read: int
    bytes_written: int
    waited_seconds: float
    update_waited_seconds: float
    resident_bytes: int
    peak_bytes: int
    tuned_bytes_per_second: float | None

    @property
    def bytes_per_second(self) -> float:
        """Both directions together, over the whole step."""
        return (self.bytes_read + self.bytes_written) / self.seconds

    def __str__(self) -> str:
        text = (
            f"step {self.step}: {self.seconds:.2f} s, {self.update_seconds:.2f} s of them in the optimizer; read {self.bytes_read / 1e9:.2f} GB and wrote "
            f"{self.bytes_written / 1e9:.2f} GB, {self.bytes_per_second / 1e9:.2f} GB/s; waited {self.waited_seconds:.2f} s for the drive "
            f"({self.waited_seconds / self.seconds:.0%})"
        )
        if self.tuned_bytes_per_second is not None:
            text += f", which does {self.tuned_bytes_per_second / 1e9:.2f} GB/s by its profile"
        return f"{text}; {self.resident_bytes / 1e9:.2f} GB in host memory"


class StepClock:
    """Makes the `StepStats` of one engine, whose optimizer step is everything between `begin_update` and `end_update`.

    A tier that several engines share counts for each of them what moved during its own steps.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._steps = 0
        self._tuned = _tuned(tier)
        self._ended = self._began = time.monotonic()
        self._before = self._at_update = tier.swapper.stats()

    def begin_update(self) -> None:
        """The optimizer step begins."""
        self._began, self._at_update = time.monotonic(), self._tier.swapper.stats()

    def end_update(self) -> StepStats:
        """The optimizer step is over, and with it the training step."""
        now, counted = time.monotonic(), self._tier.swapper.stats()
        self._steps += 1
        waited = counted.read_wait_seconds + counted.room_wait_seconds
        result = StepStats(
            step=self._steps,
            seconds=now - self._ended,
            update_seconds=now - self._began,
            bytes_read=counted.bytes_read - self._before.bytes_read,
            bytes_written=counted.bytes_written - self._before.bytes_written,
            waited_seconds=waited - self._before.read_wait_seconds - self._before.room_wait_seconds,
            update_waited_seconds=waited - self._at_update.read_wait_seconds - self._at_update.room_wait_seconds,
            resident_bytes=counted.resident_bytes,
            peak_bytes=counted.peak_bytes,
            tuned_bytes_per_second=self._tuned,
        )
        self._ended, self._before = now, counted
        heartbeat.rest(self._tier)
        return result


def last_step(engine: Any) -> StepStats:
    """The `StepStats` of *engine*'s last step. Raises: UsageError when it has none."""
    result = getattr(getattr(engine, "optimizer", None), "last_step", None)
    if not isinstance(result, StepStats):
        raise UsageError("this engine has made no step with optimizer states on a drive behind nvme_offload")
    return result


def _tuned(tier: Tier) -> float | None:
    from .. import profile_shelf

    try:
        return sum(profile_shelf.find(path).performance["mixed"].gb_per_s for path in tier.paths) * 1e9
    except (OffloadError, OSError):  # never swept
        return None
