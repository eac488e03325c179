"""`kernels` chooses the kernels that pack states on a GPU; `fault` says why they are not Triton's."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from . import by_torch
from .packed import bits_of
from .rounding import BLOCK

_log = logging.getLogger(__name__)


@functools.cache
def kernels(device: torch.device) -> Any:
    """The module whose functions pack tensors on *device*: `by_triton` if it can be used there,
    otherwise `by_torch`, which makes some 170 passes over memory instead of seven.
    """
    if device.type != "cuda":
        return by_torch
    why = fault(device)
    if why is not None:
        _log.warning(
            "states on %s are packed by torch's operations, which take several times as long: %s",
            *(device, why),
        )
        return by_torch
    from . import by_triton

    return by_triton


def packs_in_one_pass(device: torch.device) -> bool:
    """Whether `kernels` of *device* are Triton's, which allocate no memory."""
    return device.type == "cuda" and fault(device) is None


@functools.cache
def fault(device: torch.device) -> str | None:
    """Why `by_triton` cannot be used on *device*; None if it can: it must be installed, compile for
    the device, and give the same bits as torch's operations. Raises: torch.cuda.OutOfMemoryError.
    """
    try:
        from . import by_triton

        wrong = _differing(by_triton, device)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # imports, compilers and drivers raise errors without a common class
        return f"Triton cannot be used: {reason(error)}"
    return f"Triton gives other bits in {', '.join(wrong)}" if wrong else None


def reason(error: Exception) -> str:
    """The class and the first line of *error*."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _differing(by: Any, device: torch.device) -> list[str]:
    """The names of results for which the kernels *by* differ from torch's operations on *device*."""
    values = _of_all_kinds().to(device)
    ours, theirs = _made(by, values), _made(by_torch, values)
    return [name for name, made in ours.items() if not torch.equal(made, theirs[name])]


def _of_all_kinds() -> torch.Tensor:
    """Numbers of 40 octaves in every other block, random bits in the rest. The last block is not
    whole.
    """
    generator = torch.Generator().manual_seed(0)
    bits, octaves = (
        torch.randint(-(1 << 31), 1 << 31, (64, BLOCK), dtype=torch.int64, generator=generator)
        for _ in range(2)
    )
    exponents = (torch.arange(64)[:, None] * 4 - octaves % 40).clamp(min=0)
    bits[::2] = bits[::2] & 0x807FFFFF | exponents[::2] << 23
    return bits.to(torch.int32).view(torch.float32).flatten()[:-3]


def _made(by: Any, values: torch.Tensor) -> dict[str, torch.Tensor]:

    def empty(dtype: torch.dtype, size: int = values.numel()) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=values.device)

    made: dict[str, torch.Tensor] = {}
    for signed, of in ((True, values), (False, values.abs())):
        codes, fields, back = (
            empty(torch.uint8),
            empty(torch.uint8, -(-values.numel() // BLOCK)),
            empty(torch.float32),
        )
        by.encode(of, codes, fields, signed=signed, seed=(1, 2))
        by.decode(codes, fields, back, signed=signed)
        made |= {f"codes, {signed=}": codes, f"exponents, {signed=}": fields}
        made[f"values, {signed=}"] = bits_of(back)
    for first in (values, None):
        far = empty(torch.bool, -(-values.numel() // BLOCK))
        by.mark_far(values.abs(), first, far, 1e-8)
        made[f"far blocks, {first is None}"] = far
    made["sums"] = torch.zeros(2, dtype=torch.int64, device=values.device)
    factors = torch.arange(1 << 14, device=values.device).view(2, -1) * -7046029254386353131
    by.add_sums(values.view(torch.int32), factors, factors[:, 1:5].contiguous(), made["sums"])
    rounded = values.clone()
    by.round_to_24(rounded, seed=(3,))
    made["masters of 24 bits"] = rounded.view(torch.int32)
    for master, low in ((values, empty(torch.int16)), (rounded, empty(torch.int8))):
        working, back = empty(torch.bfloat16), empty(torch.float32)
        by.split(master, working, low)
        by.join(working, low, back)
        made[f"weights beside {low.dtype}"] = working.view(torch.int16)
        made[f"rests in {low.dtype}"] = low
        made[f"masters of {low.dtype}"] = back.view(torch.int32)
    return made
