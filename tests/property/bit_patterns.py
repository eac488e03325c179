"""Values of fp32 by their bits."""

from __future__ import annotations

import torch

from nvme_offload.optimizer_states.rounding import BLOCK

# zeros, denormals, the largest numbers, infinities, and NaN of every kind
SPECIAL = [
    0,
    1,
    0x7FFFFF,
    0x800000,
    0x7EFFFFFF,
    0x7F000000,
    0x7F7FFFFF,
    0x7F800000,
    0x7F800001,
    0x7FC00000,
    0x7FF00001,
    0x7FFFFFFF,
]


def patterns(numel: int, seed: int = 0) -> torch.Tensor:
    """Any 32 bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 31), 1 << 31, (numel,), dtype=torch.int64, generator=generator).to(
        torch.int32
    )


def numbers(numel: int, octaves: int) -> torch.Tensor:
    """Of any mantissa and sign, the octaves of each block from its own one down."""
    bits = patterns(numel)
    top = (patterns(-(-numel // BLOCK), seed=1).remainder(254)).repeat_interleave(BLOCK)[:numel]
    exponents = (top - patterns(numel, seed=2).remainder(octaves)).clamp(min=0)
    return (bits & ~0x7F800000 | exponents << 23).view(torch.float32)
