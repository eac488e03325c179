"""The report of trainings and stress test as Markdown, JSON and a chart."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report import columns, document, listed
from .stress import BOUND, ELEMENTS, STEPS, Stressed
from .trainer import Trained

SMOOTHED_STEPS = 50


@dataclasses.dataclass
class Results:
    """The results of one call. facts: machine and command, by name."""

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
    """*format* compared with exact. losses: validation losses by seed; exact: with exact states and
    the same seeds.
    """

    format: str
    losses: Sequence[float]
    exact: Sequence[float]

    @property
    def mean(self) -> float:
        """The mean difference to exact over the seeds."""
        return statistics.mean(self._differences)

    @property
    def standard_error(self) -> float:
        """The standard error of the mean; infinite with one seed."""
        if len(self.losses) < 2:
            return math.inf
        return statistics.stdev(self._differences) / len(self.losses) ** 0.5

    @property
    def within(self) -> bool:
        """Whether the mean loss is within the range of exact's seeds."""
        return min(self.exact) <= statistics.mean(self.losses) <= max(self.exact)

    @property
    def _differences(self) -> list[float]:
        return [here - there for here, there in zip(self.losses, self.exact, strict=True)]

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.standard_error:.4f}"


def verdict(results: Results, format: str) -> Verdict:
    """Compare *format*'s losses with exact's."""
    exact, other = results.of("exact"), results.of(format)
    seeds = [seed for seed in exact if seed in other]
    losses = ([runs[seed].validation for seed in seeds] for runs in (other, exact))
    return Verdict(format, *losses)


def render(results: Results, chart: str | None) -> str:
    """The report in Markdown; *chart* is the file with the curves."""
    compared = [
        verdict(results, name)
        for name in results.formats
        if name != "exact" and results.of("exact")
    ]
    found = [
        f'- `"{one.format}"`: {"within" if one.within else "NOT within"} the seeds\' spread. '
        f"Its mean loss is {statistics.mean(one.losses):.4f}, exact's seeds lie between "
        f"{min(one.exact):.4f} and {max(one.exact):.4f}. Seed by seed it differs by {one} in the mean."
        for one in compared
    ]
    if results.stressed:
        failed = "; ".join(f"{one.format}, {one.name}" for one in results.stressed if not one.held)
        said = f"FAILED: {failed}" if failed else "no step of any case was out of bounds."
        found.append(f"- Stress: {said}")
    return document(
        "# State formats in training",
        "\n".join(found),
        "## Where, when and how",
        listed({**results.facts, "text": results.text}),
        "A character-level transformer of bfloat16 weights; AdamW on fp32 masters. Between steps masters and moments lie packed in the format, as on a drive.\n"
        "One seed has the same first weights and the same order of the text with every format. Losses are in nats a byte; validation is of held-out files.",
        '"split" changes only the rounding of weights halfway between two bfloat16 numbers, one in 65536. So its differences to\n'
        '"exact" show how far two trainings diverge that differ in last bits. The figure after ± is the standard error of a mean over seeds.',
        "## Validation loss",
        _validation_table(results, {one.format: one for one in compared}),
        f"![Training loss by format, and its difference to the exact one]({chart})"
        if chart
        else "",
        *(_stress(results.stressed) if results.stressed else ()),
    )


def _validation_table(results: Results, compared: dict[str, Verdict]) -> str:
    def losses(name: str) -> list[float]:
        return [run.validation for run in results.of(name).values()]

    def bytes_each(name: str) -> str:
        first = next(iter(results.of(name).values()))
        return f"{first.state_bytes / first.parameters:.3f}"

    def of_seed(name: str, seed: int) -> str:
        runs = results.of(name)
        return f"{runs[seed].validation:.4f}" if seed in runs else ""

    seeds = sorted({run.seed for run in results.trained})
    cells = {
        "format": str,
        "bytes a parameter": bytes_each,
        **{f"seed {seed}": lambda name, seed=seed: of_seed(name, seed) for seed in seeds},
        "mean": lambda name: f"{statistics.mean(losses(name)):.4f}",
        "largest - least": lambda name: f"{max(losses(name)) - min(losses(name)):.4f}",
        "mean difference to exact": lambda name: compared.get(name, ""),
    }
    return columns(results.formats, cells)


def _stress(stressed: Sequence[Stressed]) -> tuple[str, str, str]:
    cells = {
        "gradients": lambda case: case.name,
        "format": lambda case: case.format,
        "largest step": lambda case: f"{case.largest_step:.3f}",
        "finite": lambda case: "yes" if case.finite else "NO",
        "in bounds": lambda case: "yes" if case.held else "NO",
    }
    return (
        "## Gradients that misbehave",
        f"AdamW steps {ELEMENTS} weights {STEPS} times by gradients of this magnitude; the largest step of a weight over the learning rate. Exact states\n"
        f"cannot step further than (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)) = {BOUND:.2f}; steps are in bounds up to a fifth above that.",
        columns(stressed, cells),
    )


def as_json(results: Results) -> dict[str, Any]:
    """All results, for `from_json`."""
    return dataclasses.asdict(results)


def from_json(written: dict[str, Any]) -> Results:
    """Read the output of `as_json`."""
    trained = [Trained(**run) for run in written["trained"]]
    stressed = [Stressed(**case) for case in written["stressed"]]
    return Results(written["facts"], written["text"], trained, stressed)


def smoothed(losses: Sequence[float], steps: int = SMOOTHED_STEPS) -> list[float]:
    """The mean of each *steps* losses, one after another; of fewer at the end."""
    starts = range(0, len(losses), steps)
    return [statistics.mean(losses[start : start + steps]) for start in starts]


def draw(results: Results, path: Path) -> None:
    """Chart the training losses of every run, and their differences to the exact run of the same
    seed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import pandas as pd

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 8), sharex=True, height_ratios=[3, 2], constrained_layout=True
    )

    def curve(run: Trained) -> pd.Series:
        means = smoothed(run.losses)
        ends = [min((place + 1) * SMOOTHED_STEPS, len(run.losses)) for place in range(len(means))]
        return pd.Series(means, ends)

    exact = {seed: curve(run) for seed, run in results.of("exact").items()}
    for number, name in enumerate(results.formats):
        for index, (seed, run) in enumerate(results.of(name).items()):
            style = {"color": f"C{number}", "linewidth": 1.2, "alpha": 0.8}
            style["label"] = name if index == 0 else None
            above.plot(curve(run), **style)
            if name != "exact" and seed in exact:
                below.plot(curve(run) - exact[seed], **style)
    if exact:
        curves = pd.DataFrame(exact)
        width = curves.max(axis=1) - curves.min(axis=1)
        label = "spread of exact's seeds"
        below.fill_between(width.index, -width, width, color="0.9", label=label)
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
