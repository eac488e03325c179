"""`TrainerProgress`: drive time of the steps, in the log of a Hugging Face `Trainer`."""

from __future__ import annotations

import importlib
from typing import Any

from .progress import Progress


class TrainerProgress(importlib.import_module("transformers").TrainerCallback):  # type: ignore[misc]  # the base is only known when it is there
    """A callback for a Hugging Face `Trainer` with a DeepSpeed configuration or an `NVMeOptimizer`:
    `Trainer(callbacks=[TrainerProgress()])`.

    To each log that the Trainer writes, every `logging_steps`, it adds the metrics of
    `Progress.metrics` over the steps since the last log: `nvme_wait_share`, `nvme_gb_per_s`,
    `nvme_offload/busy_share` and others. The progress bar prints them, and the state's
    `log_history` has them. Training ends with a summary line. TensorBoard, W&B and other reporters
    get the metrics, too, if this callback comes before theirs: see `put_first`.
    """

    def __init__(self) -> None:
        self._progress = Progress()

    @classmethod
    def put_first(cls, trainer: Any) -> None:
        """Put this callback first: a reporter logs only metrics that were added before it runs."""
        callback = trainer.pop_callback(cls) or cls()
        trainer.callback_handler.callbacks.insert(0, callback)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the step that has ended."""
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
