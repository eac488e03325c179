from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from processes import finished

from nvme_offload.errors import UnsupportedError
from sweeps.compare.team import SideFailed, Team

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
PREPARE: dict[str, Any] = {
    "verb": "prepare",
    "side": "x",
    "transfer": "",
    "checkpoint": "",
    "setting": {},
}


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    return finished([sys.executable, "-m", "sweeps.compare", *arguments], cwd=ROOT)


def test_two_sides_are_interleaved_and_leave_no_files(tmp_path: Path) -> None:
    place, output = tmp_path / "drive", tmp_path / "report"
    place.mkdir()
    ran = compare(
        *(
            *(str(place), "--size", "8MiB", "--rounds", "2", "--only", "ours-libaio,memmap"),
            *("--output", str(output)),
        ),
        *("--tasks", "write,read-1MiB,checkpoint-read,checkpoint-write", "--note", "In a test."),
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.rstrip() == output.with_suffix(".md").read_text().rstrip()
    found = json.loads(output.with_suffix(".json").read_text())
    runs = found["runs"]
    assert found["skipped"] == []
    assert len(runs) == 16
    assert {(run["task"], run["side"]) for run in runs} == {
        (task, side)
        for task in ("write", "read-1MiB", "checkpoint-read", "checkpoint-write")
        for side in ("ours-libaio", "memmap")
    }
    assert {run["side"] for run in runs if run["position"] == 0} == {"ours-libaio", "memmap"}
    assert all(run["seconds"] > 0 and run["nbytes"] >= 8 << 20 for run in runs)
    ours = next(side for side in found["sides"] if side["name"] == "ours-libaio")
    assert ours["setting"]["backend"] == "libaio"
    assert found["notes"] == ["In a test."]
    assert list(place.iterdir()) == []


def test_a_wrong_option_is_an_error_of_one_line(tmp_path: Path) -> None:
    for arguments, said in (
        (("--size", "many"), "'many' is not a size"),
        (("--size", "1KiB"), "at least 8 MiB"),
        (("--only", "other"), "'other' is none of ours-libaio"),
        (("--size", "900TiB", "--only", "fio"), "a comparison with --size 900 TiB needs"),
    ):
        ran = compare(str(tmp_path), *arguments)
        assert ran.returncode != 0
        assert said in ran.stderr
        assert "Traceback" not in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_memory_is_refused() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        ran = compare(place, "--size", "8MiB", "--only", "memmap")
        assert ran.returncode == 1
        assert "stay in memory" in ran.stderr
        assert list(Path(place).iterdir()) == []


def test_a_side_that_ends_or_hangs_is_reported_and_gets_a_new_process(tmp_path: Path) -> None:
    with Team(tmp_path, True, timeout_seconds=60) as team:
        assert team.ask("one", PREPARE) == {"version": ""}
        process = team._processes["one"]
        os.kill(process.pid, signal.SIGSTOP)
        team.start("one", PREPARE)
        with pytest.raises(SideFailed, match="no answer within 0 s"):
            team.answer("one", 1e-3)
        assert process.returncode == -signal.SIGKILL
        assert team.ask("one", PREPARE) == {"version": ""}
        os.kill(team._processes["one"].pid, signal.SIGKILL)
        with pytest.raises(SideFailed, match="its process ended with SIGKILL"):
            team.ask("one", PREPARE)
        with pytest.raises(SideFailed, match="'other' is no side"):
            team.ask("one", {**PREPARE, "transfer": "other"})
        # Answers that come together are both there to be read.
        for _ in range(3):
            team.start("one", PREPARE)
        assert [team.answer("one") for _ in range(3)] == [{"version": ""}] * 3


def test_a_side_that_is_not_installed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        Team(tmp_path, True, timeout_seconds=60) as team,
        pytest.raises(UnsupportedError, match="fio is not installed"),
    ):
        team.ask("one", {**PREPARE, "transfer": "fio"})


def test_peers_that_cannot_be_installed_are_reported(tmp_path: Path) -> None:
    command = ["tools/compare-peers", sys.executable, "--no-index", "--find-links", str(tmp_path)]
    ran = finished(command, cwd=ROOT, check=True)
    lines = ran.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        *("safetensors", "deepspeed", "kvikio", "tensornvme")
    ]
    said = re.compile("already installed|skipped, (it needs|pip reports: .*No matching)")
    assert all(said.match(line.partition(": ")[2]) for line in lines)
    assert ran.stderr == ""
