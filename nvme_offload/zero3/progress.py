"""`Progress`: summarizes training steps for progress bars, logs and a final line. The callbacks for
Lightning and the Trainer use it.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from ..errors import UsageError
from .step_stats import StepStats, clock_of

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Sum:
    steps: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0

    def add(self, step: StepStats) -> None:
        self.steps += 1
        for name in ("seconds", "waited_seconds", "bytes_read", "bytes_written"):
            setattr(self, name, getattr(self, name) + getattr(step, name))

    @property
    def wait_share(self) -> float:
        return self.waited_seconds / self.seconds

    @property
    def gb_per_s(self) -> float:
        return (self.bytes_read + self.bytes_written) / self.seconds / 1e9


class Progress:
    """The steps of one engine, as they are seen.

    An engine without anything offloaded by this package has nothing to show. That is logged once as
    a warning, and is not an error.
    """

    def __init__(self) -> None:
        self._last: StepStats | None = None
        self._since = _Sum()
        self._all = _Sum()
        self._warned = False

    def see(self, engine: Any) -> bool:
        """Take in the last step of an engine.

        Parameters
        ----------
        engine
            A DeepSpeed engine, or a wrapper with its optimizer as `optimizer`.

        Returns
        -------
        bool
            Whether it is a step that was not seen before.
        """
        try:
            step = clock_of(engine).last
        except UsageError as reason:
            if not self._warned:
                _log.warning("no progress of offload to show: %s", reason)
                self._warned = True
            return False
        if step is None or step is self._last:  # a micro-batch of a step that is not over
            return False
        self._last = step
        self._since.add(step)
        self._all.add(step)
        return True

    def metrics(self) -> dict[str, float]:
        """Averages over the steps seen since the last call, {} for none: `nvme_wait_share`, the
        share of time that training waited for a drive; `nvme_gb_per_s`; `nvme_read_gb` and
        `nvme_written_gb`, for each step.
        """
        seen, self._since = self._since, _Sum()
        if not seen.steps:
            return {}
        return {
            "nvme_wait_share": round(seen.wait_share, 4),
            "nvme_gb_per_s": round(seen.gb_per_s, 4),
            "nvme_read_gb": round(seen.bytes_read / seen.steps / 1e9, 6),
            "nvme_written_gb": round(seen.bytes_written / seen.steps / 1e9, 6),
        }

    def tell_summary(self) -> None:
        """Log totals of all steps since the last summary."""
        seen, self._all = self._all, _Sum()
        if seen.steps:
            _log.info(
                "%d steps in %.3g s, %.3g s each: %.0f%% of it waiting for the drive; read %.3g GB and wrote %.3g GB, %.3g GB/s",
                *(seen.steps, seen.seconds, seen.seconds / seen.steps, 100 * seen.wait_share),
                *(seen.bytes_read / 1e9, seen.bytes_written / 1e9, seen.gb_per_s),
            )
