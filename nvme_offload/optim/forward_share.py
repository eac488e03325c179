"""`ForwardShare`: which share of a step's time its forward pass has."""

from __future__ import annotations

import time
from typing import Any

import torch


class ForwardShare:
    """Measures two typical steps, each after another one, whose updates are made under its forward
    pass.

    A step is from the end of one `step` to the end of the next, and its forward pass is over with
    the first gradient. On a GPU both are times of its own, since programs run ahead of it. Of two
    steps the smaller share counts: an evaluation between them makes one larger.

    Attributes: *value*, None until it is known. It does not change any more: what is decided by it
    changes the order in which values are used, which the planner learns.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._began: Any = None  # the step that goes on; None where the one before was not typical
        self._forward_ended: Any = None
        self._shares: list[float] = []

    def forward_ends(self, device: torch.device) -> None:
        """The first gradient comes."""
        if self._began is not None:
            self._forward_ended = _now(device)

    def step_ends(self, typical: bool, device: torch.device) -> None:
        """A step is over, and was *typical*, or it does not count."""
        if self.value is not None:
            return
        began, ended = self._began, _now(device) if typical else None
        self._began = ended
        if began is not None and ended is not None:
            self._shares.append(_seconds(began, self._forward_ended) / _seconds(began, ended))
            if len(self._shares) == 2:
                self.value, self._began = min(self._shares), None


def _now(device: torch.device) -> Any:
    """This moment; on a GPU an event, which it reaches after what it was given."""
    if device.type != "cuda":
        return time.perf_counter()
    make: Any = torch.cuda.Event
    event = make(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(began: Any, ended: Any) -> float:
    """From one moment to a later one."""
    if isinstance(began, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended) / 1000)
