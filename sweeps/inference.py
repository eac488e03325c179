"""Inference of a model from a drive, by this package and by accelerate: `python3 -m sweeps.inference
DIR --model 1b`, from the root of the repository.

Each side is a separate process that loads the same weights, made on DIR, and then makes tokens one
at a time with a cache of keys and values. Files are dropped from the page cache before each token,
as if the model were larger than memory.

Source: accelerate's `disk_offload`.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import pandas as pd
import torch

from nvme_offload.hardware.config import AioConfig
from nvme_offload.swap.tier import engine_config

from . import apart, command, turns
from .command import COUNT, Names, Size, option, say
from .floor import Beside, Speeds, described, floor, floor_seconds
from .machine import facts
from .meter import Meter, restart_peak, status
from .report import Medians, columns, document, escaped, listed, write
from .system_steps import example, write_weights

_PROMPT = 16  # tokens


@dataclasses.dataclass
class Results:
    """facts: machine and command, by name. options: of the command. nbytes: of the weights. runs: in
    order. speeds: fio's measurements, with the settings *aio*.
    """

    facts: dict[str, str]
    options: dict[str, Any]
    nbytes: int
    runs: list[dict[str, Any]]
    notes: list[str]
    aio: AioConfig = dataclasses.field(default_factory=AioConfig)
    speeds: list[Speeds] = dataclasses.field(default_factory=list)


def _ours(job: dict[str, Any], device: torch.device) -> tuple[Any, int]:
    """Parameters that stream from files of safetensors, and the bytes of memory that they may use."""
    from nvme_offload import Offload

    model = example()["empty_llama"](job["model"]).eval().requires_grad_(False)
    model.offload = Offload(job["directory"], host_memory=job["host_memory"])
    model.offload.parameters(
        model, device, weights=job["weights"], gpu_memory=job["gpu_memory"] or "auto"
    )
    on_device = sum(buffer.nbytes for buffer in model.buffers()) + (job["gpu_memory"] or 0)
    return model, job["host_memory"] + (on_device if device.type == "cpu" else 0)


def _accelerate(job: dict[str, Any], device: torch.device) -> tuple[Any, int]:
    """`disk_offload`, of a model that was loaded to memory."""
    from accelerate import disk_offload
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["weights"], dtype=torch.bfloat16)
    return disk_offload(model, job["directory"], execution_device=device).eval(), 0


class Side(NamedTuple):
    """A side: its title, the factory of its model and of the bytes of memory that it may use, and how
    many tokens do not count. The first is the prompt's.
    """

    title: str
    make: Callable[[dict[str, Any], torch.device], tuple[Any, int]]
    settling: int


SIDES = {
    # The tier learns which weights are fetched once the same ones stay on the device.
    "offload": Side("Offload: streamed parameters", _ours, 5),
    "accelerate": Side("accelerate, `disk_offload`", _accelerate, 1),
}


def _drop_page_cache(*directories: str) -> None:
    for directory in directories:
        for file in Path(directory).rglob("*"):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def _infer(job: dict[str, Any]) -> None:
    """Run one side in this process, which reports every token."""
    send = apart.event_sender()
    if job["side"] == "weights":
        write_weights(example()["empty_llama"](job["model"]), Path(job["weights"]))
        return
    side = SIDES[job["side"]]
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    import transformers  # noqa: F401  # its memory is not the model's

    example()
    os.sync()  # so that earlier writes are not this side's traffic
    _drop_page_cache(job["weights"])
    meter = Meter(Path(job["directory"]))
    gc.collect()
    restart_peak()
    before = status()["VmRSS"]
    with meter.stretch() as taken:
        model, budget = side.make(job, device)
    send("made", taken=taken, over_bytes=status()["VmHWM"] - before - budget)
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, model.config.vocab_size, (1, _PROMPT), generator=generator).to(device)
    cache = None
    with torch.inference_mode():
        for number in range(side.settling + job["tokens"]):
            _drop_page_cache(job["directory"], job["weights"])
            with meter.stretch() as taken:
                out = model(words, past_key_values=cache, use_cache=True)
                logits = out.logits[:, -1].float().cpu()
            words, cache = logits.argmax(-1, keepdim=True).to(device), out.past_key_values
            digest = hashlib.sha256(logits.numpy().tobytes()).hexdigest()
            peak = torch.cuda.max_memory_allocated() if cuda else 0
            send("token", number=number, taken=taken, logits=digest, gpu_bytes=peak)


@click.command()
@command.directory
@option("--model", default="1b", help="A model of examples/big_models/train.py.")
@option("--sides", type=Names(SIDES), default=",".join(SIDES), help="With commas between.")
@option("--host-memory", type=Size("1MB"), default="1GB", help="Of Offload.")
@option("--gpu-memory", type=Size(), default=None, help="Of Offload; by default the free memory.")
@option("--tokens", type=COUNT, default=8, help="That count; a side makes a few before.")
@option("--timeout", type=float, default=560, help="Of a side, in seconds.")
@option("--rounds", type=COUNT, default=2, help="Each runs every side once.")
@command.seconds()
@command.fio_bytes
@command.output("Write OUTPUT.md and OUTPUT.json, after every side.")
@command.note
def main(
    directory: Path,
    sides: list[str],
    timeout: float,
    rounds: int,
    seconds: float | None,
    fio_bytes: int,
    output: Path | None,
    notes: tuple[str, ...],
    **options: Any,
) -> None:
    """Make tokens by each side from weights on the drive of DIRECTORY, and print a report in
    Markdown. Ratios are to the first of --sides.
    """
    command.stop_at_sigterm()
    about, aio = facts(directory, "sweeps.inference"), engine_config(str(directory))
    results = Results(about, options, 0, [], list(notes), aio)
    with (
        apart.place("inference", directory) as work,
        floor(directory, aio, fio_bytes, about, results.notes) as drive,
    ):
        job = {**options, "weights": str(work / "weights")}
        _, error = apart.run("sweeps.inference", {**job, "side": "weights"}, work, timeout)
        if error is not None:
            raise click.ClickException(f"no weights: {error}")
        results.nbytes = sum(file.stat().st_size for file in (work / "weights").iterdir())
        beside = Beside(drive, results.speeds)
        with turns.interruptible(about, results.notes):
            for number in turns.rounds(rounds, seconds, results.notes):
                beside.begin()
                for name in turns.there_and_back(sides, number):
                    with apart.place("side", work) as own:
                        events, error = apart.run(
                            "sweeps.inference",
                            {**job, "side": name, "directory": str(own)},
                            own,
                            timeout,
                            on_event=lambda event: say(json.dumps(event)),
                        )
                    run = {"side": name, "round": number, "error": error, "events": events}
                    run["drive"] = beside.end()
                    results.runs.append(run)
                    write(output, render(results), dataclasses.asdict(results))
    write(output, text := render(results), dataclasses.asdict(results))
    click.echo(text)


def _figures(run: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run, medians over the tokens that count; "count" is 0 if it had none."""
    tokens, settling = apart.of(run["events"], "token"), SIDES[run["side"]].settling
    settled = [token["taken"] for token in tokens if token["number"] >= settling]
    figures = {"name": run["side"], "round": run["round"], "count": len(settled)}
    if not settled:
        return figures
    made, taken = apart.of(run["events"], "made")[0], pd.DataFrame(settled).median()
    least = floor_seconds(taken["read_bytes"], 0, run["drive"]) if run["drive"] else math.nan
    return {
        **figures,
        "seconds": taken["seconds"],
        "read": taken["read_bytes"] / 1e9,
        "floor": least / taken["seconds"],
        "loading": made["taken"]["seconds"],
        "over": made["over_bytes"] / 1e9,
        "gpu": tokens[-1]["gpu_bytes"] / 1e9,
    }


def render(results: Results) -> str:
    """The report in Markdown."""
    medians, nbytes = Medians(map(_figures, results.runs)), results.nbytes / 1e9
    known, names = medians.cell, medians.names
    # of the tokens that a run made before it ended
    digests = [
        [token["logits"] for token in apart.of(run["events"], "token")] for run in results.runs
    ]
    shared = min(map(len, digests), default=0)
    cells: dict[str, Callable[[str], str]] = {
        "": lambda name: SIDES[name].title,
        "tokens that count": lambda name: str(medians.count(name)),
        "s a token": known(lambda run: f"{run.seconds:.3f}"),
        "tokens a second": known(lambda run: f"{1 / run.seconds:.2f}"),
        f"time over {names[0] if names else 'the first'}": medians.ratio,
        "GB read a token": known(lambda run: f"{run.read:.2f}"),
        "GB/s": known(lambda run: f"{run.read / run.seconds:.2f}"),
        "floor / time": known(lambda run: "" if math.isnan(run.floor) else f"{run.floor:.2f}"),
        "GPU, GB": known(lambda run: f"{run.gpu:.1f}"),
        "s to load": known(lambda run: f"{run.loading:.1f}"),
        "loaded, GB/s": known(lambda run: f"{nbytes / run.loading:.2f}"),
        "peak of memory in loading beyond the budget, GB": known(lambda run: f"{run.over:.2f}"),
    }
    same = all(one[:shared] == digests[0][:shared] for one in digests)
    stopped = [
        f"- {SIDES[run['side']].title}: {escaped(run['error'])}"
        for run in results.runs
        if run["error"]
    ]
    return document(
        f"# {results.options['model']}: inference from the drive",
        listed(results.facts),
        f"{nbytes:.2f} GB of weights. Each figure is the median over the rounds of the median over a run's settled tokens; "
        "each ratio is the median over the rounds of the ratio in one round. Bytes read are of the side's process. "
        "The budget is host_memory, and gpu_memory where the device is the CPU.",
        columns(names, cells),
        described(results.speeds, results.aio),
        f"The logits of the first {shared} tokens are {'equal bit for bit in all runs' if same else 'not equal'}."
        if shared and len(digests) > 1
        else "",
        "\n".join(stopped),
        *results.notes,
    )


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].endswith("job.json"):  # the process of a side
        _infer(json.loads(Path(sys.argv[1]).read_text()))
    else:
        command.run(main, "sweeps.inference")
