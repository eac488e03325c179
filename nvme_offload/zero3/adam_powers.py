"""Restores the powers of the betas that DeepSpeed's Adam for the CPU keeps from step to step.

Adam multiplies the powers by the betas in every step, in fp32. If the betas or the step number are
not the expected ones, it computes the powers by `pow` instead, which rounds differently. No state
dict contains the powers, so a checkpoint records the number of multiplications, and a load repeats
them.

Source: DeepSpeed, csrc/includes/cpu_adam.h, `IncrementStep`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# In fp32, 1 - power is 1 far above it.
_NEGLIGIBLE = 2.0**-30
_NO_BETAS = (-1.0, -1.0)  # equal to no optimizer's, so that the next powers are computed by `pow`


class AdamPowers:
    """The powers of one *optimizer*. Its class may be any; only DeepSpeed's CPU Adam has powers."""

    def __init__(self) -> None:
        self._betas: tuple[float, float] | None = None  # of the last update
        self.multiplied = 0  # steps that multiplied the powers since the last `pow`

    def count(self, optimizer: Any, groups: Sequence[int]) -> None:
        """Count a step that the optimizer has made or is about to make. *groups*: the parameter
        group of each sub-group, in the order of their updates.
        """
        if not _keeps_powers(optimizer):
            return
        betas = [tuple(optimizer.param_groups[group]["betas"]) for group in groups]
        same = set(betas) <= {self._betas or betas[-1]}
        self._betas, self.multiplied = betas[-1], self.multiplied + 1 if same else 0

    def jump(self) -> None:
        """The next step does not follow the last one: the optimizer will compute powers by `pow`."""
        self.multiplied = -1

    def state(self, optimizer: Any) -> dict[str, Any]:
        """The state to pass to `restore`; empty if the optimizer keeps no powers."""
        if not _keeps_powers(optimizer):
            return {}
        return {"betas": self._betas, "multiplied": self.multiplied}

    def restore(
        self, optimizer: Any, saved: Mapping[str, Any], step: int, groups: Sequence[int]
    ) -> None:
        """Restore the powers that the optimizer had after *step*, when *saved* was its `state`.
        Without *saved*, assume that all steps were made in one run. *groups*: as in `count`.
        """
        if not _keeps_powers(optimizer):
            return
        betas = tuple(saved.get("betas") or optimizer.param_groups[groups[-1]]["betas"])
        self._betas, self.multiplied = betas, min(saved.get("multiplied", step), step)
        empty = [torch.empty(0) for _ in range(4)]

        def update(at: int, by: tuple[float, ...]) -> None:
            optimizer.ds_opt_adam.adam_update(
                optimizer.opt_id, at, 0.0, *by, 1e-8, 0.0, True, *empty
            )

        first = step - self.multiplied
        if max(betas) ** step < _NEGLIGIBLE:
            first = step
        update(0, _NO_BETAS)
        for at in range(first, step + 1):
            update(at, betas)
        if len(groups) > 1:
            # Older releases compute the powers by `pow` in every update but the first of a step.
            update(step, betas)


def _keeps_powers(optimizer: Any) -> bool:
    return hasattr(optimizer, "ds_opt_adam")
