"""`GradientCopies`: gradients between a GPU and host memory, and sums of them on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..device.copies import CopyStreams


class GradientCopies:
    """What is done with gradients on one *device* beside what its current stream computes.

    All take pinned host memory, and tensors of the device in a row. The caller keeps both until the
    event is reached that they return.
    """

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda  # untyped there
        self._device = device
        self._streams = CopyStreams()
        self._adding = cuda.Stream(device)

    def bring(self, there: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy *source* to *there*, before what comes next on the current stream."""
        stream = torch.cuda.current_stream(self._device)
        came = self._streams.start(there, source, after=stream.record_event())
        stream.wait_event(came)
        return came

    def send(self, place: torch.Tensor, values: torch.Tensor) -> Any:
        """Copy *values* to *place*, which the current stream does not wait for."""
        made = torch.cuda.current_stream(self._device).record_event()
        return self._streams.start(place, values, after=made)

    def add(
        self, place: torch.Tensor, values: torch.Tensor, change: Callable[[torch.Tensor], None]
    ) -> tuple[Any, torch.Tensor]:
        """Add *values* to what is at *place*, after a *change* to that; the current stream does not
        wait for it. The event, and a tensor to be kept, too.
        """
        total = torch.empty_like(values)
        # in memory that the current stream may still use for what was there before
        made = torch.cuda.current_stream(self._device).record_event()
        self._adding.wait_event(self._streams.start(total, place, after=made))
        with torch.cuda.stream(self._adding):
            change(total)
            total.add_(values)
            added = self._adding.record_event()
        return self._streams.start(place, total, after=added), total
