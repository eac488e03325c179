"""`ForwardShare`: which share of a step's time its forward pass has."""

from __future__ import annotations

import time
from typing import Any

import torch

_STEPS = 2  # to measure


class ForwardShare:
    """Measures steps, each of which comes after one that is alike: its forward pass, under which that
    one's updates are made, is as long as every other.

    A step is from the end of one `step` to the end of the next, and its forward pass is over with
    the first gradient. On a GPU both are times of its own, since programs run ahead of it. Of two
    steps the smaller share counts: an evaluation between them makes one larger.

    Attributes: *value*, None until it is known. It does not change any more: what is decided by it
    changes the order in which values are used, which the planner learns.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._kind = 0  # of the step before
        self._began: Any = None  # the step that goes on
        self._forward_ended: Any = None
        self._shares: list[float] = []

    def forward_ends(self, device: torch.device) -> None:
        """The first gradient comes."""
        if self.value is None:
            self._forward_ended = _now(device)

    def step_ends(self, kind: int, device: torch.device) -> None:
        """A step is over, and those of the same *kind* are alike. One of kind 0 does not count."""
        if self.value is not None:
            return
        began, forward_ended, ended = self._began, self._forward_ended, _now(device)
        if kind and kind == self._kind:
            self._shares.append(_seconds(began, forward_ended) / _seconds(began, ended))
            if len(self._shares) == _STEPS:
                self.value = min(self._shares)
        self._kind, self._began = kind, ended


def _now(device: torch.device) -> Any:
    """This moment; on a GPU an event, which it reaches after what it was given."""
    if device.type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(began: Any, ended: Any) -> float:
    """From one moment to a later one."""
    if isinstance(began, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended) / 1000)
