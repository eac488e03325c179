"""Splits an fp32 master into a bfloat16 working weight and the 16 bits that the weight lacks.

Rounding to nearest gives the working weight W = (bits + 0x8000) >> 16: one more than the upper half
if the lower half L is 0x8000 or more. So with L read as a signed number

    bits = (W << 16) + L

Ties round away from zero. torch rounds ties to even; an even W with L = 0x8000 could then come from
either side. The largest finite values overflow to infinity, as in torch, and `join` restores them.

Infinities and NaN are not rounded: 0x7fff8000 would become minus zero. A NaN keeps its upper half.
The 2 * 65535 NaN patterns with the upper half of an infinity become quiet NaN; arithmetic does not
produce them.

On the CPU the extension computes this in one pass over memory (aio/codec.h), elsewhere `on_gpu`.
"""

from __future__ import annotations

import torch

from ..extension import _aio
from .on_gpu import kernels
from .rounding import addresses


def split(master: torch.Tensor, working: torch.Tensor, low: torch.Tensor) -> None:
    """Round *master* into *working*, and write the bits that *working* lacks into *low*.

    Shapes: flat, contiguous, of one size. Dtypes: float32, bfloat16, and int16, or int8 for a
    master whose low 8 bits are zero.
    """
    if not master.is_cpu:
        kernels(master.device).split(master, working, low)
        return
    by_extension = _aio.split if low.dtype == torch.int16 else _aio.split_short
    by_extension(*addresses(master, working, low), master.numel(), torch.get_num_threads())


def join(working: torch.Tensor, low: torch.Tensor, master: torch.Tensor) -> None:
    """Restore *master*, which was split into *working* and *low*. Shapes: as for `split`."""
    if not master.is_cpu:
        kernels(master.device).join(working, low, master)
        return
    by_extension = _aio.join if low.dtype == torch.int16 else _aio.join_short
    by_extension(*addresses(working, low, master), master.numel(), torch.get_num_threads())
