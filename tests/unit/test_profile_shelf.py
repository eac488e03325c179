"""A drive's profile is found by any path on the drive, and no other drive's ever."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import finished
from profiles import profile

from nvme_offload.errors import UnsupportedError, UsageError
from nvme_offload.files import sealed
from nvme_offload.hardware import profile_shelf
from nvme_offload.hardware.config import AioConfig
from nvme_offload.hardware.drive import describe
from nvme_offload.hardware.profile import Profile, Setting
from nvme_offload.swap.tier import Tier

SETTING = Setting(
    block_size=1 << 20,
    queue_depth=16,
    thread_count=2,
    single_submit=True,
    overlap_events=False,
    backend="posix",
)


def profile_of(
    path: Path, setting: Setting = SETTING, engine: str = "native", **drive: Any
) -> Profile:
    return profile(setting=setting, at=path, drive=drive, engine={"name": engine})


@pytest.fixture(autouse=True)
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config/nvme-offload/profiles"


def test_any_path_on_the_drive_finds_it_and_no_other(
    tmp_path: Path, mounted: Callable[[str], Path], shelf: Path
) -> None:
    deep = mounted("ext4") / "deep"
    deep.mkdir(exist_ok=True)
    kept = profile_shelf.keep(profile_of(mounted("ext4")))
    assert (kept.parent, list(shelf.iterdir())) == (shelf, [kept])
    assert (
        AioConfig.for_path(deep)
        == AioConfig.for_path(deep / "not" / "there yet")
        == AioConfig.of(SETTING)
    )
    assert AioConfig.for_path(str(deep), queue_depth=4) == AioConfig.of(
        dataclasses.replace(SETTING, queue_depth=4)
    )
    for other in (tmp_path, mounted("ext4-4k")):
        with pytest.raises(
            UnsupportedError,
            match=f"no profile of the drive of {other} .* run `nvme-sweep {other}` first",
        ):
            AioConfig.for_path(other)
    with pytest.raises(UsageError, match="queue_depth"):
        AioConfig.for_path(deep, queue_depth=0)


def test_a_later_profile_takes_the_earlier_ones_place(tmp_path: Path, shelf: Path) -> None:
    for depth in (4, 8):
        profile_shelf.keep(profile_of(tmp_path, dataclasses.replace(SETTING, queue_depth=depth)))
    assert AioConfig.for_path(tmp_path).queue_depth == 8
    assert len(list(shelf.iterdir())) == 1


def _use(path: Path, host_memory: int) -> None:
    tier = Tier([str(path)], AioConfig(backend="posix", direct="auto"), host_memory=host_memory)
    tier.require(2 << 20)
    tier.close()


def test_a_directory_on_the_root_filesystem_is_named_until_it_is_swept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if tmp_path.stat().st_dev != Path("/").stat().st_dev:
        pytest.skip("the directory of the tests is not on the root filesystem")
    swept, other, fits = tmp_path / "swept", tmp_path / "other", tmp_path / "fits"
    for path in (swept / "below", other, fits):
        path.mkdir(parents=True)
    profile_shelf.keep(profile_of(swept))
    for path in (swept, swept / "below", other, fits):
        # the values of the last tier do not need the drive
        _use(path, host_memory=2 << 20 if path == fits else 1 << 20)
    warned = [line for line in caplog.messages if "is on the root filesystem" in line]
    assert [line.partition(" ")[0] for line in warned] == [str(other)]
    assert f"run `nvme-sweep {other}`" in warned[0]


def test_another_engines_profile_is_kept_apart(tmp_path: Path, shelf: Path) -> None:
    profile_shelf.keep(
        profile_of(tmp_path, dataclasses.replace(SETTING, queue_depth=8), engine="deepspeed")
    )
    with pytest.raises(UnsupportedError, match="run `nvme-sweep"):
        profile_shelf.find(tmp_path)
    profile_shelf.keep(profile_of(tmp_path))
    assert profile_shelf.find(tmp_path).chosen == SETTING
    assert len(list(shelf.iterdir())) == 2


def test_a_file_of_another_drive_is_refused(tmp_path: Path) -> None:
    kept = profile_shelf.keep(profile_of(tmp_path))
    data = sealed.loads(kept.read_text())
    sealed.unseal(data)
    data["drive"]["identity"] = "0" * 32
    kept.write_text(sealed.dumps(data))
    with pytest.raises(UnsupportedError, match="is not a profile of the drive of"):
        AioConfig.for_path(tmp_path)
    kept.write_text("{")
    with pytest.raises(UsageError, match="not a drive profile"):
        AioConfig.for_path(tmp_path)


def test_where_there_is_no_profile_the_nearest_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnsupportedError, match=f"no profile of the drive of {tmp_path}/file "):
        AioConfig.for_path(tmp_path / "file" / "below")


def test_a_relative_xdg_directory_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profile_shelf.directory() == tmp_path / ".config/nvme-offload/profiles"


def test_without_a_home_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "")
    if os.geteuid() != 0:
        pytest.skip("becoming a user without a home needs root")
    # A user whom the machine does not know, as containers have them.
    script = "import os; from nvme_offload.files import sealed\nfrom nvme_offload.hardware import profile_shelf\n"
    script += "os.setuid(54321); os.environ.pop('HOME')\ntry: profile_shelf.directory()\n"
    script += "except Exception as error: print(type(error).__name__, error)"
    said = finished([sys.executable, "-c", script], check=True).stdout
    assert (
        said
        == "UnsupportedError this user has no home directory; set XDG_CONFIG_HOME to a directory that you can write to\n"
    )


def test_a_path_that_was_swept_on_another_drive_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    swept = tmp_path / "local_nvme"
    other, ours = "0" * 32, describe(tmp_path)
    for directory in (swept, swept / "job", tmp_path / "elsewhere"):
        directory.mkdir()
    profile_shelf.keep(
        profile_of(
            swept,
            identity=other,
            model="SOLIDIGM D7",
            device="/dev/nvme9n1",
            mount_point=str(swept),
        )
    )

    def tell(directory: Path) -> list[str]:
        caplog.clear()
        for _ in range(2):
            _use(directory, host_memory=1 << 20)
        return [
            line
            for line in caplog.messages
            if "nvme-sweep measured" in line or "root filesystem" in line
        ]

    for directory in (swept, swept / "job"):
        assert tell(directory) == [
            f"{directory} is on {ours.device}, and nvme-sweep measured it on SOLIDIGM D7 /dev/nvme9n1: mount that drive, or run `nvme-sweep {directory}` "
            "for this one, which has no tuned settings"
        ]
    assert not any("measured" in line for line in tell(tmp_path / "elsewhere"))
    profile_shelf.keep(profile_of(swept))  # the existing profile
    (swept / "job2").mkdir()
    assert tell(swept / "job2") == []


def test_what_is_mounted_below_a_swept_place_is_another_place(tmp_path: Path) -> None:
    profile_shelf.keep(profile_of(tmp_path, identity="0" * 32, mount_point="/"))
    found = profile_shelf.swept_elsewhere(describe(tmp_path))
    assert (found is None) == (describe(tmp_path).mount_point != "/")
