"""What the tables and charts of a report count: trials by setting, by stage, and over time. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nvme_offload.profile import PHASES, Best, Profile, Setting, Trial

# ZeRO-Infinity's optimizer step with mixed-precision Adam: master weights, two moments and the gradient, 4 bytes each, all read and all written.
STEP_BYTES_PER_PARAMETER = 16 + 16


class Median(NamedTuple):
    """What a setting reached over *trials* trials."""

    gb_per_s: float
    relative: float
    trials: int


def sound(trials: Iterable[Trial]) -> list[Trial]:
    """The trials that count."""
    return [trial for trial in trials if not trial.flaw]


def medians(trials: Iterable[Trial], phase: str) -> dict[Setting, Median]:
    """By setting: the medians of its sound trials under *phase*, runs as the control among them."""
    groups: dict[Setting, list[Trial]] = {}
    for trial in sound(trials):
        if trial.phase == phase:
            groups.setdefault(trial.setting, []).append(trial)
    return {
        setting: Median(statistics.median(trial.gb_per_s for trial in group), statistics.median(trial.relative for trial in group), len(group))
        for setting, group in groups.items()
    }


def phases_tried(trials: Iterable[Trial]) -> list[str]:
    """The phases with sound trials, the one that matters most for training first."""
    tried = {trial.phase for trial in sound(trials)}
    return [phase for phase in ("mixed", "read", "write") if phase in tried]


def last_stage(trials: Sequence[Trial]) -> str:
    """The stage that decided: "final" where the search came so far, or else the last one; "" without any sound trial."""
    stages = [trial.stage for trial in sound(trials)]
    return "final" if "final" in stages else stages[-1] if stages else ""


def control_gb_per_s(profile: Profile, phase: str) -> float | None:
    """The speed of the control setting: what it ran at when the chosen one was judged, or else the median of all its runs."""
    reached = profile.performance.get(phase)
    if reached is not None:
        return reached.gb_per_s / reached.relative
    runs = [trial.gb_per_s for trial in sound(profile.trials) if trial.control and trial.phase == phase]
    return statistics.median(runs) if runs else None


def interval_gb_per_s(best: Best) -> tuple[float, float]:
    """The 90 % interval of the ratio, as a speed."""
    return best.gb_per_s * best.relative_low / best.relative, best.gb_per_s * best.relative_high / best.relative


def throughput(trial: Trial, most_points: int = 48) -> list[tuple[float, float]]:
    """(seconds into the window, GB/s) between the samples of *trial*, in at most *most_points* steps of about the same length."""
    points = sorted({(0.0, 0), *trial.samples})
    if len(points) < 3:
        return []
    step = points[-1][0] / most_points
    kept = points[:1]
    for point in points[1:]:
        if point[0] - kept[-1][0] >= step:
            kept.append(point)
    return [((before[0] + after[0]) / 2, (after[1] - before[1]) / (after[0] - before[0]) / 1e9) for before, after in itertools.pairwise(kept)]


def three_digits(gb_per_s: float) -> str:
    """A speed with three significant digits, zeros included: "2.20", "15.1", "104"."""
    return f"{gb_per_s:#.3g}".rstrip(".")


class StepTime(NamedTuple):
    """What an optimizer step moves for a model, and the drive's seconds for it; the default's where the control was measured."""

    parameters: float
    step_bytes: float
    seconds: float
    default_seconds: float | None


def step_times(profile: Profile, parameters: Sequence[float] = (7e9, 13e9, 70e9)) -> list[StepTime]:
    """An estimate for models of so many *parameters*: bytes over the mixed bandwidth; nothing without that."""
    mixed, control = profile.performance.get("mixed"), control_gb_per_s(profile, "mixed")
    if mixed is None:
        return []
    moved = [STEP_BYTES_PER_PARAMETER * count for count in parameters]
    return [
        StepTime(count, step_bytes, step_bytes / mixed.gb_per_s / 1e9, step_bytes / control / 1e9 if control else None)
        for count, step_bytes in zip(parameters, moved, strict=True)
    ]


class Finalist(NamedTuple):
    """A setting of the deciding stage, with its medians there by phase."""

    setting: Setting
    phases: dict[str, Median]


def finalists(profile: Profile, most: int = 12) -> list[Finalist]:
    """The settings of the deciding stage, the fastest first; the chosen one and the control stay when there are too many."""
    stage = last_stage(profile.trials)
    decisive = [trial for trial in sound(profile.trials) if trial.stage == stage]
    by_phase = {phase: medians(decisive, phase) for phase in PHASES}
    controls = {trial.setting for trial in decisive if trial.control}
    settings = dict.fromkeys(trial.setting for trial in decisive)
    found = [Finalist(setting, {phase: reached[setting] for phase, reached in by_phase.items() if setting in reached}) for setting in settings]

    def speed(finalist: Finalist) -> tuple[int, float]:
        mixed = finalist.phases.get("mixed")
        return (1, mixed.relative) if mixed else (0, max(reached.relative for reached in finalist.phases.values()))

    found.sort(key=speed, reverse=True)
    return found[:most] + [finalist for finalist in found[most:] if finalist.setting == profile.chosen or finalist.setting in controls]
