"""Blocks of second moments for which 8 bits are too few are the same by the extension and by torch's
operations.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from bit_patterns import SPECIAL, patterns

from nvme_offload.optimizer_states import by_torch
from nvme_offload.optimizer_states.formats import state_format
from nvme_offload.optimizer_states.rounding import BLOCK
from nvme_offload.optimizer_states.widening import far_blocks

pytestmark = pytest.mark.usefixtures("threads")

ROW = 1 << 16  # what a thread works on
SIZES = [0, 1, 17, BLOCK - 1, BLOCK, BLOCK + 20, ROW, ROW + 1, 3 * ROW + BLOCK + 33]
EPS = [0.0, 1e-30, 1e-15, 1e-8, 1e-3, float("inf"), float("nan")]


def check(second: torch.Tensor, first: torch.Tensor | None, eps: float) -> int:
    """Both find the same blocks. Returns: how many blocks are far."""
    states = {"exp_avg_sq": second} | ({} if first is None else {"exp_avg": first})
    layout = state_format("compact").layout(
        second.numel(), dict.fromkeys(states, torch.float32), torch.float32
    )
    found = far_blocks(layout, states, eps)
    reference = torch.zeros(-(-second.numel() // BLOCK), dtype=torch.bool)
    by_torch.mark_far(second, first, reference, eps)
    assert (found is None) == (not reference.any())
    assert found is None or torch.equal(found, reference)
    return int(reference.sum())


def moments(numel: int, octaves: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Over *octaves*, the first from far below the root to far above it."""
    drawn = torch.Generator().manual_seed(numel)
    second = torch.exp2(-octaves * torch.rand(numel, generator=drawn))
    away = torch.exp2(20 * torch.rand(numel, generator=drawn) - 10)
    return second.sqrt() * away * torch.randn(numel, generator=drawn).sign(), second


@pytest.mark.parametrize("numel", SIZES)
def test_numbers_some_octaves_apart(numel):
    for octaves in (1, 30, 31, 33, 60, 120):
        first, second = moments(numel, octaves)
        found = [check(second, one, eps) for one in (first, None) for eps in EPS]
        assert max(found) > 0 or octaves < 60 or numel <= 20


@pytest.mark.parametrize("numel", SIZES)
def test_any_patterns(numel):
    second, first = (patterns(numel, seed).view(torch.float32) for seed in (0, 1))
    for eps in EPS:
        check(second, first, eps)
        check(second.abs(), first, eps)


@pytest.mark.parametrize("special", [*SPECIAL, -1, -(1 << 31), 0x30800000])
def test_one_that_is_special_among_others(special):
    for place, which in itertools.product((0, BLOCK - 1, 2 * BLOCK + 100, 3 * BLOCK + 2), range(2)):
        values = moments(3 * BLOCK + 30, 40)
        values[which].view(torch.int32)[place] = special
        for eps in EPS:
            check(values[1], values[0], eps)


def test_how_many_of_a_block_are_few():
    for count, numel in ((16, BLOCK), (17, BLOCK), (16, 40), (17, 40)):
        second = torch.ones(numel)
        second[:count] = 2.0**-31
        assert check(second, second.sqrt(), 1e-12) == (count > 16)


@pytest.mark.parametrize(
    ("second", "first", "eps", "far"),
    [
        (2.0**-30, None, 0.0, 0),  # the least code itself
        (2.0**-32, 2.0**-22, 0.0, 1),  # 64 times exp_avg is the root
        (2.0**-32, 2.0**-22, 1e-30, 1),  # which this does not change
        (2.0**-32, 2.0**-23, 0.0, 0),
        (2.0**-32, 1.0, 2.0**-12, 0),  # 8 roots of the least code
        (2.0**-32, 1.0, 2.0**-12.1, 1),
        (2.0**-32, None, 6 * 2.0**-16, 1),  # of unknown exp_avg, up to 7 roots
        (2.0**-32, None, 7.1 * 2.0**-16, 0),
    ],
)
def test_bounds(second, first, eps, far):
    values = torch.ones(BLOCK)
    values[:20] = second
    assert check(values, None if first is None else torch.full((BLOCK,), first), eps) == far
