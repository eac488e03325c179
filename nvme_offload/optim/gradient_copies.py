"""`GradientCopies`: gradients between a GPU and host memory, and sums of them on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..device.copies import CopyStreams


class GradientCopies:
    """Copies and sums of gradients on one *device*, concurrent with its current stream.

    All methods take pinned host memory, and contiguous tensors of the device. They return an event;
    the caller keeps the tensors alive until the event.
    """

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda  # untyped there
        self._device = device
        self._streams = CopyStreams()
        self._adding = cuda.Stream(device)

    def bring(self, there: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy *source* to *there*, before later work of the current stream."""
        stream = torch.cuda.current_stream(self._device)
        came = self._streams.start(there, source, after=stream.record_event())
        stream.wait_event(came)
        return came

    def send(self, place: torch.Tensor, values: torch.Tensor) -> Any:
        """Copy *values* to *place*; the current stream does not wait for the copy."""
        made = torch.cuda.current_stream(self._device).record_event()
        return self._streams.start(place, values, after=made)

    def add(
        self, place: torch.Tensor, values: torch.Tensor, change: Callable[[torch.Tensor], None]
    ) -> tuple[Any, torch.Tensor]:
        """Apply *change* to the values at *place*, then add *values* to them; the current stream
        does not wait for it. Return the event, and another tensor that has to stay alive.
        """
        total = torch.empty_like(values)
        # the current stream may still use this memory for the tensor that was there before
        made = torch.cuda.current_stream(self._device).record_event()
        self._adding.wait_event(self._streams.start(total, place, after=made))
        with torch.cuda.stream(self._adding):
            change(total)
            total.add_(values)
            added = self._adding.record_event()
        return self._streams.start(place, total, after=added), total
