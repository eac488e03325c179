"""The CPU that `save_on_nvme` adds for each tensor that autograd saves."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from nvme_offload import save_on_nvme

_ELEMENTS = 1024  # of each saved tensor, 4 KiB: copying it costs next to nothing
_STEPS = 5  # the first two learn the order


@dataclasses.dataclass(frozen=True)
class Added:
    """The results of one number of saved tensors: medians over the steps after the learning ones.

    forward_seconds, backward_seconds: CPU of the whole process per saved tensor, minus the time of
    the same step without offload.
    """

    tensors: int
    host_bytes: int
    written_bytes: int
    forward_seconds: float
    backward_seconds: float


def added(directory: Path, tensors: int, fits: bool) -> Added:
    """Train a chain of *tensors* operations, each of which saves its input, with enough host memory
    (*fits*), or with an eighth of that.
    """
    needed = tensors * _ELEMENTS * 4
    host = 2 * needed if fits else needed // 8
    first = torch.ones(_ELEMENTS, requires_grad=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(dir=directory) as made:
            plain = [_step(first, tensors, None) for _ in range(_STEPS)][2:]
            offload = save_on_nvme(made, min_bytes=1, host_memory=host)
            try:
                steps = [_step(first, tensors, offload) for _ in range(_STEPS - 1)]
                before = offload.stats().bytes_written
                steps.append(_step(first, tensors, offload))
                written = offload.stats().bytes_written - before
            finally:
                offload.close()
    finally:
        torch.set_num_threads(threads)
    forward, backward = (
        (
            statistics.median(step[way] for step in steps[2:])
            - statistics.median(step[way] for step in plain)
        )
        / tensors
        for way in (0, 1)
    )
    return Added(tensors, host, written, forward, backward)


def _step(first: torch.Tensor, tensors: int, offload: save_on_nvme | None) -> tuple[float, float]:
    """CPU seconds of a forward and a backward pass."""
    gc.collect()
    began = time.process_time()
    if offload is None:
        result = _chain(first, tensors)
    else:
        with offload:
            result = _chain(first, tensors)
    between = time.process_time()
    result.backward()  # type: ignore[no-untyped-call]
    ended = time.process_time()
    first.grad = None
    return between - began, ended - between


def _chain(first: torch.Tensor, tensors: int) -> torch.Tensor:
    result = first
    for _ in range(tensors):
        result = result.sin()
    return result.sum()


CELLS: dict[str, Callable[[Added], str]] = {
    "saved tensors of 4 KiB": lambda one: f"{one.tensors}",
    "MB of host memory": lambda one: f"{one.host_bytes / 1e6:.3g}",
    "MB written a step": lambda one: f"{one.written_bytes / 1e6:.3g}",
    "CPU us a tensor, forward": lambda one: f"{one.forward_seconds * 1e6:.0f}",
    "backward": lambda one: f"{one.backward_seconds * 1e6:.0f}",
}
