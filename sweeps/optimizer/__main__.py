"""`python -m sweeps.optimizer DIR`: run steps with the states on the drive of DIR, interleaved, and
write the report.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from nvme_offload.hardware.config import AioConfig
from nvme_offload.swap.tier import engine_config, memory_size

from .. import apart, command
from ..command import COUNT, Names, Size, option, say
from ..floor import Floor, floor, mean
from ..machine import commit, facts
from ..models import CONFIGS, config_of, tensors
from ..report import write
from ..turns import interruptible, rounds, there_and_back
from .report import SETTLING, TITLES, Drive, Results, Run, as_json, render
from .shapes import gpt_shapes


@click.command()
@command.directory
@option("--parameters", type=float, help="How many.  [default: 1.6e9 with a GPU, 4e8 without]")
@option(
    "--model",
    help=f"Instead of a GPT of so many: {', '.join(CONFIGS)}, or the path of a config.json.",
)
@command.width
@option(
    "--host-memory",
    help='Of each variant, all ranks together: a size, or "auto".  [default: 2.75 bytes for each parameter]',
)
@option(
    "--variants",
    type=Names(TITLES),
    default="exact,split,compact,memory",
    help=f"Of {', '.join(TITLES)}, separated by commas.",
)
@option("--ranks", type=COUNT, default=1, help="With more than one, FSDP2 shards the parameters.")
@option("--rounds", "count", type=COUNT, default=2)
@option(
    "--steps",
    type=click.IntRange(min=SETTLING + 1),
    default=5,
    help=f"In each process; the first {SETTLING} do not count.",
)
@option(
    "--block-size",
    type=Size(),
    help="By default from the drive's profile, or the engine's default; so are --queue-depth and --thread-count.",
)
@option("--queue-depth", type=COUNT)
@option("--thread-count", type=COUNT)
@option("--fio-size", type=Size(), default="4GB", help="Of each of fio's two files; 0: no fio.")
@option("--timeout", type=click.FloatRange(min=1), default=300, help="Of a process, in seconds.")
@command.seconds()
@command.output("Write OUTPUT.md and OUTPUT.json, after every run.")
@command.note
def main(
    directory: Path,
    parameters: float | None,
    model: str | None,
    width: int | None,
    host_memory: str | None,
    variants: list[str],
    ranks: int,
    count: int,
    steps: int,
    fio_size: int,
    timeout: float,
    seconds: float | None,
    output: Path | None,
    notes: tuple[str, ...],
    **given: int | None,
) -> None:
    """Compare optimizer steps with the states on the drive of DIRECTORY, in interleaved runs, and
    print a report in Markdown.
    """
    command.stop_at_sigterm()
    if (parameters and model) or (width and not model):
        raise click.UsageError("give --parameters or --model, and --width with a model alone")
    if model is None:
        elements = int(parameters or (1.6e9 if _has_gpu() else 4e8))
        shapes = gpt_shapes(elements)
    else:
        shapes = [tensor.shape for tensor in tensors(config_of(model, width))]
        elements = sum(map(math.prod, shapes))
    cap = memory_size(host_memory or int(2.75 * elements))
    chosen = {key: value for key, value in given.items() if value is not None}
    aio = dataclasses.replace(engine_config(str(directory)), **chosen)
    described = facts(directory, "sweeps.optimizer") | {"versions": commit(), "engine": _text(aio)}
    if model is not None:
        narrow = "" if width is None else f", width {width}"
        described["model"] = f"{model}{narrow}: {len(shapes)} tensors"
    shown = host_memory or f"{cap / 1e9:.2f} GB"
    results = Results(described, shown, ranks, [], [], list(notes))
    job = {
        "shapes": shapes,
        "host_memory": cap if cap == "auto" else cap // ranks,
        "ranks": ranks,
        "steps": steps,
        "aio": dataclasses.asdict(aio),
        "patience_seconds": timeout,
    }
    with (
        interruptible(results.facts, results.notes),
        floor(directory, aio, fio_size, results.facts, results.notes) as drive,
    ):
        speeds = lambda: _speeds(results, drive, aio, cap)  # noqa: E731
        before = speeds()
        for number in rounds(count, seconds, results.notes):
            before = _round(
                results,
                directory,
                there_and_back(variants, number),
                number,
                job,
                before,
                speeds,
                output,
            )
    write(output, text := render(results), as_json(results))
    click.echo(text)


def _round(
    results: Results,
    directory: Path,
    variants: Sequence[str],
    number: int,
    job: dict[str, Any],
    before: Drive | None,
    speeds: Callable[[], Drive | None],
    output: Path | None,
) -> Drive | None:
    """Run each of *variants* once; returns the drive's last speeds."""
    for variant in variants:
        told, error = _run(directory, {**job, "variant": variant})
        done = next(iter(apart.of(told, "done")), {})
        settled = [step for step in apart.of(told, "step") if step["number"] >= SETTLING]
        if not done and error is None:
            error = "ended without a result"
        after = speeds() if variant != "memory" else before
        drive = mean(before, after) if variant != "memory" else None
        results.runs.append(Run(variant, number, settled, done, drive, error))
        before = after
        _note(results, results.runs[-1])
        write(output, render(results), as_json(results))
    return before


def _run(directory: Path, job: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """The events of the ranks of *job*, and the error or None."""

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            say(f"  {job['variant']}, step {event['number'] + 1}: {event['seconds']:.2f} s")

    with apart.place("optimizer", directory) as work:
        return apart.run(
            "sweeps.optimizer.trainee",
            {**job, "directory": str(work)},
            work,
            job["patience_seconds"],
            ranks=job["ranks"],
            environment=apart.threads(job["ranks"]),
            hear=hear,
        )


def _speeds(results: Results, drive: Floor | None, aio: AioConfig, cap: int | str) -> Drive | None:
    if drive is None:
        return None
    engine = drive.engine_speed(aio, sys.maxsize if cap == "auto" else int(cap))
    results.speeds.append(Drive(*drive.measure(), engine))
    read, write, mixed, alone = (f"{speed / 1e9:.2f}" for speed in results.speeds[-1])
    say(f"  fio: read {read}, write {write}, mixed {mixed} GB/s; the engine alone: {alone} GB/s")
    return results.speeds[-1]


def _note(results: Results, run: Run) -> None:
    if run.error is not None:
        say(f"round {run.round + 1}, {run.variant}: failed: {run.error}")
        return
    results.facts["accelerator"] = run.done["accelerator"]
    results.facts["threads of torch"] = str(run.done["threads"])
    if run.done["versions"] not in results.facts["versions"]:
        results.facts["versions"] += f", {run.done['versions']}"
    found = run.figures()
    share = f", {found['floor'] / found['seconds']:.2f} of the floor"
    peak = f"host peak {found['host_peak_bytes'] / 1e9:.2f} GB"
    said = f"{found['seconds']:.2f} s a step{'' if math.isnan(found['floor']) else share}, {peak}"
    say(f"round {run.round + 1}, {run.variant}: {said}")


def _text(aio: AioConfig) -> str:
    return f"{aio.backend}, block {aio.block_size >> 10} KiB, depth {aio.queue_depth}, threads {aio.thread_count}"


def _has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


if __name__ == "__main__":
    command.run(main, "sweeps.optimizer")
