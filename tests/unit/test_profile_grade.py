"""How much evidence a profile needs, and the messages if it has less."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import profiles
import pytest
from profiles import CHOSEN, best, trial

from nvme_offload.hardware import profile_shelf
from nvme_offload.hardware.config import AioConfig
from nvme_offload.hardware.profile import PHASES, Best, Profile, Trial
from nvme_offload.hardware.profile_grade import Grade, final_trials, grade, inconsistencies

SPEEDS = {"read": 3.0, "write": 2.0, "mixed": 2.5}


def evidence(seconds: float = 0.6, rounds: int = 4) -> tuple[Trial, ...]:
    """As many final trials as *rounds* of a sweep give."""
    return tuple(
        trial(phase, seconds=seconds)
        for number in range(rounds)
        for phase in ("mixed", ("read", "write")[number % 2])
    )


def profile(place: Path = Path("/"), **changes: Any) -> Profile:
    return profiles.profile(SPEEDS, at=place, **{"trials": evidence(), **changes})


def test_a_minute_of_whole_trials_that_agree_is_good() -> None:
    assert grade(profile()) == Grade("good")
    assert len(final_trials(profile(), "mixed")) == 4


def with_best(phase: str, one: Best) -> dict[str, Best]:
    return {**{name: best(speed) for name, speed in SPEEDS.items()}, phase: one}


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({"trials": ()}, "poor", "mixed: 0 of 4 final trials of at least 0.5 s"),
        (
            {"trials": evidence(seconds=0.1)},
            "poor",
            "mixed: 0 of 4 final trials of at least 0.5 s, the longest took 0.1 s",
        ),
        ({"trials": evidence(rounds=2)}, "weak", "read: 1 of 2 final trials of at least 0.5 s"),
        ({"trials": evidence(rounds=3)}, "weak", "mixed: 3 of 4 final trials"),
        ({"trials": evidence(rounds=1)}, "poor", "write: 0 of 2 final trials"),
        (
            {"trials": tuple(dataclasses.replace(one, flaw="drifted") for one in evidence())},
            "poor",
            "read: 0 of 2 final trials",
        ),
        (
            {"trials": tuple(dataclasses.replace(one, stage="screen") for one in evidence())},
            "poor",
            "read: 0 of 2 final trials",
        ),
        (
            {"performance": with_best("read", best(3.0, low=0.0, high=572.0))},
            "poor",
            "read: the speed is known within tenfold or more",
        ),
        (
            {"performance": with_best("mixed", best(2.5, low=1.0, high=2.25))},
            "weak",
            "mixed: the speed is known within \N{PLUS-MINUS SIGN}50%",
        ),
        (
            {"performance": with_best("mixed", best(6.0))},
            "poor",
            "mixed: 6 GB/s is more than read and write together, 5 GB/s",
        ),
    ],
)
def test_less_is_weak_or_poor_with_its_reason(
    changes: dict[str, Any], name: str, reason: str
) -> None:
    found = grade(profile(**changes))
    assert found.name == name
    assert any(each.startswith(reason) for each in found.reasons), found.reasons
    assert str(found).startswith(f"{name} (")


def test_no_speed_can_be_more_than_the_link_carries() -> None:
    for link, said in ((3.0, []), (2.0, ["read: 3 GB/s is more than the link carries, 2 GB/s"])):
        drive = {**profile().drive, "link_bytes_per_second": int(link * 1e9)}
        assert inconsistencies(profile(drive=drive)) == said
    # each direction has separate lanes
    narrow = {**profile().drive, "link_bytes_per_second": 10**9}
    assert inconsistencies(profile(drive=narrow))[-1].startswith(
        "mixed: 2.5 GB/s is more than the link carries, 2 GB/s"
    )
    # nor the best of one load, whatever was chosen
    elsewhere = {**SPEEDS, "write": 4.0}
    found = inconsistencies(
        profile(
            drive={**profile().drive, "link_bytes_per_second": 3 * 10**9},
            best={phase: best(speed) for phase, speed in elsewhere.items()},
        )
    )
    assert found == ["write: 4 GB/s is more than the link carries, 3 GB/s"]


def test_noise_is_no_contradiction() -> None:
    assert inconsistencies(profile(performance=with_best("mixed", best(5.2)))) == []


@pytest.mark.parametrize(("speeds", "name"), [((2.0, 2.1), "good"), ((0.2, 2.0), "poor")])
def test_the_defaults_are_known_by_their_own_trials(speeds: tuple[float, float], name: str) -> None:
    """Their ratio to themselves is 1 whatever they do."""
    defaults = {phase: best(speed, low=1.5, high=1.5) for phase, speed in SPEEDS.items()}
    trials = tuple(
        trial(phase, speed=speed) for phase in PHASES for speed in speeds for _ in range(2)
    )
    assert grade(profile(performance=defaults, best=defaults, trials=trials)).name == name


# On the shelf


@pytest.fixture(autouse=True)
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    profile_shelf._warned.clear()
    return tmp_path / "config/nvme-offload"


def test_for_path_warns_of_poor_evidence_and_names_the_callers_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    swept, used = tmp_path / "swept", tmp_path / "used"
    swept.mkdir()
    used.mkdir()
    with caplog.at_level(logging.WARNING):
        for rounds in (4, 3):  # good, and weak, which is enough for settings
            profile_shelf.keep(profile(swept, trials=evidence(rounds=rounds)))
            assert AioConfig.for_path(used) == AioConfig.of(CHOSEN)
        assert caplog.messages == []
        profile_shelf.keep(profile(swept, trials=evidence(rounds=1)))
        for path in (used, used, swept):  # logged once for a drive
            assert AioConfig.for_path(path) == AioConfig.of(CHOSEN)
    assert caplog.messages == [
        f"the settings for {used} are from a sweep of its drive on 2025-01-02 that had little "
        f"evidence: run `nvme-sweep {used}`, which takes a minute"
    ]


def test_what_has_more_evidence_is_found_before_it_is_replaced(tmp_path: Path, shelf: Path) -> None:
    good, weak, poor = (
        profile(tmp_path, trials=evidence(rounds=rounds), command=str(rounds))
        for rounds in (4, 3, 1)
    )
    assert profile_shelf.better(poor) is None
    profile_shelf.keep(weak)
    assert profile_shelf.better(poor) == weak
    assert profile_shelf.better(weak) is None
    assert profile_shelf.better(good) is None
    profile_shelf.keep(good)
    assert profile_shelf.better(weak) == good
    # another engine's is another profile
    by_deepspeed = dataclasses.replace(poor, engine={"name": "deepspeed"})
    assert profile_shelf.better(by_deepspeed) is None
    # an unreadable profile does not block a new one
    (kept,) = (shelf / "profiles").iterdir()
    kept.write_text("{")
    assert profile_shelf.better(poor) is None
