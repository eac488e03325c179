"""Charts over time: every trial of the sweep, and writing without a pause."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING, Any

from nvme_offload.hardware.profile import Profile
from nvme_offload.planning import traffic

from .. import summary, wording
from ..palette import Palette
from .canvas import DASHED, DOTTED, Chart, few_ticks, note, panels, plot, title

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
            of_phase = [t for t in profile.trials if t.phase == phase and not t.control]
            counted = [trial for trial in of_phase if not trial.flaw]
            top = max(*(speed for _, speed in control), *(t.gb_per_s for t in counted))
            left_out = [trial for trial in of_phase if trial.flaw and trial.gb_per_s <= 1.1 * top]
            look: dict[str, Any] = {"linestyle": "", "markersize": 3.6, "color": palette.soft}
            for points, marker, alpha, edge in ((counted, "o", 0.45, 0), (left_out, "x", 0.8, 1.1)):
                places = [t.started_seconds for t in points], [t.gb_per_s for t in points]
                axes.plot(*places, marker=marker, alpha=alpha, markeredgewidth=edge, **look)
            look = {"marker": "o", "markersize": 3.6, "linewidth": 1.4}
            axes.plot(*zip(*control, strict=True), color=palette.phase(phase), **look)
            axes.set_ylim(0, 1.12 * top or 1)
            axes.margins(x=0.015)
            few_ticks(axes)
            title(axes, f"{wording.PHASE_NAMES[phase]}, GB/s", palette.phase(phase))
        axes_of[-1].set_xlabel("seconds since the sweep began")
        return figure

    rows = []
    for phase, points in runs.items():
        speeds = [speed for _, speed in points]
        others = [trial for trial in profile.trials if trial.phase == phase and not trial.control]
        flawed = [trial for trial in profile.trials if trial.phase == phase and trial.flaw]
        spread = min(speeds), statistics.median(speeds), max(speeds)
        counts = str(len(others)), str(len(flawed))
        name = wording.PHASE_NAMES[phase]
        rows.append((name, str(len(points)), *map(wording.speed, spread), *counts))
    said = "; ".join(f"{row[0]} {row[2]} to {row[4]}{wording.SPACE}GB/s" for row in rows)
    return Chart(
        "trials",
        "Every trial, and the drive's own drift",
        f"The defaults alone, run again and again, ranged over {said}: this is the drift of the drive, not an effect of settings.",
        "Line: DeepSpeed's defaults. Grey dots: other settings. Crosses: trials left out, because the drive's speed jumped or a cache answered.",
        (
            *("Load", "Runs of the defaults", "Slowest, GB/s", "Median of all, GB/s"),
            *("Fastest, GB/s", "Other trials", "Left out"),
        ),
        tuple(rows),
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
        ink, steady, end = palette.ink, run.steady_gb_per_s, run.bytes / 1e9
        axes.plot([0.72 * end, end], [steady] * 2, color=ink, linewidth=1, linestyle=DASHED)
        note(axes, f"{wording.speed(steady)} in the end", (end, steady), (0, 6), ink, ha="right")
        marks = [(run.cache_ends_bytes, "the cache ends")] if run.cache_ends_bytes else []
        if step_bytes < run.bytes:
            marks.append((int(step_bytes), "one step of 7 B"))
        for place, name in marks:
            axes.axvline(place / 1e9, color=ink, linewidth=1, linestyle=DOTTED)
            side, shift = ("right", -4) if place > run.bytes / 2 else ("left", 4)
            look = {"xycoords": ("data", "axes fraction"), "va": "top", "ha": side}
            note(axes, name, (place / 1e9, 1), (shift, -2), ink, **look)
        title(axes, "GB/s", palette.write)
        axes.set_xlabel("written so far, GB")
        return figure

    cache = "not seen"
    if run.cache_ends_bytes is not None:
        cache = wording.decimal_bytes(run.cache_ends_bytes)
    first, last = wording.speed(run.first_gb_per_s), wording.speed(run.steady_gb_per_s)
    fell = f"from {first} to {last}{wording.SPACE}GB/s"
    finding = f"After {cache} the drive fell {fell}: its fast cache is full."
    if run.cache_ends_bytes is None:
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
            ("First round, GB/s", first),
            ("Last five rounds, GB/s", last),
            ("Steady at the end", "yes" if run.steady else "no"),
            ("Cache ends after", cache),
        ),
        draw,
    )


def _written(samples: list[tuple[float, int]], seconds: float) -> float:
    """Bytes written by *seconds*, interpolated between samples."""
    for (before, low), (after, high) in itertools.pairwise(samples):
        if before < after and before <= seconds <= after:
            return low + (high - low) * (seconds - before) / (after - before)
    return samples[-1][1]
