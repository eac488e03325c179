"""The ways to run the blocks, and the measurement of one step."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from nvme_offload import save_on_nvme

from ..meter import restart_peak, status
from .transformer import checksum


class Step(NamedTuple):
    """The measurements of one step, with bytes of saved tensors and of the drive. peak_bytes:
    device memory above weights and gradients.
    """

    way: str
    round: int
    forward_seconds: float
    backward_seconds: float
    peak_bytes: int
    checksum: int
    saved_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    host_bytes: int = 0
    forward_wait_seconds: float = 0.0
    backward_wait_seconds: float = 0.0


@dataclasses.dataclass
class Way:
    """A way to run the blocks: *context* applies to a *share* of them, evenly spread, and
    *recomputes* them in the backward pass or not; other blocks save their activations.

    kept_bytes: of host memory between steps. fresh: no step was made yet; the first allocates
    memory, and teaches the swapper its order.
    """

    name: str
    title: str
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    recomputes: bool = False
    offload: save_on_nvme | None = None
    share: float = 1.0
    kept_bytes: int = 0
    fresh: bool = True

    @property
    def base(self) -> str:
        """The name of the same way without a drive."""
        return "checkpoint" if self.recomputes and self.offload is not None else "none"

    def forward(self, blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        chosen = spread(len(blocks), self.share)
        for number, block in enumerate(blocks):
            with self.context() if number in chosen else contextlib.nullcontext():
                x = (
                    checkpoint(block, x, use_reentrant=False)
                    if self.recomputes and number in chosen
                    else block(x)
                )
        return x.float().square().mean()


def spread(count: int, share: float) -> set[int]:
    """A *share* of the numbers below *count*, evenly spaced, so that every part of a pass uses the
    drive equally.
    """
    chosen = round(share * count)
    return {number * count // chosen for number in range(chosen)}


NAMES = ("none", "cpu", "checkpoint", "nvme", "nvme-checkpoint")


@contextlib.contextmanager
def ways(
    names: Sequence[str],
    directory: Path,
    host_memory: Mapping[str, Sequence[str]],
    shares: Sequence[float],
    min_bytes: str,
) -> Iterator[list[Way]]:
    """The ways *names*; ways with a drive once per *host_memory*, "nvme" also once per share in
    *shares*.

    They are closed at the end of the `with`.
    """
    plain = {
        "none": Way("none", "nothing"),
        "checkpoint": Way("checkpoint", "checkpointing", recomputes=True),
        "cpu": Way("cpu", "save_on_cpu(pin_memory=True)", lambda: save_on_cpu(pin_memory=True)),
    }
    with contextlib.ExitStack() as stack:
        found = []
        for name in names:
            if name in plain:
                found.append(plain[name])
                continue
            recomputes = name == "nvme-checkpoint"
            for share, memory in itertools.product(
                [1.0] if recomputes else shares, host_memory[name]
            ):
                offload = save_on_nvme(directory, min_bytes, memory)
                stack.callback(offload.close)
                title = f"save_on_nvme, {memory} of host memory"
                title += ", checkpointing" if recomputes else ""
                title += f", {share:.0%} of the blocks" if share < 1 else ""
                context = lambda offload=offload: offload  # noqa: E731
                key = f"{name} {memory} {share}"
                found.append(Way(key, title, context, recomputes, offload, share))
        yield found


def measure(way: Way, blocks: nn.ModuleList, x: torch.Tensor, number: int) -> Step:
    """One step of *way*, in round *number*. Raises: torch.OutOfMemoryError."""
    blocks.zero_grad(set_to_none=False)  # so that gradients exist before every step
    before = way.offload.stats() if way.offload is not None else None
    peak = Peak(x.device)
    started = _now(x.device)
    loss = way.forward(blocks, x)
    turned = _now(x.device)
    loss.backward()
    ended = _now(x.device)
    del loss
    step = Step(
        way.name,
        number,
        turned - started,
        ended - turned,
        peak.nbytes() + way.kept_bytes,
        checksum(blocks),
    )
    if way.offload is None or before is None:
        return step
    way.kept_bytes += peak.left()
    after = way.offload.stats()

    def added(name: str) -> Any:
        return getattr(after, name) - getattr(before, name)

    return step._replace(
        saved_bytes=added("saved_bytes"),
        written_bytes=added("bytes_written"),
        read_bytes=added("bytes_read"),
        host_bytes=after.peak_host_bytes,
        forward_wait_seconds=added("forward_wait_seconds"),
        backward_wait_seconds=added("backward_wait_seconds"),
    )


def give_back_at_once() -> None:
    """Make the C library return freed tensors to the kernel, since they would count as resident.
    Source: mallopt(3), for M_MMAP_THRESHOLD.
    """
    ctypes.CDLL(None).mallopt(-3, 1 << 20)


class Peak:
    """The growth of memory since creation, at its peak: of the GPU, or of this process where there
    is no GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            _trim()
            restart_peak()
        self._before = self._now("allocated", "VmRSS")

    def nbytes(self) -> int:
        """The peak so far."""
        return max(self._now("max", "VmHWM") - self._before, 0)

    def left(self) -> int:
        """The current growth; 0 on a GPU."""
        if self._device.type == "cuda":
            return 0
        _trim()
        return self._now("allocated", "VmRSS") - self._before

    def _now(self, of_gpu: str, of_process: str) -> int:
        if self._device.type == "cuda":
            return {
                "allocated": torch.cuda.memory_allocated,
                "max": torch.cuda.max_memory_allocated,
            }[of_gpu](self._device)
        return status()[of_process]


def _trim() -> None:
    gc.collect()
    # free memory in the heap would hide later allocations. Source: malloc_trim(3)
    ctypes.CDLL(None).malloc_trim(0)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
