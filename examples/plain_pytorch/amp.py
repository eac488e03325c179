"""Automatic mixed precision, with a GradScaler, and the optimizer's states on a drive.

python examples/plain_pytorch/amp.py /local_nvme
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from nvme_offload import NVMeOptimizer


def main(directory: str, steps: int = 6) -> None:
    """Train in float16; steps whose gradients overflow are skipped, and touch no state."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(device)
    batch = torch.randn(16, 256, device=device)
    optimizer = NVMeOptimizer(model.parameters(), lr=1e-3, paths=directory, host_memory="1MB")
    scaler = torch.amp.GradScaler(device, init_scale=2.0**20)  # far too much to begin with
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = nn.functional.mse_loss(model(batch).float(), batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        print(f"loss {loss.item():.4f}, scale {scaler.get_scale():.0f}")
    print(optimizer.stats())
    optimizer.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
