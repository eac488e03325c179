"""Charts of the noise: every trial as a dot, and how far the ranking of the finalists stands above
it.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from nvme_offload.hardware.profile import Profile, Setting

from .. import summary, wording
from ..palette import Palette
from .canvas import DASHED, SMALL, Chart, few_ticks, frameless, note, panels, plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 8
_PANEL, _GAP = 74, 24


def trials(profile: Profile) -> Chart | None:
    """Every trial over the time of the sweep, a panel for each phase, with the control as a line:
    what the drive did by itself.
    """
    runs = {
        phase: points
        for phase in summary.phases_tried(profile.trials)
        if len(points := summary.control_runs(profile, phase)) > 1
    }
    if not runs:
        return None

    def draw(palette: Palette) -> Figure:
        figure, axes_of = panels(len(runs), _PANEL, gap=_GAP, left=34, top=22)
        for axes, (phase, control) in zip(axes_of, runs.items(), strict=True):
            others = [
                trial for trial in profile.trials if trial.phase == phase and not trial.control
            ]
            top = max(
                [speed for _, speed in control]
                + [trial.gb_per_s for trial in others if not trial.flaw]
            )
            counted = [trial for trial in others if not trial.flaw]
            left_out = [trial for trial in others if trial.flaw and trial.gb_per_s <= 1.1 * top]
            look: dict[str, Any] = {"linestyle": "", "markersize": 3.6, "color": palette.soft}
            axes.plot(
                [t.started_seconds for t in counted],
                [t.gb_per_s for t in counted],
                marker="o",
                alpha=0.45,
                markeredgewidth=0,
                **look,
            )
            axes.plot(
                [t.started_seconds for t in left_out],
                [t.gb_per_s for t in left_out],
                marker="x",
                alpha=0.8,
                markeredgewidth=1.1,
                **look,
            )
            axes.plot(
                *zip(*control, strict=True),
                color=palette.phase(phase),
                marker="o",
                markersize=3.6,
                linewidth=1.4,
            )
            axes.set_ylim(0, 1.12 * top or 1)
            axes.margins(x=0.015)
            few_ticks(axes)
            axes.set_title(
                f"{wording.PHASE_NAMES[phase]}, GB/s",
                loc="left",
                fontsize=SMALL,
                color=palette.phase(phase),
                pad=3,
            )
        axes_of[-1].set_xlabel("seconds since the sweep began")
        return figure

    spreads = {}
    for phase, points in runs.items():
        speeds = [speed for _, speed in points]
        spreads[phase] = (min(speeds), statistics.median(speeds), max(speeds))
    said = "; ".join(
        f"{wording.PHASE_NAMES[phase]} {wording.speed(low)} to {wording.speed(high)}{wording.SPACE}GB/s"
        for phase, (low, _, high) in spreads.items()
    )
    return Chart(
        "trials",
        "Every trial, and the drive's own drift",
        f"The defaults alone, run again and again, ranged over {said}: that is the drive or its neighbours, not a setting.",
        "Line: DeepSpeed's defaults. Grey dots: the other settings. Crosses: trials left out, as the drive jumped around them or a cache answered.",
        (
            "Load",
            "Runs of the defaults",
            "Slowest, GB/s",
            "Median of all, GB/s",
            "Fastest, GB/s",
            "Other trials",
            "Left out",
        ),
        tuple(
            (
                wording.PHASE_NAMES[phase],
                str(len(runs[phase])),
                *map(wording.speed, spreads[phase]),
                str(sum(trial.phase == phase and not trial.control for trial in profile.trials)),
                str(sum(trial.phase == phase and bool(trial.flaw) for trial in profile.trials)),
            )
            for phase in runs
        ),
        draw,
    )


class _Row(NamedTuple):
    name: str
    ratios: list[float]
    relative: float  # as everywhere in the report
    chosen: bool = False
    control: bool = False

    @property
    def range(self) -> float:
        """As a share of the ratio."""
        return (max(self.ratios) - min(self.ratios)) / self.relative if self.relative else 0.0


def ranking(profile: Profile) -> Chart | None:
    """The finalists under the load that decides: every trial a dot, the median of each, and the
    interval of the chosen one.
    """
    phase = next(iter(summary.phases_tried(summary.decisive(profile))), "")
    finalists = _finalists(profile, phase)
    if not any(len(row.ratios) > 1 for row in finalists):
        return None
    rows = [
        row for index, row in enumerate(finalists) if index < MOST_ROWS or row.chosen
    ] + _control(profile, phase)
    best = profile.performance.get(phase)

    def draw(palette: Palette) -> Figure:
        figure, axes = plot(26 * len(rows) + 56, left=112, right=46, top=14, bottom=42)
        for y, row in enumerate(rows):
            colour = palette.soft if row.control else palette.phase(phase)
            if row.chosen and best is not None:
                axes.barh(
                    y,
                    best.relative_high - best.relative_low,
                    left=best.relative_low,
                    height=0.62,
                    color=colour,
                    alpha=0.18,
                    linewidth=0,
                )
            # Dots of one row apart from each other, always in the same way.
            lift = [y + 0.2 * (index % 3 - 1) for index in range(len(row.ratios))]
            axes.plot(
                row.ratios,
                lift,
                linestyle="",
                marker="o",
                markersize=4.2,
                color=colour,
                alpha=0.55,
                markeredgewidth=0,
            )
            axes.plot(
                [row.relative, row.relative], [y - 0.36, y + 0.36], color=palette.ink, linewidth=1.8
            )
            colour = palette.ink if row.chosen else palette.soft
            note(
                axes,
                wording.ratio(row.relative),
                (1, y),
                (6, 0),
                colour,
                xycoords=("axes fraction", "data"),
                va="center",
            )
        axes.axvline(1, color=palette.soft, linewidth=1, linestyle=DASHED)
        # An interval that says nothing does not squeeze the dots.
        low, high = (
            min(1.0, *(min(row.ratios) for row in rows)),
            max(1.0, *(max(row.ratios) for row in rows)),
        )
        span = high - low or 0.1
        ends = (best.relative_low, best.relative_high) if best is not None else (low, high)
        axes.set_xlim(
            max(min(low, ends[0]), low - 0.4 * span) - 0.05 * span,
            min(max(high, ends[1]), high + 0.4 * span) + 0.05 * span,
        )
        axes.set(
            ylim=(len(rows) - 0.4, -0.6),
            xlabel=f"{wording.PHASE_NAMES[phase]}, over the defaults at the same moment",
        )
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        for text, row in zip(axes.get_yticklabels(), rows, strict=True):
            if row.chosen:
                text.set(fontweight="bold", color=palette.ink)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}{wording.TIMES}")
        axes.locator_params(axis="x", nbins=5)
        frameless(axes)
        return figure

    finding = f"Trials of one finalist ranged over {wording.percent(statistics.median(row.range for row in finalists))} of what it reached"
    if len(finalists) > 1:
        first, second = (row.relative for row in finalists[:2])
        finding += f"; the two fastest of {len(finalists)} are {wording.percent((first - second) / first if first else 0.0)} apart"
    return Chart(
        "ranking",
        "How sure the ranking is",
        f"{finding}.",
        f"Rows: block size {wording.TIMES} queue depth {wording.TIMES} threads, the chosen one bold. A dot for each trial, a bar for what it reached; "
        f"shaded: the 90{wording.SPACE}% interval of the chosen one. Last row: the defaults against their own neighbours in time.",
        ("Setting", "Trials", "Lowest", "Reached", "Highest"),
        tuple(
            (
                row.name,
                str(len(row.ratios)),
                *map(wording.ratio, (min(row.ratios), row.relative, max(row.ratios))),
            )
            for row in rows
        ),
        draw,
    )


def _finalists(profile: Profile, phase: str) -> list[_Row]:
    """The settings of the deciding stage but the control, the fastest first."""
    found: dict[Setting, list[float]] = {}
    for trial in summary.decisive(profile):
        if trial.phase == phase and not trial.control:
            found.setdefault(trial.setting, []).append(trial.relative)
    reached = summary.reached(profile, phase)
    rows = [
        _Row(
            wording.setting(setting),
            ratios,
            reached[setting].relative,
            chosen=setting == profile.chosen,
        )
        for setting, ratios in found.items()
    ]
    return sorted(rows, key=lambda row: -row.relative)


def _control(profile: Profile, phase: str) -> list[_Row]:
    """A row of the control, which by definition is 1: what shows its noise is each run against its
    neighbours in time.
    """
    speeds = [speed for _, speed in summary.control_runs(profile, phase)]
    ratios = [
        2 * middle / (before + after)
        for before, middle, after in zip(speeds, speeds[1:], speeds[2:], strict=False)
        if before + after > 0
    ]
    return [_Row("the defaults", ratios, 1.0, control=True)] if ratios else []
