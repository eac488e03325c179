"""A sweep that was interrupted goes on as if it had not been."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from nvme_offload.files import sealed
from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS, Profile, Setting
from nvme_offload.sweep import space
from nvme_offload.sweep.journal import Begun, Entry, Journal, Playback, journal_path
from nvme_offload.sweep.preflight import Refusal
from nvme_offload.sweep.search import Search, drive
from nvme_offload.sweep.verdict import Ask, Result

SWEEP = [sys.executable, "-m", "nvme_offload.sweep"]
ASKED = {"seconds": 5, "engine": "native"}
BEGUN = Begun(file_bytes=1, bytes_per_second=1e9, copy_bytes_per_second=1e10, search_seconds=20.0)
ENTRY = Entry(
    Ask(Setting(1 << 20, 4, 1), "read", 0.1, "screen", control=False),
    Result(1, 2, 0.1, ((0.1, 3),)),
    1.0,
)


class Interrupted(BaseException):
    """What ends a search after so many trials."""


class Machine:
    """A drive whose speed follows from the setting and from the time, and a clock that its trials
    move on.
    """

    def __init__(self, trials: float = float("inf"), now: float = 1000.0) -> None:
        self.now = now
        self.trials = trials
        self.asked: list[Ask] = []

    def clock(self) -> float:
        return self.now

    def measure(self, ask: Ask) -> Result:
        if len(self.asked) == self.trials:
            raise Interrupted
        self.asked.append(ask)
        self.now += ask.seconds + 0.05
        # no two are equal
        tilt = (
            1
            + (
                7 * ask.setting.block_size // 131072
                + 13 * ask.setting.queue_depth
                + 101 * ask.setting.thread_count
            )
            % 97
            / 2000
        )
        moved = int(
            1e9
            * tilt
            * ask.seconds
            * ask.setting.bytes_in_flight
            / (ask.setting.bytes_in_flight + (4 << 20))
        )
        return Result(
            moved if ask.phase != "write" else 0,
            moved if ask.phase != "read" else 0,
            ask.seconds,
            ((ask.seconds, moved),),
        )


def search(machine: Machine, journal: Journal) -> Search:
    playback = Playback(journal, machine.measure, machine.clock)
    made = Search(space.grid("libaio", 2, 1e9), DEEPSPEED_DEFAULTS, 20, playback.clock)
    drive(made.asks(), playback.measure)
    return made


@pytest.mark.parametrize("trials", [0, 1, 17, 50])
def test_a_search_goes_on_where_it_was_interrupted(tmp_path: Path, trials: int) -> None:
    whole = Machine()
    expected = search(whole, Journal(None, ASKED)).evidence.trials()
    assert len(expected) > 50
    path = tmp_path / "deep/journal.jsonl"
    first = Journal(path, ASKED)
    first.begin(BEGUN)
    with pytest.raises(Interrupted):
        search(Machine(trials), first)
    assert first.has_trials == (trials > 0)
    again = Journal(path, ASKED, resume=True)
    assert again.begun == BEGUN
    again.begin(dataclasses.replace(BEGUN, file_bytes=2))  # changes nothing
    later = Machine(now=50_000.0)
    found = search(later, again).evidence.trials()
    assert len(later.asked) == len(expected) - trials
    assert [(trial.setting, trial.phase, trial.stage) for trial in found] == [
        (trial.setting, trial.phase, trial.stage) for trial in expected
    ]
    assert [trial.bytes for trial in found] == pytest.approx([trial.bytes for trial in expected])
    assert [trial.started_seconds for trial in found] == pytest.approx(
        [trial.started_seconds for trial in expected]
    )
    # And once more, from the journal alone.
    assert len(Journal(path, ASKED, resume=True).entries) == len(expected)
    again.remove()
    assert not path.exists()


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, ASKED)
    journal.begin(BEGUN)
    later = ENTRY._replace(ended_seconds=2.0)
    for entry in (ENTRY, later):
        journal.add(entry)
    path.write_text(path.read_text()[:-5])
    again = Journal(path, ASKED, resume=True)
    assert (again.entries, again.warnings) == ([ENTRY], [])
    again.begin(BEGUN)
    again.add(later)  # not behind half a line
    assert Journal(path, ASKED, resume=True).entries == [ENTRY, later]


@pytest.mark.parametrize("content", [None, "", "{"])
def test_what_never_began_is_none(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "journal.jsonl"
    if content is not None:
        path.write_text(content)
    journal = Journal(path, ASKED, resume=True)
    assert (journal.begun, journal.entries, journal.has_trials) == (None, [], False)


@pytest.mark.parametrize(
    "content",
    [
        "{}\n",
        "[1, 2, 3]\n{}\n",
        "\x00\xff\n\n\n",
        "[" * 100_000 + "\n",
        sealed.dumps({"line": 1, "begun": 7}) + "\n",
    ],
)
def test_what_is_no_journal_is_refused_in_a_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(content)
    with pytest.raises(
        Refusal, match=r"journal\.jsonl, is damaged from its first line on: leave out --resume"
    ):
        Journal(path, ASKED, resume=True)


def test_what_stands_before_the_damage_counts(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, ASKED)
    journal.begin(BEGUN)
    for _ in range(5):
        journal.add(ENTRY)
    lines = path.read_text().splitlines(keepends=True)
    for damaged in (
        [*lines[:3], *lines[4:]],
        [*lines[:3], lines[3].replace("read", "reed"), *lines[4:]],
        [*lines[:3], "{}\n", *lines[4:]],
    ):
        path.write_text("".join(damaged))
        again = Journal(path, ASKED, resume=True)
        assert again.entries == [ENTRY, ENTRY]
        of = len(damaged) - 1
        assert again.warnings == [
            f"the journal of the interrupted sweep, {path}, is damaged at line 4: of its {of} trials the 2 before that count"
        ]
    again.begin(BEGUN)
    again.add(ENTRY)
    repaired = Journal(path, ASKED, resume=True)
    assert (repaired.entries, repaired.warnings) == ([ENTRY] * 3, [])


def test_other_options_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path, ASKED).begin(BEGUN)
    with pytest.raises(
        Refusal, match="made with engine 'native', not 'deepspeed': ask for the same"
    ):
        Journal(path, {**ASKED, "engine": "deepspeed"}, resume=True)


def test_without_a_place_for_it_a_sweep_has_no_journal(tmp_path: Path) -> None:
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    for path in (None, nowhere / "journal.jsonl"):
        journal = Journal(path, ASKED)
        journal.begin(BEGUN)
        journal.add(ENTRY)
        assert not journal.has_trials
        journal.remove()


def test_kill_9_and_resume_in_earnest(disk: Path, tmp_path: Path) -> None:
    """The trials of the killed process are in the profile, and no file stays."""
    arguments = [str(disk), "--report-dir", str(tmp_path), "--seconds", "4", "--size", "256MiB"]
    with subprocess.Popen(
        [*SWEEP, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert any(line.startswith("final") for line in process.stderr)
        process.send_signal(signal.SIGKILL)
    (path,) = (Path(os.environ["XDG_STATE_HOME"]) / "nvme-offload/sweeps").iterdir()
    journaled = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert len(journaled) > 5
    result = subprocess.run(
        [*SWEEP, *arguments, "--resume"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert result.returncode == 0, result.stderr
    assert "screen: " not in result.stderr  # it was past that
    (report,) = tmp_path.iterdir()
    trials = Profile.load(report / "profile.json").trials
    assert [(trial.phase, trial.bytes) for trial in trials[: len(journaled)]] == [
        (line["ask"]["phase"], line["result"]["read_bytes"] + line["result"]["write_bytes"])
        for line in journaled
    ]
    assert len(trials) > len(journaled)
    assert list(disk.iterdir()) == []
    assert not path.exists()


def test_the_journal_is_the_users_and_the_drives_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert (
        journal_path("0" * 32, "native")
        == tmp_path / "nvme-offload/sweeps" / f"{'0' * 32}-native.jsonl"
    )
