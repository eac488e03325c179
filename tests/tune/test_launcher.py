"""Under a launcher one process of each node sweeps, for all ranks of the node, and rank 0 reports
for all nodes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import PATIENCE
from ports import free_port
from processes import finished

from nvme_offload.errors import UsageError
from nvme_offload.hardware.profile import Profile
from nvme_offload.hardware.profile_shelf import find
from nvme_offload.tune.launcher import Place, place

pytestmark = pytest.mark.slow

SWEEP = ["-m", "nvme_offload.tune"]


def variables(text: str) -> dict[str, str]:
    """Environment variables, as a shell writes them."""
    return dict(word.split("=") for word in text.split())


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ("", None),
        ("RANK=0", None),
        (
            "RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2",
            Place(5, 1, 4, 1, 2),
        ),
        (
            "RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 LOCAL_SIZE=4 CROSS_RANK=1 CROSS_SIZE=2",
            Place(5, 1, 4, 1, 2),
        ),
        ("RANK=1 LOCAL_RANK=1 WORLD_SIZE=2", Place(1, 1, 2, 0, 1)),
    ],
)
def test_launchers_say_where_a_process_stands(environment: str, expected: Place | None) -> None:
    assert place(variables(environment)) == expected


@pytest.mark.parametrize(
    "change",
    [
        "RANK=two",
        "RANK=2",
        "LOCAL_RANK=-1",
        "LOCAL_WORLD_SIZE=0",
        "LOCAL_WORLD_SIZE=4",
        "WORLD_SIZE=",
    ],
)
def test_what_makes_no_sense_is_refused_with_what_was_said(change: str) -> None:
    with pytest.raises(UsageError, match=r"make no sense together .*RANK="):
        place(variables(f"RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 {change}"))


def test_torchrun_has_the_ranks_of_a_node_contend(disk: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *SWEEP,
        str(disk),
    ]
    command += ["--report-dir", str(tmp_path), "--seconds", "1", "--size", "256MiB"]
    result = finished(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    (report,) = tmp_path.iterdir()  # one, of one process
    assert Profile.load(report / "profile.json").workload["ranks"] == 2
    assert result.stdout.count("Report: ") == 1
    assert list(disk.iterdir()) == []


def test_rank_0_reports_for_all_nodes(mounted: Callable[[str], Path], tmp_path: Path) -> None:
    """Two nodes on one machine, as DeepSpeed's launcher starts them: each has a drive of
    its own.
    """
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    port = free_port()
    drives = [mounted("ext4"), mounted("ext4-4k")]
    started = []
    for rank, drive in enumerate(drives):
        said = f"RANK={rank} LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_SIZE=1 CROSS_RANK={rank} CROSS_SIZE=2"
        said += f" MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
        environment = {**os.environ, **variables(said)}
        # the first word is the launcher's
        command = [
            sys.executable,
            *SWEEP,
            *("--local_rank=0", str(drive), "--report-dir", str(tmp_path / str(rank))),
        ]
        command += ["--seconds", "1", "--size", "128MiB", "--json"]
        started.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
            )
        )
    try:
        (out, errors), (other_out, other_errors) = [
            process.communicate(timeout=PATIENCE) for process in started
        ]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], errors + other_errors
    assert other_out == ""
    assert not (tmp_path / "1").exists()
    entries = json.loads(out)["drives"]
    found = [Profile.from_json(json.dumps(one["profile"])) for one in entries]
    assert [profile.drive["path"] for profile in found] == list(map(str, drives))
    assert {profile.engine["host"] for profile in found} == {socket.gethostname()}
    # each node has kept its own
    assert [find(drive).chosen for drive in drives] == [profile.chosen for profile in found]
    reports = sorted((tmp_path / "0").iterdir())
    assert sorted(
        Profile.load(report / "profile.json").drive["path"] for report in reports
    ) == sorted(map(str, drives))


def test_a_node_that_cannot_be_found_is_one_line(disk: Path, tmp_path: Path) -> None:
    said = variables("RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_SIZE=1")
    environment = {**os.environ, **said}
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    command = [
        sys.executable,
        *SWEEP,
        *(str(disk), "--report-dir", str(tmp_path), "--seconds", "1", "--size", "128MiB"),
    ]
    result = finished(command, env=environment)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1].startswith("nvme-sweep: ")
    assert "sweep on each node separately" in result.stderr
