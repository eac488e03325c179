"""How a bundle of parameters' optimizer states lies on the drive: `"exact"`, `"split"` and `"compact"`. Computes on tensors, moves nothing."""

from __future__ import annotations

from .formats import FORMATS, Layout, Slot, StateFormat, StateSlot, state_format

__all__ = ["FORMATS", "Layout", "Slot", "StateFormat", "StateSlot", "state_format"]
