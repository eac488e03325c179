"""The time of an update of Adam on the CPU, by state format:

    python -m sweeps.cpu_update . --output reports/cpu-update

Compares, in interleaved rounds, torch's AdamW over fp32 tensors with the update of a bucket of
bfloat16 weights: in one pass (`step_in_one_pass`), and in several (unpack, step, pack).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
import pandas as pd
import torch

from nvme_offload.errors import UnsupportedError
from nvme_offload.optimizer_states import FORMATS, block_names, looks_at
from nvme_offload.optimizer_states.one_pass import Part, step_in_one_pass

from . import command
from .command import COUNT, option, say
from .machine import facts
from .report import columns, document, listed, ratios, shown, write
from .turns import there_and_back

_STATES = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32)


class Side(NamedTuple):
    """The states to update, the kernels of torch, and the way."""

    what: str
    fused: bool
    how: str


_REFERENCE = Side("fp32 in memory", True, "torch")


@click.command()
@command.directory
@option("--elements", type=COUNT, default=1 << 25, help="Of the bucket.")
@option("--rounds", type=COUNT, default=9)
@option("--threads", type=COUNT, default=1)
@command.output("Write OUTPUT.md.")
def main(directory: Path, elements: int, rounds: int, threads: int, output: Path | None) -> None:
    """Update states on this machine's CPU, and print a report in Markdown. DIRECTORY is described as
    the machine's drive, and not used.
    """
    torch.set_num_threads(threads)
    described = facts(directory, "sweeps.cpu_update")
    described["versions"] += f", {torch.backends.cpu.get_cpu_capability()}"
    sides = [
        Side(what, fused, how)
        for fused in (True, False)
        for what, how in [
            ("fp32 in memory", "torch"),
            *((name, how) for name in FORMATS for how in ("one pass", "several passes")),
        ]
    ]
    gradient = torch.randn(elements) * 1e-2
    calls = {side: _call(side, gradient) for side in sides}
    found = {side: pd.DataFrame(columns=["seconds", "cpu"], dtype=float) for side in sides}
    for number in range(rounds + 1):
        for side in there_and_back(sides, number):
            taken = _timed(calls[side])
            if number:  # the first finds memory
                found[side].loc[number] = taken
        say(f"round {number} of {rounds}")
    reference = found[_REFERENCE]
    cells: dict[str, Callable[[Side], str]] = {
        "states": lambda side: side.what,
        "kernels of torch": lambda side: "fused" if side.fused else "default",
        "by": lambda side: side.how,
        "CPU ns a parameter": lambda side: shown(found[side]["cpu"] / elements * 1e9),
        "CPU time over fused fp32": lambda side: shown(
            ratios(found[side]["cpu"], reference["cpu"])
        ),
        "ms": lambda side: shown(found[side]["seconds"] * 1e3, 0),
        "time over fused fp32": lambda side: shown(
            ratios(found[side]["seconds"], reference["seconds"])
        ),
    }
    text = document(
        "# An update of AdamW on the CPU",
        listed(described),
        f"{elements:,} parameters, on {threads} of the cores, medians of {rounds} interleaved rounds. The formats have bfloat16 weights and gradients.",
        columns(sides, cells),
    )
    click.echo(text)
    write(output, text)


def _call(side: Side, gradient: torch.Tensor) -> Callable[[], None]:
    numel = gradient.numel()
    make = functools.partial(torch.optim.AdamW, lr=1e-3, fused=side.fused or None)
    if side.how == "torch":
        whole = torch.nn.Parameter(torch.randn(numel))
        whole.grad = gradient
        return make([whole]).step
    packing = FORMATS[side.what]
    layout = packing.layout(numel, _STATES, torch.bfloat16)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    weight, narrow = torch.randn(numel).bfloat16(), gradient.bfloat16()
    shadow = torch.nn.Parameter(torch.empty(0))
    optimizer = make([shadow])
    state = optimizer.state[shadow]
    state["step"] = torch.tensor(64.0)
    state.update({key: torch.empty(0) for key in _STATES})
    part = Part(shadow, optimizer.param_groups[0], weight, narrow, 0, 0)
    seeds = (seed for seed in range(64, 1 << 40) if not looks_at(packing, seed + 1))
    blocks = block_names(0, numel)
    widened = torch.empty(numel if side.how == "several passes" else 0)
    memory = torch.empty(packing.unpacked_elements(layout) if len(widened) else 0)

    def step_in_passes() -> None:
        shadow.grad = None
        master, states = packing.unpack(layout, buffer, [weight], memory)
        shadow.data = weight if master is None else master
        shadow.grad = widened.copy_(narrow)
        for key, values in states.items():
            state[key].data = values
        optimizer.step()
        packing.pack(layout, buffer, [weight], master, states, next(seeds), blocks)

    def step_at_once() -> None:
        if not step_in_one_pass(optimizer, packing, layout, buffer, [part], next(seeds)):
            raise UnsupportedError("the extension does not give the bits of torch's kernels here")

    return step_at_once if side.how == "one pass" else step_in_passes


def _timed(call: Callable[[], None]) -> tuple[float, float]:
    began = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began[0], time.process_time() - began[1]


if __name__ == "__main__":
    command.run(main, "sweeps.cpu_update")
