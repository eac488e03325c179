"""`CopyStreams`: copies between host memory and a GPU that overlap with its computation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class CopyStreams:
    """Two CUDA streams for each GPU, one for each direction, made when first used: a copy to the
    GPU does not wait for one to the host.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, bool], Any] = {}

    def start(self, target: torch.Tensor, source: torch.Tensor, *, after: Any) -> Any:
        """Start copying *source* to *target*, one of which is on a GPU and the other in pinned
        host memory. Returns the event at its end.

        *after*: an event that the copy waits for: after the kernels that write *source*, and those
        that still use *target*. None for none. Lifetime: the caller keeps both tensors until the
        event is done.
        """
        import torch

        cuda: Any = torch.cuda  # untyped there
        device = target.device if target.is_cuda else source.device
        key = (device, target.is_cuda)
        if key not in self._streams:
            self._streams[key] = cuda.Stream(device)
        stream = self._streams[key]
        if after is not None:
            stream.wait_event(after)
        with cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()
