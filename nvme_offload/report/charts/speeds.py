"""Charts of speeds and latencies: the chosen setting compared with the defaults, the best setting and
fio.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from nvme_offload.hardware.profile import PHASES, Best, Latency, Profile
from nvme_offload.units import format_milliseconds

from .. import summary, wording
from ..palette import Palette
from .canvas import DASHED, TEXT, Chart, frameless, note, plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class _Bar(NamedTuple):
    name: str
    gb_per_s: float
    interval: tuple[float, float] | None


def comparison(profile: Profile) -> Chart | None:
    """GB/s of the control, the chosen setting and the best of each phase, with 90 % intervals; fio and
    the link if known.
    """
    groups = {
        phase: _bars(profile, phase, best)
        for phase in PHASES
        if (best := profile.performance.get(phase)) is not None
    }
    if not groups:
        return None
    link = (profile.drive.get("link_bytes_per_second") or 0) / 1e9
    fastest = max(bar.gb_per_s for bars in groups.values() for bar in bars)
    # wider intervals are cut off at the edge of the drawing
    room = max(
        fastest,
        *(
            min(bar.interval[1], 1.3 * fastest)
            for bars in groups.values()
            for bar in bars
            if bar.interval
        ),
    )
    link_in_sight = 0 < link < 1.5 * room

    def draw(palette: Palette) -> Figure:
        rows = sum(len(bars) for bars in groups.values())
        above, below = 18 if link_in_sight else 4, 40
        figure, axes = plot(
            17 * rows + 14 * len(groups) + above + below, left=84, right=12, top=above, bottom=below
        )
        y, ticks = 0.0, []
        for phase, bars in groups.items():
            ticks.append((y + (len(bars) - 1) / 2, wording.PHASE_NAMES[phase]))
            for bar in bars:
                _draw_bar(axes, y, bar, palette, palette.phase(phase), room)
                y += 1
            y += 0.8
        axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks])
        axes.tick_params(axis="y", labelcolor=palette.ink, labelsize=TEXT)
        axes.set(
            xlim=(0, max(room * 1.36 or 1, link * 1.02 if link_in_sight else 0)),
            ylim=(y - 1.2, -0.6),
            xlabel="GB/s",
        )
        frameless(axes)
        if link_in_sight:
            axes.axvline(link, color=palette.ink, linewidth=1, linestyle=DASHED)
            note(
                axes,
                f"the PCIe link, {wording.speed(link)}",
                (link, 1),
                (0, 3),
                palette.soft,
                xycoords=("data", "axes fraction"),
                ha="right",
            )
        return figure

    said = []
    rows = []
    for phase, bars in groups.items():
        speeds = {bar.name: wording.speed(bar.gb_per_s) for bar in bars}
        against = f" against {speeds['defaults']}" if "defaults" in speeds else ""
        said.append(f"{wording.PHASE_NAMES[phase]} {speeds['chosen']}{against}")
        for bar in bars:
            interval = (
                wording.DASH.join(map(wording.speed, bar.interval))
                if bar.interval
                else wording.NONE
            )
            rows.append(
                (wording.PHASE_NAMES[phase], bar.name, wording.speed(bar.gb_per_s), interval)
            )
    names = {bar.name for bars in groups.values() for bar in bars}
    fio = " Outlined: fio with the same setting, interleaved." if "fio" in names else ""
    against_what, grey = (
        (" against DeepSpeed's defaults", "Grey: DeepSpeed's defaults. ")
        if "defaults" in names
        else (", which is DeepSpeed's defaults", "")
    )
    alone = (
        " Pale: the best for that load alone, where it is another setting."
        if "best" in names
        else ""
    )
    return Chart(
        "comparison",
        "Against the defaults",
        f"GB/s of the chosen setting{against_what}: {'; '.join(said)}.",
        f"{grey}Solid: the chosen setting.{alone}{fio} Marks: the middle 90{wording.SPACE}% of the ratio.",
        ("Load", "What", "GB/s", "90 % interval"),
        tuple(rows),
        draw,
    )


def _bars(profile: Profile, phase: str, reached: Best) -> list[_Bar]:
    bars = [_Bar("chosen", reached.gb_per_s, summary.interval_gb_per_s(reached))]
    if not summary.is_defaults(profile.chosen):
        bars.insert(0, _Bar("defaults", summary.control_gb_per_s(profile, phase) or 0.0, None))
    best = profile.best.get(phase)
    if best is not None and best.setting != profile.chosen:
        bars.append(_Bar("best", best.gb_per_s, summary.interval_gb_per_s(best)))
    fio = summary.beside(profile, "fio").get(phase)
    if fio is not None:
        bars.append(_Bar("fio", profile.beside_gb_per_s(fio), None))
    return bars


def _draw_bar(axes: Axes, y: float, bar: _Bar, palette: Palette, colour: str, room: float) -> None:
    looks: dict[str, dict[str, Any]] = {
        "defaults": {"color": palette.soft, "alpha": 0.4},
        "chosen": {"color": colour},
        "best": {"color": colour, "alpha": 0.38},
        "fio": {"facecolor": "none", "edgecolor": colour, "linewidth": 1.2},
    }
    axes.barh(y, bar.gb_per_s, height=0.74, **{"linewidth": 0, **looks[bar.name]})
    low, high = bar.interval or (bar.gb_per_s, bar.gb_per_s)
    if high > low:
        axes.plot([min(low, room), min(high, room)], [y, y], color=palette.ink, linewidth=1.1)
        ends = [end for end in (low, high) if end <= room]
        axes.plot(
            ends,
            [y] * len(ends),
            color=palette.ink,
            linestyle="",
            marker="|",
            markersize=6,
            markeredgewidth=1.1,
        )
    place = (min(max(bar.gb_per_s, high), room), y)
    note(
        axes,
        f"{wording.speed(bar.gb_per_s)} {bar.name}",
        place,
        (6, 0),
        palette.ink if bar.name == "chosen" else palette.soft,
        va="center",
    )


def latencies(profile: Profile) -> Chart | None:
    """The latency of a block with full queues: the chosen setting and the control, by phase."""
    control = next((trial.setting for trial in profile.trials if trial.control), None)
    rows: list[tuple[str, str, Latency]] = []
    for phase in PHASES:
        for name, setting in (("chosen", profile.chosen), ("defaults", control)):
            if (
                setting is not None
                and (name == "chosen" or setting != profile.chosen)
                and (found := summary.latency(profile, setting).get(phase))
            ):
                rows.append((phase, name, found))
    if not rows:
        return None

    def draw(palette: Palette) -> Figure:
        figure, axes = plot(30 * len(rows) + 44, left=132, right=26, top=4, bottom=40)
        for y, (phase, name, found) in enumerate(rows):
            colour = palette.phase(phase) if name == "chosen" else palette.soft
            axes.plot([found.p50_ms, found.max_ms], [y, y], color=colour, linewidth=1, alpha=0.6)
            axes.plot(
                [found.p50_ms, found.p99_ms],
                [y, y],
                color=colour,
                linewidth=5,
                alpha=0.45,
                solid_capstyle="butt",
            )
            axes.plot([found.p50_ms], [y], marker="o", markersize=7, color=colour)
            axes.plot(
                [found.p95_ms, found.p99_ms, found.max_ms],
                [y] * 3,
                linestyle="",
                marker="|",
                markersize=10,
                markeredgewidth=1.4,
                color=colour,
            )
            note(
                axes,
                format_milliseconds(found.p50_ms),
                (found.p50_ms, y),
                (0, 6),
                palette.ink,
                ha="center",
                fontsize=9,
            )
            if found.p99_ms > 1.35 * found.p50_ms:
                note(
                    axes,
                    format_milliseconds(found.p99_ms),
                    (found.p99_ms, y),
                    (0, 6),
                    palette.soft,
                    ha="center",
                    fontsize=9,
                )
        axes.set_xscale("log")
        values = [value for _, _, found in rows for value in (found.p50_ms, found.max_ms)]
        ticks = _log_ticks(min(values), max(values))
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set(
            xlim=(min(*ticks, min(values) / 1.15), max(*ticks, max(values) * 1.1)),
            ylim=(len(rows) - 0.5, -0.7),
        )
        axes.set_xlabel("milliseconds from submission to completion")
        axes.set_yticks(
            range(len(rows)), [f"{wording.PHASE_NAMES[phase]}, {name}" for phase, name, _ in rows]
        )
        frameless(axes)
        return figure

    said = "; ".join(
        f"{wording.PHASE_NAMES[phase]} {format_milliseconds(found.p50_ms)} and {format_milliseconds(found.p99_ms)}"
        for phase, name, found in rows
        if name == "chosen"
    )
    every = sorted(profile.latencies, key=lambda found: (PHASES.index(found.phase), found.p50_ms))
    return Chart(
        "latency",
        "How long a block takes",
        f"Milliseconds of the chosen setting with full queues, median and 99th percentile: {said}."
        if said
        else f"Latencies of {len(rows)} loads of the defaults, with full queues.",
        "Dot: the median. Ticks: the 95th and 99th percentile and the longest. Deeper queues wait longer for the same speed.",
        (
            "Load",
            "Block size \N{MULTIPLICATION SIGN} depth \N{MULTIPLICATION SIGN} threads",
            "Blocks",
            "50 %, ms",
            "95 %, ms",
            "99 %, ms",
            "99.9 %, ms",
            "Longest, ms",
        ),
        tuple(
            (
                wording.PHASE_NAMES[e.phase],
                wording.setting(e.setting),
                str(e.blocks),
                *map(format_milliseconds, (e.p50_ms, e.p95_ms, e.p99_ms)),
                format_milliseconds(e.p999_ms) if e.p999_ms is not None else wording.NONE,
                format_milliseconds(e.max_ms),
            )
            for e in every
        ),
        draw,
    )


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten that span *low* to *high*, as many as fit in a chart."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 40 else (1,)
    ticks = [step * 10.0**power for power in powers for step in steps]
    return [tick for tick in ticks if low / 2.2 <= tick <= high * 1.1] or [low, high]
