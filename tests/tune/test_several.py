"""Several paths: each is swept, then all are used concurrently, and the weights are shares of their
speeds then.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import finished

from nvme_offload.errors import UsageError
from nvme_offload.hardware.drive import describe
from nvme_offload.hardware.profile import PHASES, Profile, Setting, StripePath
from nvme_offload.tune import results, several
from nvme_offload.units import format_speed
from nvme_offload.zero3.settings import Settings

SWEEP = [sys.executable, "-m", "nvme_offload.tune"]


@pytest.mark.slow
def test_two_paths_are_swept_and_used_together(
    mounted: Callable[[str], Path], tmp_path: Path
) -> None:
    paths = [str(mounted("ext4")), str(mounted("ext4-4k"))]
    config = tmp_path / "ds.json"
    config.write_text("{}")
    before = [sorted(Path(path).iterdir()) for path in paths]
    command = [
        *SWEEP,
        *paths,
        *("--report-dir", str(tmp_path / "reports"), "--seconds", "1", "--size", "128MiB"),
        *("--config", str(config)),
    ]
    result = finished(command)
    assert result.returncode == 0, result.stderr
    profiles = sorted(
        (Profile.load(report / "profile.json") for report in (tmp_path / "reports").iterdir()),
        key=lambda one: paths.index(one.drive["path"]),
    )
    assert [profile.drive["path"] for profile in profiles] == paths
    assert profiles[0].stripe == profiles[1].stripe
    stripe = profiles[0].stripe
    assert [(one.path, one.setting) for one in stripe] == [
        (profile.drive["path"], profile.chosen) for profile in profiles
    ]
    assert sum(one.weight for one in stripe) == pytest.approx(1)
    for one in stripe:
        assert one.weight == pytest.approx(
            one.together["mixed"] / sum(other.together["mixed"] for other in stripe)
        )
        assert set(one.alone) == set(one.together) == set(PHASES)
        assert all(speed > 0 for speed in (*one.alone.values(), *one.together.values()))
        read, alone = format_speed(one.together["read"]), format_speed(one.alone["read"])
        assert f"  {one.path}: read {read} ({alone})" in result.stdout
    assert [sorted(Path(path).iterdir()) for path in paths] == before


def test_the_weights_are_printed_as_zero3_reads_them() -> None:
    stripe = [
        StripePath(path, "/dev/x", "", Setting(1 << 20, 8, 1), speeds, speeds, weight)
        for path, weight in (("/data/0", 0.75), ("/data/1", 0.25))
        for speeds in [dict.fromkeys(PHASES, weight)]
    ]
    section = results.stripe_lines(stripe)[-1].strip()
    settings = Settings.of(json.loads("{" + section + "}"))
    assert (settings.paths, settings.weights) == (("/data/0", "/data/1"), (0.75, 0.25))


def test_paths_on_one_drive_are_refused(mounted: Callable[[str], Path], tmp_path: Path) -> None:
    one = describe(mounted("ext4"))
    with pytest.raises(UsageError, match="are on the same drive"):
        several.require_apart([one, describe(mounted("ext4") / "lost+found")])
    several.require_apart([one, describe(mounted("ext4-4k"))])
    partitions = [
        dataclasses.replace(
            one, layers=("partition",), mount_point=f"/{index}", physical_devices=("/dev/nvme0n1",)
        )
        for index in range(2)
    ]
    with pytest.raises(UsageError, match=r"the same drive \(/dev/nvme0n1\)"):
        several.require_apart(partitions)
