"""The fp32 master as a bfloat16 working weight and the 16 bits that it lacks, without loss.

A bfloat16 is the upper half of an fp32 pattern. Rounding to the nearest makes the working weight W = (bits + 0x8000) >> 16, one more than the upper
half wherever the lower half L is 0x8000 or more, so that the upper half is always W - (L >= 0x8000), and with L read as a signed number

    bits = (W << 16) + L

Ties go away from zero (patterns are sign and magnitude), where torch rounds them to even: then an even W with L = 0x8000 could have come from either
side, and 16 bits do not tell which. The largest finite values overflow to infinity as they do in torch, and come back from there.

Infinities and NaN must not be rounded: 0x7fff8000 would become minus zero. NaN keep their upper half. There are 2 * (2**23 - 1) of them, and 2 * 127 *
2**16 pairs with a W that is NaN, so 2 * 65535 have no place: those whose upper half is that of an infinity, which become quiet. No arithmetic makes such.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CPU_CHUNK = 1 << 16  # elements a thread, so that what is between stays in its cache
_GPU_CHUNK = 1 << 24


def chunk_elements(device: torch.device) -> int:
    """How many elements to work on at once on *device*: many enough to keep it busy, few enough that temporaries are small. A power of two or more."""
    import torch

    return _CPU_CHUNK * torch.get_num_threads() if device.type == "cpu" else _GPU_CHUNK


def split(master: torch.Tensor, working: torch.Tensor, low: torch.Tensor) -> None:
    """Round *master* into *working* and keep in *low* what that lacks. Shapes: flat, of one size; float32, bfloat16, int16."""
    import torch

    chunk = chunk_elements(master.device)
    scratch = torch.empty(min(chunk, master.numel()), dtype=torch.int32, device=master.device)
    for start in range(0, master.numel(), chunk):
        part = slice(start, start + chunk)
        bits = master[part].view(torch.int32)
        high = torch.add(bits, 0x8000, out=scratch[: bits.numel()])
        high.bitwise_right_shift_(16)
        if _may_have_nan(master[part]):
            upper = bits >> 16
            quiet = torch.where((upper & 0x7F) == 0, upper | 0x40, upper)
            torch.where(master[part].isnan(), quiet, high, out=high)
        working[part].view(torch.int16).copy_(high)
        low[part].copy_(bits)


def join(working: torch.Tensor, low: torch.Tensor, master: torch.Tensor) -> None:
    """The *master* that *working* and *low* were split from. Shapes: as in `split`."""
    import torch

    chunk = chunk_elements(master.device)
    scratch = torch.empty(min(chunk, master.numel()), dtype=torch.int32, device=master.device)
    for start in range(0, master.numel(), chunk):
        part = slice(start, start + chunk)
        bits = master[part].view(torch.int32)
        bits.copy_(working[part].view(torch.int16))
        bits.bitwise_left_shift_(16)
        bits.add_(scratch[: bits.numel()].copy_(low[part]))
        if _may_have_nan(master[part]):  # a working weight that is NaN gives a NaN also by the rule for numbers
            upper = working[part].view(torch.int16).to(torch.int32) << 16
            torch.where(working[part].isnan(), upper | (low[part].to(torch.int32) & 0xFFFF), bits, out=bits)


def _may_have_nan(values: torch.Tensor) -> bool:
    """False where there is surely none. A GPU is not waited for."""
    return values.device.type != "cpu" or bool(values.amax().isnan())
