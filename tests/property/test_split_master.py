"""The split master is lossless. `python tests/property/test_split_master.py` looks at all 2**32
patterns; the tests at those that decide.
"""

from __future__ import annotations

import time

import pytest
import torch

from nvme_offload.optimizer_states import by_torch
from nvme_offload.optimizer_states.split import join, split

INFINITY = 0x7F800000
# nothing, just above it, just below, at and just above a tie, just below the next
LOWS = [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
HIGHS = [
    0x0000,
    0x0001,
    0x007F,
    0x0080,
    0x3F7F,
    0x3F80,
    0x3F81,
    0x7F7E,
    0x7F7F,
    0x7F80,
    0x7F81,
    0x7FBF,
    0x7FC0,
    0x7FFE,
    0x7FFF,
]
HIGHS += [0x8000 | high for high in HIGHS]


def there_and_back(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The working weights of the masters of these patterns, and the patterns that come back; the
    same by the extension and by torch's operations.
    """
    found = []
    for there, home in ((split, join), (by_torch.split, by_torch.join)):
        working = torch.empty(bits.numel(), dtype=torch.bfloat16)
        low = torch.empty(bits.numel(), dtype=torch.int16)
        back = torch.empty(bits.numel(), dtype=torch.float32)
        there(bits.view(torch.float32), working, low)
        home(working, low, back)
        found.append((working, low, back.view(torch.int32)))
    for ours, reference in zip(*found, strict=True):
        assert torch.equal(ours.view(torch.uint8), reference.view(torch.uint8))
    working, _, back = found[0]
    return working, back


def check(bits: torch.Tensor) -> None:
    """Every pattern comes back, and its working weight is the nearest bfloat16, of two the one away
    from zero.
    """
    working, back = there_and_back(bits)
    magnitude = bits & 0x7FFFFFFF
    # NaN by their lower half alone
    homeless = (magnitude > INFINITY) & (magnitude < INFINITY + 0x10000)
    assert torch.equal(back, torch.where(homeless, bits | 0x400000, bits))
    master = bits.view(torch.float32)
    assert torch.equal(working.isnan(), master.isnan())
    pattern = working.view(torch.int16).to(torch.int32) & 0xFFFF
    upper, lower = (bits >> 16) & 0xFFFF, bits & 0xFFFF
    number = magnitude <= INFINITY
    assert torch.equal(pattern[number], (upper + (lower >= 0x8000))[number])
    untied = number & (lower != 0x8000)
    assert torch.equal(
        working[untied].view(torch.int16), master[untied].bfloat16().view(torch.int16)
    )


def check_short(bits: torch.Tensor) -> None:
    """The same of patterns whose lowest 8 bits are zero, of which 8 bits are kept: all come back
    with the working weights that 16 bits give.
    """
    bits = bits & ~0xFF
    working, back = there_and_back(bits)
    for there, home in ((split, join), (by_torch.split, by_torch.join)):
        short = torch.empty(bits.numel(), dtype=torch.bfloat16)
        low = torch.empty(bits.numel(), dtype=torch.int8)
        found = torch.empty(bits.numel(), dtype=torch.float32)
        there(bits.view(torch.float32), short, low)
        home(short, low, found)
        assert torch.equal(short.view(torch.int16), working.view(torch.int16))
        assert torch.equal(found.view(torch.int32), back)


def as_bits(patterns: torch.Tensor) -> torch.Tensor:
    return patterns.to(torch.int32)  # from int64, keeping the lower half


def test_every_upper_half_with_every_lower_half_that_decides():
    check(as_bits((torch.arange(1 << 16)[:, None] << 16 | torch.tensor(LOWS)).flatten()))


def test_every_upper_half_with_every_byte_that_is_kept():
    check_short(
        as_bits(
            (
                torch.arange(1 << 16)[:, None] << 16 | torch.tensor([0, 0x7F, 0x80, 0xFF]) << 8
            ).flatten()
        )
    )
    check_short(as_bits((torch.tensor(HIGHS)[:, None] << 16 | torch.arange(1 << 16)).flatten()))


def test_every_lower_half_with_every_upper_half_that_decides():
    check(as_bits((torch.tensor(HIGHS)[:, None] << 16 | torch.arange(1 << 16)).flatten()))


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0xFFFF])
def test_working_weights_that_were_changed_are_joined_alike(low):
    # Every working weight, with low bits from another weight.
    working = as_bits(torch.arange(1 << 16)).to(torch.int16).view(torch.bfloat16)
    lows = torch.full((1 << 16,), low, dtype=torch.int32).to(torch.int16)
    ours, reference = torch.empty(1 << 16), torch.empty(1 << 16)
    join(working, lows, ours)
    by_torch.join(working, lows, reference)
    assert torch.equal(ours.view(torch.int32), reference.view(torch.int32))


def main() -> None:
    """Look at all patterns."""
    began = time.monotonic()
    chunk = 1 << 22
    for start in range(-(1 << 31), 1 << 31, chunk):
        check(torch.arange(start, start + chunk, dtype=torch.int64).to(torch.int32))
    print(f"all 2**32 patterns in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
