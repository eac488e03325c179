"""`python -m sweeps.training DIR`: train what a plan says with the drive of DIR, in interleaved
runs, and write the report.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import click

from nvme_offload.errors import UnsupportedError

from ..command import run, stop_at_sigterm
from ..machine import commit, facts
from ..models import CONFIGS
from .drive import Floor
from .plan import Model, Variant, read_plan
from .report import Results, as_json, render
from .runs import Run, Speeds, mean_speeds
from .trainer import train

_DEFAULT_PLAN = Path(__file__).parents[1] / "plans" / "training.toml"


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--plan",
    "plan_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=_DEFAULT_PLAN,
    show_default=True,
)
@click.option(
    "--model",
    help=f"Instead of the plan's: {', '.join(CONFIGS)}, or the path of a Hugging Face config.json.",
)
@click.option(
    "--width",
    type=click.IntRange(min=8),
    help="Of the model's small-width form, which has all of its tensors, instead of the model.",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Rows of tokens, of that model.",
)
@click.option(
    "--tokens", type=click.IntRange(min=2), default=128, show_default=True, help="In each row."
)
@click.option("--rounds", type=click.IntRange(min=1), help="Instead of the plan's number.")
@click.option("--cold-rounds", type=click.IntRange(min=0), help="Instead of the plan's number.")
@click.option("--steps", type=click.IntRange(min=1), help="Instead of the plan's number.")
@click.option("--only", help="Of the plan's variants only these, with commas between.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    help="Begin no further round that would not end within this time.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Write OUTPUT.md and OUTPUT.json, for example reports/training-vda; after every run.",
)
@click.option(
    "--note",
    multiple=True,
    help="A sentence on the circumstances, for the report; may be given again.",
)
def main(
    directory: Path,
    plan_path: Path,
    model: str | None,
    width: int | None,
    batch: int,
    tokens: int,
    rounds: int | None,
    cold_rounds: int | None,
    steps: int | None,
    only: str | None,
    seconds: float | None,
    output: Path | None,
    note: tuple[str, ...],
) -> None:
    """Compare ways to train with offload to the drive of DIRECTORY, in interleaved runs, and print
    a report in Markdown.
    """
    stop_at_sigterm()
    if width and not model:
        raise click.UsageError("give --width with --model")
    other = Model(name=model, width=width, batch=batch, tokens=tokens) if model else None
    plan = read_plan(plan_path).narrowed(
        rounds, cold_rounds, steps, only.split(",") if only else None, other
    )
    results = Results(
        facts(directory, "sweeps.training") | {"versions": commit()}, plan, [], [], [], list(note)
    )
    started = time.monotonic()
    try:
        for _ in _measure(results, directory, started + seconds if seconds is not None else None):
            results.facts["took"] = f"{time.monotonic() - started:.0f} s"
            if output is not None:
                _write(results, output)
    except KeyboardInterrupt:
        results.notes.insert(0, "Interrupted: not all rounds were held.")
    results.facts["took"] = f"{time.monotonic() - started:.0f} s"
    if output is not None:
        _write(results, output)
    click.echo(render(results))


def _measure(results: Results, directory: Path, deadline: float | None) -> Iterator[None]:
    """Hold the rounds of the plan; yields after each run."""
    plan = results.plan
    longest = 0.0
    with contextlib.ExitStack() as undo:
        floor = _floor(results, directory, undo)
        for number in range(plan.rounds):
            began = time.monotonic()
            if deadline is not None and number > 0 and began + longest > deadline:
                results.notes.append(
                    f"{number} of {plan.rounds} rounds were held in the time that was given."
                )
                return
            before = _speeds(results, floor)
            for variant in plan.variants[:: -1 if number % 2 else 1]:
                run = train(plan, variant, number, directory)
                after = _speeds(results, floor) if variant.drives else before
                run.drive = (
                    mean_speeds(before, after) if before and after and variant.drives else None
                )
                before = after
                _note(results, variant, run)
                results.runs.append(run)
                yield
            longest = max(longest, time.monotonic() - began)
        cold = [plan.named(name) for name in plan.cold_variants]
        for number in range(plan.cold_rounds):
            for variant in cold[:: -1 if number % 2 else 1]:
                run = train(plan, variant, number, directory, cold=True)
                _note(results, variant, run)
                results.cold_runs.append(run)
                yield


def _floor(results: Results, directory: Path, undo: contextlib.ExitStack) -> Floor | None:
    if not results.plan.fio_bytes:
        return None
    try:
        floor = undo.enter_context(Floor(results.plan, directory))
    except UnsupportedError as error:
        results.notes.append(f"Without the drive's own speed: {error}")
        return None
    results.facts["versions"] = f"{floor.version}, {results.facts['versions']}"
    return floor


def _speeds(results: Results, floor: Floor | None) -> Speeds | None:
    if floor is None:
        return None
    results.speeds.append(floor.measure())
    return results.speeds[-1]


def _note(results: Results, variant: Variant, run: Run) -> None:
    for version in run.facts.get("versions", []):
        if version not in results.facts["versions"]:
            results.facts["versions"] += f", {version}"
    if "accelerator" in run.facts:
        results.facts["accelerator"] = run.facts["accelerator"]
        results.facts["threads and optimizer"] = (
            f"{run.facts['threads']} threads of torch; {run.facts['optimizer']}"
        )
    settling = (
        results.plan.settling_steps if len(run.step_ends) > results.plan.settling_steps else 0
    )
    times = [run.measure(name, settling) for name in ("forward", "backward", "optimizer", "cold")]
    figures = " / ".join("-" if value is None else f"{value:.2f}" for value in times)
    said = (
        f"failed: {run.error}"
        if run.error
        else f"forward / backward / optimizer / cold start {figures} s, peak {(run.peak_bytes() or 0) / 1e9:.2f} GB"
    )
    share = run.share("optimizer_floor", settling)
    _say(
        f"round {run.number + 1}, {variant.name}: {said}{'' if share is None else f', {share:.2f} of the floor'}"
    )


def _write(results: Results, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_name(output.name + ".md").write_text(render(results))
    output.with_name(output.name + ".json").write_text(
        json.dumps(as_json(results), indent=1) + "\n"
    )


def _say(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    run(main, "sweeps.training")
