"""`step_by_kernels` makes a step of Adam or AdamW with `fused=True` over packed states on a GPU: one
kernel for each parameter, if it gives the bits of torch's kernel (`_tried`). `StateFormat.unpack`,
the optimizer's step and `StateFormat.pack` one after another give the same bits.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .formats import Layout, Slot, StateFormat
from .on_gpu import packs_in_one_pass, reason
from .one_pass import Part, is_usual
from .packed import Look, Pieces, bits_of
from .rounding import BLOCK
from .traits import raw_step

_SAMPLE = 1 << 17  # values
# of a group; the learning rate changes from step to step, and torch before 2.7 lacks the last one
_OPTIONS = ("eps", "weight_decay", "maximize", "decoupled_weight_decay")

_log = logging.getLogger(__name__)


def can_step_by_kernels(optimizer: torch.optim.Optimizer, parts: Sequence[Part]) -> bool:
    """Whether `step_by_kernels` knows the options and states of *parts*, for an *optimizer* of which
    `one_pass.is_packed_adam` is true.
    """
    return all(
        _gives_bits_of_torch(type(optimizer), part.group, optimizer.state.get(part.parameter, {}))
        for part in parts
    )


def _gives_bits_of_torch(kind: Any, group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    if not (is_usual(group, state) and group["fused"] and all(name in group for name in _OPTIONS)):
        return False
    device = state["step"].device
    options = tuple((name, group[name]) for name in _OPTIONS), tuple(group["betas"])
    return packs_in_one_pass(device) and _tried(device, kind, *options)


def step_by_kernels(
    optimizer: torch.optim.Optimizer,
    state_format: StateFormat,
    layout: Layout,
    buffer: torch.Tensor,
    parts: Sequence[Part],
    seed: int,
    begin: Callable[[], None],
    look: Look | None = None,
) -> None:
    """Make a step of *optimizer* over the packed states in *buffer*, and advance its step counts.
    Parameters: see `one_pass.step_in_one_pass`; `can_step_by_kernels` must be true. *look*: for far
    blocks of the new second moments.
    """
    from . import by_triton

    begin()
    for group in {id(part.group): part.group for part in parts}.values():
        chosen = [part for part in parts if part.group is group]
        steps = [optimizer.state[part.parameter]["step"] for part in chosen]
        for part, powers in zip(chosen, _advanced(steps, tuple(group["betas"])), strict=True):
            if not part.weight.numel():
                continue
            pieces = _pieces(state_format, layout, buffer, part)
            by_triton.adam(pieces, part.gradient, powers, group, part.first_block, seed, look)
            if pieces.low is None and layout.master is not None:
                part.weight.copy_(pieces.master)


def _advanced(steps: Sequence[torch.Tensor], betas: tuple[float, float]) -> torch.Tensor:
    """Advance the step counts *steps*; return a row for each, the *betas* to its power."""
    with torch.no_grad():
        torch._foreach_add_(list(steps), 1)
        counts = torch.stack(list(steps)) if len(steps) > 1 else steps[0][None]
        return torch.pow(_on_device(betas, counts.device), counts[:, None])


@functools.lru_cache(64)
def _on_device(betas: tuple[float, float], device: torch.device) -> torch.Tensor:
    return torch.tensor(betas, dtype=torch.float32, device=device)


def _pieces(state_format: StateFormat, layout: Layout, buffer: torch.Tensor, part: Part) -> Pieces:
    numel, start, first = part.weight.numel(), part.start, part.start // BLOCK

    def place(slot: Slot, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return slot.of(buffer).view(dtype)[start : start + numel]

    low, master = None, part.weight
    if layout.master is not None and state_format.splits_master:
        low = place(layout.master, layout.master_dtype)
    elif layout.master is not None:
        master = place(layout.master)
    moments: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for slot in layout.states.values():
        if slot.exponents is None:
            moments.append((place(slot.values), None))
        else:
            exponents = slot.exponents.of(buffer)[first : first - (-numel // BLOCK)]
            moments.append((place(slot.values, torch.uint8), exponents))
    return Pieces(part.weight, low, master, moments)


@functools.lru_cache(64)
def _tried(
    device: torch.device,
    kind: Any,
    options: tuple[tuple[str, Any], ...],
    betas: tuple[float, float],
) -> bool:
    """Whether `by_triton.adam` gives the bits of torch's kernel, whose compiler may fuse other sums."""
    why = "Triton gives other bits than torch"
    try:
        if _gives_same_bits(device, kind, {**dict(options), "betas": betas}):
            return True
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # as in `on_gpu.fault`
        why = reason(error)
    _log.info("Adam on %s unpacks states, updates and packs them: %s", device, why)
    return False


def _gives_same_bits(device: torch.device, kind: Any, options: dict[str, Any]) -> bool:
    from . import by_triton

    weight, gradient, first, second = (value.to(device) for value in _sample())
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = kind([parameter], lr=1e-2, fused=True)
    optimizer.param_groups[0].update(options)
    [group], count = optimizer.param_groups, torch.zeros((), device=device)
    state = optimizer.state[parameter]
    state.update({"step": count.clone(), "exp_avg": first.clone(), "exp_avg_sq": second.clone()})
    trained = parameter.detach(), state["exp_avg"], state["exp_avg_sq"]
    pieces = Pieces(weight, None, weight, [(first, None), (second, None)])
    for number in (4, 999):
        for steps in (count, state["step"]):
            steps.fill_(number)
        parameter.grad = gradient.clone()
        raw_step(optimizer)(optimizer)
        [powers] = _advanced([count], group["betas"])
        by_triton.adam(pieces, gradient, powers, group, 0, 0)
    return all(
        torch.equal(bits_of(one), bits_of(other))
        for one, other in zip(trained, (weight, first, second), strict=True)
    )


def _sample() -> list[torch.Tensor]:
    """Weight, gradient and moments of many magnitudes, and special gradients."""
    generator = torch.Generator().manual_seed(0)

    def drawn(spread: float) -> torch.Tensor:
        values = torch.randn(2, _SAMPLE, generator=generator, dtype=torch.float32, device="cpu")
        return values[0] * torch.exp(values[1] * spread)

    weight, gradient, first, second = drawn(1), drawn(4), drawn(4), drawn(8).abs()
    for place, number in enumerate([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 3e38]):
        gradient[7 * place] = number
    return [weight, gradient, first, second]
