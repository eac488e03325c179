"""Tensor parallelism, by torch's DTensor and by hand as TorchShard does it, with the optimizer's
states on a drive.

torchrun --nproc_per_node 2 examples/plain_pytorch/tensor_parallel.py /local_nvme
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nvme_offload import NVMeOptimizer


class _Sum(torch.autograd.Function):
    """The sum over all ranks, whose gradient is everybody's."""

    @staticmethod
    def forward(context: Any, part: torch.Tensor) -> torch.Tensor:
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class ShardedLinear(nn.Module):
    """A linear layer of which every rank has some of the input's columns: plain parameters that
    happen to differ between ranks.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.columns = inputs // dist.get_world_size()
        self.weight = nn.Parameter(torch.randn(outputs, self.columns) / inputs**0.5)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The layer's output, whole on every rank."""
        first = dist.get_rank() * self.columns
        part: torch.Tensor = _Sum.apply(batch[:, first : first + self.columns] @ self.weight.t())
        return part


def train(name: str, model: nn.Module, batch: torch.Tensor, directory: str, steps: int = 4) -> None:
    """Some steps over the same batch on every rank."""
    # foreach=False where some parameters are DTensors and others are not, as for every optimizer of
    # torch's.
    with NVMeOptimizer(
        model.parameters(), lr=1e-3, foreach=False, paths=directory, host_memory="1MB"
    ) as optimizer:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0:
                print(f"{name}: loss {loss.item():.4f}; {optimizer.stats()}")


def main(directory: str) -> None:
    """Both ways."""
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    batch = torch.randn(16, 256, device=device)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    train(
        "DTensor",
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}),
        batch,
        directory,
    )
    torch.manual_seed(dist.get_rank())
    train("by hand", ShardedLinear(256, 256).to(device), batch, directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
