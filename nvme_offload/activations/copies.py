"""Copies between a device and places in host memory: at once where the device is the CPU, beside
the computation on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError
from .storages import bytes_of

if TYPE_CHECKING:
    import torch


class Copy:
    """A copy that a GPU makes. Lifetime: it holds the GPU's memory until `let_go` or `wait`, and
    the place in host memory until `wait`.
    """

    def __init__(
        self, target: torch.Tensor, source: torch.Tensor, computing: Any, copying: Any
    ) -> None:
        import torch

        cuda: Any = torch.cuda  # untyped there
        self._memory: torch.Tensor | None
        self._place: torch.Tensor | None
        self._memory, self._place = (target, source) if target.is_cuda else (source, target)
        self._computing = computing
        self._ended = cuda.Event()
        copying.wait_stream(computing)  # what makes the source, or used the target's memory before
        with cuda.stream(copying):
            target.copy_(source, non_blocking=True)
            self._ended.record()

    def done(self) -> bool:
        """Whether it has ended; never blocks."""
        return bool(self._ended.query())

    def wait(self) -> None:
        """Return when it has ended."""
        self._ended.synchronize()
        self._memory = self._place = None

    def let_go(self) -> None:
        """Let the GPU's memory go at once: it is what is computed from here on that waits for the
        copy, and not the caller.
        """
        if self._memory is not None:
            self._computing.wait_event(self._ended)
            self._memory = None

    def precede(self, storage: torch.UntypedStorage) -> None:
        """See that what is computed from here on finds *storage*, the target's, filled."""
        import torch

        computing: Any = torch.cuda.current_stream(storage.device)
        computing.wait_event(self._ended)
        if computing != self._computing:
            bytes_of(storage, 0, storage.nbytes()).record_stream(computing)
        self._memory = None


class Copier:
    """Starts copies, on two streams of its own for each GPU."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, bool], Any] = {}

    def overlaps(self, device: torch.device) -> bool:
        """Whether copies to and from *device* are made beside its computing, so that it is worth
        starting them early.
        """
        return device.type == "cuda"

    def save(self, source: torch.Tensor, place: torch.Tensor) -> Copy | None:
        """Copy *source* into *place* of host memory; None when that is done already."""
        if not self.overlaps(source.device):
            place.copy_(source)
            return None
        return self._start(place, source, saving=True)

    def bring(self, place: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Copy | None]:
        """*place* as new memory of *device*, and the copy that fills it, None when that is done
        already.
        """
        import torch

        target = torch.empty(place.numel(), dtype=torch.uint8, device=device)
        if not self.overlaps(device):
            target.copy_(place)
            return target, None
        return target, self._start(target, place, saving=False)

    def _start(self, target: torch.Tensor, source: torch.Tensor, saving: bool) -> Copy:
        import torch

        cuda: Any = torch.cuda  # untyped there
        device = source.device if saving else target.device
        if (device, saving) not in self._streams:
            self._streams[device, saving] = cuda.Stream(device)
        return Copy(target, source, cuda.current_stream(device), self._streams[device, saving])


def check_no_capture(tensor: torch.Tensor) -> None:
    """Raises: UnsupportedError when *tensor* is made for a CUDA graph, whose replays would not save
    it again.
    """
    import torch

    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "a CUDA graph that is being captured cannot keep its tensors on a drive: capture it outside of save_on_nvme"
        )
