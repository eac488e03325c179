"""The charts of a report as inline SVG, in the colours of the page that they stand in.

Each function gives "" when the profile has nothing for it to draw. matplotlib writes fixed colours, so every colour here is a stand-in for a CSS
variable and is replaced in the finished text: one drawing then follows the reader's light or dark theme. Text stays text, in the page's font.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from nvme_offload.profile import DEEPSPEED_DEFAULTS, PHASES, Best, Profile
from nvme_offload.units import format_bytes

from . import summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# CSS variable -> the colour that stands for it while matplotlib draws; none of these occurs otherwise.
_COLOURS = {name: f"#0a0b{index:02x}" for index, name in enumerate(("ink", "soft", "line", "read", "write", "mixed", "slower", "on-fill", "on-half"), 16)}
INK, SOFT, LINE, SLOWER = (_COLOURS[name] for name in ("ink", "soft", "line", "slower"))
_MARKERS = {"read": "o", "write": "s", "mixed": "D"}
_TIMES = "\N{MULTIPLICATION SIGN}"
_WIDTH = 460  # CSS pixels; small enough to stay readable when it is scaled down to a telephone

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 11,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.borderpad": 0,
    "legend.borderaxespad": 0,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.4,
}


def heat_map(profile: Profile) -> str:
    """Block size by queue depth: the best thread count of each cell, in the phase that matters most, relative to the control."""
    phases = summary.phases_tried(profile.trials)
    if not phases:
        return ""
    cells: dict[tuple[int, int], tuple[float, int]] = {}
    for setting, reached in summary.medians(profile.trials, phases[0]).items():
        place = (setting.block_size, setting.queue_depth)
        cells[place] = max(cells.get(place, (0.0, 0)), (reached.relative, setting.thread_count))
    blocks, depths = (sorted({place[axis] for place in cells}) for axis in (0, 1))
    fastest = max(cells.values())[0]
    slowest = min(cells.values())[0]

    def draw() -> Figure:
        from matplotlib.patches import FancyBboxPatch

        figure, axes = _axes(62 + 40 * len(blocks))
        for (block, depth), (relative, threads) in cells.items():
            x, y = depths.index(depth), blocks.index(block)
            # Pale below a quarter more or less, so that noise alone does not look like a result.
            extreme = max(math.log(1.25), abs(math.log(fastest if relative >= 1 else slowest)))
            strength = min(1.0, 0.07 + 0.93 * abs(math.log(relative)) / extreme)
            chosen = (block, depth) == (profile.chosen.block_size, profile.chosen.queue_depth)
            default = (block, depth) == (DEEPSPEED_DEFAULTS.block_size, DEEPSPEED_DEFAULTS.queue_depth)
            box: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.1", "mutation_aspect": 1.4}
            fill = _COLOURS["mixed"] if relative >= 1 else SLOWER
            axes.add_patch(FancyBboxPatch((x - 0.46, y - 0.45), 0.92, 0.9, facecolor=fill, alpha=strength, linewidth=0, **box))
            if chosen or default:
                edge: dict[str, Any] = {"edgecolor": INK, "linewidth": 2.2} if chosen else {"edgecolor": INK, "linewidth": 1.2, "linestyle": (0, (3, 2))}
                axes.add_patch(FancyBboxPatch((x - 0.46, y - 0.45), 0.92, 0.9, facecolor="none", **edge, **box))
            # A half-strong fill is pale on a light page and dark on a dark one, so there the page has a colour of its own for the text.
            colour = _COLOURS["on-fill" if strength > 0.88 else "on-half" if strength > 0.58 else "ink"]
            axes.text(x, y + 0.14, f"{relative:.2f}", ha="center", va="center", fontsize=12.5, color=colour, fontweight="bold" if chosen else "normal")
            axes.text(x, y - 0.25, f"{threads} thr", ha="center", va="center", fontsize=9, color=colour)
        axes.set(xlim=(-0.5, len(depths) - 0.5), ylim=(-0.5, len(blocks) - 0.5), xlabel="queue depth", ylabel="block size")
        axes.set_xticks(range(len(depths)), [str(depth) for depth in depths])
        axes.set_yticks(range(len(blocks)), [format_bytes(block) for block in blocks])
        axes.grid(False)
        axes.tick_params(length=0)
        axes.spines["bottom"].set_visible(False)
        return figure

    best = max(cells, key=lambda place: cells[place])
    label = (
        f"Heat map of {len(cells)} pairs of block size and queue depth, {phases[0]} phase. The fastest is {format_bytes(best[0])} at queue depth {best[1]}, "
        f"{fastest:.2f} times DeepSpeed's defaults; the slowest cell {slowest:.2f} times."
    )
    return _svg("heat-map", label, draw)


def by_threads(profile: Profile) -> str:
    """The best ratio to the control at each thread count, by phase."""
    curves: dict[str, dict[int, float]] = {}
    for phase in summary.phases_tried(profile.trials):
        for setting, reached in summary.medians(profile.trials, phase).items():
            curve = curves.setdefault(phase, {})
            curve[setting.thread_count] = max(curve.get(setting.thread_count, 0.0), reached.relative)
    counts = sorted({count for curve in curves.values() for count in curve})
    if len(counts) < 2:
        return ""

    def draw() -> Figure:
        figure, axes = _axes(230)
        for phase, curve in _in_order(curves):
            x = [counts.index(count) for count in sorted(curve)]
            axes.plot(x, [curve[count] for count in sorted(curve)], color=_COLOURS[phase], marker=_MARKERS[phase], label=phase)
        axes.set_xticks(range(len(counts)), [str(count) for count in counts])
        axes.margins(x=0.06)
        axes.set_xlabel("threads")
        _ratio_axis(axes)
        _legend(axes)
        return figure

    said = "; ".join(f"{phase}: " + ", ".join(f"{curve[count]:.2f} with {_threads(count)}" for count in sorted(curve)) for phase, curve in curves.items())
    return _svg("by-threads", f"Best ratio to DeepSpeed's defaults by number of threads. {said}.", draw)


def by_bytes_in_flight(profile: Profile) -> str:
    """Every setting's ratio to the control against its bytes in flight, and the best of each, by phase."""
    dots = {
        phase: sorted((setting.bytes_in_flight, reached.relative) for setting, reached in summary.medians(profile.trials, phase).items())
        for phase in summary.phases_tried(profile.trials)
    }
    amounts = sorted({amount for points in dots.values() for amount, _ in points})
    if len(amounts) < 2:
        return ""

    def draw() -> Figure:
        figure, axes = _axes(230)
        for phase, points in _in_order(dots):
            best = dict(points)  # sorted by ratio within an amount, so that the best one stays
            axes.plot(*zip(*points, strict=True), color=_COLOURS[phase], marker=_MARKERS[phase], markersize=3.2, linestyle="", alpha=0.4, markeredgewidth=0)
            axes.plot(list(best), list(best.values()), color=_COLOURS[phase], linewidth=1.6, label=phase)
        axes.axvline(profile.chosen.bytes_in_flight, color=INK, linewidth=1, linestyle=(0, (1, 2)))
        axes.set_xscale("log", base=2)
        lowest, highest = (math.floor(math.log2(amounts[0])), math.ceil(math.log2(amounts[-1])))
        ticks = [1 << power for power in range(lowest, highest + 1, max(1, math.ceil((highest - lowest) / 5)))]
        axes.set_xticks(ticks, [format_bytes(tick) for tick in ticks])
        axes.set_xlabel("in flight (block size \N{MIDDLE DOT} queue depth \N{MIDDLE DOT} threads)")
        _ratio_axis(axes)
        _legend(axes)
        return figure

    label = f"Ratio to DeepSpeed's defaults of each setting against its bytes in flight, from {format_bytes(amounts[0])} to {format_bytes(amounts[-1])}."
    return _svg("by-bytes-in-flight", label, draw)


def comparison(profile: Profile) -> str:
    """GB/s of the control, the chosen setting and the best of each phase, with the 90 % intervals."""
    groups: dict[str, list[tuple[str, float, Best | None]]] = {}
    for phase, reached in profile.performance.items():
        best = profile.best.get(phase)
        groups[phase] = [("defaults", summary.control_gb_per_s(profile, phase) or 0.0, None), ("chosen", reached.gb_per_s, reached)]
        if best is not None and best.setting != profile.chosen:
            groups[phase].append(("best", best.gb_per_s, best))
    if not groups:
        return ""

    def draw() -> Figure:
        figure, axes = _axes(26 + 76 * len(groups))
        top = 0.0
        for row, (phase, bars) in enumerate(_in_order(groups)):
            looks = {"defaults": (SOFT, 0.45), "chosen": (_COLOURS[phase], 1.0), "best": (_COLOURS[phase], 0.4)}
            for place, (name, speed, interval) in enumerate(bars):
                y = row + 0.27 * (place - 1)
                colour, alpha = looks[name]
                axes.barh(y, speed, height=0.22, color=colour, alpha=alpha, linewidth=0)
                low, high = summary.interval_gb_per_s(interval) if interval else (speed, speed)
                if high > low:
                    axes.plot([low, high], [y, y], color=INK, linewidth=1.1, marker="|", markersize=6, markeredgewidth=1.1)
                axes.annotate(
                    f"{summary.three_digits(speed)} {name}", (max(speed, high), y), (6, 0), textcoords="offset points", va="center", fontsize=9.5, color=SOFT
                )
                top = max(top, speed, high)
        axes.set_yticks(range(len(groups)), [phase for phase, _ in _in_order(groups)])
        axes.tick_params(axis="y", labelcolor=INK, labelsize=12)
        axes.set(xlim=(0, top * 1.3), ylim=(len(groups) - 0.45, -0.5), xlabel="GB/s")
        axes.grid(False)
        axes.grid(True, axis="x")
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(axis="x", length=0)
        return figure

    said = "; ".join(f"{phase}: " + ", ".join(f"{name} {summary.three_digits(speed)}" for name, speed, _ in bars) for phase, bars in _in_order(groups))
    return _svg("comparison", f"Speeds in GB/s. {said}.", draw)


def drift(profile: Profile) -> str:
    """The control setting over the time of the sweep: what the drive did by itself."""
    runs = {
        phase: sorted(
            (trial.started_seconds, trial.gb_per_s) for trial in profile.trials if trial.control and trial.phase == phase and trial.flaw != "impossible"
        )
        for phase in PHASES
    }
    runs = {phase: points for phase, points in runs.items() if len(points) > 1}
    if not runs:
        return ""

    def draw() -> Figure:
        figure, axes = _axes(210)
        for phase, points in _in_order(runs):
            axes.plot(*zip(*points, strict=True), color=_COLOURS[phase], marker=_MARKERS[phase], markersize=3.6, linewidth=1.5, label=phase)
        axes.set_ylim(bottom=0, top=1.12 * max(speed for points in runs.values() for _, speed in points))
        axes.set_xlabel("seconds since the sweep began")
        axes.set_ylabel("GB/s")
        _legend(axes)
        return figure

    said = "; ".join(" ".join([phase, *(summary.three_digits(end(speed for _, speed in points)) for end in (min, max))]) for phase, points in runs.items())
    return _svg("drift", f"DeepSpeed's default setting run again and again during the sweep, slowest and fastest in GB/s: {said}.", draw)


def over_time(profile: Profile) -> str:
    """Throughput within the trials of the deciding stage: a panel for each phase."""
    stage = summary.last_stage(profile.trials)
    lines: dict[str, list[tuple[str, list[tuple[float, float]]]]] = {}
    for trial in profile.trials:
        if trial.stage == stage and not trial.flaw and (points := summary.throughput(trial)):
            role = "chosen" if trial.setting == profile.chosen else "defaults" if trial.control else "others"
            lines.setdefault(trial.phase, []).append((role, points))
    phases = [phase for phase in PHASES if phase in lines]
    if not phases:
        return ""

    def draw() -> Figure:
        figure, panels = _panels(50 + 105 * len(phases), len(phases))
        for axes, phase in zip(panels, phases, strict=True):
            looks: dict[str, dict[str, Any]] = {
                "others": {"color": SOFT, "alpha": 0.22, "linewidth": 0.8},
                "defaults": {"color": SOFT, "alpha": 0.85, "linewidth": 1.1, "linestyle": (0, (3, 1.5))},
                "chosen": {"color": _COLOURS[phase], "linewidth": 1.7},
            }
            for role, look in looks.items():
                for _, points in (line for line in lines[phase] if line[0] == role):
                    axes.plot(*zip(*points, strict=True), **look)
            axes.set_ylim(bottom=0)
            axes.margins(x=0.01)
            axes.set_title(f"{phase}, GB/s", loc="left", fontsize=10.5, color=_COLOURS[phase], pad=4)
        panels[-1].set_xlabel("seconds since the trial began")
        return figure

    count = sum(map(len, lines.values()))
    return _svg("over-time", f"Throughput within {count} trials of the {stage} stage, for {', '.join(phases)}.", draw)


def _axes(height: int) -> tuple[Figure, Axes]:
    figure, panels = _panels(height, 1)
    return figure, panels[0]


def _panels(height: int, count: int) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure

    # Not through pyplot, which keeps figures and picks a window system.
    figure = Figure(figsize=(_WIDTH / 72, height / 72), layout="constrained")
    return figure, list(figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0])


def _in_order(by_phase: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    return ((phase, by_phase[phase]) for phase in PHASES if phase in by_phase)


def _ratio_axis(axes: Axes) -> None:
    axes.axhline(1, color=SOFT, linewidth=1, linestyle=(0, (3, 2)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}{_TIMES}")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.9), max(high, 1.1))


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.03), ncols=3, fontsize=10.5)


def _threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"


def _svg(name: str, label: str, draw: Any) -> str:
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        draw().savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return _inline(text.getvalue(), name, label)


def _inline(svg: str, name: str, label: str) -> str:
    """matplotlib's SVG document as an element of a page: themed, labelled, with ids that no other chart has, and a third of the size."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL).replace("xlink:href", "href")
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda match: f' id="{name}-{match[1]}"' if match[1] in used else "", svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    svg = re.sub(r" font-family: [^;\"]*;", "", svg)
    svg = re.sub(r' transform="rotate\(-?0 [^"]*"', "", svg)
    # The page has this rule for its charts; here it would hold for all of the page.
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<path d="[^"]*" style="fill: none"/>', "", svg)
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), tag[0]), svg)
    for variable, colour in _COLOURS.items():
        svg = svg.replace(colour, f"var(--{variable})")
    view_box = re.search(r'viewBox="[^"]*"', svg)
    opening = f'<svg {view_box[0] if view_box else ""} role="img" aria-label="{escape(label)}">'
    svg = re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)
    svg = re.sub(r"\s+", " ", re.sub(r">\s+<", "><", svg))
    return re.sub(r"<g/>|<g></g>", "", svg).strip()
