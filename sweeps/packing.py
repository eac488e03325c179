"""Time of packing states on a GPU, by torch's operations and by Triton's kernels:

    python -m sweeps.packing . --output reports/packing

In each format, both sides unpack and pack the states of a bucket as an update does, interleaved.
Both give equal bits, which `optimizer_states.on_gpu` checks.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import click
import torch

from nvme_offload.errors import UnsupportedError
from nvme_offload.optimizer_states import eight_bit, on_gpu, split, state_format

from . import command
from .command import COUNT, option, say
from .machine import commit, facts
from .report import columns, document, listed, write
from .turns import there_and_back

_STATES = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
_FORMATS = ("split", "compact", "compact24")
_BY = {"torch": "torch's operations", "triton": "Triton"}
_REPEATS = 20


class Taken(NamedTuple):
    """Seconds of one bucket on the GPU, and of the CPU until everything is queued; and bytes of
    additional GPU memory.
    """

    gpu: float
    queued: float
    extra: int


@click.command()
@command.directory
@option("--elements", type=COUNT, default=1 << 23, help="Of the bucket.")
@option("--rounds", type=COUNT, default=9)
@command.output("Write OUTPUT.md.")
def main(directory: Path, elements: int, rounds: int, output: Path | None) -> None:
    """Pack states on this machine's GPU, and print a report in Markdown. DIRECTORY is described as
    the machine's drive, and not used.
    """
    device = (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    )
    if device is None or on_gpu.fault(device) is not None:
        raise UnsupportedError("needs a GPU that Triton compiles for")
    described = facts(directory, "sweeps.packing")
    described["accelerator"] = torch.cuda.get_device_name(device)
    described["versions"] = f"{commit()}, torch {torch.__version__}"
    sides = [(name, by) for name in _FORMATS for by in _BY]
    calls = {side: _call(side[0], elements, device) for side in sides}
    found: dict[tuple[str, str], list[Taken]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side in there_and_back(sides, number):
            with _packed_by(side[1]):
                taken = _timed(calls[side])
            if number:  # in the first, kernels are compiled and memory is found
                found[side].append(taken)
        say(f"round {number} of {rounds}")

    def median(side: tuple[str, str], name: str) -> float:
        return statistics.median(getattr(taken, name) for taken in found[side])

    def ratio(side: tuple[str, str]) -> str:
        pairs = zip(found[side[0], "torch"], found[side], strict=True)
        ratios = sorted(torchs.gpu / ours.gpu for torchs, ours in pairs)
        return f"{statistics.median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})"

    cells: dict[str, Callable[[tuple[str, str]], str]] = {
        "format": lambda side: side[0],
        "by": lambda side: _BY[side[1]],
        "GPU, ms": lambda side: f"{median(side, 'gpu') * 1e3:.3f}",
        "torch's over these": ratio,
        "processor, ms": lambda side: f"{median(side, 'queued') * 1e3:.3f}",
        "billion parameters a second": lambda side: f"{elements / median(side, 'gpu') / 1e9:.2f}",
        "GPU memory in addition to the bucket, MB": lambda side: (
            f"{median(side, 'extra') / 1e6:.0f}"
        ),
    }
    text = document(
        "# Packing states on a GPU",
        listed(described),
        f"{elements:,} bfloat16 parameters with Adam's two moments, unpacked and packed again. Medians of {rounds} rounds of {_REPEATS}, interleaved.",
        "If the CPU takes as long to queue the kernels, the GPU waits for it.",
        columns(sides, cells),
    )
    click.echo(text)
    write(output, text)


@contextlib.contextmanager
def _packed_by(name: str) -> Iterator[None]:
    """States on the GPU are packed by *name*, one of `_BY`."""
    with contextlib.ExitStack() as stack:
        for module in (eight_bit, split) if name == "torch" else ():
            stack.enter_context(
                mock.patch.object(module, "kernels", return_value=on_gpu.by_torch())
            )
        yield


def _call(name: str, elements: int, device: torch.device) -> Callable[[], None]:
    """Unpacks and packs a bucket of the format *name*."""
    packing = state_format(name)
    layout = packing.layout(elements, _STATES, torch.bfloat16)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
    weights = [torch.randn(elements, device=device).bfloat16()]
    seeds = iter(range(1 << 40))

    def call() -> None:
        master, states = packing.unpack(layout, buffer, weights)
        packing.pack(layout, buffer, weights, master, states, next(seeds))

    return call


def _timed(call: Callable[[], None]) -> Taken:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began = time.perf_counter()
    start.record()
    for _ in range(_REPEATS):
        call()
    end.record()
    queued = time.perf_counter() - began
    torch.cuda.synchronize()
    beside = torch.cuda.max_memory_allocated() - before
    return Taken(start.elapsed_time(end) / 1e3 / _REPEATS, queued / _REPEATS, beside)


if __name__ == "__main__":
    command.run(main, "sweeps.packing")
