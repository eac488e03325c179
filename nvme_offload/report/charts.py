"""The drawings of a report: the heat map, a table with coloured cells, and the plot of `--sustained`."""

from __future__ import annotations

import base64
import dataclasses
import io
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS, Profile, Setting
from nvme_offload.units import format_bytes

from . import wording

# readable on light and on dark paper, since an image does not know the page's colours
_WRITE, _INK = "#d0702a", "#7a828c"
_STRONGEST = 45  # per cent of colour: text stays readable on it, light and dark


class Cell(NamedTuple):
    """The best number of threads for a pair of block size and queue depth. *strength*: of its
    colour, in per cent; *kind*: CSS classes.
    """

    ratio: float
    threads: int
    strength: int
    kind: str


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """Mixed speed by block size (rows, the largest first) and queue depth; None: not measured."""

    depths: tuple[int, ...]
    rows: dict[int, list[Cell | None]]
    finding: str


@dataclasses.dataclass(frozen=True)
class Plot:
    """Write speed over the bytes written. image: an SVG document, as the address of an image."""

    image: str
    finding: str


def mixed_ratios(profile: Profile) -> dict[Setting, float]:
    """The ratio of each setting to the control under the mixed load: the sweep's estimate, or the
    median.
    """
    tried: dict[Setting, list[float]] = defaultdict(list)
    for trial in profile.trials:
        if trial.phase == "mixed" and not trial.flaw:
            tried[trial.setting].append(trial.relative)
    finals = {one.setting: one.relative for one in profile.finals["mixed"]}
    return {setting: statistics.median(ratios) for setting, ratios in tried.items()} | finals


def heat_map(profile: Profile) -> HeatMap:
    """The mixed speed of every pair that was tried, relative to the control."""
    best: dict[tuple[int, int], tuple[float, int]] = {}
    for setting, ratio in mixed_ratios(profile).items():
        pair = setting.block_size, setting.queue_depth
        best[pair] = max(best.get(pair, (0.0, 0)), (ratio, setting.thread_count))
    marks = {
        (setting.block_size, setting.queue_depth): mark
        for mark, setting in (("defaults", DEEPSPEED_DEFAULTS), ("chosen", profile.chosen))
    }
    logs = {pair: math.log(ratio) for pair, (ratio, _) in best.items()}
    # pale within a quarter of 1, so that noise does not look like a result
    most = math.log(1.25)
    most_of = {True: max(most, *logs.values()), False: max(most, *(-one for one in logs.values()))}
    cells = {
        pair: Cell(
            ratio,
            threads,
            round(_STRONGEST * abs(logs[pair]) / most_of[ratio >= 1]),
            f"{'faster' if ratio >= 1 else 'slower'} {marks.get(pair, '')}".strip(),
        )
        for pair, (ratio, threads) in best.items()
    }
    depths = tuple(sorted({depth for _, depth in cells}))
    blocks = sorted({block for block, _ in cells}, reverse=True)
    (fast, slow) = (end(cells, key=lambda pair: cells[pair].ratio) for end in (max, min))
    return HeatMap(
        depths,
        {block: [cells.get((block, depth)) for depth in depths] for block in blocks},
        f"The fastest of {len(cells)} pairs is {format_bytes(fast[0])} at queue depth {fast[1]}, {wording.ratio(cells[fast].ratio)} "
        f"DeepSpeed's defaults; the slowest, {format_bytes(slow[0])} at {slow[1]}, {wording.ratio(cells[slow].ratio)}.",
    )


def sustained(profile: Profile) -> Plot | None:
    """Writing without a pause; None if it was not measured."""
    run = profile.sustained
    if run is None:
        return None
    speeds = [
        (after / 1e9, (after - before) / (end - start) / 1e9)
        for (start, before), (end, after) in itertools.pairwise(run.samples)
        if end > start
    ]
    first, last = wording.speed(run.first_gb_per_s), wording.speed(run.steady_gb_per_s)
    said = f"Over {wording.decimal_bytes(run.bytes)} the drive went from {first} to {last} GB/s: no end of a cache was seen."
    cache_ends = run.cache_ends_bytes
    if cache_ends is not None:
        said = f"After {wording.decimal_bytes(cache_ends)} the drive fell from {first} to {last} GB/s: its fast cache is full."
    return Plot(_plotted(speeds, None if cache_ends is None else cache_ends / 1e9), said)


def _plotted(speeds: Sequence[tuple[float, float]], cache_ends: float | None) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    colours = ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color")
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "",
        **dict.fromkeys(colours, _INK),
    }
    document = io.StringIO()
    with matplotlib.rc_context(style):
        # Not through pyplot, which keeps figures and chooses a window system.
        figure = Figure(figsize=(5, 2.4), layout="constrained")
        axes = figure.subplots()
        axes.plot(*zip(*speeds, strict=True), color=_WRITE)
        if cache_ends is not None:
            axes.axvline(cache_ends, color=_INK, linestyle=":")
        axes.set(xlabel="GB written", ylabel="GB/s", xlim=(0, None), ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(document, format="svg", transparent=True, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(document.getvalue().encode()).decode()
