"""Steps that are cut short, by a drive, by Ctrl-C, at any line or by the user's code: a load on the
same engine goes on bit for bit.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from launch import Case, run_script

SCRIPT = Path(__file__).with_name("recovering.py")
SMALLEST = {"host_memory": "smallest"}
OVERLAP = {"overlap_step": True}
LAST = {**SMALLEST, "missing_gradients": "last"}


def run(directory: Path, case: Case, cut: str, **request: Any) -> dict[str, Any]:
    case = dataclasses.asdict(case)
    ((result,),) = (
        rank.results for rank in run_script(SCRIPT, directory, case=case, cut=cut, **request)
    )
    return result


CASES = {
    "states": Case(model="odd", sub_group_size=700, accumulation=2, clipping=0.5, section=SMALLEST),
    "both": Case(
        model="odd", sub_group_size=700, parameters="nvme", optimizer="momentum", section=SMALLEST
    ),
    "split": Case(
        model="odd",
        sub_group_size=700,
        parameters="nvme",
        section={"state_format": "split", "host_memory": "smallest"},
    ),
    "parameters": Case(model="odd", parameters="nvme", states="cpu", section=SMALLEST),
    "last": Case(
        model="dropped",
        parameters="nvme",
        sub_group_size=9000,
        accumulation=2,
        clipping=0.05,
        section=LAST,
    ),
}


@pytest.mark.parametrize(
    ("name", "most"),
    [("last", 8)]
    + [pytest.param(name, 20, marks=pytest.mark.slow) for name in CASES if name != "last"],
)
def test_an_exception_of_the_users_code_in_a_pass_is_undone_by_a_load(name, most, tmp_path):
    result = run(tmp_path, CASES[name], "passes", most=most)
    assert result["wrong"] == []
    assert result["seen"]["forward"] > 1, result
    assert result["seen"]["backward"] > 1, result


# With parameters on the drive, without, and with updates after the step: in the step that begins
# with the updates of the step before, and in the passes that wait for them.
LINES = {
    "parameters and states": (CASES["both"].but(optimizer="adamw"), 0),
    **{
        # A repeated step repeats all its micro-batches.
        name: (CASES[name].but(accumulation=1), 0)
        for name in ("states", "split", "parameters", "last")
    },
    "step_in_backward": (
        Case(model="odd", sub_group_size=700, section={**SMALLEST, "step_in_backward": True}),
        0,
    ),
    "overlap_step": (Case(model="odd", sub_group_size=700, section={**SMALLEST, **OVERLAP}), 1),
    "overlap_step, parameters": (
        Case(model="odd", sub_group_size=700, parameters="nvme", section={**SMALLEST, **OVERLAP}),
        1,
    ),
}


def test_an_exception_at_some_lines_of_a_step_is_reported_and_undone_by_a_load(tmp_path):
    case, warm = LINES["overlap_step, parameters"]
    result = run(tmp_path, case, "lines", most=12, warm=warm)
    assert result["wrong"] == []
    assert result["places"] > 500, result
    assert result["seen"]["exact"] > 0, result
    assert result["seen"]["refused and restored"] > 3, result


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_an_exception_at_any_line_of_a_step_is_reported_and_undone_by_a_load(name, tmp_path):
    case, warm = LINES[name]
    # of the lines that cases share, each case tries others
    first = 11 * [*LINES].index(name)
    result = run(tmp_path, case, "lines", most=30, first=first, warm=warm)
    assert result["wrong"] == []
    assert result["seen"]["exact"] > 0, result
    assert result["seen"]["refused and restored"] > 7, result


STREAMED = Case(model="blocks", parameters="nvme", sub_group_size=9000, section=SMALLEST)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What training comes to that nothing disturbed."""
    end: dict[str, Any] = run(tmp_path_factory.mktemp("drive"), STREAMED, "none")["end"]
    return end


@pytest.mark.slow
def test_writes_that_fail_in_a_step_are_undone_by_a_load(tmp_path, whole):
    result = run(tmp_path, STREAMED, "write")
    assert "File too large" in result["raised"]
    assert result["end"] == whole


@pytest.mark.slow
def test_ctrl_c_in_a_step_is_undone_by_a_load(tmp_path, whole):
    result = run(tmp_path, STREAMED, "interrupt")
    assert result["raised"]
    assert result["refused"] == [True, True]
    assert result["end"] == whole


@pytest.mark.slow
def test_a_fragment_function_that_raises_leaves_nothing_in_use(tmp_path, whole):
    result = run(tmp_path, STREAMED, "fragment")
    assert result["raised"] > 50
    assert result["end"] == whole
