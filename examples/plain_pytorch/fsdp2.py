"""FSDP2: parameters sharded by `fully_shard`, each rank's part of the optimizer's states on its
machine's drive, with a sharded checkpoint.

torchrun --nproc_per_node 2 examples/plain_pytorch/fsdp2.py /local_nvme
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from nvme_offload import NVMeOptimizer


def train(directory: str, device: torch.device, checkpoint: Path, steps: int, resume: bool) -> None:
    """Some steps, from the checkpoint or to it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    # after fully_shard, as any optimizer
    with NVMeOptimizer(
        model.parameters(), lr=1e-3, paths=directory, host_memory="1MB"
    ) as optimizer:
        if resume:
            states = dict(
                zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)
            )
            dcp.load(states, checkpoint_id=checkpoint)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=states["model"],
                optim_state_dict=states["optimizer"],
            )
        batch = torch.randn(16, 256, device=device)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch).float(), batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if dist.get_rank() == 0:
                print(f"loss {loss.item():.4f}; {optimizer.stats()}")
        if not resume:
            dcp.save(
                dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)),
                checkpoint_id=checkpoint,
            )


def main(directory: str) -> None:
    """Train, and go on from the checkpoint."""
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    checkpoint = Path(directory, "fsdp2-example")
    try:
        train(directory, device, checkpoint, 3, resume=False)
        train(directory, device, checkpoint, 3, resume=True)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(checkpoint, ignore_errors=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
