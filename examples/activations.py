"""Train a transformer whose saved activations are kept on a drive, not on the GPU.

python examples/activations.py /local_nvme
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from nvme_offload import save_on_nvme


def main(directory: str, steps: int = 4) -> None:
    """Train on noise; what matters is where the activations are."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch, target = torch.randn(2, 2, 512, 256, device=device)

    # once; the more memory, the less goes to the drive
    offload = save_on_nvme(directory, host_memory="16 MiB")
    for step in range(steps):
        with offload:
            loss = nn.functional.mse_loss(model(batch), target)
        loss.backward()  # saved tensors are read back before it needs them
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")

    stats = offload.stats()
    print(
        f"saved {stats.saved_bytes / 1e6:.0f} MB; to the drive went {stats.bytes_written / 1e6:.0f} MB, from it came {stats.bytes_read / 1e6:.0f} MB"
    )
    print(
        f"waited {stats.forward_wait_seconds:.2f} s for room in forward, {stats.backward_wait_seconds:.2f} s for tensors in backward"
    )
    offload.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
