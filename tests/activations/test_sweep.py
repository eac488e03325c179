"""The comparison of ways to keep activations runs as its users call it, and its report says what was measured."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = shlex.split("--blocks 2 --width 32 --heads 2 --sequence 256 --rounds 2 --min-bytes 1KiB --host-memory 140KB --checkpoint-host-memory 36KB")


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "sweeps.activations", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def cells(report: str, section: str, way: str) -> dict[str, str]:
    """The line of *way* in the table of *section*, by column."""
    lines = report.split(f"## {section}\n\n")[1].split("\n\n")[0].splitlines()
    head, rows = lines[0], [line for line in lines[2:] if line.startswith(f"| {way} |")]
    assert len(rows) == 1
    return dict(zip(head.strip("| ").split(" | "), rows[0].strip("| ").split(" | "), strict=True))


def test_every_way_is_measured_and_comes_to_the_same(tmp_path: Path) -> None:
    written = tmp_path / "report.md"
    report = run(str(tmp_path), *SMALL, "--output", str(written))
    assert written.read_text() == report
    assert "The gradients of all steps are equal bit for bit." in report
    for way in ("nothing", "save_on_cpu(pin_memory=True)", "checkpointing", "save_on_nvme, 140KB of host memory"):
        found = cells(report, "Time and memory", way)
        assert abs(float(found["forward s"]) + float(found["backward s"]) - float(found["step s"])) < 0.5 * float(found["step s"]) + 0.002
    drive = cells(report, "Through the drive", "save_on_nvme, 140KB of host memory")
    saved, out, back = (float(drive[name]) for name in ("saved GB", "written GB", "read GB"))
    assert saved >= max(out, back) * 0.99
    assert min(out, back) > 0.5 * saved > 0
    inputs = cells(report, "Through the drive", "save_on_nvme, 36KB of host memory, checkpointing")
    assert 0 < float(inputs["saved GB"]) < 0.2 * saved
    assert "to cost nothing, it would have to take" in report
    for fact in ("date", "command", "processor", "drive", "software"):
        assert f"\n- {fact}: " in report


def test_a_share_of_the_blocks(tmp_path: Path) -> None:
    saved = []
    for share in ("1", "0.5"):
        report = run(str(tmp_path), *SMALL, "--ways", "none", "nvme", "--share", share)
        saved.append(float(cells(report, "Through the drive", "save_on_nvme, 140KB of host memory")["saved GB"]))
    assert saved[1] == pytest.approx(saved[0] / 2, rel=0.1)
    assert "the first 1 go the way of the table" in report
