"""`python -m sweeps.windows DIR`: how much of an optimizer step each way of `NVMeOptimizer` hides
under the passes, with and without clipping.

The layers of the model compute nothing: each pass keeps the GPU busy for the time that it is given,
and every gradient is there at its end. So the window is known, and what a step takes beside it is
the updates' time. Ways are interleaved, and compared by the ratios of a round. It needs a GPU: on the
CPU, a backward pass and the updates in it take turns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from pathlib import Path
from typing import Any

import click
import torch

from nvme_offload import NVMeOptimizer

from . import command
from .command import COUNT, Size, option
from .machine import commit, facts
from .report import document, listed, table
from .turns import interruptible, rounds, there_and_back


@dataclasses.dataclass(frozen=True)
class Way:
    """How a step is made: *options* of `NVMeOptimizer`, one of so many steps *clipped*, 0 for none,
    and the *theory* of its time from the seconds of forward pass, backward pass and updates.
    """

    options: dict[str, Any]
    theory: str
    clipped: int = 0


_BOTH = {"step_in_backward": "provisional", "overlap_step": True}
WAYS = {
    "after": Way({}, "F + B + U"),
    "in backward, nothing can be clipped": Way({"step_in_backward": True}, "F + max(B, U)"),
    "provisional": Way({"step_in_backward": "provisional"}, "F + max(B, U)"),
    "provisional, 1 of 8 steps clipped": Way(
        {"step_in_backward": "provisional"}, "6/8 of F + max(B, U), 2/8 of F + B + U", clipped=8
    ),
    "under the next forward": Way({"overlap_step": True}, "B + max(F, U)"),
    "provisional and under the next forward": Way(_BOTH, "at least max(F + B, U)"),
}


class Pace(torch.autograd.Function):
    """Takes the time of a layer, forward and backward."""

    @staticmethod
    def forward(context: Any, x: Any, weight: Any, forward: float, backward: float) -> Any:
        """Return *x* after *forward* seconds."""
        context.save_for_backward(weight)
        context.seconds = backward
        pause(forward)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        """Return the gradients after the time of the backward pass."""
        (weight,) = context.saved_tensors
        pause(context.seconds)
        return gradients[0], torch.full_like(weight, 1e-3), None, None


class Layer(torch.nn.Module):
    """*elements* bfloat16 weights, and a pass of so many seconds in each direction."""

    def __init__(self, elements: int, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = forward, backward
        self.weight = torch.nn.Parameter(
            torch.full((elements,), 0.1, dtype=torch.bfloat16, device="cuda")
        )

    def forward(self, x: torch.Tensor) -> Any:
        """*x*, later."""
        return Pace.apply(x, self.weight, *self.seconds)


def pause(seconds: float) -> None:
    """Keep the GPU busy."""
    torch.cuda._sleep(int(seconds * _cycles_a_second()))


@functools.cache
def _cycles_a_second() -> float:
    rate = 0.0
    for cycles in (10_000_000, 100_000_000):  # the first finds it at rest
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        rate = cycles / (time.perf_counter() - began)
    return rate


class Side:
    """One way, its model and optimizer, and what its steps took."""

    def __init__(self, way: Way, make: Any, directory: Path, options: dict[str, Any]) -> None:
        self.way = way
        self.net = make()
        self.optimizer = NVMeOptimizer(
            self.net.parameters(), lr=1e-4, paths=directory, **options, **way.options
        )
        self.number = 0
        self.seconds: list[float] = []
        self.updated: list[tuple[int, int]] = []
        self.gigabytes: list[float] = []

    def run(self, steps: int) -> None:
        """Make so many steps; the first begins the measurement where it ends."""
        began = 0.0
        for step in range(steps + 1):
            self.number += 1
            self.optimizer.zero_grad()
            self.net(torch.ones(1, device="cuda", requires_grad=True)).sum().backward()
            clips = self.way.clipped and self.number % self.way.clipped == 0
            if self.way.options.get("step_in_backward") is not True:
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1e-3 if clips else 1e9)
            self.optimizer.step()
            torch.cuda.current_stream().synchronize()  # as who prints the loss
            if step == 0:
                began = time.perf_counter()
        self.seconds.append((time.perf_counter() - began) / steps)
        stats = self.optimizer.stats()  # which waits for what is to come
        self.updated.append((stats.buckets, stats.updated_in_backward))
        self.gigabytes.append((stats.bytes_read + stats.bytes_written) / 1e9)


@click.command()
@command.directory
@option("--layers", type=COUNT, default=24)
@option("--elements", type=COUNT, default=4 << 20, help="Of a layer.")
@option("--forward", "forward_seconds", type=click.FloatRange(min=0), default=0.02, help="A layer.")
@option(
    "--backward", "backward_seconds", type=click.FloatRange(min=0), default=0.06, help="A layer."
)
@option("--format", "state_format", default="exact")
@option("--host-memory", type=Size(), default="256MB")
@option("--steps", type=COUNT, default=8, help="Of a way in a round.")
@option("--rounds", "count", type=COUNT, default=3)
@command.seconds()
@command.output("Write the table to OUTPUT.")
@command.note
def main(
    directory: Path,
    layers: int,
    elements: int,
    forward_seconds: float,
    backward_seconds: float,
    state_format: str,
    host_memory: int,
    steps: int,
    count: int,
    seconds: float | None,
    output: Path | None,
    notes: tuple[str, ...],
) -> None:
    """Time the ways of a step with states on the drive of DIRECTORY."""
    if not torch.cuda.is_available():
        raise click.ClickException("needs a GPU that CUDA knows")
    about = {**facts(directory, "sweeps.windows"), "commit": commit()}
    said = list(notes)

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(
            *(Layer(elements, forward_seconds, backward_seconds) for _ in range(layers))
        )

    options = {"state_format": state_format, "host_memory": host_memory}
    with contextlib.ExitStack() as stack, interruptible(about, said):
        sides = {name: Side(way, make, directory, options) for name, way in WAYS.items()}
        for side in sides.values():
            stack.callback(side.optimizer.close)
            side.run(3)  # makes the states, and learns the order
            side.seconds.clear()
        for number in rounds(count, seconds, said):
            for side in there_and_back(list(sides.values()), number):
                side.run(steps)
        text = report(sides, about, layers * forward_seconds, layers * backward_seconds, said)
        click.echo(text, nl=False)
        if output is not None:
            output.write_text(text, encoding="utf-8")


def report(
    sides: dict[str, Side], about: dict[str, str], forward: float, backward: float, notes: list[str]
) -> str:
    """The table, as Markdown."""
    after = sides["after"].seconds
    rows = []
    for name, side in sides.items():
        ratios = [own / other for own, other in zip(side.seconds, after, strict=True)]
        buckets, made = (statistics.median(counts) for counts in zip(*side.updated, strict=True))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        rows.append(
            [
                name,
                f"{statistics.median(side.seconds):.2f}",
                spread,
                f"{made:.0f} of {buckets:.0f}" if made else "",
                f"{statistics.median(side.gigabytes):.2f}",
                side.way.theory,
            ]
        )
    updates = statistics.median(after) - forward - backward
    head = ["way", "step, s", "of after", "updated in backward", "GB moved", "theory"]
    return document(
        "# Which way hides an optimizer step",
        listed(
            {**about, "computing": f"torch {torch.__version__}, {torch.cuda.get_device_name()}"}
        ),
        *notes,
        f"{len(after)} rounds. F = {forward:.2f} s, B = {backward:.2f} s, as given; U = {updates:.2f} s of updates, by the median of steps after the backward "
        "pass. The ratios are of one round each: median, lowest and highest.",
        table(head, rows),
    )


if __name__ == "__main__":
    main()
