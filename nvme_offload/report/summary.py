"""The numbers of tables and charts: trials by setting, by stage, and over time."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nvme_offload.hardware.profile import (
    DEEPSPEED_DEFAULTS,
    PHASES,
    Beside,
    Latency,
    Profile,
    Setting,
    Trial,
)


class Median(NamedTuple):
    """The speed of a setting, and the number of its trials."""

    gb_per_s: float
    relative: float
    trials: int


def is_defaults(setting: Setting) -> bool:
    """Whether *setting* is DeepSpeed's defaults, on any backend."""
    return dataclasses.replace(setting, backend=DEEPSPEED_DEFAULTS.backend) == DEEPSPEED_DEFAULTS


def sound(trials: Iterable[Trial]) -> list[Trial]:
    """The trials without a flaw."""
    return [trial for trial in trials if not trial.flaw]


def reached(
    profile: Profile, phase: str, trials: Iterable[Trial] | None = None
) -> dict[Setting, Median]:
    """The speed of each setting of *trials*, by default of all, under *phase*. All parts of the report
    use this function.

    The ratio of a finalist is the sweep's estimate, of other settings the median of their sound
    trials. The speed is the control's speed in the finals times the ratio.
    """
    given = profile.trials if trials is None else trials
    tried: dict[Setting, list[float]] = {}
    for trial in sound(given):
        if trial.phase == phase:
            tried.setdefault(trial.setting, []).append(trial.relative)
    groups = (profile.performance, profile.best)
    judged = {best.setting: best.relative for best in profile.finals.get(phase, ())} | {
        group[phase].setting: group[phase].relative for group in groups if phase in group
    }
    judged |= {trial.setting: 1.0 for trial in profile.trials if trial.control}
    level = control_gb_per_s(profile, phase) or 0.0
    found = {}
    for setting, ratios in tried.items():
        relative = judged.get(setting, statistics.median(ratios))
        found[setting] = Median(level * relative, relative, len(ratios))
    return found


def phases_tried(trials: Iterable[Trial]) -> list[str]:
    """The phases with sound trials, the most important for training first."""
    tried = {trial.phase for trial in sound(trials)}
    return [phase for phase in ("mixed", "read", "write") if phase in tried]


def last_stage(trials: Sequence[Trial]) -> str:
    """The deciding stage: "final" if the search reached it, otherwise the last one; "" without sound
    trials.
    """
    stages = [trial.stage for trial in sound(trials)]
    return "final" if "final" in stages else stages[-1] if stages else ""


def decisive(profile: Profile) -> list[Trial]:
    """The sound trials of the deciding stage."""
    stage = last_stage(profile.trials)
    return [trial for trial in sound(profile.trials) if trial.stage == stage]


def control_gb_per_s(profile: Profile, phase: str) -> float | None:
    """The speed of the control setting: in the finals, or otherwise the median of all its runs."""
    chosen = profile.performance.get(phase)
    if chosen is not None and chosen.relative > 0:
        return chosen.gb_per_s / chosen.relative
    runs = [
        trial.gb_per_s for trial in sound(profile.trials) if trial.control and trial.phase == phase
    ]
    return statistics.median(runs) if runs else None


def control_speeds(profile: Profile) -> dict[str, float]:
    """GB/s of the control by phase; {} unless all phases were measured."""
    speeds = {phase: speed for phase in PHASES if (speed := control_gb_per_s(profile, phase))}
    return speeds if set(speeds) >= set(PHASES) else {}


def control_runs(profile: Profile, phase: str) -> list[tuple[float, float]]:
    """(seconds since the sweep began, GB/s) of the control's runs, including the runs around which the
    drive's speed jumped.
    """
    return sorted(
        (trial.started_seconds, trial.gb_per_s)
        for trial in profile.trials
        if trial.control and trial.phase == phase and trial.flaw != "impossible"
    )


def slopes(
    samples: Iterable[tuple[float, int]], most_points: int = 48
) -> list[tuple[float, float]]:
    """(seconds, GB/s) between (seconds, bytes so far) *samples*, in at most *most_points* steps of
    about the same length.
    """
    points = sorted({(0.0, 0), *samples})
    if len(points) < 3:
        return []
    step = points[-1][0] / most_points
    kept = points[:1]
    for point in points[1:]:
        if point[0] - kept[-1][0] >= step:
            kept.append(point)
    return [
        ((before[0] + after[0]) / 2, (after[1] - before[1]) / (after[0] - before[0]) / 1e9)
        for before, after in itertools.pairwise(kept)
    ]


def both_directions(profile: Profile) -> dict[Setting, tuple[float, float]]:
    """By setting: GB/s of reads and writes under the mixed load, which add up to `reached`. Their shares
    are from the deciding stage, or otherwise from all trials.
    """
    mixed = [trial for trial in sound(profile.trials) if trial.phase == "mixed"]
    stage = last_stage(profile.trials)
    late = {trial.setting for trial in mixed if trial.stage == stage}
    moved: dict[Setting, list[Trial]] = {}
    for trial in mixed:
        if trial.stage == stage or trial.setting not in late:
            moved.setdefault(trial.setting, []).append(trial)
    speeds = reached(profile, "mixed")
    both: dict[Setting, tuple[float, float]] = {}
    for setting, each in moved.items():
        read = statistics.median(trial.read_gb_per_s for trial in each)
        write = statistics.median(trial.write_gb_per_s for trial in each)
        share = read / (read + write) if read + write else 0.5
        whole = speeds[setting].gb_per_s
        both[setting] = share * whole, (1 - share) * whole
    return both


def beside(profile: Profile, name: str) -> dict[str, Beside]:
    """By phase: the comparison *name*, unless nothing was transferred."""
    moved = [
        other
        for other in profile.beside
        if other.name == name and 0 < other.relative_low <= other.relative_high
    ]
    return {other.phase: other for other in sorted(moved, key=_order)}


def latency(profile: Profile, setting: Setting) -> dict[str, Latency]:
    """By phase: the latencies of *setting*."""
    timed = [
        each
        for each in profile.latencies
        if each.setting == setting and 0 < each.p50_ms <= each.p99_ms <= each.max_ms
    ]
    return {each.phase: each for each in sorted(timed, key=_order)}


def _order(measured: Beside | Latency) -> int:
    return PHASES.index(measured.phase)


class Finalist(NamedTuple):
    """A setting of the deciding stage, with its speeds by phase."""

    setting: Setting
    phases: dict[str, Median]


def finalists(profile: Profile, most: int = 12) -> list[Finalist]:
    """The settings of the deciding stage, the fastest first, at most *most* and the chosen one and the
    control.
    """
    trials = decisive(profile)
    by_phase = {phase: reached(profile, phase, trials) for phase in PHASES}
    kept = {trial.setting for trial in trials if trial.control} | {profile.chosen}
    found = []
    for setting in dict.fromkeys(trial.setting for trial in trials):
        phases = {phase: speeds[setting] for phase, speeds in by_phase.items() if setting in speeds}
        found.append(Finalist(setting, phases))

    def speed(finalist: Finalist) -> tuple[bool, float]:
        mixed = finalist.phases.get("mixed")
        best = max(each.relative for each in finalist.phases.values())
        return mixed is not None, mixed.relative if mixed else best

    found.sort(key=speed, reverse=True)
    return found[:most] + [finalist for finalist in found[most:] if finalist.setting in kept]
