"""Runs `examples/train_lightning.py` where there is no GPU.

`DeepSpeedStrategy` refuses every accelerator but `CUDAAccelerator`, so this is one, whose devices
are the CPU. All else is Lightning, DeepSpeed and the script as they are; `tests/gpu` has it on a
GPU without this.
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed.ops
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as plain_gloo says


class CpuInTheNameOfCuda(CUDAAccelerator):
    """Two devices at most, each a name of the CPU."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def setup(self, trainer: Trainer) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: int) -> int:
        return devices

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("cpu", index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    import train_lightning

    train_lightning.main(accelerator=CpuInTheNameOfCuda(), devices=1)
