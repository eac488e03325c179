"""The example trains, and its activations go to the drive."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from processes import finished

EXAMPLE = Path(__file__).parents[2] / "examples" / "activations.py"


def test_the_example(tmp_path: Path) -> None:
    done = finished([sys.executable, "-W", "error", str(EXAMPLE), str(tmp_path)])
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    saved, written, read = (int(found) for found in re.findall(r"(\d+) MB", done.stdout))
    assert saved > 200
    assert min(written, read) > 100
    assert list(tmp_path.iterdir()) == []
