"""Charts of throughput over time: within the trials that decided, and while writing on and on."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING, Any

from nvme_offload.hardware.profile import PHASES, Profile
from nvme_offload.planning import traffic

from .. import summary, training, wording
from ..palette import Palette
from .canvas import DASHED, DOTTED, SMALL, Chart, few_ticks, note, panels, plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANEL, _GAP = 74, 24


def within_trials(profile: Profile) -> Chart | None:
    """Throughput within the trials of the deciding stage: a panel for each phase."""
    lines: dict[str, list[tuple[str, list[tuple[float, float]]]]] = {}
    for trial in summary.decisive(profile):
        if points := summary.slopes(trial.samples):
            role = (
                "chosen"
                if trial.setting == profile.chosen
                else "defaults"
                if trial.control
                else "others"
            )
            lines.setdefault(trial.phase, []).append((role, points))
    phases = [phase for phase in summary.phases_tried(profile.trials) if phase in lines]
    if not phases:
        return None

    def draw(palette: Palette) -> Figure:
        figure, axes_of = panels(len(phases), _PANEL, gap=_GAP, left=34, top=22)
        for axes, phase in zip(axes_of, phases, strict=True):
            looks: dict[str, dict[str, Any]] = {
                "others": {"color": palette.soft, "alpha": 0.2, "linewidth": 0.8},
                "defaults": {
                    "color": palette.soft,
                    "alpha": 0.85,
                    "linewidth": 1.1,
                    "linestyle": DASHED,
                },
                "chosen": {"color": palette.phase(phase), "linewidth": 1.6},
            }
            for role, look in looks.items():
                for _, points in (line for line in lines[phase] if line[0] == role):
                    axes.plot(*zip(*points, strict=True), **look)
            axes.set_ylim(
                0, 1.08 * max(speed for _, points in lines[phase] for _, speed in points) or 1
            )
            axes.margins(x=0.015)
            few_ticks(axes)
            axes.set_title(
                f"{wording.PHASE_NAMES[phase]}, GB/s",
                loc="left",
                fontsize=SMALL,
                color=palette.phase(phase),
                pad=3,
            )
        axes_of[-1].set_xlabel("seconds since the trial began")
        return figure

    def change(phase: str, role: str) -> float | None:
        """The last third of a trial over its first third, the median of its runs."""
        ratios = []
        for points in (
            points for each, points in lines[phase] if each == role and len(points) >= 3
        ):
            speeds = [speed for _, speed in points]
            third = len(speeds) // 3
            if (first := statistics.fmean(speeds[:third])) > 0:
                ratios.append(statistics.fmean(speeds[-third:]) / first - 1)
        return statistics.median(ratios) if ratios else None

    count = sum(map(len, lines.values()))
    changes = {
        phase: value
        for phase in PHASES
        if phase in phases and (value := change(phase, "chosen")) is not None
    }
    said = "; from its first to its last third the chosen setting changed by " + ", ".join(
        f"{wording.signed_percent(value)} ({wording.PHASE_NAMES[phase]})"
        for phase, value in changes.items()
    )
    rows = []
    for phase in phases:
        for role in ("chosen", "defaults", "others"):
            runs = [points for each, points in lines[phase] if each == role]
            speeds = [speed for points in runs for _, speed in points]
            if speeds:
                rows.append(
                    (
                        wording.PHASE_NAMES[phase],
                        role,
                        str(len(runs)),
                        *map(wording.speed, (min(speeds), statistics.median(speeds), max(speeds))),
                    )
                )
    return Chart(
        "within-trials",
        "Inside the trials that decided",
        f"{count} trials over their own time{said if changes else ''}.",
        "Solid: the chosen setting. Dashed: DeepSpeed's defaults. Faint: the other finalists. "
        "A line that falls within a trial may be a drive whose fast cache has filled up.",
        (
            "Load",
            "Setting",
            "Trials",
            "Slowest slice, GB/s",
            "Median slice, GB/s",
            "Fastest slice, GB/s",
        ),
        tuple(rows),
        draw,
    )


def sustained(profile: Profile) -> Chart | None:
    """Writing on and on: where a drive's cache ends, and what it has left then."""
    run = profile.sustained
    if run is None or not (points := summary.slopes(run.samples, 120)):
        return None
    samples = sorted({(0.0, 0), *run.samples})
    written = [_written(samples, seconds) / 1e9 for seconds, _ in points]
    step_bytes = traffic.STEP_BYTES_7B

    def draw(palette: Palette) -> Figure:
        figure, axes = plot(236, top=22, bottom=42, left=34)
        axes.plot(written, [speed for _, speed in points], color=palette.write, linewidth=1.8)
        axes.set_ylim(0, 1.15 * max(speed for _, speed in points) or 1)
        axes.set_xlim(0, run.bytes / 1e9 or 1)
        axes.plot(
            [0.72 * run.bytes / 1e9, run.bytes / 1e9],
            [run.steady_gb_per_s] * 2,
            color=palette.ink,
            linewidth=1,
            linestyle=DASHED,
        )
        end = (run.bytes / 1e9, run.steady_gb_per_s)
        note(
            axes,
            f"{wording.speed(run.steady_gb_per_s)} in the end",
            end,
            (0, 6),
            palette.ink,
            ha="right",
        )
        marks = [(run.cache_ends_bytes, "the cache ends")] if run.cache_ends_bytes else []
        if step_bytes < run.bytes:
            marks.append((int(step_bytes), "one step of 7 B"))
        for place, name in marks:
            late = place > run.bytes / 2
            axes.axvline(place / 1e9, color=palette.ink, linewidth=1, linestyle=DOTTED)
            side = "right" if late else "left"
            note(
                axes,
                name,
                (place / 1e9, 1),
                (-4 if late else 4, -2),
                palette.ink,
                xycoords=("data", "axes fraction"),
                va="top",
                ha=side,
            )
        axes.set_title("GB/s", loc="left", fontsize=SMALL, color=palette.write, pad=3)
        axes.set_xlabel("written so far, GB")
        return figure

    fell = f"from {wording.speed(run.first_gb_per_s)} to {wording.speed(run.steady_gb_per_s)}{wording.SPACE}GB/s"
    if run.cache_ends_bytes is not None:
        finding = f"After {wording.decimal_bytes(run.cache_ends_bytes)} the drive fell {fell}: its fast cache ends there."
    else:
        finding = f"Over {wording.decimal_bytes(run.bytes)} the drive went {fell}: no end of a cache was seen."
    return Chart(
        "sustained",
        "Writing on and on",
        finding,
        f"The chosen setting, one file over and over. One step of a {wording.model(training.MODELS[0])} model writes {wording.decimal_bytes(step_bytes)}.",
        ("What", "Value"),
        (
            ("Written", wording.decimal_bytes(run.bytes)),
            ("Time", wording.duration(run.seconds)),
            ("First round, GB/s", wording.speed(run.first_gb_per_s)),
            ("Last five rounds, GB/s", wording.speed(run.steady_gb_per_s)),
            ("Steady at the end", "yes" if run.steady else "no"),
            (
                "Cache ends after",
                wording.decimal_bytes(run.cache_ends_bytes)
                if run.cache_ends_bytes is not None
                else "not seen",
            ),
        ),
        draw,
    )


def _written(samples: list[tuple[float, int]], seconds: float) -> float:
    """Bytes written by *seconds*, between samples in a straight line."""
    for (before, low), (after, high) in itertools.pairwise(samples):
        if before <= seconds <= after:
            return (
                low + (high - low) * (seconds - before) / (after - before)
                if after > before
                else high
            )
    return samples[-1][1]
