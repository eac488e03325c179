"""`FORMATS`: how the optimizer states of a bucket of parameters are packed on the drive. The
package computes on tensors and transfers no data.
"""

from __future__ import annotations

from .formats import (
    FORMATS,
    Layout,
    Slot,
    StateFormat,
    StateSlot,
    put_in_place,
    state_format,
)
from .rounding import BLOCK, block_names
from .widening import (
    Findings,
    far_blocks,
    least_eps,
    looks_at,
    mark_far_blocks,
    round_near,
    wide_enough,
    widened,
)

__all__ = [
    "BLOCK",
    "FORMATS",
    "Findings",
    "Layout",
    "Slot",
    "StateFormat",
    "StateSlot",
    "block_names",
    "far_blocks",
    "least_eps",
    "looks_at",
    "mark_far_blocks",
    "put_in_place",
    "round_near",
    "state_format",
    "wide_enough",
    "widened",
]
