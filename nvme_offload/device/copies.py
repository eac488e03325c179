"""`CopyStreams`: copies between host memory and a GPU that overlap with the GPU's computation."""

from __future__ import annotations

from typing import Any

import torch


class CopyStreams:
    """Two CUDA streams for each GPU, made when first used, so that directions are independent."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, bool], Any] = {}

    def start(self, target: torch.Tensor, source: torch.Tensor, *, after: Any) -> Any:
        """Start copying *source* to *target*. One of the two is on a GPU and the other in pinned
        host memory. Returns the event at the end of the copy.

        *after*: the event for which the copy waits; it must come after the kernels that write
        *source* and the kernels that still use *target*. None for no event. Lifetime: the caller
        keeps both tensors until the returned event is done.
        """
        cuda: Any = torch.cuda  # untyped there
        stream = self._stream(target.device if target.is_cuda else source.device, target.is_cuda)
        if after is not None:
            stream.wait_event(after)
        with cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, device: torch.device, to_device: bool, event: Any) -> None:
        """Let later copies in one direction wait for *event*."""
        self._stream(device, to_device).wait_event(event)

    def outlast(self, tensor: torch.Tensor, to_device: bool) -> None:
        """Keep the memory of *tensor* from being reused before the copies that were started end."""
        tensor.record_stream(self._stream(tensor.device, to_device))

    def bring(
        self, source: torch.Tensor, device: torch.device, into: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Start copying *source*, in pinned host memory, to *device*: into *into* if given,
        otherwise into new memory. Returns the copy, for which the current stream waits, and the
        event after which *source* may change.
        """
        cuda: Any = torch.cuda
        stream, current = self._stream(device, True), cuda.current_stream(device)
        if into is None:
            # Allocate on this stream, so that the copy does not wait for other computation.
            with cuda.stream(stream):
                into = source.to(device, non_blocking=True)
            done = stream.record_event()
            into.record_stream(current)
        else:
            done = self.start(into, source, after=current.record_event())
        current.wait_event(done)
        return into, done

    def take_back(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Start copying *source*, which the current stream computes, to *target* in pinned host
        memory. Returns the event at the end of the copy. Lifetime: until the event is done, the
        caller keeps *target* and does not change *source*.
        """
        cuda: Any = torch.cuda
        done = self.start(target, source, after=cuda.current_stream(source.device).record_event())
        source.record_stream(self._stream(source.device, False))
        return done

    def _stream(self, device: torch.device, to_device: bool) -> Any:
        key = (device, to_device)
        if key not in self._streams:
            cuda: Any = torch.cuda
            self._streams[key] = cuda.Stream(device)
        return self._streams[key]
