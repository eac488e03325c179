"""`ZeroRedundancyOptimizer`: each rank updates its share of the parameters, with the states of that
share on its machine's drive.

torchrun --nproc_per_node 2 examples/plain_pytorch/zero_redundancy.py /local_nvme
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from nvme_offload import NVMeOptimizer


def main(directory: str, steps: int = 4) -> None:
    """Train; functools.partial(NVMeOptimizer, optimizer_class=...) is for another than AdamW."""
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
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), NVMeOptimizer, lr=1e-3, paths=directory, host_memory="1MB"
    )
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.4f}; {optimizer.optim.stats()}")
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        print(f"a checkpoint has the states of {len(optimizer.state_dict()['state'])} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
