"""Gradients that misbehave: huge, tiny, both side by side, suddenly of another scale. What does
AdamW's step become with each state format?
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from nvme_offload.optimizer_states import state_format

from .trainer import PackedAdamW

STEPS = 300
ELEMENTS = 1 << 14
BETAS = (0.9, 0.999)
# The Cauchy-Schwarz bound of |exp_avg| / sqrt(exp_avg_sq). Gradients that grow by beta2 / beta1 per
# step approach it.
BOUND = (1 - BETAS[0]) / math.sqrt((1 - BETAS[1]) * (1 - BETAS[0] ** 2 / BETAS[1]))
RATE = 1e-3


@dataclasses.dataclass(frozen=True)
class Stressed:
    """The result of one case. largest_step: of any weight in any step, over the learning rate.
    bound: its limit.
    """

    name: str
    format: str
    largest_step: float
    finite: bool
    bound: float

    @property
    def held(self) -> bool:
        """Whether all steps were finite and within the bound."""
        return self.finite and self.largest_step <= self.bound


def _noise(step: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(step))


def _decades(step: int) -> torch.Tensor:
    """Magnitudes from 1e-12 to 1e4 mixed in every block, constant for each weight."""
    return _noise(step) * torch.logspace(-12, 4, 17).repeat(ELEMENTS // 17 + 1)[:ELEMENTS]


def _rare(step: int) -> torch.Tensor:
    """Nothing but for one weight in a hundred, another each step, as in the embedding of rare
    words.
    """
    chosen = torch.rand(ELEMENTS, generator=torch.Generator().manual_seed(step + STEPS)) < 0.01
    return _noise(step) * chosen


CASES: dict[str, Callable[[int], torch.Tensor]] = {
    "1e6": lambda step: _noise(step) * 1e6,
    "1e-9": lambda step: _noise(step) * 1e-9,
    "1e-12 to 1e4 side by side": _decades,
    "1e-9, then 1e6 from the middle on": lambda step: (
        _noise(step) * (1e-9 if step < STEPS // 2 else 1e6)
    ),
    "1e6, then 1e-9 from the middle on": lambda step: (
        _noise(step) * (1e6 if step < STEPS // 2 else 1e-9)
    ),
    "1, with 1e6 once": lambda step: _noise(step) * (1e6 if step == STEPS // 2 else 1.0),
    "rising by a tenth a step": lambda step: torch.full((ELEMENTS,), 1e-9 * 1.11**step),
    "rare": _rare,
}


def stress(name: str, format: str) -> Stressed:
    """Step a bundle by the gradients of the case *name* with states in *format*."""
    weight = torch.nn.Parameter(torch.zeros(ELEMENTS, dtype=torch.bfloat16))
    optimizer = PackedAdamW(
        [weight], state_format(format), 0, betas=BETAS, weight_decay=0.0, eps=1e-16
    )
    before = torch.zeros(ELEMENTS)
    largest, finite = 0.0, True
    for step in range(STEPS):
        weight.grad = CASES[name](step).to(torch.bfloat16)
        optimizer.step(RATE)
        [(master, states)] = optimizer.unpacked()
        assert master is not None
        finite = finite and all(
            bool(tensor.isfinite().all()) for tensor in (master, *states.values())
        )
        largest = max(largest, float((master - before).abs().max()) / RATE)
        before = master.clone()
    return Stressed(name, format, largest, finite, BOUND * 1.2)  # that one rounding may make of it
