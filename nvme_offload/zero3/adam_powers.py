"""Restores the powers of the betas that DeepSpeed's Adam for the CPU keeps from step to step.

For its bias correction it multiplies them by the betas in every step, in fp32, and it computes them
by `pow` where the betas or the step number are not the expected ones. Both ways round differently,
and no state dict has the powers. So a checkpoint records how many multiplications led to them, and
a load repeats these.

Source: DeepSpeed, csrc/includes/cpu_adam.h, `IncrementStep`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# In fp32, 1 - power is 1 far above it.
_NEGLIGIBLE = 2.0**-30
_NO_BETAS = (-1.0, -1.0)  # others than any optimizer's, so that the next ones are taken by `pow`


class AdamPowers:
    """The powers of one *optimizer*, which may be of any class: others have none."""

    def __init__(self) -> None:
        self._betas: tuple[float, float] | None = None  # of the last update
        self.multiplied = 0  # in this many steps since the last `pow`

    def count(self, optimizer: Any, groups: Sequence[int]) -> None:
        """The optimizer has made a step, or will. *groups*: the parameter group of each sub-group,
        in the order of their updates.
        """
        if not _keeps_powers(optimizer):
            return
        betas = [tuple(optimizer.param_groups[group]["betas"]) for group in groups]
        same = set(betas) <= {self._betas or betas[-1]}
        self._betas, self.multiplied = betas[-1], self.multiplied + 1 if same else 0

    def jump(self) -> None:
        """The next step does not follow the last one: the powers will be taken by `pow`."""
        self.multiplied = -1

    def state(self, optimizer: Any) -> dict[str, Any]:
        """For `restore`; empty where there are no powers."""
        if not _keeps_powers(optimizer):
            return {}
        return {"betas": self._betas, "multiplied": self.multiplied}

    def restore(
        self, optimizer: Any, saved: Mapping[str, Any], step: int, groups: Sequence[int]
    ) -> None:
        """Give the optimizer the powers that it had after *step*, when *saved* was its `state`.
        Without one, the run is taken for one without a break. *groups*: as in `count`.
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
            # Older releases take the powers by `pow` in every update but the first of a step.
            update(step, betas)


def _keeps_powers(optimizer: Any) -> bool:
    return hasattr(optimizer, "ds_opt_adam")
