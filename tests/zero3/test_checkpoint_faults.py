"""With any single fault in a file of a checkpoint, `load_checkpoint` refuses the file by name, or
loads the saved values.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import Case, finish, start

SCRIPT = Path(__file__).with_name("damaging.py")
CASE = Case(name="damaged", model="odd", states="nvme", persistence=100)


@pytest.mark.slow
def test_no_single_fault_is_accepted(tmp_path: Path) -> None:
    count = 1000
    with start([CASE], tmp_path, script=SCRIPT, count=count, seed=17) as (process,):
        ended = finish(process, 550)
    assert ended.status == 0, ended.complaints
    (reported,) = ended.results
    assert reported["wrong"] == []
    assert sum(reported["ends"].values()) == count
    assert reported["ends"]["refused"] > 0.9 * count
