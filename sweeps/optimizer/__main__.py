"""`python -m sweeps.optimizer DIR`: steps with the states on the drive of DIR, in interleaved runs,
and the report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import click

from nvme_offload.errors import UnsupportedError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.swap.tier import engine_config, memory_size
from nvme_offload.units import parse_bytes
from sweeps.machine import commit, facts
from sweeps.models import CONFIGS, config_of, tensors
from sweeps.training.drive import Floor
from sweeps.training.plan import Plan
from sweeps.training.trainer import last_words

from ..command import run, stop_at_sigterm
from .report import SETTLING, TITLES, Drive, Results, Run, as_json, render
from .shapes import gpt_shapes

_ROOT = Path(__file__).parents[2]
_PATIENCE_SECONDS = 15


class _FioPlan(NamedTuple):
    """What `Floor` looks at of a plan."""

    aio: dict[str, int]
    fio_bytes: int


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--parameters",
    type=float,
    default=None,
    help="How many, about.  [default: 1.6e9 with a GPU, 4e8 without]",
)
@click.option(
    "--model",
    help=f"Instead of a GPT of so many: {', '.join(CONFIGS)}, or the path of a Hugging Face config.json.",
)
@click.option(
    "--width",
    type=click.IntRange(min=8),
    help="Of the model's small-width form, which has all of its tensors, instead of the model.",
)
@click.option(
    "--host-memory",
    default=None,
    help='Of each variant, all ranks together: a size, or "auto".  [default: 2.75 bytes for each parameter]',
)
@click.option(
    "--variants",
    default="exact,split,compact,memory",
    show_default=True,
    help=f"Which of {', '.join(TITLES)}, with commas between.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="With more than one, FSDP2 shards the parameters over them.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--steps",
    type=click.IntRange(min=SETTLING + 1),
    default=5,
    show_default=True,
    help=f"In each process; the first {SETTLING} do not count.",
)
@click.option(
    "--block-size",
    help="Instead of the drive's profile, or of the engine's default without one; likewise the next two.",
)
@click.option("--queue-depth", type=click.IntRange(min=1))
@click.option("--thread-count", type=click.IntRange(min=1))
@click.option(
    "--fio-size",
    default="4GB",
    show_default=True,
    help="Of each of fio's two files; 0 runs no fio.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=300,
    show_default=True,
    help="Of a process, in seconds.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    help="Begin no further round that would not end within this time.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Write OUTPUT.md and OUTPUT.json, after every run.",
)
@click.option(
    "--note",
    multiple=True,
    help="A sentence on the circumstances, for the report; may be given again.",
)
def main(
    directory: Path,
    parameters: float | None,
    model: str | None,
    width: int | None,
    host_memory: str | None,
    variants: str,
    ranks: int,
    rounds: int,
    steps: int,
    block_size: str | None,
    queue_depth: int | None,
    thread_count: int | None,
    fio_size: str,
    timeout: float,
    seconds: float | None,
    output: Path | None,
    note: tuple[str, ...],
) -> None:
    """Compare optimizer steps with the states on the drive of DIRECTORY, in interleaved runs, and
    print a report in Markdown.
    """
    stop_at_sigterm()
    names = variants.split(",")
    if unknown := sorted(set(names) - set(TITLES)):
        raise click.BadParameter(
            f"{unknown[0]!r} is none of {', '.join(TITLES)}", param_hint="--variants"
        )
    if (parameters and model) or (width and not model):
        raise click.UsageError("give --parameters or --model, and --width with a model alone")
    wanted = int(parameters or (1.6e9 if _has_gpu() else 4e8))
    shapes = (
        gpt_shapes(wanted)
        if model is None
        else [tensor.shape for tensor in tensors(config_of(model, width))]
    )
    if model is not None:
        wanted = sum(map(math.prod, shapes))
    cap = host_memory or int(2.75 * wanted)
    chosen = engine_config(str(directory))
    given = {
        "block_size": parse_bytes(block_size) if block_size else None,
        "queue_depth": queue_depth,
        "thread_count": thread_count,
    }
    aio = dataclasses.replace(
        chosen, **{key: value for key, value in given.items() if value is not None}
    )
    described = facts(directory, "sweeps.optimizer") | {"versions": commit(), "engine": _text(aio)}
    if model is not None:
        described["model"] = (
            f"{model}{'' if width is None else f', width {width}'}: {len(shapes)} tensors"
        )
    shown = host_memory or f"{int(cap) / 1e9:.2f} GB"
    results = Results(described, shown, ranks, [], [], list(note))
    job = {
        "shapes": shapes,
        "host_memory": cap,
        "ranks": ranks,
        "steps": steps,
        "aio": dataclasses.asdict(aio),
        "patience_seconds": timeout,
    }
    started = time.monotonic()
    try:
        _measure(
            results,
            directory,
            names,
            rounds,
            job,
            parse_bytes(fio_size),
            timeout,
            None if seconds is None else started + seconds,
            output,
        )
    except KeyboardInterrupt:
        results.notes.insert(0, "Interrupted: not all rounds were held.")
    results.facts["took"] = f"{time.monotonic() - started:.0f} s"
    _write(results, output)
    click.echo(render(results))


def _measure(
    results: Results,
    directory: Path,
    names: Sequence[str],
    rounds: int,
    job: dict[str, Any],
    fio_bytes: int,
    timeout: float,
    deadline: float | None,
    output: Path | None,
) -> None:
    longest = 0.0
    with contextlib.ExitStack() as undo:
        floor = _floor(results, directory, job["aio"], fio_bytes, undo)
        before = _speeds(results, floor, job)
        for number in range(rounds):
            began = time.monotonic()
            if deadline is not None and number > 0 and began + longest > deadline:
                results.notes.append(
                    f"{number} of {rounds} rounds were held in the time that was given."
                )
                return
            for variant in names[:: -1 if number % 2 else 1]:
                told, error = _run(directory, {**job, "variant": variant}, timeout)
                done = next((event for event in told if event["event"] == "done"), {})
                settled = [
                    event
                    for event in told
                    if event["event"] == "step" and event["number"] >= SETTLING
                ]
                if not done and error is None:
                    error = "ended without a word"
                after = _speeds(results, floor, job) if variant != "memory" else before
                run = Run(
                    variant,
                    number,
                    settled,
                    done,
                    Drive.mean(before, after) if before and after and variant != "memory" else None,
                    error,
                )
                before = after
                results.runs.append(run)
                _note(results, run)
                _write(results, output)
            longest = max(longest, time.monotonic() - began)


def _run(
    directory: Path, job: dict[str, Any], timeout: float
) -> tuple[list[dict[str, Any]], str | None]:
    """What the process of *job* told, and why it did not come to its end, if so."""
    with (
        tempfile.TemporaryDirectory(prefix="sweeps-optimizer-", dir=directory) as place,
        tempfile.TemporaryFile("w+") as log,
    ):
        path = Path(place) / "job.json"
        cap = memory_size(job["host_memory"])
        path.write_text(
            json.dumps(
                {
                    **job,
                    "directory": place,
                    "host_memory": cap if cap == "auto" else cap // job["ranks"],
                }
            )
        )
        ranks = []
        environment = dict(os.environ)
        if job["ranks"] > 1:  # as torchrun does, or the ranks' threads would be in each other's way
            environment.setdefault(
                "OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // job["ranks"], 1))
            )
        for rank in range(job["ranks"]):
            command = [sys.executable, "-m", "sweeps.optimizer.trainee", str(path), str(rank)]
            ranks.append(
                subprocess.Popen(
                    command,
                    cwd=_ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    text=True,
                )
            )
        killers = [threading.Timer(timeout, rank.kill) for rank in ranks]
        for killer in killers:
            killer.start()
        told = []
        try:
            assert ranks[0].stdout is not None
            for line in ranks[0].stdout:
                told.append(json.loads(line))
                if told[-1]["event"] == "step":
                    _say(
                        f"  {job['variant']}, step {told[-1]['number'] + 1}: {told[-1]['seconds']:.2f} s"
                    )
            status = max((rank.wait(_PATIENCE_SECONDS) for rank in ranks), key=abs)
        finally:
            late = not killers[0].is_alive()
            for killer, rank in zip(killers, ranks, strict=True):
                killer.cancel()
                rank.kill()
                rank.wait()
                rank.stdout.close() if rank.stdout else None
        if status == 0:
            return told, None
        log.seek(0)
        text = log.read()
        sys.stderr.write(text[-3000:])
        return (
            told,
            f"not done after {timeout:g} s" if late else f"{last_words(text)} (status {status})",
        )


def _floor(
    results: Results,
    directory: Path,
    aio: dict[str, Any],
    fio_bytes: int,
    undo: contextlib.ExitStack,
) -> Floor | None:
    if not fio_bytes:
        return None
    settings = {
        "block_size": aio["block_size"],
        "queue_depth": aio["queue_depth"],
        "intra_op_parallelism": aio["thread_count"],
    }
    try:
        floor = undo.enter_context(Floor(cast(Plan, _FioPlan(settings, fio_bytes)), directory))
    except UnsupportedError as error:
        results.notes.append(f"Without the drive's own speed: {error}")
        return None
    results.facts["versions"] = f"{floor.version}, {results.facts['versions']}"
    return floor


def _speeds(results: Results, floor: Floor | None, job: Mapping[str, Any]) -> Drive | None:
    if floor is None:
        return None
    cap = memory_size(job["host_memory"])
    found = Drive(
        floor.measure(),
        floor.engine_speed(AioConfig(**job["aio"]), sys.maxsize if cap == "auto" else cap),
    )
    results.speeds.append(found)
    read, write, mixed = (f"{speed / 1e9:.2f}" for speed in found.fio)
    _say(
        f"  fio: read {read}, write {write}, mixed {mixed} GB/s; the engine alone, in as much memory as a step has: {found.engine / 1e9:.2f} GB/s"
    )
    return found


def _note(results: Results, run: Run) -> None:
    if run.error is not None:
        _say(f"round {run.round + 1}, {run.variant}: failed: {run.error}")
        return
    results.facts["accelerator"] = run.done["accelerator"]
    results.facts["threads of torch"] = str(run.done["threads"])
    if run.done["versions"] not in results.facts["versions"]:
        results.facts["versions"] += f", {run.done['versions']}"
    share = f", {run.floor / run.median('seconds'):.2f} of the floor" if run.floor else ""
    _say(
        f"round {run.round + 1}, {run.variant}: {run.median('seconds'):.2f} s a step{share}, host peak {run.done['host_peak_bytes'] / 1e9:.2f} GB"
    )


def _write(results: Results, output: Path | None) -> None:
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.with_name(output.name + ".md").write_text(render(results))
        output.with_name(output.name + ".json").write_text(
            json.dumps(as_json(results), indent=1) + "\n"
        )


def _text(aio: AioConfig) -> str:
    return f"{aio.backend}, block {aio.block_size >> 10} KiB, depth {aio.queue_depth}, threads {aio.thread_count}"


def _has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def _say(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    run(main, "sweeps.optimizer")
