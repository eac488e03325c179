"""What runs interleaved with the engine: fio's command and its answer, and ratios that a drift does
not move.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvme_offload.errors import UnsupportedError
from nvme_offload.hardware.profile import Setting
from nvme_offload.sweep import fio
from nvme_offload.sweep.beside import by_turns, judged
from nvme_offload.sweep.trial import REQUEST_BYTES, Rig

SETTING = Setting(1 << 20, 16, 2)


def test_a_steady_drift_cancels() -> None:
    now = [1.0]

    def run(factor: float) -> float:
        now[0] *= 0.8
        return 1e9 * now[0] * factor

    found = judged("fio", "fio-3", "mixed", *by_turns(lambda: run(1.0), lambda: run(1.5), 3))
    assert (found.relative_low, found.relative, found.relative_high) == pytest.approx(
        (1.5, 1.5, 1.5)
    )
    assert (found.name, found.version, found.phase) == ("fio", "fio-3", "mixed")


def test_fio_has_as_much_under_way_as_the_engine() -> None:
    words = fio.command({"read": ["/a", "/b"]}, 1 << 30, SETTING, 0.5, True)
    assert {
        "--iodepth=16",
        "--numjobs=2",
        "--bs=1048576",
        "--direct=1",
        "--runtime=500ms",
        "--ioengine=libaio",
    } <= set(words)
    assert [word for word in words if word.startswith("--filename")] == [
        "--filename=/a",
        "--filename=/b",
    ]
    mixed = fio.command(
        {"read": ["/a"], "write": ["/b"]}, 1 << 30, Setting(1 << 20, 16, 1), 0.5, True
    )
    assert {"--iodepth=8", "--numjobs=1"} <= set(mixed)
    assert [word for word in mixed if word.startswith("--rw")] == ["--rw=read", "--rw=write"]


def test_jobs_at_once_add_up() -> None:
    idle = {"io_bytes": 0, "runtime": 0}
    jobs = [
        {"read": {"io_bytes": 3_000_000, "runtime": 1000}, "write": idle},
        {"read": idle, "write": {"io_bytes": 1_000_000, "runtime": 500}},
    ]
    assert fio.parse("fio: a note\n" + json.dumps({"jobs": jobs})) == 5e6
    with pytest.raises(UnsupportedError, match="moved nothing"):
        fio.parse(json.dumps({"jobs": [{"read": idle, "write": idle}]}))


def test_fio_on_the_files_of_a_sweep(disk: Path) -> None:
    if fio.version() is None:
        pytest.skip("fio is not installed")
    with Rig(disk, 2 * REQUEST_BYTES) as rig:
        rig.fill(SETTING, None, lambda done: None)
        for directions in (["read"], ["read", "write"]):
            paths = {direction: rig.paths(direction) for direction in directions}
            assert 1e6 < fio.bytes_per_second(paths, rig.file_bytes, SETTING, 0.2, True) < 1e12
        assert Path(rig.paths("write")[0]).stat().st_size == rig.file_bytes
        # what fio wrote went into the file that is written
        assert rig.run(SETTING, "read", 0.05).read_bytes > 0
        with pytest.raises(UnsupportedError, match="fio failed"):
            fio.bytes_per_second({"read": [str(disk / "none")]}, rig.file_bytes, SETTING, 0.2, True)
