"""Two profiles compared: drives, kernels and speeds."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from nvme_offload.errors import OffloadError, UsageError
from nvme_offload.hardware.profile import PHASES, Beside, Profile
from nvme_offload.hardware.profile_grade import final_trials, grade, quantile
from nvme_offload.hardware.profile_shelf import find
from nvme_offload.units import format_change, format_speed

from .progress import change

LEAST_SCATTER = 0.02  # the least relative spread that is assumed for few runs


def load(place: Path) -> Profile:
    """The profile in the file *place*, of the report *place*, or of the drive of *place*. Raises:
    UsageError.
    """
    place = place.parent if place.name == "report.html" else place
    try:
        if place.is_dir():
            inside = place / "profile.json"
            return Profile.load(inside) if inside.exists() else find(place)
        return Profile.load(place)
    except FileNotFoundError:
        raise UsageError(
            f"{place} does not exist: give a profile.json, the directory of a report, or a directory on a drive that was swept"
        ) from None
    except OSError as error:
        raise UsageError(f"{place} cannot be read: {error.strerror}") from None
    except OffloadError as error:
        raise UsageError(str(error)) from None


def changes(first: Profile, second: Profile) -> list[Beside]:
    """The speed of the second's chosen setting over the speed of the first's, by phase, with the 90 %
    intervals by the scatter of the final runs.
    """
    found = []
    for phase in PHASES:
        one, other = _final_logs(first, phase), _final_logs(second, phase)
        if not one or not other:
            continue
        before, after = (each.performance[phase].gb_per_s for each in (first, second))
        gap = math.log(after / before)
        reach = quantile(len(one) + len(other) - 2) * math.hypot(_error(one), _error(other))
        interval = math.exp(gap), math.exp(gap - reach), math.exp(gap + reach)
        found.append(Beside("", "", phase, after, before, *interval))
    return found


def lines(first: Profile, second: Profile, names: tuple[str, str]) -> list[str]:
    """What to print."""
    one, other = _facts(first), _facts(second)
    rows = [("", *names), *((label, one[label], other[label]) for label in one)]
    width = max(len(row[0]) for row in rows)
    middle = max(len(row[1]) for row in rows)
    said = [f"{label:{width}}  {left:{middle}}  {right}".rstrip() for label, left, right in rows]
    trusted = all(grade(profile).name != "poor" for profile in (first, second))
    said += ["", *(_line(found, trusted) for found in changes(first, second)), ""]
    said.append(
        "The intervals cover the scatter of the runs, but not a drive that is faster on one day than on another."
    )
    if first.drive.get("identity") != second.drive.get("identity"):
        said.append("These are different drives.")
    return said


def _line(found: Beside, trusted: bool) -> str:
    if not trusted:
        sure = "too little evidence"
    elif found.relative_low <= 1 <= found.relative_high:
        sure = "no significant difference"
    else:
        sure = "faster" if found.relative > 1 else "slower"
    speeds = f"{format_speed(found.chosen_gb_per_s)} -> {format_speed(found.gb_per_s)} GB/s"
    by = change(found.relative, found.relative_low, found.relative_high)
    return f"{found.phase:6}  {speeds}, {by}: {sure}"


def _facts(profile: Profile) -> dict[str, str]:
    drive, engine = profile.drive, profile.engine
    return {
        "swept": profile.created,
        "path": drive["path"],
        "drive": drive["model"] or drive["device"],
        "firmware": drive.get("firmware") or "not known",
        "link": drive.get("pcie_link") or "not known",
        "filesystem": drive["filesystem"],
        "scheduler": drive.get("scheduler") or "not known",
        "kernel": engine.get("kernel", "not known"),
        "engine": f"{engine.get('name')} {engine.get('version')}, {engine.get('backend')}",
        "ranks": str(profile.workload.get("ranks", 1)),
        "setting": str(profile.chosen),
        "over the defaults": ", ".join(
            f"{phase} {format_change(profile.performance[phase].relative)}" for phase in PHASES
        ),
        "evidence": grade(profile).name,
        "steady": "yes" if profile.steady else "no",
    }


def _final_logs(profile: Profile, phase: str) -> list[float]:
    runs = final_trials(profile, phase)
    return [math.log(trial.gb_per_s) for trial in runs if trial.gb_per_s > 0]


def _error(logs: list[float]) -> float:
    """The standard error of their median."""
    scatter = statistics.stdev(logs) if len(logs) > 1 else LEAST_SCATTER
    return 1.253 * max(scatter, LEAST_SCATTER) / math.sqrt(len(logs))
