"""`Pieces`: consecutive elements of a bucket that one parameter has. `Look`: a look at the new
states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

MASTER_INDEX = -1  # in the rounding seed; states are numbered from 0


class Pieces(NamedTuple):
    """What a step of Adam changes, each flat."""

    weight: torch.Tensor
    # int16 or int8: the lower bits of the master, whose upper bits are the weight. None if the
    # format does not split masters.
    low: torch.Tensor | None
    master: torch.Tensor  # float32; not used with *low*
    # The first and the second: codes and exponents, both uint8, or float32 values and None.
    moments: Sequence[tuple[torch.Tensor, torch.Tensor | None]]


class Look(NamedTuple):
    """A look for far blocks (`widening`) in the step of Adam: *flag* gets 1 if there is one. *eps*: of
    the bucket's groups, the smallest.
    """

    flag: torch.Tensor  # a single int8
    eps: float


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """The bit patterns of the float32 *values*, with one pattern for NaN: compilers choose its bits."""
    return torch.where(values.isnan(), torch.nan, values).view(torch.int32)
