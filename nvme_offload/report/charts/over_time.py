"""Charts over time: every trial of the sweep, and writing without a pause."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING, Any

from nvme_offload.hardware.profile import Profile
from nvme_offload.planning import traffic

from .. import summary, wording
from ..palette import Palette
from .canvas import DASHED, DOTTED, SMALL, Chart, few_ticks, note, panels, plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANEL, _GAP = 74, 24


def trials(profile: Profile) -> Chart | None:
    """Every trial over the time of the sweep, a panel for each phase, with the control as a line, which
    shows the drift of the drive.
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
        f"The defaults alone, run again and again, ranged over {said}: this is the drift of the drive, not an effect of settings.",
        "Line: DeepSpeed's defaults. Grey dots: other settings. Crosses: trials left out, because the drive's speed jumped or a cache answered.",
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


def sustained(profile: Profile) -> Chart | None:
    """Writing without a pause: the size of a drive's cache, and its speed after that."""
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
        finding = f"After {wording.decimal_bytes(run.cache_ends_bytes)} the drive fell {fell}: its fast cache is full."
    else:
        finding = f"Over {wording.decimal_bytes(run.bytes)} the drive went {fell}: no end of a cache was seen."
    return Chart(
        "sustained",
        "Writing without a pause",
        finding,
        f"The chosen setting, on one file again and again. One step of a 7{wording.SPACE}B model writes {wording.decimal_bytes(step_bytes)}.",
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
    """Bytes written by *seconds*, interpolated between samples."""
    for (before, low), (after, high) in itertools.pairwise(samples):
        if before <= seconds <= after:
            return (
                low + (high - low) * (seconds - before) / (after - before)
                if after > before
                else high
            )
    return samples[-1][1]
