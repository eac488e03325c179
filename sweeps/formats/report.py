"""What the trainings and the stress gave, as Markdown, JSON and a chart."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .stress import BOUND, ELEMENTS, STEPS, Stressed
from .trainer import Trained

SMOOTHED_STEPS = 50


@dataclasses.dataclass
class Results:
    """Everything of one call. facts: of the machine and the command, by name."""

    facts: dict[str, str]
    text: str
    trained: list[Trained]
    stressed: list[Stressed]

    def of(self, format: str) -> dict[int, Trained]:
        """The trainings with *format*, by seed."""
        return {run.seed: run for run in self.trained if run.format == format}

    @property
    def formats(self) -> list[str]:
        """The formats, in the order in which they were trained."""
        return list(dict.fromkeys(run.format for run in self.trained))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """*format* beside the exact one. losses: validation of its seeds; exact: of the same seeds with
    exact states.
    """

    format: str
    losses: Sequence[float]
    exact: Sequence[float]

    @property
    def mean(self) -> float:
        """Of the differences to exact, seed by seed."""
        return statistics.mean(self._differences)

    @property
    def standard_error(self) -> float:
        """Of that mean; nothing is known with one seed."""
        return (
            statistics.stdev(self._differences) / len(self.losses) ** 0.5
            if len(self.losses) > 1
            else math.inf
        )

    @property
    def within(self) -> bool:
        """Whether the mean loss is one that a seed makes by itself."""
        return min(self.exact) <= statistics.mean(self.losses) <= max(self.exact)

    @property
    def _differences(self) -> list[float]:
        return [here - there for here, there in zip(self.losses, self.exact, strict=True)]


def verdict(results: Results, format: str) -> Verdict:
    """How *format*'s losses compare with those of the exact one."""
    exact, other = results.of("exact"), results.of(format)
    seeds = [seed for seed in exact if seed in other]
    return Verdict(
        format,
        [other[seed].validation for seed in seeds],
        [exact[seed].validation for seed in seeds],
    )


def render(results: Results, chart: str | None) -> str:
    """The report in Markdown; *chart* is the file with the curves."""
    lines = ["# State formats: what they do to training", ""]
    compared = [
        verdict(results, name)
        for name in results.formats
        if name != "exact" and results.of("exact")
    ]
    for found in compared:
        answer = "within" if found.within else "NOT within"
        lines += [
            f"- `\"{found.format}\"`: {answer} the seeds' spread. Its mean loss is {statistics.mean(found.losses):.4f}, exact's seeds lie between "
            f"{min(found.exact):.4f} and {max(found.exact):.4f}. Seed by seed it differs by {_plus_or_minus(found)} in the mean."
        ]
    failed = [f"{case.format}, {case.name}" for case in results.stressed if not case.held]
    if results.stressed:
        lines += [
            f"- Stress: {'FAILED: ' + '; '.join(failed) if failed else 'no step of any case was out of bounds.'}"
        ]
    lines += [
        "",
        "## Where, when and how",
        "",
        *(f"- {name}: {value}" for name, value in results.facts.items()),
        f"- text: {results.text}",
        "",
    ]
    lines += [
        "A character-level transformer of bfloat16 weights; AdamW on fp32 masters. Between steps masters and moments lie packed in the format, as on a drive.",
        "One seed has the same first weights and the same order of the text with every format. Losses are in nats a byte; validation is of held-out files.",
        "",
        '"split" loses nothing: what it changes is the rounding of weights that lie halfway between two bfloat16 numbers, one in 65536. So its differences to',
        '"exact" show how far two trainings drift apart that differ in last bits. What stands after ± is the standard error of a mean over seeds.',
        "",
        *_validation_table(results, compared),
    ]
    if chart is not None:
        lines += ["", f"![Training loss by format, and its difference to the exact one]({chart})"]
    if results.stressed:
        lines += ["", "## Gradients that misbehave", "", *_stress_table(results.stressed)]
    return "\n".join(lines) + "\n"


def _validation_table(results: Results, compared: Sequence[Verdict]) -> list[str]:
    seeds = sorted({run.seed for run in results.trained})
    lines = ["## Validation loss", ""]
    lines += _row(
        [
            "format",
            "bytes a parameter",
            *(f"seed {seed}" for seed in seeds),
            "mean",
            "largest - least",
            "mean difference to exact",
        ]
    )
    lines += ["| --- " * (len(seeds) + 5) + "|"]
    found = {item.format: item for item in compared}
    for name in results.formats:
        runs = results.of(name)
        finals = [run.validation for run in runs.values()]
        first = next(iter(runs.values()))
        cells = [
            name,
            f"{first.state_bytes / first.parameters:.3f}",
            *(f"{runs[seed].validation:.4f}" if seed in runs else "" for seed in seeds),
        ]
        cells += [f"{statistics.mean(finals):.4f}", f"{max(finals) - min(finals):.4f}"]
        lines += _row([*cells, _plus_or_minus(found[name]) if name in found else ""])
    return lines


def _plus_or_minus(found: Verdict) -> str:
    return f"{found.mean:+.4f} ± {found.standard_error:.4f}"


def _stress_table(stressed: Sequence[Stressed]) -> list[str]:
    lines = [
        f"AdamW steps {ELEMENTS} weights {STEPS} times by gradients of this magnitude; the largest step of any of them, over the learning rate. Exact states",
        f"cannot step further than (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)) = {BOUND:.2f}; in bounds is what is at most a fifth above that.",
        "",
        *_row(["gradients", "format", "largest step", "finite", "in bounds"]),
        "| --- | --- | --- | --- | --- |",
    ]
    for case in stressed:
        lines += _row(
            [
                case.name,
                case.format,
                f"{case.largest_step:.3f}",
                "yes" if case.finite else "NO",
                "yes" if case.held else "NO",
            ]
        )
    return lines


def _row(cells: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(cells)} |"]


def as_json(results: Results) -> dict[str, Any]:
    """Everything that the report was made of."""
    return dataclasses.asdict(results)


def from_json(written: dict[str, Any]) -> Results:
    """What `as_json` made."""
    trained = [Trained(**run) for run in written["trained"]]
    return Results(
        written["facts"],
        written["text"],
        trained,
        [Stressed(**case) for case in written["stressed"]],
    )


def smoothed(losses: Sequence[float], steps: int = SMOOTHED_STEPS) -> list[float]:
    """The mean of each *steps* losses, one after another; of fewer at the end."""
    return [
        statistics.mean(losses[start : start + steps]) for start in range(0, len(losses), steps)
    ]


def draw(results: Results, path: Path) -> None:
    """Chart the training losses of every run, and their differences to the exact run of the same
    seed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 8), sharex=True, height_ratios=[3, 2], constrained_layout=True
    )
    exact = {seed: smoothed(run.losses) for seed, run in results.of("exact").items()}
    for number, name in enumerate(results.formats):
        for index, (seed, run) in enumerate(results.of(name).items()):
            curve = smoothed(run.losses)
            steps = [
                min((place + 1) * SMOOTHED_STEPS, len(run.losses)) for place in range(len(curve))
            ]
            style = {
                "color": f"C{number}",
                "linewidth": 1.2,
                "alpha": 0.8,
                "label": name if index == 0 else None,
            }
            above.plot(steps, curve, **style)
            if name != "exact" and seed in exact:
                below.plot(
                    steps,
                    [here - there for here, there in zip(curve, exact[seed], strict=True)],
                    **style,
                )
    if exact:
        width = [max(at) - min(at) for at in zip(*exact.values(), strict=True)]
        below.fill_between(
            steps, [-w for w in width], width, color="0.9", label="spread of exact's seeds"
        )
    above.set(
        ylabel="training loss, nats a byte",
        title=f"Means of {SMOOTHED_STEPS} steps, one line a seed",
    )
    below.set(ylabel="less exact's, same seed", xlabel="step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
