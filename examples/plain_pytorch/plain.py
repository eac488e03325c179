"""Train with AdamW whose states are on a drive, saved and resumed.

python examples/plain_pytorch/plain.py /local_nvme
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from nvme_offload import NVMeOptimizer


def train(directory: str, steps: int, checkpoint: Path, resume: bool) -> float:
    """Fit a line's worth of noise; the loss of the last step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(
        device, torch.bfloat16
    )
    batch = torch.randn(16, 256, device=device, dtype=torch.bfloat16)

    # Was: torch.optim.AdamW(model.parameters(), lr=1e-3). The fp32 weights that bfloat16 needs are
    # its business, too.
    with NVMeOptimizer(
        model.parameters(), lr=1e-3, paths=directory, host_memory="4MB"
    ) as optimizer:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        if resume:
            # mapped, so that the states need not fit into memory
            saved = torch.load(checkpoint, mmap=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch), batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            print(f"loss {loss.item():.4f}; {optimizer.stats()}")
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            },
            checkpoint,
        )
        return loss.item()


def main(directory: str) -> None:
    """Train, and go on from the checkpoint."""
    checkpoint = Path(directory, "plain-example.pt")
    try:
        train(directory, 4, checkpoint, resume=False)
        train(directory, 4, checkpoint, resume=True)
    finally:
        checkpoint.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
