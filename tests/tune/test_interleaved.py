"""What runs interleaved with the engine: fio's command and its answer, and ratios that a drift does
not move.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvme_offload.errors import UnsupportedError
from nvme_offload.hardware.profile import Setting
from nvme_offload.tune import fio, sweep
from nvme_offload.tune.interleaved import interleaved, judged
from nvme_offload.tune.progress import Progress
from nvme_offload.tune.trial import REQUEST_BYTES, Rig
from nvme_offload.tune.verdict import Result

SETTING = Setting(1 << 20, 16, 2)


def test_a_steady_drift_cancels() -> None:
    now = [1.0]

    def run(factor: float) -> float:
        now[0] *= 0.8
        return 1e9 * now[0] * factor

    ones, (others,) = interleaved(lambda: run(1.0), [lambda: run(1.5)], 3)
    found = judged("fio", "fio-3", "mixed", ones, others)
    assert (found.relative_low, found.relative, found.relative_high) == pytest.approx(
        (1.5, 1.5, 1.5)
    )
    assert (found.name, found.version, found.phase) == ("fio", "fio-3", "mixed")


def test_several_take_turns_with_the_engine() -> None:
    ran: list[str] = []

    def run(name: str, speed: float) -> float:
        ran.append(name)
        return speed

    ones, (fio_s, others) = interleaved(
        lambda: run("ours", 4.0), [lambda: run("fio", 5.0), lambda: run("other", 2.0)], 2
    )
    assert ran == ["ours", "fio", "other", "ours", "fio", "other", "ours"]
    assert (ones, fio_s, others) == ([4.0] * 3, [5.0] * 2, [2.0] * 2)


@pytest.mark.parametrize("seconds", [40, 60, 300])
def test_fio_is_run_more_than_once_for_half_a_second_at_least(
    monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    monkeypatch.setattr(fio, "version", lambda: "fio-3")
    options = sweep.Options(seconds=seconds)
    ran: list[tuple[str, float]] = []

    class Counting:
        file_bytes, direct = 1 << 30, True

        def paths(self, direction: str) -> list[str]:
            return ["/" + direction]

        def run(self, setting: Setting, phase: str, window: float) -> Result:
            ran.append((phase, window))
            return Result(10**9, 10**9, 1.0)

    speeds = iter([3e9, 4e9] * 100)

    def by_fio(paths: object, size: int, setting: Setting, window: float, direct: bool) -> float:
        ran.append(("fio", window))
        return next(speeds)

    monkeypatch.setattr(fio, "bytes_per_second", by_fio)
    found = sweep._compare_others(Counting(), SETTING, options, Progress(None))  # type: ignore[arg-type]
    of_fio = [one for one in found if one.name == "fio"]
    assert [one.phase for one in of_fio] == ["read", "write", "mixed"]
    assert all(one.relative_low < one.relative_high for one in of_fio)
    assert sum(name == "fio" for name, _ in ran) >= 6
    assert {window for _, window in ran} == {0.5}
    assert sweep._seconds_after(options) < 0.5 * seconds


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
