"""A drive against its data sheet: what is asked for, pass and fail, and the files for CI."""

from __future__ import annotations

import dataclasses
import json
import statistics
from xml.etree import ElementTree

import pytest
from swept_profiles import made_up

from nvme_offload.hardware.profile import PHASES, Best, Profile, Setting
from nvme_offload.sweep import specification
from nvme_offload.sweep.specification import Specification, checks, parse, passed


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("read=7000,write=5000", Specification({"read": 7.0, "write": 5.0})),
        (" read = 7000MB/s , mixed=6.5 GB/s", Specification({"read": 7.0, "mixed": 6.5})),
        ("write=1GiB/s", Specification({"write": (1 << 30) / 1e9})),
        ("read=7g,within=5%", Specification({"read": 7.0}, 0.05)),
        ("within=2.5 %,read=3500.5", Specification({"read": 3.5005}, 0.025)),
    ],
)
def test_what_is_asked_for(text: str, wanted: Specification) -> None:
    assert parse(text) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not understood"),
        ("read", "'read' is not understood"),
        ("reads=7000", "'reads=7000' is not understood"),
        ("read=7000,read=6000", "read is there twice"),
        ("within=5%,within=6%,read=1", "within is there twice"),
        ("read=fast", "read=fast is no speed: write MB/s, or a unit"),
        ("read=0", "read=0 is no speed"),
        ("read=-1", "read=-1 is no speed"),
        ("read=7000,within=5", "within must be a share below 100 %, such as 5%, not '5'"),
        ("read=7000,within=100%", "within must be a share"),
        ("within=5%", "no speed is asked for"),
    ],
)
def test_what_cannot_be_asked_for_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        parse(text)


def outcome(text: str, profile: Profile) -> list[bool]:
    return [one.passed for one in checks(profile, parse(text))]


def test_a_speed_is_judged_by_its_own_trials() -> None:
    """And not by what a sweep takes for its level, which also looks at other settings."""
    profile = made_up(2.0, scatter=0.0)
    read = dataclasses.replace(profile.best["read"], gb_per_s=2.4)
    levelled = dataclasses.replace(profile, best={**profile.best, "read": read})
    assert outcome("read=2001", levelled) == [True, False]
    (_, found) = checks(levelled, parse("read=2000"))
    assert found.gb_per_s == 2.0


def test_a_speed_passes_where_it_was_reached() -> None:
    profile = made_up(2.0, scatter=0.0)
    assert outcome("read=2000", profile) == [True, True]
    assert outcome("read=2001", profile) == [True, False]
    assert outcome("read=2100,within=5%", profile) == [True, True]
    assert outcome("read=2110,within=5%", profile) == [True, False]
    assert outcome("read=1900,write=2001,mixed=1GiB/s", profile) == [True, True, False, True]
    assert checks(profile, None)[0].passed
    assert not passed(checks(profile, parse("read=2001")))


def test_the_fastest_of_the_finals_is_what_a_data_sheet_means() -> None:
    other = Setting(4 << 20, 32, 1)
    whole = made_up(2.0)
    fastest = Best(
        **dataclasses.asdict(other), gb_per_s=3.0, relative=2.0, relative_low=1.9, relative_high=2.1
    )
    trials = [
        dataclasses.replace(one, **dataclasses.asdict(other), gb_per_s=1.5 * one.gb_per_s)
        for one in whole.trials
        if one.phase == "read"
    ]
    profile = dataclasses.replace(
        whole, best={**whole.best, "read": fastest}, trials=(*whole.trials, *trials)
    )
    (_, read) = checks(profile, parse("read=2900"))
    assert read.passed
    median = statistics.median(one.gb_per_s for one in trials)
    assert read.gb_per_s == median
    assert read.low_gb_per_s is not None
    assert read.high_gb_per_s is not None
    assert 2.7 < read.low_gb_per_s < 3.0 < read.high_gb_per_s < 3.3
    assert "3.02 GB/s with 4 MiB x 32; its 8 trials gave " in read.found


def test_what_is_not_known_does_not_pass() -> None:
    poor = dataclasses.replace(made_up(2.0), trials=made_up(runs=1).trials[:1])
    scattered = checks(made_up(2.0, scatter=1.0), parse("mixed=1"))[1]
    assert not scattered.passed
    assert scattered.found.endswith(": too uncertain to say")
    assert (scattered.low_gb_per_s, scattered.high_gb_per_s) == (None, None)
    (evidence,) = checks(poor, None)
    assert not evidence.passed
    assert evidence.found.startswith("the evidence is poor (")


def two() -> specification.Outcome:
    good, wanted = made_up(2.0), parse("read=1900,write=2500")
    second = made_up(1.0, path="/mnt/<&> second")
    second = dataclasses.replace(second, engine={**second.engine, "host": "node-2"})
    return [(good, checks(good, wanted)), (second, checks(second, wanted))]


def test_junit_is_read_by_the_standard_library() -> None:
    root = ElementTree.fromstring(specification.junit(two()))
    assert (root.tag, root.get("name")) == ("testsuites", "nvme-sweep")
    first, second = root.findall("testsuite")
    assert (first.get("tests"), first.get("failures"), first.get("errors")) == ("3", "1", "0")
    assert second.get("failures") == "2"
    assert second.get("name") == "node-2 /mnt/<&> second"
    assert float(first.get("time", "")) == 24.0
    cases = {case.get("name"): case for case in first.findall("testcase")}
    assert list(cases) == ["evidence", "read at least 1.90 GB/s", "write at least 2.50 GB/s"]
    assert cases["read at least 1.90 GB/s"].find("failure") is None
    failure = cases["write at least 2.50 GB/s"].find("failure")
    assert failure is not None
    assert (failure.text or "").startswith("2.00 GB/s with 1 MiB x 16, 2 threads")
    assert failure.get("message") == failure.text


def test_json_is_read_by_the_standard_library() -> None:
    found = json.loads(specification.as_json(two()))
    assert found["passed"] is False
    first, second = found["drives"]
    assert (first["path"], first["host"], first["passed"]) == ("/local_nvme", None, False)
    assert (second["host"], second["grade"]["name"]) == ("node-2", "good")
    wanted = [(one["phase"], one["wanted_gb_per_s"], one["passed"]) for one in first["checks"]]
    assert wanted == [(None, None, True), ("read", 1.9, True), ("write", 2.5, False)]
    again = Profile.from_json(json.dumps(first["profile"]))
    assert again.performance == made_up(2.0).performance
    assert set(again.best) == set(PHASES)


def test_lines_for_people() -> None:
    first, *_, last = specification.lines(two())
    assert first == "pass  /local_nvme, evidence: the evidence is good"
    assert last.startswith("FAIL  /mnt/<&> second, write at least 2.50 GB/s: 1.00 GB/s with ")
