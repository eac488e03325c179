"""`StepStats`: the duration of a training step, or of a forward pass of an inference, and the time
spent on the drive in it.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, cast

from ..errors import UsageError, known
from ..swap.drive_use import DriveUse, Meter

if TYPE_CHECKING:
    from ..swap.tier import Tier

__all__ = ["StepStats"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepStats(DriveUse):
    """The `DriveUse` of one training step, from the end of the previous optimizer step to its own.
    Skipped steps (fp16 overflow) count too.

    Attributes
    ----------
    update_seconds : float
        The optimizer step's part of `seconds`.
    update_waited_seconds : float
        The optimizer step's part of `waited_seconds`.

    Notes
    -----
    With `"overlap_step"`, `waited_seconds` includes the time that the program waited for updates,
    but not the time that updates waited for the drive. Bytes that updates transfer count for the
    step during which they are transferred.

    For an engine without an optimizer, a step is one forward pass, and `update_seconds` and
    `update_waited_seconds` are 0.
    """

    update_seconds: float
    update_waited_seconds: float

    def _duration(self) -> str:
        update = (
            f", {self.update_seconds:.2f} s of them in the optimizer" if self.update_seconds else ""
        )
        return f"{super()._duration()}{update}"


class StepClock:
    """Makes the `StepStats` of an engine with values in *tier*. The optimizer step lasts from
    `begin_update` to `end`. If several engines share a tier, each engine's steps count the bytes
    that moved during them. Attributes: *last*, the statistics of the last step, None before it ends.
    """

    def __init__(self, tier: Tier) -> None:
        self.last: StepStats | None = None
        self._meter = Meter(tier)
        self._steps = 0
        self.begin()

    @property
    def number(self) -> int:
        """The number of the step in progress, counted from 1."""
        return self._steps + 1

    def begin(self) -> None:
        """Start the step now, instead of at the end of the previous one."""
        self._meter.take(ended=False)
        self._began = time.monotonic()
        # The start of the optimizer step, and the seconds waited by then.
        self._update: tuple[float, float] | None = None

    def begin_update(self) -> None:
        """Begin the optimizer step."""
        self._update = time.monotonic(), self._meter.waited_seconds()

    def end(self, update_waited: float = 0.0, drive_waited: float = 0.0) -> StepStats:
        """End the step, and begin the next one. *update_waited*: seconds that the program waited for
        updates in another thread. *drive_waited*: seconds that the updates waited for the drive.
        """
        now, used = time.monotonic(), self._meter.take()
        if update_waited or drive_waited:
            used["waited_seconds"] = max(used["waited_seconds"] - drive_waited, 0.0) + update_waited
        update_began, waited = self._update or (now, used["waited_seconds"])
        self._steps += 1
        self.last = StepStats(
            step=self._steps,
            seconds=now - self._began,
            update_seconds=now - update_began,
            update_waited_seconds=used["waited_seconds"] - waited,
            **used,
        )
        self._began, self._update = now, None
        return self.last


def last_step(trained: Any) -> DriveUse | None:
    """The transfers of the last step of an engine or an `NVMeOptimizer`, or of a wrapper with the
    optimizer of either; None before it ends. Raises: UsageError if nothing is offloaded.
    """
    import torch

    for owner in (trained, getattr(trained, "optimizer", None)):
        if isinstance(owner, torch.nn.Module):
            continue  # an engine has the attributes of its model, which may be named clock
        if (clock := getattr(owner, "clock", None)) is not None:
            return cast("DriveUse | None", clock.last)
        if type(owner).__name__ == "NVMeOptimizer":
            return cast("DriveUse | None", known(owner).last_stats)
    raise UsageError(
        "this engine has no parameters and no optimizer states on a drive behind nvme_offload"
    )
