"""`python -m sweeps.training DIR`: train the variants of a plan with the drive of DIR, interleaved,
and write the report.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from .. import apart, command
from ..command import COUNT, option, say
from ..floor import Beside, Floor, floor
from ..machine import facts
from ..report import write
from ..turns import interruptible, rounds, there_and_back
from .plan import Variant, read_plan
from .report import Results, as_json, render
from .runs import Run, assemble

_DEFAULT_PLAN = Path(__file__).parents[1] / "plans" / "training.toml"
_NUMBER = "Instead of the plan's number."


@click.command()
@command.directory
@option("--plan", "plan_path", type=command.FILE, default=_DEFAULT_PLAN)
@option("--ranks", type=COUNT, default=1, help="Processes; FSDP2 or ZeRO-3 shards the model.")
@command.rounds
@option("--steps", type=COUNT, help=_NUMBER)
@option("--only", type=command.Names(), help="Variants of the plan, separated by commas.")
@command.seconds()
@command.output("Write OUTPUT.md and OUTPUT.json after every run.")
@command.note
def main(
    directory: Path,
    plan_path: Path,
    only: list[str] | None,
    ranks: int,
    seconds: float | None,
    output: Path | None,
    notes: tuple[str, ...],
    **numbers: Any,
) -> None:
    """Compare ways to train with offload to the drive of DIRECTORY, in interleaved runs, and print
    a report in Markdown.
    """
    command.stop_at_sigterm()
    plan = read_plan(plan_path).narrowed(only, **numbers)
    results = Results(facts(directory, "sweeps.training"), plan, [], [], list(notes))
    with (
        interruptible(results.facts, results.notes),
        floor(directory, plan.aio, plan.fio_bytes, results.facts, results.notes) as drive,
    ):
        _measure(results, directory, drive, ranks, seconds, output)
    write(output, text := render(results), as_json(results))
    click.echo(text)


def _measure(
    results: Results,
    directory: Path,
    drive: Floor | None,
    ranks: int,
    seconds: float | None,
    output: Path | None,
) -> None:
    """Run the rounds of the plan; write the report after each run."""

    plan, beside = results.plan, Beside(drive, results.speeds)
    for number in rounds(plan.rounds, seconds, results.notes):
        beside.begin()
        for variant in there_and_back(plan.variants, number):
            run = train(results, variant, number, directory, ranks)
            run.drive = beside.end() if variant.drives else None
            _note(results, run)
            results.runs.append(run)
            write(output, render(results), as_json(results))


def train(results: Results, variant: Variant, number: int, directory: Path, ranks: int = 1) -> Run:
    """Run *variant* once; its files in *directory* are removed afterwards."""
    plan = results.plan
    with apart.place("training", directory) as work:
        (work / "offload").mkdir()
        job = {
            "ours": variant.ours,
            "plain": variant.plain,
            "ranks": ranks,
            "aio": dataclasses.asdict(plan.aio),
            "offload": str(work / "offload"),
            "ds_config": variant.ds_config_at(str(work / "offload")),
            "directory": str(directory),
            **dataclasses.asdict(plan.model),
            "steps": plan.steps,
        }
        environment = apart.launched(ranks)
        module, timeout = "sweeps.training.trainee", plan.timeout_seconds
        events, error = apart.run(module, job, work, timeout, ranks=ranks, environment=environment)
    return assemble(variant.name, number, error, events)


def _note(results: Results, run: Run) -> None:
    for version in run.facts.get("versions", []):
        if version not in results.facts["versions"]:
            results.facts["versions"] += f", {version}"
    if "accelerator" in run.facts:
        threads, optimizer = run.facts["threads"], run.facts["optimizer"]
        results.facts["accelerator"] = run.facts["accelerator"]
        results.facts["threads and optimizer"] = f"{threads} threads of torch; {optimizer}"
    settling = results.plan.settling_steps
    found = run.figures(settling if len(run.step_ends) > settling else 0)
    names = ("forward", "backward", "optimizer")
    figures = " / ".join(f"{found[name]:.2f}" for name in names)
    peak = f"peak {run.peak_bytes() / 1e9:.2f} GB"
    said = f"forward / backward / optimizer {figures} s, {peak}"
    say(f"round {run.number + 1}, {run.variant}: {f'failed: {run.error}' if run.error else said}")


if __name__ == "__main__":
    command.run(main, "sweeps.training")
