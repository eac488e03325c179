"""How a bucket of parameters' optimizer states lies on the drive: `"exact"`, `"split"` and
`"compact"`. Computes on tensors, moves nothing.
"""

from __future__ import annotations

from .eight_bit import BLOCK
from .formats import (
    FORMATS,
    Layout,
    Slot,
    StateFormat,
    StateSlot,
    far_blocks,
    looks_at,
    round_near,
    state_format,
    wide_enough,
    widened,
)

__all__ = [
    "BLOCK",
    "FORMATS",
    "Layout",
    "Slot",
    "StateFormat",
    "StateSlot",
    "far_blocks",
    "looks_at",
    "round_near",
    "state_format",
    "wide_enough",
    "widened",
]
