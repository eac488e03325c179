"""The grade of a profile: how much evidence its speeds rest on, and the evidence that is missing."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from .profile import PHASES, Profile, Setting, Trial

GRADES = ("poor", "weak", "good")  # in ascending order

LEAST_TRIAL_SECONDS = 0.5  # shorter final trials do not count
GOOD_TRIALS = {"read": 2, "write": 2, "mixed": 4}  # final trials of the chosen setting
LEAST_TRIALS = {"read": 1, "write": 1, "mixed": 2}
GOOD_SPREAD = 0.25  # half of the 90 % interval, as a share
MOST_SPREAD = 1.0  # above, the speed is not known within a factor of two
EXCESS = 1.10  # noise may lift mixed speed so far above the sum of read and write speed
LINK_EXCESS = 1.03  # of the link's nominal speed, for clocks that run fast


@dataclasses.dataclass(frozen=True)
class Grade:
    """The evidence of a profile, "good", "weak" or "poor", and the reasons, one clause each."""

    name: str
    reasons: tuple[str, ...] = ()

    @property
    def level(self) -> int:
        """The place in `GRADES`: higher is better."""
        return GRADES.index(self.name)

    def __str__(self) -> str:
        return f"{self.name} ({'; '.join(self.reasons)})" if self.reasons else self.name


def grade(profile: Profile) -> Grade:
    """Judge the evidence for the chosen setting of *profile*."""
    poor, weak = inconsistencies(profile), list[str]()
    for phase in PHASES:
        runs = final_trials(profile, phase)
        counted = sum(trial.seconds >= LEAST_TRIAL_SECONDS for trial in runs)
        if counted < GOOD_TRIALS[phase]:
            lacking = f"{phase}: {counted} of {GOOD_TRIALS[phase]} final trials of at least {LEAST_TRIAL_SECONDS:g} s"
            if runs and not counted:
                lacking += f", the longest took {max(trial.seconds for trial in runs):.2g} s"
            (weak if counted >= LEAST_TRIALS[phase] else poor).append(lacking)
        found = spread(profile, phase)
        if found > GOOD_SPREAD and counted >= LEAST_TRIALS[phase]:
            # rounded up, so that 25.2 % does not read as 25 %
            within = "tenfold or more"
            if found < 10:
                within = f"\N{PLUS-MINUS SIGN}{math.ceil(100 * found)}%"
            reason = f"{phase}: the speed is known within {within} instead of \N{PLUS-MINUS SIGN}{GOOD_SPREAD:.0%}"
            (weak if found <= MOST_SPREAD else poor).append(reason)
    name = "poor" if poor else "weak" if weak else "good"
    return Grade(name, (*poor, *weak))


def inconsistencies(profile: Profile) -> list[str]:
    """The speeds of *profile* that contradict each other, one clause each: mixed speed above the sum of
    read and write speed, or a speed above the drive's link.
    """
    found = []
    speeds = {phase: best.gb_per_s for phase, best in profile.performance.items()}
    most = speeds["read"] + speeds["write"]
    if speeds["mixed"] > EXCESS * most:
        found.append(
            f"mixed: {speeds['mixed']:.3g} GB/s is more than read and write together, {most:.3g} GB/s"
        )
    nominal = profile.drive.get("link_bytes_per_second")
    link = nominal / 1e9 if isinstance(nominal, int | float) else 0.0
    for phase in PHASES if link else ():
        reached = max(speeds[phase], profile.best[phase].gb_per_s)
        # the directions have separate lanes
        carried = link * (2 if phase == "mixed" else 1)
        if reached > LINK_EXCESS * carried:
            found.append(
                f"{phase}: {reached:.3g} GB/s is more than the link carries, {carried:.3g} GB/s"
            )
    return found


def spread(profile: Profile, phase: str) -> float:
    """Half of the 90 % interval of the chosen setting's speed under *phase*, as a share: of the ratio to
    the defaults, or of the speed where the defaults were chosen. Infinite where it reaches 0.
    """
    reached = profile.performance[phase]
    if reached.relative_low == reached.relative_high:  # the defaults
        speeds = [trial.gb_per_s for trial in final_trials(profile, phase)]
        return speed_spread(speeds) if len(speeds) > 1 else 0.0
    if not 0 < reached.relative_low < reached.relative_high:
        return math.inf
    return math.sqrt(reached.relative_high / reached.relative_low) - 1


def speed_spread(speeds: Sequence[float]) -> float:
    """Half of the 90 % interval of the median of *speeds*, as a share, by Student's t."""
    if min(speeds) <= 0:
        return math.inf
    logs = [math.log(speed) for speed in speeds]
    # 1.253: the standard error of a median over the standard error of a mean
    error = 1.253 * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.expm1(quantile(len(logs) - 1) * error)


def quantile(freedom: int) -> float:
    """The 95 % quantile of Student's t. Source: Abramowitz and Stegun 26.7.5."""
    z, v = 1.6449, max(2, freedom)
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)


def final_trials(profile: Profile, phase: str, setting: Setting | None = None) -> list[Trial]:
    """The final trials under *phase* of *setting*, by default the chosen one, that count, of any length."""
    wanted = (setting or profile.chosen, phase, "final", "")
    return [
        trial
        for trial in profile.trials
        if (trial.setting, trial.phase, trial.stage, trial.flaw) == wanted
    ]
