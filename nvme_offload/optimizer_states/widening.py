"""Decides when 8 bits are too few for a state: "compact" then keeps the state in 16 ("wide"). The
thresholds were measured: reports/compact-quality-cpu.md.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..extension import _aio
from .eight_bit import decode, encode
from .formats import Layout, StateFormat
from .on_gpu import kernels
from .rounding import BLOCK, CHUNK, block_names, chunks

_LARGEST_BETA = 0.96  # a slower first moment accumulates rounding errors
_LEAST_EPS = 1e-12
_CHECK_INTERVAL = 64  # steps; steps that are powers of two are checked, too

_log = logging.getLogger(__name__)


def wide_enough(
    format: StateFormat, optimizer: str, groups: Iterable[Mapping[str, Any]]
) -> StateFormat:
    """*format*, or its wide form if the options of *groups* need it; the change is logged.

    A large beta1 or momentum accumulates rounding errors in the first moment. With a small eps the
    step depends on second moments far below the block's maximum, which 8 bits cannot hold.
    """
    if not format.eight_bit or format.wide:
        return format
    for group in groups:
        betas = group.get("betas")
        decays = {
            "beta1": betas[0] if isinstance(betas, tuple | list) and betas else 0,
            "momentum": group.get("momentum", 0),
        }
        reasons = [
            f"{name} is {float(value):g}"
            for name, value in decays.items()
            if float(value) > _LARGEST_BETA
        ]
        eps = group.get("eps")
        if isinstance(eps, int | float) and eps < _LEAST_EPS:
            reasons.append(f"eps is {float(eps):g}")
        if reasons:
            return widened(format, optimizer, reasons[0])
    return format


def widened(
    format: StateFormat,
    optimizer: str,
    reason: str = "second moments of one block are more than 30 octaves apart",
) -> StateFormat:
    """The wide form of *format*; the change is logged, with the *reason*."""
    _log.info(
        'state_format="%s" keeps the states of %s in 16 bits: %s, for which 8 are too few',
        *(format.name, optimizer, reason),
    )
    return dataclasses.replace(format, wide=True)


def looks_at(format: StateFormat, step: int) -> bool:
    """Whether to look for `far_blocks` at *step*, from 1: at powers of two and every 64th step."""
    return format.eight_bit and (step & (step - 1) == 0 or step % _CHECK_INTERVAL == 0)


def least_eps(groups: Iterable[Mapping[str, Any]]) -> float:
    """The smallest eps of *groups*, 0.0 if no group has one."""
    return min(
        (eps for group in groups if isinstance(eps := group.get("eps"), int | float)), default=0.0
    )


class Findings:
    """Whether looks at the states on any device have found far blocks (`far_blocks`). Only `found`
    waits for a GPU.
    """

    def __init__(self) -> None:
        self._flags: dict[torch.device, torch.Tensor] = {}
        self._last: dict[Any, Any] = {}  # events of the last looks, by stream

    def flag(self, device: torch.device) -> torch.Tensor:
        """A single int8 on *device*, to which a look writes 1 if it finds a far block. The caller
        calls `note` after the look.
        """
        if device not in self._flags:
            self._flags[device] = torch.zeros(1, dtype=torch.int8, device=device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # any stream may use it
        return self._flags[device]

    def note(self, device: torch.device) -> None:
        """Let `found` wait for the current stream of *device*."""
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            self._last[stream] = stream.record_event()

    def add(self, far: torch.Tensor) -> None:
        """Add a result of `mark_far_blocks`."""
        flag = self.flag(far.device)
        torch.maximum(flag, far.any().to(flag.dtype), out=flag)  # does not wait for a GPU
        self.note(far.device)

    def found(self) -> bool:
        """Whether a look has found a far block. Waits for the looks, and not for later kernels."""
        for event in self._last.values():
            event.synchronize()
        self._last.clear()
        return any(_read(flag) for flag in self._flags.values())


def _read(flag: torch.Tensor) -> bool:
    if flag.is_cpu:
        return bool(flag)
    cuda: Any = torch.cuda
    with cuda.stream(cuda.Stream(flag.device)):  # the current stream may be far behind the CPU
        return bool(flag)


def far_blocks(
    layout: Layout, states: Mapping[str, torch.Tensor], eps: float
) -> torch.Tensor | None:
    """The result of `mark_far_blocks`; None if 8 bits are enough for all blocks."""
    far = mark_far_blocks(layout, states, eps)
    return far if bool(far.any()) else None


def mark_far_blocks(layout: Layout, states: Mapping[str, torch.Tensor], eps: float) -> torch.Tensor:
    """A bool for each block: whether 8 bits are too few for its second moments.

    They are too few if more than a sixteenth of the block's values are nonzero, below the least
    code, and matter. A value does not matter if *eps* exceeds the root of the least code, or if
    exp_avg is far below the denominator, so that the weight hardly moves, as with weights that no
    longer get gradients.
    """
    first = states.get("exp_avg")
    far = torch.zeros(
        -(-layout.numel // BLOCK),
        dtype=torch.bool,
        device=next(iter(states.values())).device if states else None,
    )
    mark = _mark_far if far.is_cpu else kernels(far.device).mark_far
    for key, slot in layout.states.items():
        if slot.rounded and not slot.signed:
            mark(states[key], first, far, eps)
    return far


def _mark_far(
    values: torch.Tensor, first: torch.Tensor | None, far: torch.Tensor, eps: float
) -> None:
    """`by_torch.mark_far`, on the CPU."""
    pointers = values.data_ptr(), 0 if first is None else first.data_ptr(), far.data_ptr()
    _aio.mark_far(*pointers, values.numel(), eps, torch.get_num_threads())


def round_near(
    layout: Layout,
    states: Mapping[str, torch.Tensor],
    far: torch.Tensor | None,
    seed: int,
    blocks: torch.Tensor | None,
) -> None:
    """Round *states* to 8 bits in place, as `StateFormat.pack` does, except the *far* blocks:
    buckets that were packed before a far block was found are rounded already, and bits do not
    depend on their order.
    """
    for index, (key, slot) in enumerate(layout.states.items()):
        if not slot.rounded:
            continue
        names = block_names(0, layout.numel, states[key].device) if blocks is None else blocks
        # On the CPU, temporaries stay small compared with host_memory.
        size = 1 << 18 if states[key].is_cpu else CHUNK
        for part, of in chunks(layout.numel, size):
            values = states[key][part]
            codes = torch.empty(values.numel(), dtype=torch.uint8, device=values.device)
            exponents = torch.empty(len(names[of]), dtype=torch.uint8, device=values.device)
            exact = values.clone()
            encode(
                values, codes, exponents, signed=slot.signed, seed=(seed, index), blocks=names[of]
            )
            decode(codes, exponents, values, signed=slot.signed)
            if far is not None:
                values.copy_(
                    torch.where(far[of].repeat_interleave(BLOCK)[: values.numel()], exact, values)
                )
