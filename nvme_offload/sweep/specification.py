"""A drive against its data sheet: `--spec read=7000,write=5000`, and the outcome for people, JUnit and
other programs. Pure.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from nvme_offload.hardware.profile import PHASES, Profile
from nvme_offload.hardware.profile_grade import MOST_SPREAD, final_trials, grade, speed_spread
from nvme_offload.units import format_speed, parse_bytes

from .progress import describe

_SPEED = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]i?B?)?(?:/s)?", re.IGNORECASE)
_SHARE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*%")


@dataclasses.dataclass(frozen=True)
class Specification:
    """What a drive is to reach: GB/s by phase, of which the share *within* may lack."""

    gb_per_s: dict[str, float]
    within: float = 0.0


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was asked of a drive. name: such as "read at least 7.00 GB/s"; found: a clause
    on what was measured. The rest is None where no speed was asked for, low and high, the 90 %
    interval, also where it is too wide to say anything.
    """

    name: str
    passed: bool
    found: str
    phase: str | None = None
    wanted_gb_per_s: float | None = None
    gb_per_s: float | None = None
    low_gb_per_s: float | None = None
    high_gb_per_s: float | None = None


def parse(text: str) -> Specification:
    """Read "read=7000,write=5000,within=5%"; a number without a unit is in MB/s.

    Raises: ValueError, which names the part that is wrong.
    """
    speeds: dict[str, float] = {}
    within = None
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name not in (*PHASES, "within"):
            raise ValueError(
                f"{part.strip()!r} is not understood: write for example read=7000,write=5000,within=5%"
            )
        if name in speeds or (name == "within" and within is not None):
            raise ValueError(f"{name} is there twice")
        if name == "within":
            share = _SHARE.fullmatch(value)
            if share is None or float(share["number"]) >= 100:
                raise ValueError(f"within must be a share below 100 %, such as 5%, not {value!r}")
            within = float(share["number"]) / 100
        else:
            speeds[name] = _gb_per_s(name, value)
    if not speeds:
        raise ValueError("no speed is asked for: write for example read=7000,write=5000")
    return Specification(speeds, within or 0.0)


def _gb_per_s(name: str, value: str) -> float:
    match = _SPEED.fullmatch(value)
    speed = (
        parse_bytes(f"{match['number']}{match['unit'] or 'MB'}") / 1e9 if match is not None else 0.0
    )
    if not speed:
        raise ValueError(f"{name}={value} is no speed: write MB/s, or a unit, such as 7GB/s")
    return speed


def checks(profile: Profile, wanted: Specification | None) -> list[Check]:
    """Whether *profile* has the evidence to be judged by, and what is *wanted* of the drive.

    A speed is that of the fastest setting of the finals under that load, as a data sheet means it:
    the median of that setting's own trials.
    """
    evidence = grade(profile)
    results = [Check("evidence", evidence.name != "poor", f"the evidence is {evidence}")]
    if wanted is None:
        return results
    tolerance = f", less {100 * wanted.within:.3g} %" if wanted.within else ""
    for phase, speed in wanted.gb_per_s.items():
        setting = profile.best[phase].setting
        runs = [trial.gb_per_s for trial in final_trials(profile, phase, setting)]
        found_gb_per_s = statistics.median(runs)
        share = speed_spread(runs) if len(runs) > 1 else math.inf
        gave = (
            f"its {len(runs)} trials gave {format_speed(min(runs))} to {format_speed(max(runs))}"
            if len(runs) > 1
            else f"its only trial gave {format_speed(runs[0])}"
        )
        found = f"{format_speed(found_gb_per_s)} GB/s with {describe(setting)}; {gave}"
        known = share <= MOST_SPREAD
        results.append(
            Check(
                name=f"{phase} at least {format_speed(speed)} GB/s{tolerance}",
                passed=known and found_gb_per_s >= speed * (1 - wanted.within),
                found=found if known else f"{found}: too uncertain to say",
                phase=phase,
                wanted_gb_per_s=speed,
                gb_per_s=found_gb_per_s,
                low_gb_per_s=found_gb_per_s / (1 + share) if known else None,
                high_gb_per_s=found_gb_per_s * (1 + share) if known else None,
            )
        )
    return results


Outcome = Sequence[tuple[Profile, Sequence[Check]]]


def lines(outcome: Outcome) -> list[str]:
    """What to print."""
    return [
        f"{'pass' if one.passed else 'FAIL'}  {profile.drive['path']}, {one.name}: {one.found}"
        for profile, results in outcome
        for one in results
    ]


def junit(outcome: Outcome) -> str:
    """A JUnit file: a suite for each profile, a case for each check."""
    root = ElementTree.Element("testsuites", name="nvme-sweep")
    for profile, results in outcome:
        name = " ".join(filter(None, (profile.engine.get("host"), profile.drive["path"])))
        # XML has no other characters
        name = "".join(letter if letter.isprintable() else "?" for letter in name)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=name,
            tests=str(len(results)),
            failures=str(sum(not one.passed for one in results)),
            errors="0",
            time=f"{sum(trial.seconds for trial in profile.trials):.3f}",
            timestamp=profile.created,
        )
        for one in results:
            case = ElementTree.SubElement(suite, "testcase", classname=name, name=one.name)
            if one.passed:
                ElementTree.SubElement(case, "system-out").text = one.found
            else:
                ElementTree.SubElement(case, "failure", message=one.found).text = one.found
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def as_json(outcome: Outcome) -> str:
    """The outcome for other programs, with the whole profile of each path but the samples of its
    trials.
    """
    drives = []
    for profile, results in outcome:
        bare: dict[str, Any] = json.loads(without_samples(profile).to_json())
        drives.append(
            {
                "path": profile.drive["path"],
                "host": profile.engine.get("host"),
                "passed": passed(results),
                "grade": bare["grade"],
                "checks": [dataclasses.asdict(one) for one in results],
                "profile": bare,
            }
        )
    whole = {"passed": all(each["passed"] for each in drives), "drives": drives}
    return json.dumps(whole, indent=2) + "\n"


def passed(results: Sequence[Check]) -> bool:
    """Whether all of *results* are as wanted."""
    return all(one.passed for one in results)


def without_samples(profile: Profile) -> Profile:
    """*profile* without its trials' throughput over time, which is most of its bytes."""
    return dataclasses.replace(
        profile,
        trials=tuple(dataclasses.replace(trial, samples=()) for trial in profile.trials),
    )
