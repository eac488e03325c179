"""The report in Markdown, and the results as JSON. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from .. import floor
from ..report import columns, document, escaped, listed, shown, table
from ..report import ratios as of_rounds
from .plan import Plan, Variant
from .runs import PHASES, Run, Speeds

# Shares of the floor, with their titles.
_SHARES = {
    "optimizer_floor": "optimizer phase: floor / time",
    "step_floor": "step: floor / time",
    "forward_floor": "forward: floor / time",
}


@dataclasses.dataclass
class Results:
    """facts: machine, versions and command, by name. runs: in order. speeds: fio's measurements."""

    facts: dict[str, str]
    plan: Plan
    runs: list[Run]
    speeds: list[Speeds]
    notes: list[str]

    def of(self, variant: str) -> list[Run]:
        """The complete runs of a variant."""
        return [run for run in self.runs if run.variant == variant and run.error is None]


class Figures:
    """The figures of *runs*, one row each."""

    def __init__(self, runs: Sequence[Run], settling_steps: int) -> None:
        self._frame = pd.DataFrame(
            {
                "variant": run.variant,
                "round": run.number,
                "whole": run.error is None,
                **run.figures(settling_steps),
            }
            for run in runs
        )

    def of(self, variant: str | None, name: str, whole: bool = True) -> pd.Series:
        """The figure *name* of a variant, by round; with failed runs unless *whole*."""
        if self._frame.empty:
            return pd.Series(dtype=float)
        mine = self._frame[self._frame.variant == variant]
        return (mine[mine.whole] if whole else mine).set_index("round")[name]

    def median(self, variant: str, name: str) -> float:
        """Over the rounds; NaN where there is none."""
        return float(self.of(variant, name).median())

    def ratios(self, variant: str, to: str | None, name: str, whole: bool = True) -> pd.Series:
        """The figure of *variant* divided by the figure of *to*, in each round with both."""
        return of_rounds(self.of(variant, name, whole), self.of(to, name, False))


def unequal(results: Results) -> list[str]:
    """The variants whose losses or weights differ from the first complete run with the same word
    in `Variant.bits`.
    """
    first: dict[str, Run] = {}
    differing = []
    for variant in results.plan.variants:
        for run in results.of(variant.name) if variant.bits else ():
            expected = first.setdefault(variant.bits, run)
            if (run.losses, run.weights) != (expected.losses, expected.weights):
                differing.append(variant.name)
    return list(dict.fromkeys(differing))


def render(results: Results) -> str:
    """The report in Markdown."""
    figures = Figures(results.runs, results.plan.settling_steps)
    there = [variant for variant in results.plan.variants if results.of(variant.name)]
    return document(
        "# Training steps with offload",
        *_equality(results, there),
        *_circumstances(results),
        *_times(results, figures, there),
        *_drive(results, figures, [variant for variant in there if variant.drives]),
        *_memory(results, figures, there),
        *_failures(results),
    )


def as_json(results: Results) -> dict[str, Any]:
    """All results as JSON, run by run."""
    return {
        "facts": results.facts,
        "notes": results.notes,
        "plan": dataclasses.asdict(results.plan),
        "speeds": [speeds._asdict() for speeds in results.speeds],
        "runs": [_run_as_json(run, results.plan.settling_steps) for run in results.runs],
    }


def _run_as_json(run: Run, settling: int) -> dict[str, Any]:
    return {
        **{field.name: getattr(run, field.name) for field in dataclasses.fields(run)},
        "phases": [phase._asdict() for phase in run.phases],
        "drive": run.drive and run.drive._asdict(),
        "figures": {name: float(one) for name, one in run.figures(settling).items() if one == one},
    }


def _equality(results: Results, there: Sequence[Variant]) -> Iterator[str]:
    differing = unequal(results)
    for bits in dict.fromkeys(variant.bits for variant in there if variant.bits):
        same = [variant for variant in there if variant.bits == bits]
        titles = ", ".join(variant.title for variant in same)
        if wrong := [variant.title for variant in same if variant.name in differing]:
            yield f"**Losses or weights differ** between {titles}: in {', '.join(wrong)}."
        else:
            runs = [run for variant in same for run in results.of(variant.name)]
            yield (
                f"Losses of every step, {len(runs[0].losses)} in each of {len(runs)} runs, and all weights at the end are equal bit for bit: {titles}."
            )


def _circumstances(results: Results) -> Iterator[str]:
    plan, model = results.plan, results.plan.model
    rounds = len({run.number for run in results.runs})
    size = (
        f"{model.parameters / 1e9:.2f}e9"
        if model.parameters >= 1e9
        else f"{model.parameters / 1e6:.0f}e6"
    )
    yield "## Where, when and how"
    yield listed(results.facts)
    yield from results.notes
    yield (
        f"The model: {model.blocks} blocks of {model.hidden}, {size} parameters. A run is a process of {plan.steps} steps, of which the first "
        f"{plan.settling_steps} count for the peak of memory alone. {rounds} rounds; each has every variant once, and the next has them in reverse order. "
        "A figure is the median over the rounds of a run's median; a ratio is the median over the rounds of the ratio within one round, to "
        f"{_title(results, plan.baseline)}; in brackets all rounds, or the middle 80 % of ten or more. "
        "Bytes are the kernel's counts of the process's drive traffic."
    )


def _times(results: Results, figures: Figures, there: Sequence[Variant]) -> Iterator[str]:
    base = results.plan.baseline
    titles = dict(
        zip((*PHASES, "update", "step"), (*PHASES, "backward + optimizer", "step"), strict=True)
    )
    cells = {
        "variant": lambda one: one.title,
        **{
            title: lambda one, name=name: _number(figures.median(one.name, name))
            for name, title in titles.items()
        },
        **{
            f"ratio of {titles[name]}": lambda one, name=name: shown(
                figures.ratios(one.name, base, name)
            )
            for name in ("optimizer", "update", "step")
        },
        "CPU s a step": lambda one: _number(
            sum(figures.of(one.name, f"{name} cpu_seconds").fillna(0) for name in PHASES).median()
        ),
    }
    yield "## Seconds a step"
    yield columns(there, cells)


def _drive(results: Results, figures: Figures, there: Sequence[Variant]) -> Iterator[str]:
    yield "## Bytes moved, compared with the drive's speed"
    if results.speeds:
        yield floor.described(results.speeds, results.plan.aio)

    def moved(variant: str, phase: str) -> list[float]:
        fields = ("read_bytes", "written_bytes")
        each = [figures.median(variant, f"{phase} {field}") for field in fields]
        return [0 if math.isnan(nbytes) else nbytes for nbytes in each]

    cells = {
        "variant": lambda one: one.title,
        **{
            f"{name}: GB read + written": lambda one, name=name: " + ".join(
                f"{nbytes / 1e9:.2f}" for nbytes in moved(one.name, name)
            )
            for name in PHASES
        },
        "optimizer: floor, s": lambda one: _number(figures.median(one.name, "optimizer floor")),
        **{
            title: lambda one, name=name: shown(figures.of(one.name, name))
            for name, title in _SHARES.items()
        },
    }
    yield columns(there, cells)


def _memory(results: Results, figures: Figures, there: Sequence[Variant]) -> Iterator[str]:
    base = results.plan.baseline

    def gigabytes(name: str) -> Any:
        return lambda one: _gigabytes(figures.median(one.name, name))

    def ratio(name: str) -> Any:
        return lambda one: shown(figures.ratios(one.name, base, name))

    cells = {
        "variant": lambda one: one.title,
        "peak": gigabytes("peak"),
        "ratio": ratio("peak"),
        "GPU, peak": gigabytes("gpu peak"),
    }
    yield "## Host memory"
    yield "Peaks of the resident bytes of the process, GB, by the kernel's counts."
    yield columns(there, cells)


def _failures(results: Results) -> Iterator[str]:
    lines = [
        (
            _title(results, run.variant),
            f"after {len(run.step_ends)} step{'' if len(run.step_ends) == 1 else 's'}",
            _gigabytes(run.peak_bytes()),
            escaped(run.error),
        )
        for run in results.runs
        if run.error is not None
    ]
    if lines:
        yield "## Failures"
        yield table(("variant", "when", "peak memory, GB", "error"), dict.fromkeys(lines))


def _title(results: Results, name: str) -> str:
    return results.plan.named(name).title


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _gigabytes(value: float) -> str:
    return "" if math.isnan(value) else f"{value / 1e9:.2f}"
