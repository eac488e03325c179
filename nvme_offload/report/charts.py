"""The drawing of a report: the heat map, a table with coloured cells."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from typing import NamedTuple

from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS, Profile, Setting
from nvme_offload.units import format_bytes

from . import wording

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
