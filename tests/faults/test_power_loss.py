"""The contents of a drive after a loss of power at any moment: the old or the new, never a mixture;
and the new once the change has returned.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from recorded_drive import FILESYSTEMS, Drive, recorded, seen_after_loss
from scenes import SCENES, run_here


@pytest.fixture(params=FILESYSTEMS)
def drive(mount_namespace: None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Drive]:
    with recorded(tmp_path / "drive", request.param) as made:
        yield made


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name == "report" else name for name in SCENES],
)
def test_the_old_or_the_new_is_found(name: str, drive: Drive, tmp_path: Path) -> None:
    scene = SCENES[name]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    run_here(scene.before, drive.place, scratch)
    os.sync()
    start = drive.now()
    run_here(scene.change, drive.place, scratch)
    end = drive.now()
    least, others = seen_after_loss(
        drive, start, end, lambda found: scene.judge(found, scratch, drive.place)
    )
    old, turn = ("none" if name == "report" else "old"), least.index("new")
    assert least == [old] * turn + ["new"] * (len(least) - turn)
    assert set(others) <= {old, "new"}
    assert turn >= 1
    assert len(others) >= 3
    assert scene.judge(drive.place, scratch, drive.place) == "new"


def test_the_laboratory_sees_what_was_not_synced(drive: Drive) -> None:
    path = drive.place / "file"
    path.write_text("old")
    os.sync()
    start = drive.now()
    aside = drive.place / "aside"
    aside.write_text("new")
    aside.rename(path)
    end = drive.now()
    least, _ = seen_after_loss(drive, start, end, lambda found: (found / "file").read_text())
    assert least[-1] != "new"
