"""The comparison of ways to keep activations runs as its users call it, and its report says what
was measured.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from processes import finished

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = shlex.split(
    "--blocks 2 --width 32 --heads 2 --sequence 256 --rounds 2 --min-bytes 1KiB --host-memory 140KB --checkpoint-host-memory 36KB"
)


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "sweeps.activations", *arguments]
    done = finished(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def cells(report: str, section: str, way: str) -> dict[str, str]:
    """The line of *way* in the table of *section*, by column."""
    lines = report.split(f"## {section}\n\n")[1].split("\n\n")[0].splitlines()
    head, rows = lines[0], [line for line in lines[2:] if line.startswith(f"| {way} |")]
    assert len(rows) == 1
    return dict(zip(head.strip("| ").split(" | "), rows[0].strip("| ").split(" | "), strict=True))


def test_every_way_and_share_is_measured_and_comes_to_the_same(tmp_path: Path) -> None:
    output = tmp_path / "report"
    shares = ("--share", "1", "--share", "0.5")
    report = run(str(tmp_path), *SMALL, *shares, "--output", str(output))
    assert (tmp_path / "report.md").read_text() + "\n" == report
    assert "The gradients of all steps are equal bit for bit." in report
    for way in (
        "nothing",
        "save_on_cpu(pin_memory=True)",
        "checkpointing",
        "save_on_nvme, 140KB of host memory",
    ):
        found = cells(report, "Time and memory", way)
        forward, backward, step = (
            float(found[name].split()[0]) for name in ("forward s", "backward s", "step s")
        )
        assert abs(forward + backward - step) < 0.5 * step + 0.02
    drive = cells(report, "Through the drive", "save_on_nvme, 140KB of host memory")
    saved, out, back = (float(drive[name]) for name in ("saved GB", "written GB", "read GB"))
    # tensors so small share values, which have gaps and whole pages
    assert saved >= max(out, back) * 0.9
    assert min(out, back) > 0.5 * saved > 0
    inputs = cells(report, "Through the drive", "save_on_nvme, 36KB of host memory, checkpointing")
    assert 0 < float(inputs["saved GB"]) < 0.2 * saved
    assert "To keep up, a drive has to take" in report
    for fact in ("date", "command", "processor", "drive", "versions"):
        assert f"\n- {fact}: " in report
    of_half = "save_on_nvme, 140KB of host memory, 50% of the blocks"
    half = float(cells(report, "Through the drive", of_half)["saved GB"])
    assert half == pytest.approx(saved / 2, rel=0.1)
    steps = json.loads(output.with_suffix(".json").read_text())["steps"]
    ran = {(step["way"], step["round"]) for step in steps}
    for way in ("none", "nvme 140KB 0.5", "nvme 140KB 1.0"):
        assert {(way, 0), (way, 1)} <= ran
    assert "\n2 rounds; " in report
