"""`LightningProgress`: drive time of the steps, in Lightning's progress bar and loggers."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from .progress import Progress


def _lightning() -> Any:
    """Lightning, under the name that the program has imported: each name has other classes."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if name in sys.modules:
            return sys.modules[name]
    old_alone = (
        importlib.util.find_spec("lightning") is None
        and importlib.util.find_spec("pytorch_lightning") is not None
    )
    return importlib.import_module("pytorch_lightning" if old_alone else "lightning.pytorch")


class LightningProgress(_lightning().Callback):  # type: ignore[misc]  # the base is only known when it is there
    """A callback for a Lightning `Trainer` with `DeepSpeedStrategy`:
    `Trainer(callbacks=[LightningProgress()])`.

    After each optimizer step the progress bar shows `nvme_wait_share`, the share of the step that
    training waited for the drive, and `nvme_gb_per_s`, both directions together. Loggers
    (TensorBoard, W&B) get every metric that `Progress.metrics` lists. `fit`, `test` and `predict`
    end with a summary line. In `test` and `predict`, each batch is a step.
    """

    def __init__(self) -> None:
        self._progress = Progress()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the step, if this batch completed one."""
        if not self._progress.see(trainer.strategy.model):
            return
        for name, value in self._progress.metrics().items():
            in_bar = name in ("nvme_wait_share", "nvme_gb_per_s")
            pl_module.log(name, value, on_step=True, on_epoch=False, prog_bar=in_bar, batch_size=1)

    def on_test_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Record the forward pass that has ended."""
        self._progress.see(trainer.strategy.model)

    on_predict_batch_end = on_test_batch_end

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the summary of all steps."""
        self._progress.tell_summary()

    on_test_end = on_predict_end = on_train_end
