"""What a kill at any call leaves is the old or the new, never a third, and goes on from there: the
change, made again, is the new, and leaves nothing aside.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from scenes import SCENES, run_here, script

KillPoints = Callable[[Path], tuple[dict[str, str], Path]]


# which tests/tune/test_commit.py kills
@pytest.mark.parametrize("name", [name for name in SCENES if name != "report"])
def test_a_kill_leaves_the_old_or_the_new(
    name: str, tmp_path: Path, kill_points: KillPoints
) -> None:
    scene = SCENES[name]
    place, scratch = tmp_path / "place", tmp_path / "scratch"
    for directory in (place, scratch):
        directory.mkdir()
    run_here(scene.before, place, scratch)
    environment, images = kill_points(place)
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script(scene.change), str(place), str(scratch)],
        check=True,
        env={**os.environ, **environment},
    )
    found = sorted(image for image in images.iterdir() if image.is_dir())
    seen = [scene.judge(image, scratch, place) for image in found]
    turn = seen.index("new")
    assert seen == ["old"] * turn + ["new"] * (len(seen) - turn)
    assert turn >= 4
    last = found[turn - 1]
    # an edit in place is for its user to finish
    if not any(path.name.endswith(".before") for path in last.iterdir()):
        run_here(scene.change, last, scratch)
        assert scene.judge(last, scratch, place) == "new"
        assert {path.name for path in last.rglob(".*")} == set()
        assert len(list(last.rglob("*"))) == len(list(place.rglob("*")))
