"""`nvme-sweep show`, `compare` and `check`: on kept profiles, on reports, and on a drive."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import finished
from profiles import CHOSEN
from profiles import swept as made_up

from nvme_offload import AioConfig
from nvme_offload.errors import UsageError
from nvme_offload.hardware.drive import describe
from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS, PHASES, Profile, Setting
from nvme_offload.hardware.profile_shelf import find, keep
from nvme_offload.tune import check, compare

SWEEP = [sys.executable, "-m", "nvme_offload.tune"]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return finished([*SWEEP, *map(str, arguments)])


@pytest.fixture(scope="module")
def swept(disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a short sweep of `disk`, whose profile is kept."""
    reports = tmp_path_factory.mktemp("reports")
    result = run(disk, "--report-dir", reports, "--seconds", "1.5", "--size", "256MiB")
    assert result.returncode == 0, result.stderr
    (report,) = reports.iterdir()
    return report


# After a sweep


def test_a_sweep_is_found_again_by_path(swept: Path, disk: Path) -> None:
    profile = Profile.load(swept / "profile.json")
    assert find(disk) == profile
    assert AioConfig.for_path(disk) == AioConfig.of(profile.chosen)


def test_show_lists_what_was_swept_and_prints_one(swept: Path, disk: Path) -> None:
    profile = Profile.load(swept / "profile.json")
    listed = run("show")
    assert listed.returncode == 0, listed.stderr
    assert f"{disk}: {profile.drive['device']}, ext4, {profile.created[:10]}: " in listed.stdout
    places = (disk, swept, swept / "profile.json", swept / "report.html")
    shown = [run("show", place).stdout for place in places]
    assert len(set(shown)) == 1
    assert f"block_size {profile.chosen.block_size} (" in shown[0]
    assert shown[0].startswith(
        f"Swept {profile.created}, kernel {profile.engine['kernel']}, nvme-sweep {disk} "
    )


@pytest.mark.slow
def test_without_a_home_a_sweep_succeeds_and_says_what_is_not_kept(
    disk: Path, tmp_path: Path
) -> None:
    """A user whom the machine does not know, as containers have them."""
    script = "import pwd, sys\ndef unknown(uid): raise KeyError(uid)\npwd.getpwuid = unknown\nfrom nvme_offload.tune import cli\nsys.exit(cli.main())"
    command = [
        *(sys.executable, "-c", script, str(disk), "--report-dir", str(tmp_path / "reports")),
        *("--seconds", "1", "--size", "128MiB"),
    ]
    environment = {
        key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CONFIG_HOME")
    }
    result = finished(command, env={**environment, "MPLCONFIGDIR": str(tmp_path)})
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith(
        "Not kept as the profile of this drive: this user has no home directory; set XDG_CONFIG_HOME"
    )
    assert len(list((tmp_path / "reports").iterdir())) == 1


# Refusals


def test_refusals_are_one_line(
    disk: Path, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ds.json").write_text('{"aio": {"queue_depth": "auto"}}')
    (tmp_path / "huge.json").write_text('{"aio": {"queue_depth": 4096, "block_size": 67108864}}')
    (tmp_path / "odd.json").write_text('{"a": 1}')
    cases: list[tuple[list[str | Path], str]] = [
        (["show", tmp_path / "none"], "none does not exist: give a profile.json"),
        (["show", "/proc"], "no profile of the drive of /proc is kept"),
        (["compare", tmp_path / "odd.json", tmp_path / "none"], "odd.json is not a drive profile"),
        (["compare", tmp_path / "odd.json"], "Missing argument 'B'"),
        (["compare", "", disk], "a path is empty: is a variable of the shell not set?"),
        (["show", ""], "a path is empty"),
        (["check", "", "--config", tmp_path / "ds.json"], "a path is empty"),
        (["check", disk, "--config", tmp_path / "none"], "none does not exist"),
        (
            ["check", disk, "--config", tmp_path / "ds.json"],
            "aio.queue_depth must be a whole number",
        ),
        (
            ["check", disk, "--config", tmp_path / "odd.json", "--seconds", "0"],
            "--seconds must be from 1",
        ),
        (["check", tmp_path / "none", "--config", tmp_path / "ds.json"], "none does not exist"),
        # a directory that is named like a command is reached by its path
        (["./show", "--size", "1MiB", "--report-dir", tmp_path], "--size must be at least"),
    ]
    (tmp_path / "show").mkdir()
    monkeypatch.chdir(tmp_path)
    keep(made_up(identity=describe(disk).identity))
    for arguments, message in cases:
        assert message in refused(*arguments)


# Comparing


def test_changes_hold_the_truth_and_say_when_they_cannot_tell() -> None:
    for phase, change in zip(PHASES, compare.changes(made_up(2.0), made_up(3.0)), strict=True):
        assert change.phase == phase
        assert change.relative_low < 1.5 < change.relative_high
        assert change.relative_low > 1.3
    said = compare.lines(made_up(2.0), made_up(2.01, identity="1" * 32), ("a", "b"))
    assert sum("no significant difference" in line for line in said) == 3
    assert said[-1] == "These are different drives."
    assert (
        sum(
            line.endswith("slower")
            for line in compare.lines(made_up(2.0), made_up(1.0), ("a", "b"))
        )
        == 3
    )
    assert compare.changes(made_up(runs=1), made_up(runs=1))[0].relative_low < 1
    poor = compare.lines(made_up(2.0, runs=1), made_up(3.0), ("a", "b"))
    assert sum(line.endswith("too little evidence") for line in poor) == 3


def test_compare_prints_both_sides(tmp_path: Path) -> None:
    for name, profile in (
        ("a.json", made_up(2.0)),
        ("b.json", made_up(3.0, model="Other Drive", setting=Setting(1 << 20, 4, 1))),
    ):
        (tmp_path / name).write_text(profile.to_json())
    result = run("compare", tmp_path / "a.json", tmp_path / "b.json")
    assert result.returncode == 0, result.stderr
    lines = {line.split("  ")[0]: line for line in result.stdout.splitlines()}
    assert lines["drive"].endswith(" Other Drive")
    assert "Made-Up Drive" in lines["drive"]
    assert lines["setting"].endswith("1 MiB x 4")
    assert "faster" in lines["read"]


def test_a_drive_that_was_never_swept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run `nvme-sweep /proc` first"):
        compare.load(Path("/proc"))


# Checking


def rounds(
    factor: float, scatter: float = 0.02, count: int = 6, seed: int = 8
) -> list[dict[tuple[Setting, str], float]]:
    """A drive on which `CHOSEN` does 2 GB/s and the config *factor* times as much, and which drifts
    from round to round.
    """
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        drift = chance.uniform(0.5, 1.5)
        speeds = {CHOSEN: 2e9, DEEPSPEED_DEFAULTS: 1.5e9, Setting(1 << 20, 2, 1): 2e9 * factor}
        found.append(
            {
                (setting, phase): drift * speed * math.exp(chance.gauss(0, scatter))
                for setting, speed in speeds.items()
                for phase in PHASES
            }
        )
    return found


@pytest.mark.parametrize(
    ("factor", "holds"), [(1.0, True), (1.3, True), (0.98, True), (0.8, False), (0.3, False)]
)
def test_settings_hold_until_a_step_takes_longer(factor: float, holds: bool) -> None:
    config = Setting(1 << 20, 2, 1)
    checked = check.judged(config, rounds(factor))
    assert checked.holds == holds
    assert checked.better == (None if holds else CHOSEN)
    assert checked.loss_low <= checked.loss <= checked.loss_high
    assert checked.loss == pytest.approx(1 / factor - 1, abs=0.05)
    said = check.lines(checked, config, made_up())
    assert said[-1].startswith("The settings hold" if holds else "The settings no longer hold")


def test_a_setting_that_was_measured_alone_is_not_compared() -> None:
    checked = check.judged(CHOSEN, [{(CHOSEN, phase): 2e9 for phase in PHASES}] * 3)
    assert checked.holds
    said = check.lines(checked, CHOSEN, made_up())[-1]
    assert (
        said
        == "The settings hold: the sweep chose DeepSpeed's defaults, and no other setting was measured."
    )


def test_noise_is_seldom_a_reason() -> None:
    found = [
        check.judged(Setting(1 << 20, 2, 1), rounds(1.0, scatter=0.2, count=4, seed=seed)).holds
        for seed in range(100)
    ]
    assert found.count(False) <= 10


def test_a_drive_that_is_too_unsteady_is_not_said_to_hold() -> None:
    """A config that is three times slower, on a drive whose noise hides even that."""
    config = Setting(1 << 20, 2, 1)
    found = [
        check.judged(config, rounds(1 / 3, scatter=0.3, count=3, seed=seed)) for seed in range(100)
    ]
    assert sum(checked.holds is True for checked in found) <= 1
    unclear = next(checked for checked in found if checked.holds is None)
    assert unclear.loss_low < 0.05 < unclear.loss_high
    assert unclear.better is None
    assert check.lines(unclear, config, made_up())[-1].startswith(
        "The drive is too unsteady for a result: a step takes "
    )


@pytest.mark.parametrize(
    ("scatter", "least", "most"), [(0.0, 12, 15), (0.2, 14, 61), (3.0, 55, 61)]
)
def test_an_unsteady_drive_is_measured_for_longer(scatter: float, least: int, most: int) -> None:
    """15 s are asked for; more are taken until there is a result, and at most four times as many."""
    chance = random.Random(8)
    now = [0.0]

    def run(setting: Setting, phase: str, window: float) -> float:
        now[0] += window
        return math.exp(chance.gauss(0, scatter)) * (1e9 if setting == CHOSEN else 2e9)

    found = check.rounds([CHOSEN, DEEPSPEED_DEFAULTS], run, 15, clock=lambda: now[0])
    assert least <= now[0] <= most
    assert (check.judged(CHOSEN, found).holds is None) == (scatter == 3.0)


def test_check_measures_and_its_status_is_for_scripts(
    swept: Path, disk: Path, tmp_path: Path
) -> None:
    keep(Profile.load(swept / "profile.json"))
    chosen = Profile.load(swept / "profile.json").chosen
    good = {
        "aio": {
            "block_size": chosen.block_size,
            "queue_depth": chosen.queue_depth,
            "intra_op_parallelism": chosen.thread_count,
        }
    }
    (tmp_path / "good.json").write_text(json.dumps(good))
    (tmp_path / "accelerate.yaml").write_text(
        "deepspeed_config:\n  deepspeed_config_file: bad.json\n"
    )
    (tmp_path / "bad.json").write_text(
        '{"aio": {"block_size": 4096, "queue_depth": 1, "deep": 1}, "a": "auto"}'
    )
    held = run("check", disk, "--config", tmp_path / "good.json", "--seconds", "1")
    assert held.returncode in (0, 3), held.stderr
    assert ("The settings no longer hold" in held.stdout) == (held.returncode == 3)
    assert "in the config, and chosen by the sweep" in held.stdout or chosen == DEEPSPEED_DEFAULTS
    alone = run("check", disk, "--seconds", "1")
    assert alone.returncode in (0, 3), alone.stderr
    assert f"{chosen}: chosen by the sweep" in alone.stdout
    assert "config" not in alone.stdout
    lost = run("check", disk, "--config", tmp_path / "accelerate.yaml", "--seconds", "1")
    assert "4 KiB x 1: in the config" in lost.stdout
    assert "bad.json: DeepSpeed does not read deep" in lost.stderr
    # other users of the disk may make the result unclear, but never positive
    assert (lost.returncode, lost.stdout.splitlines()[-1].split(":")[0]) in (
        (3, "The settings no longer hold"),
        (0, "The drive is too unsteady for a result"),
    ), lost.stdout
    assert list(disk.iterdir()) == []


def test_what_a_section_leaves_out_is_deepspeeds_default() -> None:
    assert check.setting_of({}) == DEEPSPEED_DEFAULTS
    given = {"queue_depth": 4, "thread_count": 8, "use_gds": False}
    assert check.setting_of(given) == Setting(1 << 20, 4, 1)
    with pytest.raises(UsageError, match="queue_depth"):
        check.setting_of({"queue_depth": "auto"})
