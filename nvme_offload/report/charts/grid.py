"""The chart of speed over block size and queue depth."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS, Profile
from nvme_offload.units import format_bytes

from .. import summary, wording
from ..palette import Palette
from .canvas import DASHED, TEXT, WIDTH, Chart, plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOADS = {"read": "reading", "write": "writing", "mixed": "reading and writing"}
_SLOWEST = 1e-3  # the lowest ratio with a separate colour
_LEFT, _RIGHT = 62, 12


def heat_map(profile: Profile) -> Chart | None:
    """Block size by queue depth: the best thread count of each cell, in the most important phase,
    relative to the control.
    """
    phases = summary.phases_tried(profile.trials)
    if not phases:
        return None
    cells: dict[tuple[int, int], tuple[float, int]] = {}
    for setting, reached in summary.reached(profile, phases[0]).items():
        place = (setting.block_size, setting.queue_depth)
        cells[place] = max(cells.get(place, (0.0, 0)), (reached.relative, setting.thread_count))
    # of the finalists, if there are any: a short trial is little evidence
    finals = summary.last_stage(profile.trials) == "final"
    trials = [trial for trial in summary.decisive(profile) if trial.phase == phases[0]]
    decided = {(trial.block_size, trial.queue_depth) for trial in trials}
    rough = len(set(cells) - decided) if finals else 0
    blocks, depths = (sorted({place[axis] for place in cells}) for axis in (0, 1))
    best, worst = (end(cells, key=lambda place: cells[place]) for end in (max, min))
    wide = (WIDTH - _LEFT - _RIGHT) / len(depths)
    edges: dict[tuple[int, int], dict[str, Any]] = {
        (DEEPSPEED_DEFAULTS.block_size, DEEPSPEED_DEFAULTS.queue_depth): {
            "linewidth": 1.2,
            "linestyle": DASHED,
        },
        (profile.chosen.block_size, profile.chosen.queue_depth): {"linewidth": 2.2},
    }

    def draw(palette: Palette) -> Figure:
        from matplotlib.patches import FancyBboxPatch

        figure, axes = plot(36 * len(blocks) + 52, left=_LEFT, right=_RIGHT, top=8)
        box: dict[str, Any] = {
            "width": 1 - 3 / wide,
            "height": 0.91,
            "mutation_aspect": wide / 36,
            "boxstyle": "round,pad=0,rounding_size=0.09",
        }
        centred: dict[str, Any] = {"ha": "center", "va": "center"}
        for place, (relative, threads) in cells.items():
            y, x = blocks.index(place[0]), depths.index(place[1])
            # pale within a quarter of 1, so that noise does not look like a result
            most = abs(math.log(max(cells[best if relative >= 1 else worst][0], _SLOWEST)))
            distance = abs(math.log(max(relative, _SLOWEST)))
            strength = min(1.0, 0.07 + 0.93 * distance / max(math.log(1.25), most))
            fill = palette.mixed if relative >= 1 else palette.slower
            look: dict[str, Any] = {"facecolor": fill, "alpha": strength, "linewidth": 0}
            corner = x - 0.5 + 1.5 / wide, y - 0.455
            axes.add_patch(FancyBboxPatch(corner, **look, **box))
            if place in edges:
                look = {"facecolor": "none", "edgecolor": palette.ink, **edges[place]}
                axes.add_patch(FancyBboxPatch(corner, **look, **box))
            # A half-strong fill is pale on a light page and dark on a dark one, so the palette has a
            # separate text colour for it.
            half = palette.on_half if strength > 0.58 else palette.ink
            centred["color"] = palette.on_fill if strength > 0.88 else half
            weight = "bold" if edges.get(place, {}).get("linewidth") == 2.2 else "normal"
            size = min(TEXT, 0.32 * wide)
            axes.text(x, y + 0.15, f"{relative:.2f}", fontsize=size, fontweight=weight, **centred)
            axes.text(x, y - 0.24, f"{threads} thr", fontsize=min(9.0, 0.24 * wide), **centred)
        limits = (-0.5, len(depths) - 0.5), (-0.5, len(blocks) - 0.5)
        axes.set(xlim=limits[0], ylim=limits[1], xlabel="queue depth")
        axes.set_xticks(range(len(depths)), [str(depth) for depth in depths])
        axes.set_yticks(range(len(blocks)), [format_bytes(block) for block in blocks])
        axes.grid(False)
        axes.tick_params(length=0)
        axes.spines["bottom"].set_visible(False)
        return figure

    finding = (
        f"The fastest of {len(cells)} pairs is {format_bytes(best[0])} at queue depth {best[1]}, {wording.ratio(cells[best][0])} DeepSpeed's defaults; "
        f"the slowest, {format_bytes(worst[0])} at {worst[1]}, {wording.ratio(cells[worst][0])}."
    )
    if finals and best not in decided and decided:
        first = max(decided, key=lambda place: cells[place])
        finding += (
            f" It had short trials only, and was not in the last stage, where {format_bytes(first[0])} at {first[1]} "
            f"came first with {wording.ratio(cells[first][0])}."
        )
    shorter = f" {rough} of the pairs had short trials only, which are little evidence."
    rows = (
        (wording.size(block), str(depth), str(threads), wording.ratio(relative))
        for (block, depth), (relative, threads) in sorted(cells.items())
    )
    return Chart(
        "heat-map",
        f"Block size and queue depth, {_LOADS[phases[0]]}",
        finding,
        "Each cell: the ratio to the defaults with its best number of threads. Blank: not measured. "
        f"Outlined: the chosen pair; dashed: the defaults' pair.{shorter if rough else ''}",
        ("Block size", "Queue depth", "Best threads", "Over defaults"),
        tuple(rows),
        draw,
    )
