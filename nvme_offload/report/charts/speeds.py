"""The chart of speeds: the chosen setting compared with the defaults, the best setting and fio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from nvme_offload.hardware.profile import PHASES, Best, Profile

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
