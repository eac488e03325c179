"""Codes of 8 bits are the same by the extension and by torch's operations: each code, each
exponent, and the values that these encode, bit for bit.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))
from bit_patterns import SPECIAL, numbers, patterns

from nvme_offload.optimizer_states import by_torch
from nvme_offload.optimizer_states.eight_bit import decode, encode
from nvme_offload.optimizer_states.rounding import BLOCK

pytestmark = pytest.mark.usefixtures("threads")

# values that share a row of random numbers, and the part of a tensor that a thread works on
ROW = 1 << 16
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, ROW - 1, ROW, ROW + 1, 4 * ROW, 5 * ROW + BLOCK + 3]
signed_or_not = pytest.mark.parametrize("signed", [True, False])


def check(values: torch.Tensor, *, signed: bool, seed: int = 0) -> None:
    """Both encode *values* alike, and decode the codes alike."""
    blocks = -(-values.numel() // BLOCK)
    found = []
    for there, back in ((encode, decode), (by_torch.encode, by_torch.decode)):
        codes = torch.full((values.numel() + 1,), 0xA5, dtype=torch.uint8)
        exponents = torch.full((blocks + 1,), 0xA5, dtype=torch.uint8)
        again = torch.full((values.numel() + 1,), 0.5)
        there(values, codes[:-1], exponents[:-1], signed=signed, seed=(seed, 1))
        back(codes[:-1], exponents[:-1], again[:-1], signed=signed)
        found.append((codes, exponents, again.view(torch.int32)))
    for ours, reference in zip(*found, strict=True):
        assert torch.equal(ours, reference)


@signed_or_not
@pytest.mark.parametrize("numel", SIZES)
def test_numbers_of_every_octave(signed, numel):
    for octaves in (1, 2, 16, 40, 254):
        values = numbers(numel, octaves)
        check(values, signed=signed, seed=numel)
        check(values.abs(), signed=signed, seed=-numel)


@signed_or_not
@pytest.mark.parametrize("numel", SIZES)
def test_any_patterns(signed, numel):
    check(patterns(numel).view(torch.float32), signed=signed)


@signed_or_not
@pytest.mark.parametrize("special", SPECIAL)
def test_one_that_is_special_among_others(signed, special):
    # In whole blocks and in the last one.
    for place, sign in itertools.product(
        (0, 5, BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 2), (0, -(1 << 31))
    ):
        values = numbers(3 * BLOCK + 3, 20).abs()
        values.view(torch.int32)[place] = special | sign
        check(values, signed=signed)
        check(torch.zeros(3 * BLOCK + 3).copysign(values), signed=signed)
        values.zero_().view(torch.int32)[place] = special | sign
        check(values, signed=signed)


@signed_or_not
def test_every_code_in_a_block_of_every_exponent(signed):
    codes, exponents = (
        torch.arange(256, dtype=torch.uint8).repeat(256),
        torch.arange(256, dtype=torch.uint8),
    )
    ours, reference = torch.empty(1 << 16), torch.empty(1 << 16)
    decode(codes, exponents, ours, signed=signed)
    by_torch.decode(codes, exponents, reference, signed=signed)
    assert torch.equal(ours.isnan(), reference.isnan())
    # where both a code and its block are NaN, it is the processor's choice which of them comes out
    number = ~ours.isnan()
    assert torch.equal(ours[number].view(torch.int32), reference[number].view(torch.int32))


@signed_or_not
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=600), st.integers(-(2**70), 2**70))
def test_any_patterns_side_by_side(signed, bits, seed):
    check(torch.tensor(bits).to(torch.int32).view(torch.float32), signed=signed, seed=seed)
