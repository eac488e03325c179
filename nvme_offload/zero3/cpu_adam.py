"""The powers of the betas that DeepSpeed's Adam for the CPU keeps from step to step (`AdamPowers`),
and the constants of its steps, for updates in one pass (`CPUAdam`).

Adam multiplies the powers by the betas in every step, in fp32. If the betas or the step number are
not the expected ones, it computes the powers by `pow` instead, which rounds differently. No state
dict contains the powers, so a checkpoint records the number of multiplications, and a load repeats
them.

`CPUAdam` computes the powers again and tests them: in every update, DeepSpeed and the extension
update the same small sample. If any bit differs, DeepSpeed makes the step.

Source: DeepSpeed, csrc/includes/cpu_adam.h, `IncrementStep` and `update_state`;
csrc/adam/cpu_adam_impl.cpp.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..optimizer_states.formats import FORMATS
from ..optimizer_states.one_pass import VECTORS, Part, deepspeed_step, update

# In fp32, 1 - power is 1 far above it.
_NEGLIGIBLE = 2.0**-30
_NO_BETAS = (-1.0, -1.0)  # equal to no optimizer's, so that the next powers are computed by `pow`
# Whole vectors, and a remainder after the last one.
_SAMPLE = 128 + 15
_STATES = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32)


class AdamPowers:
    """The powers of one *optimizer*. Its class may be any; only DeepSpeed's CPU Adam has powers."""

    def __init__(self) -> None:
        self._betas: tuple[float, float] | None = None  # of the last update
        self.multiplied = 0  # steps that multiplied the powers since the last `pow`

    def count(self, optimizer: Any, groups: Sequence[int]) -> None:
        """Count a step. *groups*: the parameter group of each sub-group, in order of update."""
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
        empty = [torch.empty(0, dtype=torch.float32, device="cpu") for _ in range(4)]

        def advance(at: int, by: tuple[float, ...]) -> None:
            optimizer.ds_opt_adam.adam_update(
                optimizer.opt_id, at, 0.0, *by, 1e-8, 0.0, True, *empty
            )

        first = step - self.multiplied
        if max(betas) ** step < _NEGLIGIBLE:
            first = step
        advance(0, _NO_BETAS)
        for at in range(first, step + 1):
            advance(at, betas)
        if len(groups) > 1:
            # Older releases compute the powers by `pow` in every update but the first of a step.
            advance(step, betas)


def _keeps_powers(optimizer: Any) -> bool:
    return hasattr(optimizer, "ds_opt_adam")


def is_cpu_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether *optimizer* makes the steps of DeepSpeedCPUAdam."""
    if not hasattr(optimizer, "ds_opt_adam"):
        return False
    kind: Any = importlib.import_module("deepspeed.ops.adam.cpu_adam").DeepSpeedCPUAdam
    return isinstance(optimizer, kind) and type(optimizer).step is kind.step


class CPUAdam:
    """The constants of the steps of one DeepSpeedCPUAdam."""

    def __init__(self) -> None:
        self._vectors: tuple[int, ...] = VECTORS  # elements of a vector: the sizes still possible
        self._given_up = False

    def constants(
        self,
        optimizer: Any,
        group: Mapping[str, Any],
        step: int,
        numel: int,
        multiplied: int | None,
    ) -> Any:
        """The constants of step number *step* for *numel* elements, for `one_pass.update`; None if
        DeepSpeed has to make the step. *multiplied*: the steps since DeepSpeed last computed the
        powers by `pow`, with or without this one; None if each update of a step has others.
        """
        if self._given_up or multiplied is None:
            return None
        expected = _stepped_sample(optimizer, group, step)
        for vector in self._vectors:
            for count in dict.fromkeys((multiplied + 1, multiplied, step, 0)):
                powers = [
                    _power(beta, step - min(count, step), min(count, step))
                    for beta in group["betas"]
                ]
                constants = _constants(optimizer, group, powers, _SAMPLE % vector)
                if _same_bits(constants, expected):
                    self._vectors = (vector,)
                    return _constants(optimizer, group, powers, numel % vector)
        self._given_up = True
        return None


def _power(beta: float, exponent: int, multiplications: int) -> np.float32:
    factors = np.full(multiplications + 1, beta, np.float32)
    factors[0] = float(np.float32(beta)) ** exponent
    power: np.float32 = np.multiply.accumulate(factors)[-1]
    return power


def _constants(
    optimizer: Any, group: Mapping[str, Any], powers: list[np.float32], tail: int
) -> Any:
    one = np.float32(1)
    rate, decay = np.float32(group["lr"]), np.float32(group["weight_decay"])
    beta1, beta2 = map(np.float32, group["betas"])
    correction1 = correction2 = one
    if group["bias_correction"]:
        correction1, correction2 = one - powers[0], one / np.sqrt(one - powers[1])
    return deepspeed_step(
        tail=tail,
        weight=float(one - beta1),
        beta1=float(beta1),
        beta2=float(beta2),
        square_weight=float(one - beta2),
        decays=bool(decay > 0),
        decoupled=bool(optimizer.adam_w_mode),
        decay=float(-rate * decay if optimizer.adam_w_mode else decay),
        correction=float(correction2),
        eps=group["eps"],
        step_size=float(-rate / correction1),
    )


def _stepped_sample(
    optimizer: Any, group: Mapping[str, Any], step: int
) -> tuple[torch.Tensor, ...]:
    """The sample after DeepSpeed's step, which also advances its powers of the betas."""
    weight, gradient, first, second = _sample()
    optimizer.ds_opt_adam.adam_update(
        optimizer.opt_id,
        step,
        group["lr"],
        *group["betas"],
        group["eps"],
        group["weight_decay"],
        group["bias_correction"],
        weight,
        gradient,
        first,
        second,
    )
    return weight, first, second


def _same_bits(constants: Any, expected: tuple[torch.Tensor, ...]) -> bool:
    exact = FORMATS["exact"]
    layout = exact.layout(_SAMPLE, _STATES, torch.float32)
    weight, gradient, *moments = _sample()
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu")
    places = [slot.values.of(buffer).view(torch.float32) for slot in layout.states.values()]
    for place, moment in zip(places, moments, strict=True):
        place.copy_(moment)
    update(exact, layout, buffer, Part(weight, {}, weight, gradient, 0, 0), constants, 0)
    return all(
        torch.equal(one.view(torch.int32), other.view(torch.int32))
        for one, other in zip((weight, *places), expected, strict=True)
    )


def _sample() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(5, _SAMPLE, generator=generator, dtype=torch.float32, device="cpu")
    scale = torch.exp(2 * drawn[4])
    return drawn[0] * scale, drawn[1] * scale, drawn[2] * scale, (drawn[3] * scale).square()
