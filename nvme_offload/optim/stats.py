"""`UpdateStats`: the time of an optimizer step, on the drive and elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

from ..swap.drive_use import DriveUse, Meter
from ..swap.tier import Tier


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateStats(DriveUse):
    """The `DriveUse` of one step of an `NVMeOptimizer`. Transfers are counted from the end of the
    previous step.

    Attributes
    ----------
    seconds : float
        Time in `step` and, with `step_in_backward`, in the updates before it. With `overlap_step`,
        time that the updates took, concurrently with other work.
    update_wait_seconds : float
        With `overlap_step`, time that the program waited for the updates.
    buckets : int
        Buckets of parameters that were updated.
    updated_in_backward : int
        With `step_in_backward="provisional"`, buckets that were updated before `step`.
    rolled_back : int
        Of these, buckets whose gradients were changed before `step`, which repeated the update.
    """

    update_wait_seconds: float = 0.0
    buckets: int = 0
    updated_in_backward: int = 0
    rolled_back: int = 0

    def __str__(self) -> str:
        text = super().__str__()
        if self.updated_in_backward:
            text += f"; {self.updated_in_backward} of {self.buckets} buckets updated in backward"
        if self.rolled_back:
            text += f", {self.rolled_back} of them again in step()"
        if self.update_wait_seconds:
            text += f"; the program waited {self.update_wait_seconds:.2f} s for the updates"
        return text


class UpdateClock:
    """Measures `UpdateStats`: updates run in `running`; `end_step` ends a step."""

    def __init__(self, tier: Tier) -> None:
        self._meter = Meter(tier)
        self._seconds = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measure the time of an update."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds += time.monotonic() - began

    def end_step(self, step: int, **counts: int) -> UpdateStats:
        """End the step. *counts*: of its `UpdateStats`."""
        result = UpdateStats(step=step, seconds=self._seconds, **counts, **self._meter.take())
        self._seconds = 0.0
        return result
