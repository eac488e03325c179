"""How much evidence a profile has: whether its numbers can be relied on, and what they lack. Pure."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .profile import Profile, Setting, Trial

PHASES = ("read", "write", "mixed")

GRADES = ("poor", "weak", "good")  # in ascending order

LEAST_TRIAL_SECONDS = 0.5  # a shorter trial is no final evidence
GOOD_TRIALS = {"read": 2, "write": 2, "mixed": 4}  # final trials of the chosen setting
LEAST_TRIALS = {"read": 1, "write": 1, "mixed": 2}
GOOD_SPREAD = 0.25  # half of the 90 % interval, as a share
MOST_SPREAD = 1.0  # from here on the speed is not known within a factor of two
EXCESS = 1.10  # of reading and writing alone, that both at once may reach by noise
LINK_EXCESS = 1.03  # of a link's nominal speed, for clocks


@dataclasses.dataclass(frozen=True)
class Grade:
    """How much evidence a profile has.

    Attributes
    ----------
    name : str
        "good"; "weak", usable, but the numbers may be off; or "poor", less than a profile needs.
    reasons : tuple of str
        What is lacking, a clause each; none for "good".
    """

    name: str
    reasons: tuple[str, ...] = ()

    @property
    def level(self) -> int:
        """The place in `GRADES`: higher is better."""
        return GRADES.index(self.name)

    def __str__(self) -> str:
        return f"{self.name} ({'; '.join(self.reasons)})" if self.reasons else self.name


def grade(profile: Profile) -> Grade:
    """Judge the evidence for the chosen setting of *profile*.

    Parameters
    ----------
    profile : Profile
        Of any schema; what it lacks counts as no evidence.

    Returns
    -------
    Grade
        "good" takes, under each load, `GOOD_TRIALS` final trials of at least
        `LEAST_TRIAL_SECONDS`, a 90 % interval within `GOOD_SPREAD`, and speeds that agree with each
        other. Below `LEAST_TRIALS`, beyond `MOST_SPREAD`, or with speeds that cannot all be true,
        it is "poor".
    """
    poor, weak = inconsistencies(profile), list[str]()
    for phase in PHASES:
        runs = final_trials(profile, phase)
        counted = sum(trial.seconds >= LEAST_TRIAL_SECONDS for trial in runs)
        if counted < GOOD_TRIALS[phase]:
            lacking = (
                f"{phase}: {counted} of {GOOD_TRIALS[phase]} final trials of at least "
                f"{LEAST_TRIAL_SECONDS:g} s"
            )
            if runs and not counted:
                lacking += f", the longest took {max(trial.seconds for trial in runs):.2g} s"
            (weak if counted >= LEAST_TRIALS[phase] else poor).append(lacking)
        found = spread(profile, phase)
        if found > GOOD_SPREAD:
            # rounded up, so that none reads as good that is not
            within = (
                f"\N{PLUS-MINUS SIGN}{math.ceil(100 * found)}%" if found < 10 else "tenfold or more"
            )
            (weak if found <= MOST_SPREAD else poor).append(
                f"{phase}: the speed is known within {within}, "
                f"at most \N{PLUS-MINUS SIGN}{GOOD_SPREAD:.0%} is good"
            )
    name = "poor" if poor else "weak" if weak else "good"
    return Grade(name, (*poor, *weak))


def inconsistencies(profile: Profile) -> list[str]:
    """Which speeds of *profile* cannot all be true.

    Parameters
    ----------
    profile : Profile
        Its chosen setting and the best of each load are looked at.

    Returns
    -------
    list of str
        A clause each: both directions at once faster than reading and writing added up, a direction
        faster than the drive's link; none where all is well, or nothing was measured.
    """
    found = []
    speeds = {phase: best.gb_per_s for phase, best in profile.performance.items()}
    if set(speeds) >= set(PHASES):
        most = speeds["read"] + speeds["write"]
        if speeds["mixed"] > EXCESS * most:
            found.append(
                f"mixed: {speeds['mixed']:.3g} GB/s is more than read and write together, "
                f"{most:.3g} GB/s"
            )
    told = profile.drive.get("link_bytes_per_second")
    link = told / 1e9 if isinstance(told, int | float) else 0.0
    for phase in PHASES if link else ():
        reached = max(
            (
                group[phase].gb_per_s
                for group in (profile.performance, profile.best)
                if phase in group
            ),
            default=0.0,
        )
        # each direction has lanes of its own
        carried = link * (2 if phase == "mixed" else 1)
        if reached > LINK_EXCESS * carried:
            found.append(
                f"{phase}: {reached:.3g} GB/s is more than the link carries, {carried:.3g} GB/s"
            )
    return found


def spread(profile: Profile, phase: str) -> float:
    """How far the speed of the chosen setting may be off under *phase*.

    Parameters
    ----------
    profile : Profile
        Its chosen setting is looked at.
    phase : str
        "read", "write" or "mixed".

    Returns
    -------
    float
        Half of the 90 % interval as a share, 0.25 for +-25 %: of the ratio to the defaults, or of
        the speed where the defaults were chosen. Infinite where the interval reaches 0; 0 where
        nothing was measured, which the count of trials tells.
    """
    reached = profile.performance.get(phase)
    if reached is None:
        return 0.0
    if reached.relative_low == reached.relative_high:  # the defaults
        speeds = [trial.gb_per_s for trial in final_trials(profile, phase)]
        return speed_spread(speeds) if len(speeds) > 1 else 0.0
    if not 0 < reached.relative_low < reached.relative_high:
        return math.inf
    return math.sqrt(reached.relative_high / reached.relative_low) - 1


def speed_spread(speeds: Sequence[float]) -> float:
    """How far the median of *speeds* may be off.

    Parameters
    ----------
    speeds : sequence of float
        At least two, in any unit.

    Returns
    -------
    float
        Half of its 90 % interval as a share, by Student's t; infinite where one of them is 0.
    """
    if min(speeds) <= 0:
        return math.inf
    logs = [math.log(speed) for speed in speeds]
    # 1.253: a median errs so much more than a mean
    error = 1.253 * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.expm1(quantile(len(logs) - 1) * error)


def quantile(freedom: int) -> float:
    """The 95 % quantile of Student's t.

    Parameters
    ----------
    freedom : int
        Degrees of freedom; fewer than 2 count as 2.

    Returns
    -------
    float
        By the expansion of Abramowitz and Stegun 26.7.5.
    """
    z, v = 1.6449, max(2, freedom)
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)


def final_trials(profile: Profile, phase: str, setting: Setting | None = None) -> list[Trial]:
    """The trials that a setting was judged by.

    Parameters
    ----------
    profile : Profile
        Of any schema.
    phase : str
        "read", "write" or "mixed".
    setting : Setting, optional
        The chosen one unless given.

    Returns
    -------
    list of Trial
        Those of the finals that count, whatever their length.
    """
    wanted = (setting or profile.chosen, phase, "final", "")
    return [
        trial
        for trial in profile.trials
        if (trial.setting, trial.phase, trial.stage, trial.flaw) == wanted
    ]
