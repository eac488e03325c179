"""The random numbers of stochastic rounding, the same on every device: a small table, multiplied
and shifted by a hash of the seed and the block's name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

# Number of values that share a hash and, in 8 bits, an exponent. It does not change the values of
# codes, and therefore not the errors: on real gradients, 64 and 4096 gave the same errors.
import torch

BLOCK = 256
# Elements that torch operations process at a time: enough to keep a GPU busy, and few enough that
# temporaries stay small.
CHUNK = 1 << 24

# An odd number with about half of the bits set, in no pattern.
GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number
MULTIPLIERS = (0x6A5D39EAE12657A9, 0x2C1B3C6D9E3779BB)


def block_names(start: int, numel: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Names of the blocks of *numel* elements from element *start* of all trained elements:
    positions, which do not depend on buckets or sub-groups.
    """
    first = start // BLOCK
    return torch.arange(first, first - (-numel // BLOCK), dtype=torch.int64, device=device)


@functools.cache
def random_table(device: torch.device) -> torch.Tensor:
    """A random number for each place in a block, int32."""
    return torch.randint(
        -(1 << 31),
        1 << 31,
        (BLOCK,),
        dtype=torch.int32,
        generator=torch.Generator().manual_seed(0x5EED),
    ).to(device)


def random_keys(
    count: int, seed: tuple[int, ...], device: torch.device, blocks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor and the summand for the random table of each block of *count* values, int32: a
    hash of *seed* and the block's name. Without *blocks*, blocks are numbered.
    """
    if blocks is None:
        blocks = block_names(0, count, device)
    key = blocks.mul(GOLDEN).add_(seed_state(seed))
    for multiplier in MULTIPLIERS:
        key.bitwise_xor_((key >> 29) & ((1 << 35) - 1)).mul_(multiplier)
    return (key >> 32).to(torch.int32) | 1, (key ^ (key >> 32)).to(torch.int32)


def seed_state(seed: tuple[int, ...]) -> int:
    """A hash of *seed*, as a signed number of 64 bits."""
    state = 0
    for part in seed:
        state = _mixed(state ^ (part % (1 << 64)))
    return state - (1 << 64) if state >> 63 else state


def _mixed(number: int) -> int:
    """A bijective hash of 64 bits."""
    number = (number + GOLDEN) % (1 << 64)
    for multiplier in MULTIPLIERS:
        number = ((number ^ (number >> 29)) * multiplier) % (1 << 64)
    return number ^ (number >> 32)


def randoms(factors: torch.Tensor, summands: torch.Tensor) -> torch.Tensor:
    """Random bits for blocks, a row for each, by *factors* and *summands* of `random_keys`."""
    return random_table(factors.device).mul(factors[:, None]).add_(summands[:, None])


def addresses(one: torch.Tensor, other: torch.Tensor, third: torch.Tensor) -> tuple[int, int, int]:
    """The places of tensors on the CPU, for the extension; the caller keeps the tensors."""
    return one.data_ptr(), other.data_ptr(), third.data_ptr()


def chunks(numel: int, size: int = CHUNK) -> Iterator[tuple[slice, slice]]:
    """The chunks of *numel* values, *size* in each, and their blocks."""
    for start in range(0, numel, size):
        stop = min(start + size, numel)
        yield slice(start, stop), slice(start // BLOCK, -(-stop // BLOCK))
