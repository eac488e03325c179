"""The charts of a comparison: bars of every side, one chart for the tasks that have something in
common.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nvme_offload.report import wording
from nvme_offload.report.charts.canvas import SMALL, Chart, frameless, note, plot
from nvme_offload.report.palette import Palette

from ..report import Spread
from .results import Results, Row, TaskFacts, rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR, _GAP = 13.0, 7.0  # points: of a bar, and between the sides
_LEFT, _RIGHT, _TOP, _BOTTOM = 134.0, 40.0, 4.0, 40.0
_OURS = "ours"


class _Bar(NamedTuple):
    value: float
    low: float
    high: float
    more: float  # on top of the value, paler
    text: str
    direction: str


class _Side(NamedTuple):
    title: str
    ours: bool
    ceiling: bool
    bars: list[_Bar]


def speeds(results: Results, group: str, tasks: Sequence[TaskFacts]) -> Chart:
    """GB/s of every side, with all that a side reached in the rounds."""
    by_task = {task.name: rows(results, task) for task in tasks}
    sides = _sides(
        results,
        by_task,
        lambda row: _Bar(
            row.gb_per_second.median, *row.gb_per_second[::2], 0.0, _speed(row), row.task.direction
        ),
    )
    table = [
        (
            row.side.title,
            task.title,
            _speed(row),
            _between(row.gb_per_second, wording.speed),
            _advantage(row.advantage),
        )
        for task in tasks
        for row in by_task[task.name]
    ]
    return Chart(
        f"speed-{_slug(group)}",
        group,
        " ".join(
            finding for task in tasks if (finding := _finding(results, task, by_task[task.name]))
        ),
        f"{_colours(tasks)} Pale: others. Outlined, and the dashed line: fio."
        + (
            f" A thin line goes from the slowest to the fastest of {_rounds(results)}."
            if results.rounds > 1
            else ""
        ),
        ("Side", "What", "GB/s", "Range", "Ours over it"),
        tuple(table),
        _drawn(sides, "GB/s"),
    )


def costs(results: Results, group: str, tasks: Sequence[TaskFacts]) -> Chart:
    """CPU seconds a GiB of every side."""
    by_task = {task.name: rows(results, task) for task in tasks}

    def bar(row: Row) -> _Bar:
        value = row.cpu_seconds_per_gib
        return _Bar(value, value, value, 0.0, _cost(value), row.task.direction)

    table = [
        (row.side.title, task.title, _cost(row.cpu_seconds_per_gib))
        for task in tasks
        for row in by_task[task.name]
    ]
    said = []
    for task in tasks:
        ours = next((row for row in by_task[task.name] if row.side.name == results.reference), None)
        if ours is not None:
            said.append(
                f"{task.title.capitalize()}: ours with {_backend(ours)} takes {_cost(ours.cpu_seconds_per_gib)} s of CPU a GiB."
            )
    return Chart(
        f"cpu-{_slug(group)}",
        group,
        " ".join(said),
        f"{_colours(tasks)} Pale: others. Outlined: fio. What the kernel's own threads do for the page cache later is on nobody's account.",
        ("Side", "What", "CPU s a GiB"),
        tuple(table),
        _drawn(_sides(results, by_task, bar), "CPU seconds a GiB", lines=False),
    )


def memory(results: Results, group: str, tasks: Sequence[TaskFacts]) -> Chart:
    """What a side takes of memory: of its process, and of the page cache."""
    by_task = {task.name: rows(results, task) for task in tasks}

    def bar(row: Row) -> _Bar:
        own, cached = row.extra_bytes / 1e9, row.cached_bytes / 1e9
        return _Bar(own, own, own, cached, f"{own + cached:.2f}", row.task.direction)

    table = [
        (
            row.side.title,
            task.title,
            *(f"{n / 1e9:.2f}" for n in (row.extra_bytes, row.cached_bytes)),
        )
        for task in tasks
        for row in by_task[task.name]
    ]
    return Chart(
        f"memory-{_slug(group)}",
        group,
        "GB that were resident at most beyond what the process had before, and beside them what was left in the page cache.",
        f"{_colours(tasks)} Solid: the process. Pale, on top of it: the page cache. Who reads a checkpoint needs the memory of its tensors, "
        "and a map of a file counts for both.",
        ("Side", "What", "Process, GB", "Page cache, GB"),
        tuple(table),
        _drawn(_sides(results, by_task, bar), "GB", lines=False, equal=True),
    )


def _sides(
    results: Results, by_task: dict[str, list[Row]], bar: Callable[[Row], _Bar]
) -> list[_Side]:
    found = []
    for side in results.sides:
        mine = [bar(row) for there in by_task.values() for row in there if row.side == side]
        if mine:
            found.append(
                _Side(side.title, side.name.startswith(_OURS), side.name == results.ceiling, mine)
            )
    return found


def _drawn(
    sides: list[_Side], unit: str, *, lines: bool = True, equal: bool = False
) -> Callable[[Palette], Figure]:
    bars = sum(len(side.bars) for side in sides)
    ends = [max(bar.high, bar.value + bar.more) for side in sides for bar in side.bars]
    room = max(ends, default=0.0) or 1.0

    def draw(palette: Palette) -> Figure:
        height = bars * _BAR + len(sides) * _GAP
        figure, axes = plot(
            height + _TOP + _BOTTOM, left=_LEFT, right=_RIGHT, top=_TOP, bottom=_BOTTOM
        )
        y, ticks = 0.0, []
        for side in sides:
            ticks.append((y + (len(side.bars) - 1) * _BAR / 2, side.title, side.ours))
            for bar in side.bars:
                _draw(axes, y, bar, side, palette, equal)
                y += _BAR
            y += _GAP
        axes.set(
            xlim=(0, room * 1.04), ylim=(y - _GAP / 2 - _BAR / 2, -_BAR / 2 - _GAP / 2), xlabel=unit
        )
        axes.set_yticks([place for place, _, _ in ticks], [title for _, title, _ in ticks])
        for label, (_, _, ours) in zip(axes.get_yticklabels(), ticks, strict=True):
            label.set(
                color=palette.ink if ours else palette.soft,
                fontweight="bold" if ours else "normal",
                fontsize=SMALL,
            )
        frameless(axes)
        for side in sides:
            for bar in side.bars if lines and side.ceiling else []:
                axes.axvline(
                    bar.value,
                    color=palette.phase(bar.direction),
                    linewidth=0.9,
                    linestyle=(0, (3, 2)),
                    zorder=0.5,
                )
        return figure

    return draw


def _draw(axes: Axes, y: float, bar: _Bar, side: _Side, palette: Palette, equal: bool) -> None:
    colour = palette.phase(bar.direction)
    looks: dict[str, Any] = (
        {"color": colour} if side.ours or equal else {"color": colour, "alpha": 0.42}
    )
    if side.ceiling and not equal:
        looks = {"facecolor": "none", "edgecolor": colour, "linewidth": 1.2}
    axes.barh(y, bar.value, height=_BAR - 3, **{"linewidth": 0, **looks})
    if bar.more:
        axes.barh(
            y, bar.more, left=bar.value, height=_BAR - 3, linewidth=0, color=colour, alpha=0.3
        )
    if bar.high > bar.low:
        axes.plot(
            [bar.low, bar.high], [y, y], color=palette.ink, linewidth=1.1, solid_capstyle="butt"
        )
    end = max(bar.high, bar.value + bar.more)
    ground = {"facecolor": palette.panel, "edgecolor": "none", "pad": 0.4}  # over the dashed line
    note(
        axes,
        bar.text,
        (end, y),
        (5, 0),
        palette.ink if side.ours else palette.soft,
        va="center_baseline",
        fontsize=9.0,
        annotation_clip=False,
        bbox=ground,
    )


def _finding(results: Results, task: TaskFacts, found: Sequence[Row]) -> str:
    """Ours against the fastest of the others, and against the ceiling."""
    ours = next((row for row in found if row.side.name == results.reference), None)
    if ours is None:
        return ""
    said = (
        f"{task.title.capitalize()}: ours with {_backend(ours)} {_speed(ours)}{wording.SPACE}GB/s"
    )
    others = [
        row
        for row in found
        if not row.side.name.startswith(_OURS) and row.side.name != results.ceiling
    ]
    if others:
        best = max(others, key=lambda row: row.gb_per_second.median)
        said += f", {_advantage(best.advantage)} of {best.side.title}, the fastest of the others"
    ceiling = next((row for row in found if row.side.name == results.ceiling), None)
    if ceiling is not None:
        said += f", {_advantage(ceiling.advantage)} of fio"
    return said + "."


def _backend(row: Row) -> str:
    return row.side.title.partition(", ")[2] or row.side.title


def _colours(tasks: Sequence[TaskFacts]) -> str:
    names = {"read": "Blue: read.", "write": "Orange: write.", "mixed": "Green: both."}
    return " ".join(
        names[direction] for direction in dict.fromkeys(task.direction for task in tasks)
    )


def _rounds(results: Results) -> str:
    return wording.plural(results.rounds, "round")


def _speed(row: Row) -> str:
    return wording.speed(row.gb_per_second.median)


def _cost(value: float) -> str:
    return f"{value:.3f}" if value < 0.9995 else f"{value:.2f}"


def _advantage(found: Spread | None) -> str:
    if found is None:
        return wording.NONE
    between = _between(found, lambda value: f"{value:.2f}")
    return wording.ratio(found.median) + (f" ({between})" if wording.DASH in between else "")


def _between(found: Spread, shown: Callable[[float], str]) -> str:
    low, high = shown(found.low), shown(found.high)
    return low if low == high else f"{low}{wording.DASH}{high}"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
