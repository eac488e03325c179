"""Data parallel training, each rank with its optimizer's states on its machine's drive.

torchrun --nproc_per_node 2 examples/plain_pytorch/ddp.py /local_nvme
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nvme_offload import NVMeOptimizer


def main(directory: str, steps: int = 4) -> None:
    """Train; the ranks share the directory, and never meet in it."""
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(device)
    )
    batch = torch.randn(16, 256, device=device) + dist.get_rank()
    optimizer = NVMeOptimizer(model.parameters(), lr=1e-3, paths=directory, host_memory="1MB")
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.4f}; {optimizer.stats()}")
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
