from __future__ import annotations

import dataclasses

import pytest

from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS
from nvme_offload.report import charts

TIMES = "\N{MULTIPLICATION SIGN}"


def test_the_heat_map_has_a_number_for_each_pair_measured(made_up):
    profile = made_up.profile()
    pairs = {(trial.block_size, trial.queue_depth) for trial in profile.trials}
    found = charts.heat_map(profile)
    cells = {
        (block, depth): cell
        for block, row in found.rows.items()
        for depth, cell in zip(found.depths, row, strict=True)
        if cell is not None
    }
    assert (
        cells.keys()
        == {
            (trial.block_size, trial.queue_depth)
            for trial in profile.trials
            if trial.phase == "mixed"
        }
        <= pairs
    )
    chosen = cells[made_up.chosen.block_size, made_up.chosen.queue_depth]
    assert chosen.kind == "faster chosen"
    assert chosen.ratio == pytest.approx(made_up.best(made_up.chosen, "mixed").relative)
    assert chosen.threads == made_up.chosen.thread_count
    defaults = cells[DEEPSPEED_DEFAULTS.block_size, DEEPSPEED_DEFAULTS.queue_depth]
    assert defaults.kind == "faster defaults"
    screened = cells[128 << 10, 1]
    tried = [
        trial
        for trial in profile.trials
        if (trial.block_size, trial.queue_depth, trial.phase) == (128 << 10, 1, "mixed")
    ]
    assert screened.ratio == max(trial.relative for trial in tried)
    assert screened.kind == "slower"
    fastest = max(cell.ratio for cell in cells.values())
    assert f"{fastest:.2f}{TIMES} DeepSpeed's defaults" in found.finding
    assert max(cell.strength for cell in cells.values()) == 45
    assert f"{chosen.ratio:.2f} {chosen.threads} threads" in made_up.page_of("one path").words


def test_flawed_trials_count_nowhere(made_up):
    honest = made_up.profile()
    changes = {"gb_per_s": 900.0, "relative": 300.0, "control": False, "thread_count": 64}
    wild = dataclasses.replace(honest.trials[-1], flaw="impossible", **changes)
    profile = made_up.profile(trials=(*honest.trials, wild))
    assert charts.heat_map(profile) == charts.heat_map(honest)
