"""Charts of the noise: every trial as a dot, and how far the ranking of the finalists stands above it."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from nvme_offload.profile import Profile, Setting

from .. import summary, wording
from ..palette import Palette
from .canvas import DASHED, SMALL, Chart, few_ticks, frameless, note, panels, plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANEL, _GAP = 74, 24


def trials(profile: Profile) -> Chart | None:
    """Every trial over the time of the sweep, a panel for each phase, with the control as a line: what the drive did by itself."""
    runs = {phase: points for phase in summary.phases_tried(profile.trials) if len(points := summary.control_runs(profile, phase)) > 1}
    if not runs:
        return None

    def draw(palette: Palette) -> Figure:
        figure, axes_of = panels(len(runs), _PANEL, gap=_GAP, left=34, top=22)
        for axes, (phase, control) in zip(axes_of, runs.items(), strict=True):
            others = [trial for trial in profile.trials if trial.phase == phase and not trial.control]
            top = max([speed for _, speed in control] + [trial.gb_per_s for trial in others if not trial.flaw])
            counted = [trial for trial in others if not trial.flaw]
            left_out = [trial for trial in others if trial.flaw and trial.gb_per_s <= 1.1 * top]
            look: dict[str, Any] = {"linestyle": "", "markersize": 3.6, "color": palette.soft}
            axes.plot([t.started_seconds for t in counted], [t.gb_per_s for t in counted], marker="o", alpha=0.45, markeredgewidth=0, **look)
            axes.plot([t.started_seconds for t in left_out], [t.gb_per_s for t in left_out], marker="x", alpha=0.8, markeredgewidth=1.1, **look)
            axes.plot(*zip(*control, strict=True), color=palette.phase(phase), marker="o", markersize=3.6, linewidth=1.4)
            axes.set_ylim(0, 1.12 * top or 1)
            axes.margins(x=0.015)
            few_ticks(axes)
            axes.set_title(f"{wording.PHASE_NAMES[phase]}, GB/s", loc="left", fontsize=SMALL, color=palette.phase(phase), pad=3)
        axes_of[-1].set_xlabel("seconds since the sweep began")
        return figure

    spreads = {}
    for phase, points in runs.items():
        speeds = [speed for _, speed in points]
        spreads[phase] = (min(speeds), statistics.median(speeds), max(speeds))
    said = "; ".join(
        f"{wording.PHASE_NAMES[phase]} {wording.speed(low)} to {wording.speed(high)}{wording.SPACE}GB/s" for phase, (low, _, high) in spreads.items()
    )
    return Chart(
        "trials",
        "Every trial, and the drive's own drift",
        f"The defaults alone, run again and again, ranged over {said}: that is the drive or its neighbours, not a setting.",
        "Line: DeepSpeed's defaults. Grey dots: the other settings. Crosses: trials left out, as the drive jumped around them or a cache answered.",
        ("Load", "Runs of the defaults", "Slowest, GB/s", "Median, GB/s", "Fastest, GB/s", "Other trials", "Left out"),
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


def ranking(profile: Profile) -> Chart | None:
    """The finalists under the load that decides: every trial a dot, the median of each, and the interval of the chosen one."""
    phase = next(iter(summary.phases_tried(summary.decisive(profile))), "")
    dots: dict[Setting, list[float]] = {}
    controls = []
    for trial in summary.decisive(profile):
        if trial.phase == phase and not trial.control:
            dots.setdefault(trial.setting, []).append(trial.relative)
        elif trial.phase == phase:
            controls.append(trial)
    rows = sorted(dots.items(), key=lambda item: -statistics.median(item[1]))
    if not rows or max(len(values) for values in dots.values()) < 2:
        return None
    kept = [row for index, row in enumerate(rows) if index < 8 or row[0] == profile.chosen]
    # By definition the control is 1; what shows its noise is each run against its neighbours in time.
    speeds = [speed for _, speed in summary.control_runs(profile, phase)]
    own = [2 * middle / (before + after) for before, middle, after in zip(speeds, speeds[1:], speeds[2:], strict=False) if before + after > 0]
    if own and controls:
        kept.append((controls[0].setting, own))
    best = profile.performance.get(phase)

    def draw(palette: Palette) -> Figure:
        figure, axes = plot(26 * len(kept) + 56, left=112, right=46, top=14, bottom=42)
        for y, (setting, values) in enumerate(kept):
            control = bool(controls) and setting == controls[0].setting and values is own
            colour = palette.soft if control else palette.phase(phase)
            if setting == profile.chosen and best is not None and not control:
                axes.barh(y, best.relative_high - best.relative_low, left=best.relative_low, height=0.62, color=colour, alpha=0.18, linewidth=0)
            # Dots of one row apart from each other, always in the same way.
            lift = [y + 0.2 * (index % 3 - 1) for index in range(len(values))]
            axes.plot(values, lift, linestyle="", marker="o", markersize=4.2, color=colour, alpha=0.55, markeredgewidth=0)
            middle = statistics.median(values)
            axes.plot([middle, middle], [y - 0.36, y + 0.36], color=palette.ink, linewidth=1.8)
            colour = palette.ink if setting == profile.chosen else palette.soft
            note(axes, wording.ratio(middle), (1, y), (6, 0), colour, xycoords=("axes fraction", "data"), va="center")
        axes.axvline(1, color=palette.soft, linewidth=1, linestyle=DASHED)
        # An interval that says nothing does not squeeze the dots.
        low, high = min(1.0, *(min(values) for _, values in kept)), max(1.0, *(max(values) for _, values in kept))
        span = high - low
        ends = (best.relative_low, best.relative_high) if best is not None else (low, high)
        axes.set_xlim(max(min(low, ends[0]), low - 0.4 * span) - 0.05 * span, min(max(high, ends[1]), high + 0.4 * span) + 0.05 * span)
        axes.set(ylim=(len(kept) - 0.4, -0.6), xlabel=f"{wording.PHASE_NAMES[phase]}, over the defaults at the same moment")
        names = ["the defaults" if values is own else wording.setting(setting) for setting, values in kept]
        axes.set_yticks(range(len(kept)), names)
        for text, (setting, _) in zip(axes.get_yticklabels(), kept, strict=True):
            if setting == profile.chosen:
                text.set(fontweight="bold", color=palette.ink)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}{wording.TIMES}")
        axes.locator_params(axis="x", nbins=5)
        frameless(axes)
        return figure

    finding = f"Trials of one finalist ranged over {wording.percent(statistics.median(_range(values) for _, values in rows))} of their median"
    if len(rows) > 1:
        first, second = (statistics.median(values) for _, values in rows[:2])
        finding += f"; the two fastest of {len(rows)} are {wording.percent((first - second) / first if first else 0.0)} apart"
    return Chart(
        "ranking",
        "How sure the ranking is",
        f"{finding}.",
        f"Rows: block size {wording.TIMES} queue depth {wording.TIMES} threads, the chosen one bold. A dot for each trial, a bar for the median; "
        f"shaded: the 90{wording.SPACE}% interval of the chosen one. Last row: the defaults against their own neighbours in time.",
        ("Setting", "Trials", "Lowest", "Median", "Highest"),
        tuple(
            (
                "the defaults" if values is own else wording.setting(setting),
                str(len(values)),
                wording.ratio(min(values)),
                wording.ratio(statistics.median(values)),
                wording.ratio(max(values)),
            )
            for setting, values in kept
        ),
        draw,
    )


def _range(values: list[float]) -> float:
    middle = statistics.median(values)
    return (max(values) - min(values)) / middle if middle else 0.0
