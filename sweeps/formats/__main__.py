"""`python -m sweeps.formats`: train the transformer with each state format and several seeds,
stress the formats, and write the report.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click
import torch

from nvme_offload.optimizer_states import FORMATS

from .. import command
from ..command import COUNT, option, say
from ..machine import commit, facts
from ..report import write
from .report import Results, as_json, draw, from_json, render
from .stress import CASES, stress
from .text import read_text
from .trainer import Job, Recipe, run_job
from .transformer import Shape


def shape(layers: int, width: int, heads: int, context: int, batch: int, steps: int) -> Any:
    """The options of a transformer and of its training, with these defaults."""
    kinds = [
        option("--layers", type=COUNT, default=layers),
        option("--width", type=click.IntRange(min=8), default=width),
        option("--heads", type=COUNT, default=heads),
        option(
            "--context", type=click.IntRange(min=2), default=context, help="Bytes that it sees."
        ),
        option("--batch", type=COUNT, default=batch),
        option("--steps", type=COUNT, default=steps),
        option("--device", default="cuda" if torch.cuda.is_available() else "cpu"),
    ]
    return lambda main: functools.reduce(lambda made, one: one(made), reversed(kinds), main)


@click.command()
@shape(layers=6, width=384, heads=6, context=256, batch=64, steps=1000)
@option("--seeds", type=COUNT, default=3, help="How many.")
@option("--at-once", type=COUNT, default=1, help="Trainings side by side, over all GPUs.")
@option("--formats", "names", type=command.Names(FORMATS), default=",".join(FORMATS))
@option("--text-megabytes", type=click.FloatRange(min=0.1), default=8.0)
@option(
    "--stress/--no-stress", "stressed", default=True, help="Also step by gradients that misbehave."
)
@command.output("Write OUTPUT.md, OUTPUT.json and OUTPUT.png.")
@option(
    "--again", type=command.FILE, help="Train nothing: write the report of this JSON file again."
)
def main(
    layers: int,
    width: int,
    heads: int,
    context: int,
    batch: int,
    steps: int,
    seeds: int,
    at_once: int,
    names: list[str],
    device: str,
    text_megabytes: float,
    stressed: bool,
    output: Path | None,
    again: Path | None,
) -> None:
    """Compare the losses that states in each format train to, and print a report in Markdown."""
    if again is not None:
        _write(from_json(json.loads(again.read_text(encoding="utf-8"))), output)
        return
    if width % heads:
        raise click.BadParameter(
            f"{width} is not a multiple of the {heads} heads", param_hint="--width"
        )
    text_bytes = round(text_megabytes * 1e6)
    recipe = Recipe(
        Shape(layers, width, heads, context), steps, batch, warm_up=min(100, steps // 5 + 1)
    )
    results = Results(
        device_facts(device, "sweeps.formats") | {"recipe": repr(recipe)},
        read_text(text_bytes)[2],
        [],
        [],
    )
    runs = [(seed, name) for seed in range(seeds) for name in names]
    jobs = [
        Job(number, device, text_bytes, recipe, name, seed)
        for number, (seed, name) in enumerate(runs)
    ]
    started = time.monotonic()
    with _mapped(at_once) as mapped:
        for run in mapped(run_job, jobs):
            results.trained.append(run)
            loss = f"{run.parameters / 1e6:.2f}M, validation {run.validation:.4f}"
            say(f"{run.format}, seed {run.seed}: {loss}")
    if stressed:
        results.stressed.extend(stress(case, name) for case in CASES for name in names)
    results.facts["took"] = f"{time.monotonic() - started:.0f} s"
    _write(results, output)


@contextlib.contextmanager
def _mapped(at_once: int) -> Iterator[Callable[..., Any]]:
    """`map`, in as many processes as that."""
    if at_once == 1:
        yield map
        return
    with ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn")) as pool:
        yield pool.map


def _write(results: Results, output: Path | None) -> None:
    """Print the report and, where there is an *output*, write it; the JSON file first, from which
    the rest can be made again.
    """
    chart = None
    if output is not None:
        write(output, render(results, chart), as_json(results), indent=None)
        try:
            draw(results, output.with_name(output.name + ".png"))
            chart = output.name + ".png"
        except ImportError as error:
            again = f"--again {output}.json --output {output}"
            say(f"No chart: {error}. Where matplotlib is, {again} draws it.")
    write(output, text := render(results, chart), as_json(results), indent=None)
    click.echo(text)


def device_facts(device: str, module: str) -> dict[str, str]:
    """What the machine and *device* are like, and how *module* was called, by name."""
    machine = facts(Path(), module)
    here = {
        name: machine[name]
        for name in ("date", "command", "processor", "kernel", "load at the start")
    }
    accelerator = torch.cuda.get_device_name() if torch.device(device).type == "cuda" else "none"
    return here | {"accelerator": accelerator, "versions": f"{commit()}, torch {torch.__version__}"}


if __name__ == "__main__":
    command.run(main, "sweeps.formats")
