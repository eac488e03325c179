"""Consecutive elements of a bucket that one parameter has: `Packed` by a format, and `Unpacked` for
Adam. `Look`: a look at the new states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

MASTER_INDEX = -1  # in the rounding seed; states are numbered from 0


class Packed(NamedTuple):
    """What a format packs. ``unpack(packed, unpacked, gradient)`` of `by_triton` and `by_torch`
    fills *unpacked*; ``pack(unpacked, packed, first_block, seed)`` does the reverse, as
    `StateFormat.pack` does.
    """

    working: torch.Tensor  # the weight, flat
    # int16 or int8: the lower bits of the master, whose upper bits are the weight. None if the
    # format does not split masters.
    low: torch.Tensor | None
    # Codes and exponents of Adam's first and second moments, both uint8. Empty if the format keeps
    # moments as they are.
    moments: Sequence[tuple[torch.Tensor, torch.Tensor]]


class Unpacked(NamedTuple):
    """Flat float32 tensors."""

    master: torch.Tensor
    moments: Sequence[torch.Tensor]  # Adam's first and second
    gradient: torch.Tensor | None  # memory for it; None if the gradient is in float32 already


class Look(NamedTuple):
    """A look for far blocks (`widening`) in the step of Adam: *flag* gets 1 if there is one. *eps*: of
    the bucket's groups, the smallest.
    """

    flag: torch.Tensor  # a single int8
    eps: float


def raise_flag(flag: torch.Tensor, far: torch.Tensor) -> None:
    """Write 1 to *flag*, as a `Look` has it, if one of the blocks is *far*. Does not wait for a GPU."""
    torch.maximum(flag, far.any().to(flag.dtype), out=flag)


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """The bit patterns of the float32 *values*, with one pattern for NaN: compilers choose its bits."""
    return torch.where(values.isnan(), torch.nan, values).view(torch.int32)
