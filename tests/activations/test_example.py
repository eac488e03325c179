"""The example trains, and its activations go to the drive."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "activations.py"


def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))["main"](str(tmp_path), steps=2)
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 2
    assert losses[-1] < losses[0]
    saved, written, read = (int(found) for found in re.findall(r"(\d+) MB", printed))
    assert saved > 100
    assert min(written, read) > 50
    assert list(tmp_path.iterdir()) == []
