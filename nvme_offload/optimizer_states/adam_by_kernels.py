"""`step_by_kernels` makes a step of Adam or AdamW over packed states on a GPU: a kernel
unpacks each parameter, torch's own functions update all parameters, and a kernel packs each parameter.
`StateFormat.unpack`, the optimizer's step and `StateFormat.pack` one after another give the same bits,
with several times as much Python, which takes longer than the kernels.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.adam import adam

from ..errors import known
from .on_gpu import kernels
from .one_pass import STATES, Part
from .packed import Packed, Unpacked
from .rounding import BLOCK

if TYPE_CHECKING:
    from .formats import Layout, StateFormat

_KEYS = {"step", *STATES}


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
) -> None:
    """Make a step of *optimizer* over the packed states in *buffer*, and advance its step counts.
    Parameters: see `one_pass.step_in_one_pass`; `can_step_by_kernels` must be true.
    """
    by, parts = kernels(buffer.device), [part for part in parts if part.weight.numel()]
    splits = state_format.splits_master and layout.master is not None
    widens = any(part.gradient.dtype != torch.float32 for part in parts)
    rows = splits + 2 * state_format.eight_bit + widens
    scratch = torch.empty((rows, layout.numel), dtype=torch.float32, device=buffer.device)
    packed = [_packed(state_format, layout, buffer, part) for part in parts]
    unpacked = [
        _unpacked(state_format, layout, buffer, part, scratch, widens=widens) for part in parts
    ]
    begin()
    for part, one, into in zip(parts, packed, unpacked, strict=True):
        if splits or one.moments or into.gradient is not None:
            by.unpack(one, into, part.gradient)
    for group in {id(part.group): part.group for part in parts}.values():
        chosen = [index for index, part in enumerate(parts) if part.group is group]
        _update(optimizer, group, [parts[at] for at in chosen], [unpacked[at] for at in chosen])
    for part, one, into in zip(parts, packed, unpacked, strict=True):
        if splits or one.moments:
            by.pack(into, one, part.first_block, seed)
        if layout.master is not None and not splits:
            part.weight.copy_(into.master)


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
    scratch: torch.Tensor,
    *,
    widens: bool,
) -> Unpacked:
    numel, start = part.weight.numel(), part.start
    rows = iter(scratch[:, start : start + numel])

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
