"""`python -m sweeps.outside`: a row for each test with the marker."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from processes import finished

ROOT = Path(__file__).parents[2]
PROGRAMS = """
import pytest

@pytest.fixture
def drive():
    raise OSError("no drive")

def marked(program):
    return pytest.mark.outside(program=program, reference="AdamW", steps=20, ranks="1, then {ranks}")

@marked("a loop, {mode}")
@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize("mode", ["after", "in backward"])
def test_loop(mode, ranks):
    assert mode == "after", "weight 3 | bias 2"

@marked("another")
@pytest.mark.parametrize("ranks", [2])
def test_drive(drive, ranks):
    pass

@marked("a third")
@pytest.mark.skip(reason="no Lightning")
@pytest.mark.parametrize("ranks", [2])
def test_skipped(ranks):
    pass

def test_unmarked():
    pass
"""
RUN = """
import json, sys, pytest
from sweeps.outside import Outcomes
outcomes = Outcomes()
status = pytest.main(sys.argv[1:], plugins=[outcomes])
print(json.dumps([int(status), *outcomes.rows.values()]))
"""


def test_rows_have_the_results_of_marked_tests(tmp_path: Path) -> None:
    (tmp_path / "test_programs.py").write_text(PROGRAMS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = outside: a program\n")
    done = finished(
        [sys.executable, "-c", RUN, "-m", "outside", "-p", "no:cacheprovider", str(tmp_path)],
        check=True,
        cwd=ROOT,
    )
    status, *rows = json.loads(done.stdout.splitlines()[-1])
    assert status == 1
    given = ["AdamW", "20", "1, then 2"]
    assert rows[0] == ["a loop, after", *given, "equal bit for bit"]
    assert rows[1][:4] == ["a loop, in backward", *given]
    assert rows[1][4].startswith("different: AssertionError: weight 3 \\| bias 2")
    assert rows[2] == ["another", *given, "different: OSError: no drive"]
    assert rows[3] == ["a third", *given, "not run: no Lightning"]
    assert len(rows) == 4
