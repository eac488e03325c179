"""`step_by_kernels` makes a step of Adam or AdamW over packed states on a GPU. `StateFormat.unpack`,
the optimizer's step and `StateFormat.pack` one after another give the same bits, with several times
as much Python, which takes longer than the kernels.

With `fused=True`, one kernel for each parameter makes the whole step, if it gives the bits of torch's
kernel (`_tried`). Otherwise a kernel unpacks each parameter, torch's own functions update all
parameters, and a kernel packs each parameter.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.adam import adam

from ..errors import known
from .formats import Layout, StateFormat
from .on_gpu import kernels, packs_in_one_pass, reason
from .one_pass import STATES, Part
from .packed import Look, Packed, Unpacked, bits_of, raise_flag
from .rounding import BLOCK
from .traits import raw_step

_KEYS = {"step", *STATES}
_SAMPLE = 1 << 17  # values
# of a group; the learning rate changes from step to step
_OPTIONS = ("eps", "weight_decay", "maximize", "decoupled_weight_decay")

_log = logging.getLogger(__name__)


def can_step_by_kernels(optimizer: torch.optim.Optimizer, parts: Sequence[Part]) -> bool:
    """Whether `step_by_kernels` knows the options and states of *parts*, for an *optimizer* of which
    `one_pass.is_packed_adam` is true.
    """
    return _knows_decay() and all(
        optimizer.state.get(part.parameter, {}).keys() == _KEYS
        and all(
            isinstance(number, float | int)
            for number in (part.group["lr"], part.group["weight_decay"], *part.group["betas"])
        )
        and not any(part.group.get(name) for name in ("amsgrad", "differentiable"))
        for part in parts
    )


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
    by = kernels(buffer.device)
    empty = [optimizer.state[part.parameter]["step"] for part in parts if not part.weight.numel()]
    parts = [part for part in parts if part.weight.numel()]
    steps_there = all(optimizer.state[part.parameter]["step"].is_cuda for part in parts)
    if steps_there and all(
        _gives_bits_of_torch(buffer.device, type(optimizer), group) for group, _ in _by_group(parts)
    ):
        begin()
        _advance(empty)
        _step_in_one_kernel(optimizer, state_format, layout, buffer, parts, seed, look)
        return
    splits = state_format.splits_master and layout.master is not None
    widens = any(part.gradient.dtype != torch.float32 for part in parts)
    rows = splits + 2 * state_format.eight_bit + widens
    scratch = torch.empty((rows, layout.numel), dtype=torch.float32, device=buffer.device)
    packed = [_packed(state_format, layout, buffer, part) for part in parts]
    unpacked = [
        _unpacked(state_format, layout, buffer, part, scratch, widens=widens) for part in parts
    ]
    begin()
    _advance(empty)
    for part, one, into in zip(parts, packed, unpacked, strict=True):
        if splits or one.moments or into.gradient is not None:
            by.unpack(one, into, part.gradient)
    by_parameter = {id(part): into for part, into in zip(parts, unpacked, strict=True)}
    for group, chosen in _by_group(parts):
        _update(optimizer, group, chosen, [by_parameter[id(part)] for part in chosen])
    for part, one, into in zip(parts, packed, unpacked, strict=True):
        if look is not None:
            far = torch.zeros(
                -(-part.weight.numel() // BLOCK), dtype=torch.bool, device=buffer.device
            )
            by.mark_far(into.moments[1], into.moments[0], far, look.eps)
            raise_flag(look.flag, far)
        if splits or one.moments:
            by.pack(into, one, part.first_block, seed)
        if layout.master is not None and not splits:
            part.weight.copy_(into.master)


def _step_in_one_kernel(
    optimizer: torch.optim.Optimizer,
    state_format: StateFormat,
    layout: Layout,
    buffer: torch.Tensor,
    parts: Sequence[Part],
    seed: int,
    look: Look | None,
) -> None:
    from . import by_triton

    for group, chosen in _by_group(parts):
        steps = [optimizer.state[part.parameter]["step"] for part in chosen]
        for part, powers in zip(chosen, _advanced(steps, tuple(group["betas"])), strict=True):
            packed = _packed(state_format, layout, buffer, part)
            kept = _unpacked(state_format, layout, buffer, part, None, widens=False)
            by_triton.adam(packed, kept, part.gradient, powers, group, part.first_block, seed, look)
            if packed.low is None and layout.master is not None:
                part.weight.copy_(kept.master)


def _by_group(parts: Sequence[Part]) -> list[tuple[Any, list[Part]]]:
    groups = {id(part.group): part.group for part in parts}
    return [(group, [part for part in parts if part.group is group]) for group in groups.values()]


def _advance(steps: Sequence[torch.Tensor]) -> None:
    if steps:
        with torch.no_grad():
            torch._foreach_add_(list(steps), 1)


def _advanced(steps: Sequence[torch.Tensor], betas: tuple[float, float]) -> torch.Tensor:
    """Advance the step counts *steps*; return a row for each, the *betas* to its power."""
    with torch.no_grad():
        _advance(steps)
        counts = torch.stack(list(steps)) if len(steps) > 1 else steps[0][None]
        return torch.pow(_on_device(betas, counts.device), counts[:, None])


@functools.lru_cache(64)
def _on_device(betas: tuple[float, float], device: torch.device) -> torch.Tensor:
    return torch.tensor(betas, dtype=torch.float32, device=device)


def _packed(state_format: StateFormat, layout: Layout, buffer: torch.Tensor, part: Part) -> Packed:
    numel, start = part.weight.numel(), part.start
    low = None
    if state_format.splits_master and layout.master is not None:
        low = layout.master.of(buffer).view(layout.master_dtype)[start : start + numel]
    moments = []
    for slot in layout.states.values() if state_format.eight_bit else ():
        codes, exponents = slot.values.of(buffer), known(slot.exponents).of(buffer)
        first = start // BLOCK
        moments.append((codes[start : start + numel], exponents[first : first - (-numel // BLOCK)]))
    return Packed(part.weight, low, moments)


def _unpacked(
    state_format: StateFormat,
    layout: Layout,
    buffer: torch.Tensor,
    part: Part,
    scratch: torch.Tensor | None,
    *,
    widens: bool,
) -> Unpacked:
    """The memory for the unpacked *part*, in *scratch* or in *buffer*. Without *scratch*, the weight
    is in place of each packed piece.
    """
    numel, start = part.weight.numel(), part.start
    rows: Iterator[torch.Tensor] = (
        itertools.repeat(part.weight)
        if scratch is None
        else iter(scratch[:, start : start + numel])
    )

    def kept(slot: Any) -> torch.Tensor:
        values: torch.Tensor = slot.of(buffer).view(torch.float32)
        return values[start : start + numel]

    master = part.weight
    if layout.master is not None:
        master = next(rows) if state_format.splits_master else kept(layout.master)
    moments = [
        next(rows) if state_format.eight_bit else kept(slot.values)
        for slot in layout.states.values()
    ]
    is_wide = part.gradient.dtype == torch.float32
    return Unpacked(master, moments, next(rows) if widens and not is_wide else None)


def _update(
    optimizer: torch.optim.Optimizer,
    group: Any,
    parts: Sequence[Part],
    unpacked: Sequence[Unpacked],
) -> None:
    """Source: torch.optim.Adam.step."""
    gradients = [
        part.gradient if into.gradient is None else into.gradient
        for part, into in zip(parts, unpacked, strict=True)
    ]
    first, second = ([into.moments[index] for into in unpacked] for index in range(2))
    with torch.no_grad():
        adam(
            [into.master for into in unpacked],
            gradients,
            first,
            second,
            [],
            [optimizer.state[part.parameter]["step"] for part in parts],
            foreach=group["foreach"],
            capturable=group["capturable"],
            fused=group["fused"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


@functools.cache
def _knows_decay() -> bool:
    """Whether torch's function has an option for AdamW, as it does from 2.7 on."""
    return "decoupled_weight_decay" in inspect.signature(adam).parameters


def _gives_bits_of_torch(device: torch.device, kind: Any, group: Mapping[str, Any]) -> bool:
    """Whether `by_triton.adam` makes a step of the *group* of a *kind* of optimizer."""
    options = tuple((name, group[name]) for name in _OPTIONS), tuple(group["betas"])
    return bool(group["fused"]) and packs_in_one_pass(device) and _tried(device, kind, *options)


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
    _log.info("Adam on %s unpacks, updates and packs in three kernels: %s", device, why)
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
    packed, kept = Packed(weight, None, []), Unpacked(weight, [first, second], None)
    for number in (4, 999):
        for steps in (count, state["step"]):
            steps.fill_(number)
        parameter.grad = gradient.clone()
        raw_step(optimizer)(optimizer)
        [powers] = _advanced([count], group["betas"])
        by_triton.adam(packed, kept, gradient, powers, group, 0, 0)
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
