"""The garbage collector may find an engine in the middle of any line, of another engine's too."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from covering import covering
from launch import Case, run_script

SCRIPT = Path(__file__).with_name("collecting.py")
CASE = Case(
    model="blocks", parameters="nvme", sub_group_size=5000, section={"host_memory": 500_000}
)
CASES = {
    "plain": CASE,
    "overlap": CASE.but(section={**CASE.section, "overlap_step": True}),
    "compact": CASE.but(section={"host_memory": 1_000_000, "state_format": "compact"}),
}


@covering(name=list(CASES), destroyed=[False, True])
def test_an_engine_found_by_the_collector_stops_and_leaves_nothing(name, destroyed, tmp_path):
    case = dataclasses.asdict(CASES[name])
    (ended,) = run_script(SCRIPT, tmp_path, case=case, destroyed=destroyed)
    (result,) = ended.results
    assert result["among"] == result["alone"]
    assert result["amid"] >= 3
