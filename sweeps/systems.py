"""A model of billions of parameters trained by this package and by other systems, one after
another: `python3 -m sweeps.systems DIR --model 7b`, from the root of the repository.

Each system of `system_steps` is a separate process, or one per GPU, that runs a few steps with the
same batches. Host memory is the drop of the machine's available memory while a system trains, since a
process's own counters lack memory that a GPU's driver pins. All systems need transformers; some
need deepspeed, flashoptim, torchao, bitsandbytes or megatrain (whose package is called `infinity`), and
the report names missing ones.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pandas as pd
import torch
import torch.distributed as dist

from nvme_offload.hardware.config import AioConfig
from nvme_offload.hardware.machine import available_bytes
from nvme_offload.swap.tier import engine_config

from . import apart, command, turns
from .command import COUNT, Names, Size, option, say
from .floor import Beside, Speeds, described, floor, floor_seconds
from .machine import facts
from .meter import Meter
from .report import Medians, columns, document, escaped, listed, write
from .system_steps import SYSTEMS, example, gpu_or_cpu, write_weights

_SETTLING = 2  # steps: the first creates states, after the second the order is learned


@dataclasses.dataclass
class Results:
    """facts: machine and command, by name. options: of the command. parameters: of the model.
    speeds: fio's measurements, with the settings *aio*. systems: the runs, in order.
    """

    facts: dict[str, str]
    options: dict[str, Any]
    parameters: int
    systems: list[dict[str, Any]]
    notes: list[str]
    aio: AioConfig = dataclasses.field(default_factory=AioConfig)
    speeds: list[Speeds] = dataclasses.field(default_factory=list)


def _train(job: dict[str, Any]) -> None:
    """Run one system in this process; the first rank reports every step."""
    send = apart.event_sender()
    rank, cuda = int(os.environ["RANK"]), torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    meter, tokens = Meter(Path(job["directory"])), torch.Generator().manual_seed(1 + rank)
    system = SYSTEMS[job["system"]]
    if system.loads:
        llama, weights = example()["empty_llama"](job["model"]), Path(job["directory"], "weights")
        send("written" if write_weights(llama, weights) else "no room for files")
    began = time.monotonic()
    step = system.make(job)
    send("made", seconds=time.monotonic() - began)
    words = example()["SHAPES"][job["model"]][5]
    for number in range(job["steps"]):
        shape = (job["batch"], job["sequence"])
        batch = torch.randint(words, shape, generator=tokens).to(gpu_or_cpu())
        dist.barrier()
        with meter.stretch() as taken:
            loss = step(batch)
            # Copies to host memory may run during the next forward pass.
            if cuda and number == job["steps"] - 1:
                torch.cuda.synchronize()
            dist.barrier()
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        send("step", number=number, loss=loss, gpu_bytes=peak, taken=taken)
    del step
    gc.collect()  # FSDP2's reference cycles keep gloo's threads alive past interpreter exit
    dist.destroy_process_group()


@click.command()
@command.directory
@option("--model", default="7b", help="A model of examples/big_models/train.py.")
@option("--systems", type=Names(SYSTEMS), default=",".join(SYSTEMS), help="With commas between.")
@option("--gpus", type=COUNT, default=1, help="With a process for each.")
@option("--host-memory", type=Size(), default="8GB", help="Of this package, in each process.")
@option(
    "--gpu-memory", type=Size(), default=None, help="Of Offload for parameters; else what is free."
)
@option("--batch", type=COUNT, default=4, help="Sequences for each GPU.")
@option("--sequence", type=COUNT, default=2048)
@option(
    "--steps",
    type=click.IntRange(min=_SETTLING + 1),
    default=5,
    help=f"The first {_SETTLING} do not count.",
)
@option("--timeout", type=float, default=560, help="Of a system, in seconds.")
@option("--rounds", type=COUNT, default=1, help="Each runs every system once.")
@command.seconds()
@command.fio_bytes
@command.output("Write OUTPUT.md and OUTPUT.json, after every system.")
@command.note
def main(
    directory: Path,
    systems: list[str],
    timeout: float,
    rounds: int,
    seconds: float | None,
    fio_bytes: int,
    output: Path | None,
    notes: tuple[str, ...],
    **options: Any,
) -> None:
    """Train a model of billions of parameters by each system, with the drive of DIRECTORY, and
    print a report in Markdown. Ratios are to the first system of --systems.
    """
    command.stop_at_sigterm()
    about = facts(directory, "sweeps.systems")
    about["training"] = (
        f"{options['model']} on {options['gpus']} GPU, {options['batch']} x {options['sequence']} tokens each"
    )
    aio = engine_config(str(directory))
    results = Results(about, options, _elements(options["model"]), [], list(notes), aio)
    with (
        turns.interruptible(about, results.notes),
        floor(directory, aio, fio_bytes, about, results.notes) as drive,
    ):
        beside = Beside(drive, results.speeds)
        for number in turns.rounds(rounds, seconds, results.notes):
            beside.begin()
            for name in turns.there_and_back(systems, number):
                run = _run(name, number, directory, timeout, options)
                run["drive"] = beside.end()
                results.systems.append(run)
                write(output, render(results), dataclasses.asdict(results))
    write(output, text := render(results), dataclasses.asdict(results))
    click.echo(text)


def _run(
    name: str, number: int, directory: Path, timeout: float, options: dict[str, Any]
) -> dict[str, Any]:
    """Train by the system *name* in round *number*."""
    before = lowest = available_bytes()

    def poll(_process: int) -> None:
        nonlocal lowest
        lowest = min(lowest, available_bytes())

    with apart.place("systems", directory) as work:
        events, error = apart.run(
            "sweeps.systems",
            {"system": name, "directory": str(work), **options},
            work,
            timeout,
            ranks=options["gpus"],
            environment=apart.launched(options["gpus"]),
            on_event=lambda event: say(json.dumps(event)),
            poll=poll,
        )
    taken = before - lowest
    return {"system": name, "round": number, "error": error, "host_bytes": taken, "events": events}


def _figures(one: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run, medians over its settled steps; "count" is 0 if it had none."""
    steps = apart.of(one["events"], "step")
    settled = [step["taken"] for step in steps if step["number"] >= _SETTLING]
    figures = {"name": one["system"], "round": one["round"], "count": len(settled)}
    if not settled:
        return figures
    taken = pd.DataFrame(settled).median()
    moved = taken["disk_read_bytes"], taken["disk_written_bytes"]
    least = floor_seconds(*moved, one["drive"]) if one["drive"] and any(moved) else math.nan
    return {
        **figures,
        "made": apart.of(one["events"], "made")[0]["seconds"],
        "seconds": taken["seconds"],
        "cpu": taken["cpu_seconds"],
        "read": moved[0] / 1e9,
        "written": moved[1] / 1e9,
        "busy": taken["disk_busy_seconds"] / taken["seconds"],
        "flight": taken["disk_request_seconds"] / taken["seconds"],
        "floor": least / taken["seconds"],
        "host": one["host_bytes"] / 1e9,
        "gpu": steps[-1]["gpu_bytes"] / 1e9,
        "first": steps[0]["loss"],
        "last": steps[-1]["loss"],
    }


def render(results: Results) -> str:
    """The report in Markdown."""
    options, billions = results.options, results.parameters / 1e9
    medians = Medians(map(_figures, results.systems))
    known, names = medians.cell, medians.names
    tokens = options["gpus"] * options["batch"] * options["sequence"]
    cells: dict[str, Callable[[str], str]] = {
        "": lambda name: SYSTEMS[name].title,
        "steps that count": lambda name: str(medians.count(name)),
        "s a step": known(lambda run: f"{run.seconds:.2f}"),
        f"over {names[0] if names else 'the first'}": medians.ratio,
        "tokens a second": known(lambda run: f"{tokens / run.seconds:,.0f}"),
        "CPU s a step, of a rank": known(lambda run: f"{run.cpu:.1f}"),
        "host memory, GB": known(lambda run: f"{run.host:.1f}"),
        "GB a billion": known(lambda run: f"{run.host / billions:.2f}"),
        "GPU, GB": known(lambda run: f"{run.gpu:.1f}"),
        "drive, GB read + written": known(lambda run: f"{run.read:.1f} + {run.written:.1f}"),
        "drive busy, requests in flight": known(lambda run: f"{run.busy:.2f}, {run.flight:.1f}"),
        "floor / time": known(lambda run: "" if math.isnan(run.floor) else f"{run.floor:.2f}"),
        "s to start": known(lambda run: f"{run.made:.1f}"),
        "loss of the first step, of the last": known(
            lambda run: f"{run['first']:.4f}, {run['last']:.4f}"
        ),
    }
    stopped = [
        f"- {SYSTEMS[one['system']].title}: {escaped(one['error'])}"
        for one in results.systems
        if one["error"]
    ]
    return document(
        f"# {options['model']} by each system",
        listed(results.facts),
        f"{billions:.2f} billion parameters. Each figure is the median over the rounds of the median over a run's steps past the first {_SETTLING}; "
        "each ratio is the median over the rounds of the ratio in one round. Host memory and bytes of the drive are the whole machine's.",
        columns(names, cells),
        described(results.speeds, results.aio),
        "\n".join(stopped),
        *results.notes,
    )


def _elements(model: str) -> int:
    """The number of its parameters, without memory for them."""
    with torch.device("meta"):
        made = example()["make_model"](model, torch.device("meta"), 1)
    return sum(parameter.numel() for parameter in made.parameters())


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].endswith("job.json"):  # the process of a system
        _train(json.loads(Path(sys.argv[1]).read_text()))
    else:
        command.run(main, "sweeps.systems")
