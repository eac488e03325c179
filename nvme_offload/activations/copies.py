"""Copies of saved tensors between a device and host memory: synchronous on the CPU, overlapping
with computation on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from ..device.copies import CopyStreams
from .storages import bytes_of


class Copy:
    """A copy to or from a GPU. *computing* is the stream that was current when it started, *ended*
    the event at its end.

    Lifetime: holds the GPU memory until `release_device`, `precede` or `wait`, and the host memory
    until `wait`.
    """

    def __init__(
        self, device_memory: torch.Tensor, host_memory: torch.Tensor, computing: Any, ended: Any
    ) -> None:
        self._device_memory: torch.Tensor | None = device_memory
        self._host_memory: torch.Tensor | None = host_memory
        self._computing = computing
        self._ended = ended

    def done(self) -> bool:
        """Whether it has ended. Never blocks."""
        return bool(self._ended.query())

    def wait(self) -> None:
        """Block until it has ended."""
        self._ended.synchronize()
        self._device_memory = self._host_memory = None

    def __del__(self) -> None:
        # An exception may have dropped it before anything else could wait.
        if self._device_memory is not None:
            self._ended.synchronize()

    def release_device(self) -> None:
        """Free the GPU memory for kernels launched from here on: these wait for the copy, the
        caller does not.
        """
        if self._device_memory is not None:
            self._computing.wait_event(self._ended)
            self._device_memory = None

    def precede(self, storage: torch.UntypedStorage) -> None:
        """Make kernels launched from here on wait until *storage*, the target's, is filled."""
        computing: Any = torch.cuda.current_stream(storage.device)
        computing.wait_event(self._ended)
        if computing != self._computing:
            bytes_of(storage, 0, storage.nbytes()).record_stream(computing)
        self._device_memory = None


class Copier:
    """Starts copies of saved tensors."""

    def __init__(self) -> None:
        self._streams = CopyStreams()

    def overlaps(self, device: torch.device) -> bool:
        """Whether copies to and from *device* overlap with its computation, so that starting early
        pays.
        """
        return device.type == "cuda"

    def save(self, source: torch.Tensor, place: torch.Tensor) -> Copy | None:
        """Copy *source* to *place*, in host memory. None: done already."""
        if not self.overlaps(source.device):
            place.copy_(source)
            return None
        return self._start(place, source)

    def restore(
        self, place: torch.Tensor, device: torch.device
    ) -> tuple[torch.Tensor, Copy | None]:
        """Copy *place* to new memory of *device*: that, and the copy that fills it. None: done
        already.
        """
        target = torch.empty(place.numel(), dtype=torch.uint8, device=device)
        if not self.overlaps(device):
            target.copy_(place)
            return target, None
        return target, self._start(target, place)

    def _start(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        device_memory, host_memory = (target, source) if target.is_cuda else (source, target)
        computing: Any = torch.cuda.current_stream(device_memory.device)
        try:
            # after what computes the source, or used the target's memory before
            ended = self._streams.start(target, source, after=computing.record_event())
            return Copy(device_memory, host_memory, computing, ended)
        except BaseException:
            torch.cuda.synchronize(device_memory.device)  # It may be in flight.
            raise
