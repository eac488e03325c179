"""`TrainerProgress`: drive time of the steps, in the log of a Hugging Face `Trainer`."""

from __future__ import annotations

import importlib
from typing import Any

from .progress import Progress


class TrainerProgress(importlib.import_module("transformers").TrainerCallback):  # type: ignore[misc]  # the base is only known when it is there
    """A callback for a Hugging Face `Trainer` with a DeepSpeed configuration:
    `Trainer(callbacks=[TrainerProgress()])`.

    It adds to what the Trainer logs every `logging_steps`, over the steps since: `nvme_wait_share`,
    the share of time that training waited for the drive; `nvme_gb_per_s`, both directions together;
    `nvme_read_gb` and `nvme_written_gb`, the average of a step. The progress bar prints them, and
    the state's `log_history` has them. A final line sums up.
    """

    def __init__(self) -> None:
        self._progress = Progress()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take in the step that has ended."""
        self._progress.see(kwargs["optimizer"])

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Add the metrics of the steps since the last log to *logs*."""
        metrics = self._progress.metrics()
        if logs is not None:
            logs.update(metrics)
        if state.log_history:
            state.log_history[-1].update(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the summary of all steps."""
        self._progress.tell_summary()
