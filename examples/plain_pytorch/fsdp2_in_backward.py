"""FSDP2 with updates during backward(), so that the drive works while the GPU does, and gradients
go as soon as they are reduced.

torchrun --nproc_per_node 2 examples/plain_pytorch/fsdp2_in_backward.py /local_nvme
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nvme_offload import NVMeOptimizer


def main(directory: str, replicated: bool = False, steps: int = 4) -> None:
    """Train sharded; or replicated, for which FSDP2 takes the place of DistributedDataParallel."""
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh(
        device.type, (ranks, 1) if replicated else (1, ranks), mesh_dim_names=("replicate", "shard")
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    batches = [torch.randn(16, 256, device=device) + dist.get_rank() for _ in range(2)]
    with NVMeOptimizer(
        model.parameters(), lr=1e-3, paths=directory, host_memory="1MB", step_in_backward=True
    ) as optimizer:
        for _ in range(steps):
            for number, batch in enumerate(batches):
                # gradients accumulate until they are reduced, and are used up then
                model.set_requires_gradient_sync(number + 1 == len(batches))
                loss = nn.functional.mse_loss(model(batch), batch)
                loss.backward()
            optimizer.step()
            if dist.get_rank() == 0:
                print(f"loss {loss.item():.4f}; {optimizer.stats()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".", replicated="replicated" in sys.argv[2:])
