"""A compiled model, updated during backward(), with the optimizer's states on a drive in 8 bits.

python examples/plain_pytorch/compiled.py /local_nvme
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from nvme_offload import NVMeOptimizer


def main(directory: str, steps: int = 4, backend: str = "inductor") -> None:
    """Train a stack of layers, with a separate learning rate for the last."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)), nn.Linear(256, 8)).to(
        device, torch.bfloat16
    )
    batch = torch.randn(16, 256, device=device, dtype=torch.bfloat16)
    compiled = torch.compile(model, backend=backend)
    optimizer = NVMeOptimizer(
        [{"params": model[:-1].parameters()}, {"params": model[-1].parameters(), "lr": 1e-4}],
        lr=1e-3,
        paths=directory,
        host_memory="2MB",
        state_format="compact",
        # the gradients are gone as soon as they are complete, so nothing may look at them
        # afterwards
        step_in_backward=True,
    )
    for _ in range(steps):
        with optimizer.no_sync():  # gradients accumulate
            compiled(batch).float().square().mean().backward()
        loss = compiled(batch).float().square().mean()
        loss.backward()  # and are used up here
        optimizer.step()
        print(f"loss {loss.item():.4f}")
    print(optimizer.stats())
    optimizer.close()


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["."], **({"backend": sys.argv[2]} if len(sys.argv) > 2 else {}))
