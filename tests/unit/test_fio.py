"""fio's command and its answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvme_offload.errors import UnsupportedError
from nvme_offload.hardware.profile import Setting
from sweeps import fio

SETTING = Setting(1 << 20, 16, 2)


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
    output = "fio: a note\n" + json.dumps({"jobs": [*jobs, jobs[0]]})
    assert [fio.parse(output, direction) for direction in ("read", "write")] == [6e6, 2e6]
    with pytest.raises(UnsupportedError, match="moved nothing"):
        fio.parse(json.dumps({"jobs": [{"read": idle, "write": idle}]}), "read")


def test_fio_on_files(tmp_path: Path) -> None:
    if fio.version() is None:
        pytest.skip("fio is not installed")
    nbytes = 32 << 20
    for name in ("read", "write"):
        (tmp_path / name).write_bytes(bytes(nbytes))
    for directions in (["read"], ["read", "write"]):
        paths = {direction: [str(tmp_path / direction)] for direction in directions}
        for speed in fio.bytes_per_second(paths, nbytes, SETTING, 0.2, False):
            assert 1e6 < speed < 1e12
    assert (tmp_path / "write").stat().st_size == nbytes
    assert not any((tmp_path / "read").read_bytes())
    with pytest.raises(UnsupportedError, match="fio failed"):
        fio.bytes_per_second({"read": [str(tmp_path / "none")]}, nbytes, SETTING, 0.2, False)
