"""The command as a user runs it, in a separate process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import PATIENCE
from processes import finished
from profiles import swept as made_up

from nvme_offload.ds_config.edit import read_aio
from nvme_offload.errors import UsageError
from nvme_offload.hardware import profile_shelf
from nvme_offload.hardware.config import BACKENDS
from nvme_offload.hardware.drive import describe
from nvme_offload.hardware.profile import PHASES, Profile
from nvme_offload.hardware.profile_grade import grade
from nvme_offload.tune.preflight import file_bytes
from nvme_offload.units import format_speed

PLAIN_CONFIG = '{\n    "train_batch_size": "auto", // by the launcher\n    "zero_optimization": {"stage": 3, "sub_group_size": 1e9}\n}\n'
SWEEP = [sys.executable, "-m", "nvme_offload.tune"]
Refused = Callable[..., str]
Swept = tuple[Path, Path, subprocess.CompletedProcess[str]]


def _undisturbed() -> None:
    """A shell's background jobs ignore Ctrl-C, and their child processes inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(
    *arguments: str | Path, command: list[str] = SWEEP, **others: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **others}
    return finished([*command, *map(str, arguments)], env=environment)


@contextlib.contextmanager
def started(*arguments: str | Path, command: list[str] = SWEEP) -> Iterator[subprocess.Popen[str]]:
    words = [*command, *map(str, arguments)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_undisturbed
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], topic: str) -> None:
    """Read the process's progress up to the first line on *topic*."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith(topic):
            return
    raise AssertionError(f"it ended without a line on {topic}: {seen}")


@pytest.fixture(scope="module")
def swept(disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """A short sweep with two configs: the directories of its reports and of the configs, and its
    output.
    """
    place = tmp_path_factory.mktemp("swept")
    (place / "ds.json").write_text(PLAIN_CONFIG)
    (place / "old.json").write_text('{"aio": {"block_size": 4096, "thread_count": 3}}')
    result = run(
        *(disk, "--config", place / "ds.json", "--config", place / "old.json"),
        *("--report-dir", place / "reports", "--seconds", "2", "--json", place / "outcome.json"),
    )
    return place / "reports", place, result


def test_a_sweep_succeeds_and_leaves_nothing_in_the_directory(swept: Swept, disk: Path) -> None:
    _, _, result = swept
    assert result.returncode == 0, result.stderr
    assert list(disk.iterdir()) == []


def test_its_profile_is_whole(swept: Swept, disk: Path) -> None:
    reports, _, _ = swept
    (report,) = reports.iterdir()
    assert re.fullmatch(r"[a-z0-9-]+-\d{4}-\d\d-\d\d", report.name)
    assert {path.name for path in report.iterdir()} == {
        "profile.json",
        "report.html",
        "ds_config.json",
    }
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(report.stat().st_mode) == 0o777 & ~umask
    profile = Profile.load(report / "profile.json")
    assert profile.drive["path"] == str(disk)
    assert all(
        isinstance(profile.drive[key], str) for key in ("path", "model", "filesystem", "device")
    )
    assert profile.command.startswith("nvme-sweep ")
    assert profile.engine["direct"] is True
    assert (
        set(profile.best)
        == set(profile.performance)
        == {trial.phase for trial in profile.trials}
        == set(PHASES)
    )
    for trial in profile.trials:
        assert trial.gb_per_s == pytest.approx(trial.bytes / trial.seconds / 1e9)
        assert trial.gb_per_s == pytest.approx(trial.read_gb_per_s + trial.write_gb_per_s)
        assert (trial.read_gb_per_s > 0, trial.write_gb_per_s > 0) == (
            trial.phase != "write",
            trial.phase != "read",
        )
    assert (
        json.loads((report / "ds_config.json").read_text())["aio"]["block_size"]
        == profile.chosen.block_size
    )


def test_it_sets_the_configs_and_says_what_changed(
    swept: Swept,
) -> None:
    reports, place, result = swept
    (report,) = reports.iterdir()
    chosen = Profile.load(report / "profile.json").chosen
    for name in ("ds.json", "old.json"):
        aio = read_aio(place / name)
        assert (aio["block_size"], aio["queue_depth"], aio["intra_op_parallelism"]) == (
            chosen.block_size,
            chosen.queue_depth,
            chosen.thread_count,
        )
    assert (place / "ds.json").read_text().startswith(PLAIN_CONFIG.removesuffix("\n}\n"))
    lines = result.stdout.splitlines()
    assert f"{place / 'ds.json'}: set block_size {chosen.block_size}, " in "\n".join(lines)
    assert f"{place / 'old.json'}: set block_size {chosen.block_size} (was 4096), " in "\n".join(
        lines
    )
    assert "DeepSpeed does not read thread_count" in lines[-1]


def test_it_prints_the_choice_with_its_gain(
    swept: Swept,
) -> None:
    reports, _, result = swept
    (report,) = reports.iterdir()
    profile = Profile.load(report / "profile.json")
    assert f"block_size {profile.chosen.block_size} (" in result.stdout
    assert (
        f"queue_depth {profile.chosen.queue_depth}, thread_count {profile.chosen.thread_count}"
        in result.stdout
    )
    for phase in PHASES:
        assert re.search(
            rf"^  {phase} +{re.escape(format_speed(profile.performance[phase].gb_per_s))} +[+-]\d+ %",
            result.stdout,
            re.MULTILINE,
        )
    for sentence in (*profile.reasons, *profile.warnings):
        assert sentence in result.stdout
    assert f"Report: {report / 'report.html'}" in result.stdout


def test_piped_progress_is_plain_lines_and_few(
    swept: Swept,
) -> None:
    _, _, result = swept
    lines = result.stderr.splitlines()
    assert lines[0].startswith("filling: ")
    assert any(line.startswith("screen: ") and line.endswith(" s left") for line in lines)
    assert len(lines) <= 8
    assert all(line.isprintable() for line in lines)


def test_a_second_report_does_not_replace_the_first_nor_need_torch(
    swept: Swept, disk: Path
) -> None:
    reports, _, _ = swept
    (first,) = reports.iterdir()
    before = (first / "profile.json").read_bytes()
    script = "import sys\nsys.modules['torch'] = None\nfrom nvme_offload.tune import cli\nsys.exit(cli.main())"
    result = run(
        *("--json", disk, "--report-dir", reports, "--seconds", "1"),  # it does not take the path
        command=[sys.executable, "-c", script],
    )
    assert result.returncode == 0, result.stderr
    second = first.with_name(f"{first.name}-2")
    assert (first / "profile.json").read_bytes() == before
    (drive,) = json.loads(result.stdout)["drives"]
    printed = Profile.from_json(json.dumps(drive["profile"]))
    assert printed.chosen == Profile.load(second / "profile.json").chosen
    assert len(printed.trials) == len(Profile.load(second / "profile.json").trials)
    assert f"Report: {second / 'report.html'}" in result.stderr.splitlines()


@pytest.mark.parametrize(
    ("topic", "number", "code"),
    [
        ("filling", signal.SIGINT, 130),
        ("screen", signal.SIGHUP, 129),
        ("latency", signal.SIGTERM, 143),
        ("comparing", signal.SIGTERM, 143),
        ("report", signal.SIGTERM, 143),
    ],
)
def test_a_signal_ends_it_with_one_line_and_nothing_left(
    disk: Path, tmp_path: Path, topic: str, number: signal.Signals, code: int
) -> None:
    config = tmp_path / "ds.json"
    config.write_text(PLAIN_CONFIG)
    command = SWEEP
    if topic in ("latency", "comparing"):  # which short sweeps leave out
        script = "import sys\nfrom nvme_offload.tune import cli, sweep\nsweep.LATENCY_SECONDS = sweep.COMPARISON_SECONDS = 1\nsys.exit(cli.main())"
        command = [sys.executable, "-c", script]
    with started(
        *(disk, "--report-dir", tmp_path / "reports", "--seconds", "1", "--size", "128MiB"),
        *("--config", config),
        command=command,
    ) as process:
        wait_for(process, topic)
        process.send_signal(number)
        out, rest = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, rest
    assert out == ""
    last = rest.splitlines()[-1]
    assert last.startswith(f"nvme-sweep: stopped by {number.name}")
    assert "Traceback" not in rest
    assert list(disk.iterdir()) == []
    assert config.read_text() == PLAIN_CONFIG
    assert not (tmp_path / "reports").exists() or list((tmp_path / "reports").iterdir()) == []


def test_two_at_once_are_refused_until_the_first_is_dead(disk: Path, tmp_path: Path) -> None:
    with started(disk, "--report-dir", tmp_path / "reports", "--seconds", "60") as process:
        wait_for(process, "screen")
        second = run(disk, "--report-dir", tmp_path / "reports", "--seconds", "1")
        assert second.returncode == 1
        assert second.stderr.startswith("nvme-sweep: another nvme-sweep is measuring the drive of ")
        assert len(second.stderr.splitlines()) == 1
        process.kill()
        process.communicate(timeout=PATIENCE)
    assert list(disk.iterdir()) == []
    assert not (tmp_path / "reports").exists()
    with started(disk, "--report-dir", tmp_path / "reports", "--seconds", "60") as process:
        wait_for(process, "screen")


DAMAGE = """
verify = trial._Lane.verify
def damaged(self):
    for buffer, _ in self._last.values():
        buffer[70_000] ^= 1
    verify(self)
trial._Lane.verify = damaged
"""


def test_a_broken_drive_fails_with_one_line_and_changes_nothing(disk: Path, tmp_path: Path) -> None:
    script = f"import sys\nfrom nvme_offload.tune import cli, trial\n{DAMAGE}\nsys.exit(cli.main())"
    config = tmp_path / "ds.json"
    config.write_text(PLAIN_CONFIG)
    result = run(
        *(disk, "--report-dir", tmp_path / "reports", "--seconds", "1", "--config", config),
        command=[sys.executable, "-c", script],
    )
    assert (result.returncode, result.stdout) == (1, "")
    *progress, last = result.stderr.splitlines()
    assert all(line.startswith(("filling: ", "screen: ")) for line in progress)
    assert last.startswith("nvme-sweep: read of 4 KiB at ")
    assert "differ from the data written" in last
    assert config.read_text() == PLAIN_CONFIG
    assert not (tmp_path / "reports").exists()
    assert list(disk.iterdir()) == []


# The profile that is there


@pytest.fixture
def good_profile(
    swept: Swept,
    disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Profile:
    """A profile with good evidence, kept for `disk`."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    whole = dataclasses.replace(made_up(2.0), drive=describe(disk).as_dict())
    assert grade(whole).name == "good"
    profile_shelf.keep(whole)
    return whole


@pytest.mark.slow
def test_a_worthless_sweep_does_not_replace_a_good_profile(
    good_profile: Profile, disk: Path, tmp_path: Path
) -> None:
    config = tmp_path / "ds.json"
    config.write_text(PLAIN_CONFIG)
    report = ("--report-dir", tmp_path / "reports", "--seconds", "1")
    brief = run(disk, *report, "--config", config)
    assert brief.returncode == 3, brief.stderr
    *_, refused, unset = brief.stdout.splitlines()
    assert refused.startswith(
        "Not kept as the profile of this drive: the evidence of this sweep is poor ("
    )
    assert "read: 0 of 2 final trials" in refused
    assert refused.endswith(
        f"and the profile of {good_profile.created[:10]} has good evidence. "
        "Sweep longer (--seconds), or replace it nevertheless (--force)."
    )
    assert unset == f"{config}: not set, for the same reason."
    assert config.read_text() == PLAIN_CONFIG
    assert profile_shelf.find(disk) == good_profile
    forced = run(disk, *report, "--force", "--config", config)
    assert forced.returncode == 0, forced.stderr
    assert "Kept as the profile of this drive, with poor evidence." in forced.stdout
    replaced = profile_shelf.find(disk)
    assert grade(replaced).name == "poor"
    assert read_aio(config)["block_size"] == replaced.chosen.block_size


def test_the_outcome_is_written_for_other_programs(swept: Swept, disk: Path) -> None:
    reports, place, _ = swept
    found = json.loads((place / "outcome.json").read_text())
    (drive,) = found["drives"]
    assert (drive["path"], drive["host"]) == (str(disk), None)
    assert found["passed"] == drive["passed"] == (drive["grade"]["name"] != "poor")
    profile = Profile.from_json(json.dumps(drive["profile"]))
    assert drive["grade"]["name"] == grade(profile).name
    (report,) = reports.glob("*[0-9][0-9]")  # the second is "...-2"
    assert profile.performance == Profile.load(report / "profile.json").performance


# Refusals


def test_refusals_are_one_line_and_change_nothing(
    disk: Path, tmp_path: Path, refused: Refused
) -> None:
    config = tmp_path / "good.json"
    config.write_text(PLAIN_CONFIG)
    broken = tmp_path / "broken.json"
    broken.write_text('{"a": 1, "a": 2}')
    missing = tmp_path / "missing"
    cases: list[tuple[list[str | Path], str]] = [
        ([], "Missing argument 'PATH...'"),
        ([missing], "does not exist"),
        ([config], "is not a directory"),
        ([disk, disk], "are on the same drive"),
        ([disk, missing], "does not exist"),
        ([disk, "--sustained", "much"], "--sustained: 'much' is not a size"),
        ([disk, "--sustained", "1MiB"], "--sustained must be at least 1 GiB"),
        ([disk, "--engine", "deepspeed", "--backend", "posix"], "is built on libaio, not on posix"),
        ([disk, "--config", missing], "does not exist"),
        ([disk, "--config", broken], 'broken.json: key "a" is there twice'),
        ([disk, "--config", config, "--config", tmp_path], "is a directory"),
        ([disk, "--report-dir", config], "no report can be written"),
        ([disk, "--report-dir", "/proc/reports/deep"], "no report can be written"),
        ([disk, "--seconds", "0"], "--seconds must be from 1"),
        ([disk, "--seconds", "nan"], "--seconds must be from 1"),
        ([disk, "--seconds", "soon"], "'soon' is not a valid float"),
        ([""], "a path is empty: is a variable of the shell not set?"),
        ([disk, " "], "a path is empty"),
        ([disk, "--report-dir", ""], "a path is empty"),
        ([disk, "--json", tmp_path / "no" / "file.json"], "--json: no file can be written to"),
        ([disk, "--size", "huge"], "'huge' is not a size"),
        ([disk, "--size", "1MiB"], "at least 128 MiB"),
        ([disk, "--size", "900TiB"], "too small"),
        ([disk, "--backend", "magic"], "'magic' is not one of"),
        ([disk, "--engine", "magic"], "'magic' is not one of 'native', 'deepspeed'"),
        ([disk, "--ranks", "0"], "'--ranks': 0 is not in the range 1<=x<=16"),
        ([disk, "--ranks", "17"], "'--ranks': 17 is not in the range 1<=x<=16"),
        ([disk, "--ranks", "2", "--size", "200MiB"], "at least 256 MiB with 2 ranks"),
    ]
    before = sorted(tmp_path.iterdir())
    for arguments, message in cases:
        if "--report-dir" not in arguments:
            arguments = [*arguments, "--report-dir", tmp_path / "reports" / "deep"]
        assert message in refused(*arguments)
        assert sorted(tmp_path.iterdir()) == before
    assert list(disk.iterdir()) == []
    assert config.read_text() == PLAIN_CONFIG


def test_a_config_that_cannot_be_written_is_refused_before_the_sweep(
    disk: Path, tmp_path: Path, refused: Refused
) -> None:
    config = tmp_path / "ds.json"
    config.write_text(PLAIN_CONFIG)
    config.chmod(0o444)
    said = refused(disk, "--config", config, "--report-dir", tmp_path / "reports")
    assert "is read-only" in said


def test_memory_is_refused_unless_forced_and_a_reader_may_go_away(
    mounted: Callable[[str], Path], tmp_path: Path, refused: Refused
) -> None:
    memory = mounted("tmpfs")
    said = refused(memory, "--report-dir", tmp_path)
    assert "is held in memory" in said
    assert "--force" in said
    assert list(tmp_path.iterdir()) == []
    forced = run(
        *(memory, "--report-dir", tmp_path, "--force", "--seconds", "1"),
        command=["bash", "-c", '"$@" | true; exit ${PIPESTATUS[0]}', "-", *SWEEP],
    )
    assert (forced.returncode, forced.stdout) == (0, ""), forced.stderr
    (report,) = tmp_path.iterdir()
    profile = Profile.load(report / "profile.json")
    assert profile.engine["direct"] is False
    assert any("page cache" in warning for warning in profile.warnings)
    assert list(memory.iterdir()) == []


def test_a_full_drive_is_refused(
    mounted: Callable[[str], Path], tmp_path: Path, refused: Refused
) -> None:
    said = refused(mounted("ext4-full"), "--report-dir", tmp_path)
    assert "is too small: the sweep needs 256 MiB" in said
    assert "--size" not in said  # none would fit


def test_too_small_offers_the_size_that_fits(disk: Path) -> None:
    found = describe(disk)
    for free, said in (
        (200 << 20, "256 MiB, and 200 MiB are free; --size 128MiB is the least, and fits"),
        (100 << 20, "256 MiB, and 100 MiB are free; delete files there"),
    ):
        with pytest.raises(UsageError, match=f"{re.escape(said)}$"):
            file_bytes(None, dataclasses.replace(found, free_bytes=free), 1)
    with pytest.raises(UsageError, match="1 GiB, and 200 MiB are free; --size 128MiB is the least"):
        file_bytes(1 << 30, dataclasses.replace(found, free_bytes=200 << 20), 1)
    assert file_bytes(128 << 20, dataclasses.replace(found, free_bytes=200 << 20), 1) == 64 << 20


def test_another_users_directory_is_refused(disk: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    # The interpreter may live where another user cannot look, so the process changes user after its
    # imports.
    script = "import os, sys\nfrom nvme_offload.tune import cli, trial\nos.setgid(65534); os.setuid(65534)\nsys.exit(cli.main())"
    result = run(disk, "--report-dir", tmp_path, command=[sys.executable, "-c", script])
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "is not writable" in result.stderr or "cannot be examined" in result.stderr


# Bad luck

SHORT = ["--seconds", "1", "--size", "128MiB"]


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """*directory* shown read-only, in this test session's own mount namespace."""
    subprocess.run(["mount", "--bind", str(directory), str(directory)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(directory)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_read_only_mount_is_refused_for_the_drive_and_for_the_report(
    disk: Path, mounted: Callable[[str], Path], tmp_path: Path, refused: Refused
) -> None:
    place = mounted("ext4") / "read-only"
    place.mkdir()
    with read_only(place):
        for arguments, message in (
            ([place, "--report-dir", tmp_path], "is not writable"),
            ([disk, "--report-dir", place / "reports"], "no report can be written"),
        ):
            assert message in refused(*arguments, *SHORT)
    place.rmdir()
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_what_may_be_written_is_reported(disk: Path, tmp_path: Path) -> None:
    """As a quota: the allocation is refused."""
    command = ["bash", "-c", 'ulimit -f 10000; exec "$@"', "-", *SWEEP]
    result = run(disk, "--report-dir", tmp_path, *SHORT, command=command)
    assert (result.returncode, result.stdout) == (2, "")
    assert (
        "is too small: 128 MiB cannot be allocated there (a quota, a limit?); --size takes less"
        in result.stderr.splitlines()[-1]
    )
    assert list(disk.iterdir()) == list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_planted_link_is_neither_followed_nor_replaced(disk: Path, tmp_path: Path) -> None:
    """The name of the new report is a symlink: the report takes another name, and the target of the
    link stays.
    """
    first = run(disk, "--report-dir", tmp_path, *SHORT)
    assert first.returncode == 0, first.stderr
    (report,) = tmp_path.iterdir()
    elsewhere = tmp_path / "elsewhere"
    report.rename(elsewhere)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in elsewhere.iterdir())
    report.symlink_to(elsewhere)
    second = run(disk, "--report-dir", tmp_path, *SHORT)
    assert second.returncode == 0, second.stderr
    assert sorted((path.name, path.stat().st_mtime_ns) for path in elsewhere.iterdir()) == before
    assert report.is_symlink()
    assert (tmp_path / f"{report.name}-2" / "profile.json").exists()


def test_a_sustained_write_is_in_the_profile_and_a_closed_output_is_no_failure(
    disk: Path, tmp_path: Path
) -> None:
    result = run(
        *(disk, "--report-dir", tmp_path, *SHORT, "--sustained", "1GiB"),
        command=["bash", "-c", 'exec "$@" >&-', "-", *SWEEP],
    )
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    (report,) = tmp_path.iterdir()
    found = Profile.load(report / "profile.json").sustained
    assert found is not None
    assert 1 << 30 <= found.bytes <= (2 << 30) + (64 << 20)
    assert len(found.samples) >= 32
    assert list(disk.iterdir()) == []


# Help


def test_help_names_what_there_is_and_loads_little() -> None:
    environment = {
        key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CONFIG_HOME")
    }
    result = finished([*SWEEP, "--help"], env=environment)
    assert result.returncode == 0
    shown = finished([*SWEEP, "show", "--help"], env=environment)
    assert shown.stdout.startswith("Usage: nvme-sweep"), shown.stderr
    for option in (
        *("--config", "--report-dir", "--seconds", "--size", "--engine", "--backend", "--ranks"),
        *("--sustained", "--json", "--force"),
    ):
        assert f"  {option} " in result.stdout
    assert "|".join(BACKENDS) in result.stdout
    for other in ("show [PATH] ", "compare A B ", "check PATH "):
        assert f"  nvme-sweep {other} " in result.stdout
    assert "130 after Ctrl-C, 143 after SIGTERM" in " ".join(result.stdout.split())
    heavy = "import sys\nfrom nvme_offload.tune import cli\n"
    heavy += "print(sorted({'torch', 'numpy', 'deepspeed', 'jinja2'} & set(sys.modules)))"
    assert run(command=[sys.executable, "-c", heavy]).stdout == "[]\n"
