"""Lightning's DeepSpeedStrategy with parameters and optimizer states on a drive: fit, test,
predict, checkpoint, resume, and one file of weights at the end.

In each of the three ways in which the strategy can be configured:

    python train_lightning.py --nvme_path /local_nvme                     its own arguments
    python train_lightning.py --config ds_config.json                     a DeepSpeed configuration
    PL_DEEPSPEED_CONFIG_PATH=ds_config.json python train_lightning.py     a path in the environment
"""

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nvme_offload.zero3
from nvme_offload.zero3.lightning import LightningProgress

WIDTH = 256


class Model(pl.LightningModule):
    """Learns to reproduce its input."""

    def configure_model(self) -> None:
        """Make the layers, here and not in the constructor, so that each goes to the drive as soon
        as it is made.
        """
        if not hasattr(self, "layers"):
            self.layers = nn.Sequential(
                *(
                    nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
                    for _ in range(6)
                ),
                nn.Linear(WIDTH, WIDTH),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers."""
        return self.layers(x)

    def _loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[0])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The loss of a batch."""
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Likewise."""
        self.log("test_loss", self._loss(batch), sync_dist=True)

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """What the model makes of a batch."""
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """DeepSpeed's: with another one it wants "zero_force_ds_cpu_optimizer": false in a
        configuration.
        """
        return DeepSpeedCPUAdam(self.parameters(), lr=1e-3)


def strategy(arguments: argparse.Namespace) -> DeepSpeedStrategy:
    """The strategy in the way that was asked for."""
    if arguments.nvme_path is None:
        # without one, PL_DEEPSPEED_CONFIG_PATH names the file
        return DeepSpeedStrategy(config=arguments.config)
    made = DeepSpeedStrategy(
        stage=3,
        offload_optimizer=True,
        offload_parameters=True,
        remote_device="nvme",
        offload_params_device="nvme",
        offload_optimizer_device="nvme",
        nvme_path=arguments.nvme_path,
    )
    # which the strategy has no argument for
    made.config["nvme_offload"] = {"host_memory": arguments.host_memory}
    return made


def main(argv: list[str] | None = None, **options: Any) -> None:
    """Train, with *options* of the Trainer; go on from the checkpoint, then test and predict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvme_path", metavar="DIRECTORY", help="a directory on the drive")
    parser.add_argument(
        "--host_memory",
        default="auto",
        help='with --nvme_path: the most host memory for offloading, such as "8GB"',
    )
    parser.add_argument("--config", metavar="FILE", help="a DeepSpeed configuration")
    parser.add_argument(
        "--out",
        metavar="DIRECTORY",
        type=Path,
        default=Path("lightning"),
        help="for checkpoints and logs",
    )
    arguments = parser.parse_args(argv)

    nvme_offload.zero3.enable()  # the one line that makes the difference

    data = DataLoader(
        TensorDataset(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))),
        batch_size=4,
    )
    settings = {
        "accelerator": "gpu",
        "precision": "bf16-true",
        "default_root_dir": arguments.out,
        "log_every_n_steps": 1,
        **options,
    }

    def trainer_of(**more: Any) -> pl.Trainer:
        return pl.Trainer(
            strategy=strategy(arguments), logger=CSVLogger(arguments.out), **settings, **more
        )

    half, whole = (arguments.out / f"step={steps}.ckpt" for steps in (4, 8))
    for max_steps, resumed in ((4, None), (8, half)):  # on two days, say
        pl.seed_everything(0)
        checkpoint = ModelCheckpoint(
            arguments.out, filename="{step}", every_n_train_steps=4, save_top_k=-1
        )
        trainer = trainer_of(max_steps=max_steps, callbacks=[checkpoint, LightningProgress()])
        trainer.fit(Model(), data, ckpt_path=resumed)
    trainer.test(trainer.lightning_module, data)
    trainer = trainer_of()
    predicted = trainer.predict(Model(), data, ckpt_path=whole)
    if trainer.is_global_zero:
        torch.save(predicted, arguments.out / "predicted.pt")
        convert_zero_checkpoint_to_fp32_state_dict(whole, arguments.out / "weights.pt")


if __name__ == "__main__":
    main()
