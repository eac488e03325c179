"""A profile is read back as it was written, and everything else is refused with the name of the
file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvme_offload.errors import UsageError
from nvme_offload.files import sealed
from nvme_offload.hardware.config import AioConfig
from nvme_offload.hardware.profile import (
    PHASES,
    SCHEMA_VERSION,
    Beside,
    Best,
    Health,
    Latency,
    Profile,
    Setting,
    StripePath,
    Sustained,
    Trial,
)

SETTING = Setting(
    block_size=1 << 20,
    queue_depth=16,
    thread_count=2,
    single_submit=True,
    overlap_events=False,
    backend="posix",
)
BEST = Best(
    **dataclasses.asdict(SETTING), gb_per_s=3.25, relative=1.5, relative_low=1.4, relative_high=1.6
)
TRIAL = Trial(
    phase="mixed",
    **dataclasses.asdict(SETTING),
    bytes=7 << 30,
    seconds=2.5,
    gb_per_s=3.0,
    read_gb_per_s=2.0,
    write_gb_per_s=1.0,
    stage="final",
    control=False,
    relative=1.5,
    started_seconds=12.25,
)
PROFILE = Profile(
    tool_version="0.1.0",
    created="2025-01-02T03:04:05+00:00",
    command="nvme-sweep /local_nvme",
    drive={
        "path": "/local_nvme",
        "model": "Ünïcode drive",
        "filesystem": "ext4",
        "device": "/dev/nvme0n1",
        "sector_bytes": 512,
    },
    workload={"bytes": 1 << 30},
    engine={"backend": "posix"},
    trials=(
        TRIAL,
        dataclasses.replace(TRIAL, control=True),
        dataclasses.replace(TRIAL, flaw="drifted"),
    ),
    best={
        phase: dataclasses.replace(BEST, gb_per_s=float(place))
        for place, phase in enumerate(PHASES)
    },
    chosen=SETTING,
    performance={
        phase: dataclasses.replace(BEST, relative=float(place))
        for place, phase in enumerate(PHASES)
    },
    reasons=("as fast as the best",),
    steady=True,
    warnings=("the drive slowed down", "twice"),
    latencies=(Latency("read", SETTING, 100, 1.0, 2.0, 3.0, 4.5, 4.25),),
    beside=(Beside("fio", "fio-3.33", "mixed", 3.5, 3.25, 1.08, 1.0, 1.1),),
    sustained=Sustained(
        64 << 30, 30.0, ((15.0, 32 << 30), (30.0, 64 << 30)), 4.0, 1.0, True, 32 << 30
    ),
    stripe=(
        StripePath("/local_nvme", "/dev/nvme0n1", "", SETTING, {"mixed": 3.0}, {"mixed": 2.5}, 1.0),
    ),
    health_before=Health("nvme-cli", 40.0, 0.03, 10**13, 0),
    health_after=Health("nvme-cli", 61.5, 0.03, 10**13, 2, "it is read-only", 80.0, 65.0),
    finals={"mixed": (BEST, dataclasses.replace(BEST, queue_depth=8))},
)


def test_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.to_json(), encoding="utf-8")
    again = Profile.load(path)
    assert again == PROFILE
    assert again.to_json() == PROFILE.to_json()


def test_what_was_not_measured_comes_back_as_nothing() -> None:
    bare = dataclasses.replace(
        PROFILE,
        latencies=(),
        beside=(),
        sustained=None,
        stripe=(),
        health_before=None,
        health_after=None,
    )
    assert Profile.from_json(bare.to_json()) == bare


def test_an_edited_profile_is_refused() -> None:
    text = PROFILE.to_json().replace('"queue_depth": 16', '"queue_depth": 17', 1)
    with pytest.raises(
        UsageError,
        match=r"odd\.json was damaged or edited after it was written; run nvme-sweep again",
    ):
        Profile.from_json(text, "odd.json")


def _sealed(data: Any) -> str:
    return sealed.dumps({key: value for key, value in data.items() if key != "sha256"})


def test_the_text_is_plain_json_with_the_keys_that_others_read() -> None:
    text = PROFILE.to_json()
    assert text.endswith("}\n")
    data = json.loads(text)
    assert data["schema_version"] == SCHEMA_VERSION
    assert set(data["best"]) == {"read", "write", "mixed"}
    assert data["chosen"] == {
        "block_size": 1 << 20,
        "queue_depth": 16,
        "thread_count": 2,
        "single_submit": True,
        "overlap_events": False,
        "backend": "posix",
    }
    assert data["warnings"] == ["the drive slowed down", "twice"]


def test_the_part_that_was_tuned_can_be_taken_out() -> None:
    assert TRIAL.setting == BEST.setting == SETTING
    assert len({TRIAL.setting, BEST.setting, SETTING}) == 1
    assert SETTING.bytes_in_flight == AioConfig.of(SETTING).bytes_in_flight == 32 << 20


def test_a_setting_makes_the_config_of_an_engine() -> None:
    assert AioConfig.of(SETTING, direct="auto") == AioConfig(
        block_size=1 << 20,
        queue_depth=16,
        thread_count=2,
        single_submit=True,
        overlap_events=False,
        backend="posix",
        direct="auto",
    )
    with pytest.raises(UsageError, match="queue_depth"):
        AioConfig.of(dataclasses.replace(SETTING, queue_depth=0))


def _without(*keys: str | int) -> Callable[[Any], None]:
    def edit(data: Any) -> None:
        *parents, last = keys
        for key in parents:
            data = data[key]
        del data[last]

    return edit


def _with(value: object, *keys: str | int) -> Callable[[Any], None]:
    def edit(data: Any) -> None:
        *parents, last = keys
        for key in parents:
            data = data[key]
        data[last] = value

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        _without("drive"),
        _without("trials"),
        _without("trials", 0, "seconds"),
        _without("chosen"),
        _without("chosen", "block_size"),
        _without("performance"),
        _with(1, "surprise"),
        _with(1, "trials", 0, "surprise"),
        _with({"temperature": 1}, "health_after"),
        _with([[1]], "latencies"),
        _with(3, "best"),
    ],
)
def test_an_incomplete_profile_is_refused(edit: Callable[[Any], None], tmp_path: Path) -> None:
    data = json.loads(PROFILE.to_json())
    edit(data)
    path = tmp_path / "odd.json"
    path.write_text(_sealed(data))
    with pytest.raises(UsageError, match=r"odd\.json is not a complete.*run nvme-sweep again"):
        Profile.load(path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b"null", b"7", b'"text"', b"\x7fELF\x02\xff\xfe"], ids=repr
)
def test_another_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"odd\.json is not a drive profile"):
        Profile.load(path)


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION - 1, SCHEMA_VERSION + 1, "1", True, None])
def test_another_schema_is_refused_with_what_to_do(version: object) -> None:
    data = {**json.loads(PROFILE.to_json()), "schema_version": version}
    with pytest.raises(UsageError, match="run nvme-sweep again") as caught:
        Profile.from_json(json.dumps(data), "old.json")
    assert repr(version) in str(caught.value)
    assert "old.json" in str(caught.value)


def test_a_missing_file_is_the_callers_to_see(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Profile.load(tmp_path / "none.json")
