"""`Progress` summarizes training steps for progress bars, logs and a final line. The callbacks for
Lightning and the Trainer use it.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from ..errors import UsageError
from ..swap.drive_use import DriveUse
from ..units import format_gb
from .step_stats import last_step

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Sum:
    steps: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0
    busy_seconds: float | None = 0.0  # None if a step does not know its busy share

    def add(self, step: DriveUse) -> None:
        self.steps += 1
        for name in ("seconds", "waited_seconds", "bytes_read", "bytes_written"):
            setattr(self, name, getattr(self, name) + getattr(step, name))
        if self.busy_seconds is not None and step.busy_share is not None:
            self.busy_seconds += step.busy_share * step.seconds
        else:
            self.busy_seconds = None

    @property
    def wait_share(self) -> float:
        return self.waited_seconds / self.seconds

    @property
    def gb_per_s(self) -> float:
        return (self.bytes_read + self.bytes_written) / self.seconds / 1e9


class Progress:
    """The steps of one engine. A warning says, once, if the engine offloads nothing."""

    def __init__(self) -> None:
        self._last: DriveUse | None = None
        self._since = _Sum()
        self._all = _Sum()
        self._warned = False

    def see(self, engine: Any) -> bool:
        """Record the last step of *engine*: a DeepSpeed engine, an `NVMeOptimizer`, or a wrapper
        with the optimizer of either as `optimizer`. Returns: whether the step was not recorded
        before.
        """
        try:
            step = last_step(engine)
        except UsageError as reason:
            if not self._warned:
                _log.warning("no progress of offload to show: %s", reason)
                self._warned = True
            return False
        if step is None or step is self._last:  # a micro-batch of a step that has not ended
            return False
        self._last = step
        self._since.add(step)
        self._all.add(step)
        return True

    def metrics(self) -> dict[str, float]:
        """Averages over the steps recorded since the last call.

        Returns
        -------
        dict
            {} if no step was recorded. `nvme_wait_share`: the share of time that training waited
            for a drive. `nvme_gb_per_s`: both directions together. `nvme_read_gb`,
            `nvme_written_gb` and `nvme_offload/step_seconds`: for each step.
            `nvme_offload/busy_share`: the share of time in which the busiest disk had requests.
            `nvme_offload/total_written_gb`: by this process so far. `nvme_offload/disk_written_gb`:
            to the disks, by any process, since boot. `nvme_offload/resident_gb`: offloaded data in
            host memory at the end. A metric that the kernel does not report is left out.
        """
        seen, self._since = self._since, _Sum()
        if not seen.steps or self._last is None:
            return {}
        metrics = {
            "nvme_wait_share": round(seen.wait_share, 4),
            "nvme_gb_per_s": round(seen.gb_per_s, 4),
            "nvme_read_gb": round(seen.bytes_read / seen.steps / 1e9, 6),
            "nvme_written_gb": round(seen.bytes_written / seen.steps / 1e9, 6),
            "nvme_offload/step_seconds": round(seen.seconds / seen.steps, 4),
            "nvme_offload/total_written_gb": round(self._last.total_written_bytes / 1e9, 6),
            "nvme_offload/resident_gb": round(self._last.resident_bytes / 1e9, 6),
        }
        if seen.busy_seconds is not None:
            metrics["nvme_offload/busy_share"] = round(seen.busy_seconds / seen.seconds, 4)
        if self._last.disk_written_bytes is not None:
            metrics["nvme_offload/disk_written_gb"] = round(self._last.disk_written_bytes / 1e9, 6)
        return metrics

    def tell_summary(self) -> None:
        """Log totals of all steps since the last summary."""
        seen, self._all = self._all, _Sum()
        if seen.steps:
            _log.info(
                "%d steps in %.3g s, %.3g s each: %.0f%% of it waiting for the drive; read %s and wrote %s, %.3g GB/s",
                *(seen.steps, seen.seconds, seen.seconds / seen.steps, 100 * seen.wait_share),
                *(format_gb(seen.bytes_read), format_gb(seen.bytes_written), seen.gb_per_s),
            )
