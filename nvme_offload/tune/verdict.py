"""The evaluation of trials: the gain of each setting over the control, and the setting to
recommend.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from nvme_offload.errors import UnsupportedError
from nvme_offload.hardware.profile import PHASES, Best, Setting, Trial
from nvme_offload.hardware.profile_grade import quantile
from nvme_offload.planning.traffic import GRADIENTS, PARAMETERS, STATES, floor
from nvme_offload.units import format_bytes

from . import steady
from .space import PREFERRED_BLOCK_SIZE, PREFERRED_BYTES_IN_FLIGHT, preference

# Bytes of a training step for each parameter, by load: the optimizer reads and writes at the same
# time, the passes before it read.
STEP_BYTES = {
    "read": PARAMETERS.passes_read,
    "write": PARAMETERS.written - GRADIENTS.written,
    "mixed": GRADIENTS.read + GRADIENTS.written,
}

ALIKE = 0.02  # a smaller difference does not matter
DOUBTFUL = 0.03  # the largest difference that may count as noise


class Result(NamedTuple):
    """The transfers of a trial in *seconds*; or, at a time of CLOCK_MONOTONIC, those so far."""

    read_bytes: int
    write_bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Both directions together."""
        return (self.read_bytes + self.write_bytes) / self.seconds

    def moved(self, direction: str) -> int:
        """The bytes of one direction."""
        return self.read_bytes if direction == "read" else self.write_bytes


@dataclasses.dataclass
class PlannedTrial:
    """A trial to run: *setting* under the load *phase* for a window of *seconds*."""

    setting: Setting
    phase: str
    seconds: float
    stage: str
    control: bool


@dataclasses.dataclass
class Observation(PlannedTrial):
    """A trial that ran. *flaw*: "", "drifted" when the drive's speed jumped, "impossible" when it
    was too fast.
    """

    result: Result
    started_seconds: float
    ended_seconds: float
    flaw: str = ""

    @property
    def at_seconds(self) -> float:
        """The middle of the trial."""
        return (self.started_seconds + self.ended_seconds) / 2


class Evidence:
    """The trials so far, and their evaluation by setting."""

    def __init__(self, control: Setting) -> None:
        self.control = control
        self.observations: list[Observation] = []

    def control_series(self, phase: str, stage: str | None = None) -> list[tuple[float, float]]:
        """(seconds, bytes a second) of the control's runs under *phase*, of one *stage* or all."""
        return [
            (seen.at_seconds, seen.result.bytes_per_second)
            for seen in self.observations
            if seen.control
            and seen.phase == phase
            and seen.flaw != "impossible"
            and stage in (None, seen.stage)
        ]

    def relatives(
        self, phase: str, stage: str | None = None
    ) -> dict[Setting, list[tuple[float, float]]]:
        """By setting: (log of the ratio to the control, seconds of the window) of its sound trials."""
        found: dict[Setting, list[tuple[float, float]]] = {}
        series = self.control_series(phase)
        for seen in self.observations if series else ():
            if seen.phase != phase or seen.control or seen.flaw:
                continue
            if stage in (None, seen.stage):
                ratio = seen.result.bytes_per_second / steady.control_at(seen.at_seconds, series)
                value = math.log(ratio), seen.result.seconds
                found.setdefault(seen.setting, []).append(value)
        return found

    def gains(self, phase: str) -> dict[Setting, float]:
        """By setting: the mean log of its ratio to the control, weighted by the seconds of its trials."""
        return {
            setting: sum(value * seconds for value, seconds in values)
            / sum(seconds for _, seconds in values)
            for setting, values in self.relatives(phase).items()
        }

    def step_seconds(self) -> dict[Setting, float]:
        """By setting, the control included: the drive's seconds in a training step for each
        parameter, at the median speed of the control. A load that was not tried with a setting has
        its gain under the mixed load.
        """
        gains = {phase: self.gains(phase) for phase in PHASES}
        speeds = self.control_speeds()
        if "mixed" not in speeds:
            return {}
        costs = {
            setting: sum(
                STEP_BYTES[phase] / speed * math.exp(-gains[phase].get(setting, mixed))
                for phase, speed in speeds.items()
            )
            for setting, mixed in gains["mixed"].items()
        }
        costs[self.control] = sum(STEP_BYTES[phase] / speed for phase, speed in speeds.items())
        return costs

    def control_speeds(self, stage: str | None = None) -> dict[str, float]:
        """By phase: the median of the control's speeds, of one *stage* or all."""
        series = {phase: self.control_series(phase, stage) for phase in PHASES}
        return {
            phase: statistics.median(speed for _, speed in points)
            for phase, points in series.items()
            if points
        }

    def noise(self, phase: str) -> float:
        """The spread of one run, as a share of its speed: from neighbouring runs of the control."""
        logs = [math.log(speed) for _, speed in self.control_series(phase)]
        steps = [abs(after - before) for before, after in itertools.pairwise(logs)]
        # the median of |x - y| is 0.954 standard deviations of x
        return statistics.median(steps) / 0.954 if steps else 0.05

    def trials(self) -> tuple[Trial, ...]:
        """All trials, for the profile."""
        series = {phase: self.control_series(phase) for phase in PHASES}
        return tuple(_trial(seen, series[seen.phase]) for seen in self.observations)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a sweep; the fields are as in `Profile`."""

    chosen: Setting
    best: dict[str, Best]
    performance: dict[str, Best]
    finals: dict[str, tuple[Best, ...]]
    reasons: tuple[str, ...]
    steady: bool
    warnings: tuple[str, ...]


def decide(evidence: Evidence, ranks: int = 1) -> Verdict:
    """Judge the finals, in which each of *ranks* ran the setting. Raises: UnsupportedError."""
    # all results of the finals refer to one level of the drive
    speeds = evidence.control_speeds() | evidence.control_speeds("final")
    gains = {phase: _final_gains(evidence, phase) for phase in PHASES}
    candidates = [
        setting for setting in gains["mixed"] if all(setting in gains[phase] for phase in PHASES)
    ]
    if not candidates:  # no setting completed the finals without a flaw
        raise UnsupportedError(
            "the transfers were faster than the drive's link allows, so a cache answers them: sweep the drive without that cache"
        )
    finals = {
        phase: {
            setting: _best(setting, gains[phase], evidence.control, speeds[phase])
            for setting in candidates
        }
        for phase in PHASES
    }
    costs = {
        setting: _step_cost({phase: gains[phase][setting] for phase in PHASES}, speeds)
        for setting in candidates
    }
    # the time of a step as in the report, which a single slow load can determine
    steps = {
        setting: floor(STATES, 1.0, {phase: finals[phase][setting].gb_per_s for phase in PHASES})
        for setting in candidates
    }
    most = steps[evidence.control].seconds * (1 + ALIKE)
    gaining = [setting for setting in candidates if steps[setting].seconds <= most]
    chosen, why = _choose(gaining, costs, gains, evidence.control)
    series = {phase: [speed for _, speed in evidence.control_series(phase)] for phase in PHASES}
    steadiness = {phase: steady.judge(each) for phase, each in series.items()}
    return Verdict(
        chosen=chosen,
        best={
            phase: max(each.values(), key=lambda one: one.relative)
            for phase, each in finals.items()
        },
        performance={phase: each[chosen] for phase, each in finals.items()},
        finals={phase: tuple(each.values()) for phase, each in finals.items()},
        reasons=tuple(_reasons(evidence, chosen, why, len(costs), ranks)),
        steady=all(state.steady for state in steadiness.values()),
        warnings=tuple(_warnings(evidence, steadiness)),
    )


@dataclasses.dataclass(frozen=True)
class _Estimate:
    """A logarithm, its standard error in comparisons between finalists, and that error's degrees of
    freedom.
    """

    value: float
    error: float
    freedom: int


def _final_gains(evidence: Evidence, phase: str) -> dict[Setting, _Estimate]:
    """The log of each finalist's ratio to the control; for the control 0, with the error common to
    all ratios.
    """
    logs = {
        setting: [value for value, _ in values]
        for setting, values in evidence.relatives(phase, "final").items()
    }
    rounds = min((len(values) for values in logs.values()), default=0)
    if not rounds:
        return {}
    # the drive's change between the finalists and the control is not a difference between finalists
    common = [
        statistics.fmean(values[index] for values in logs.values()) for index in range(rounds)
    ]
    level = statistics.median(common)
    own = {
        setting: [value - shared for value, shared in zip(values, common, strict=False)]
        for setting, values in logs.items()
    }
    # the scatter of all finalists together, because one has few runs
    freedom = (rounds - 1) * max(1, len(logs) - 1)
    squares = sum(
        (value - statistics.fmean(values)) ** 2 for values in own.values() for value in values
    )
    noise = 1.22 * evidence.noise(phase)  # of a ratio to the mean of two runs
    scatter = math.sqrt(squares / freedom) if freedom else noise
    # 1.253: standard errors, median over mean
    median_error = (1.253 if rounds > 2 else 1.0) / math.sqrt(rounds)
    common_error = statistics.stdev(common) if rounds > 1 else noise
    control = _Estimate(0.0, median_error * common_error, max(1, rounds - 1))
    return {evidence.control: control} | {
        setting: _Estimate(level + statistics.median(values), median_error * scatter, freedom)
        for setting, values in own.items()
    }


def _step_cost(gains: dict[str, _Estimate], speeds: dict[str, float]) -> _Estimate:
    """The drive's seconds in a training step for each parameter."""
    seconds = {
        phase: STEP_BYTES[phase] / (speeds[phase] * math.exp(gain.value))
        for phase, gain in gains.items()
    }
    total = sum(seconds.values())
    error = math.hypot(*(seconds[phase] / total * gain.error for phase, gain in gains.items()))
    return _Estimate(math.log(total), error, gains["mixed"].freedom)


def _reach(one: _Estimate, other: _Estimate) -> float:
    """Half of the 90 % interval of their difference."""
    return quantile(min(one.freedom, other.freedom)) * math.hypot(one.error, other.error)


def _alike(one: _Estimate, best: _Estimate) -> bool:
    """Whether *one* is not significantly dearer than *best*."""
    gap = one.value - best.value
    return gap <= math.log1p(ALIKE) or (_doubtful(one, best) and gap <= math.log1p(DOUBTFUL))


def _doubtful(one: _Estimate, best: _Estimate) -> bool:
    return one.value - best.value <= _reach(one, best)


def _choose(
    settings: Sequence[Setting],
    costs: dict[Setting, _Estimate],
    gains: dict[str, dict[Setting, _Estimate]],
    control: Setting,
) -> tuple[Setting, str]:
    """The setting to recommend, by the rules of docs/tuning.md, and the end of a sentence on why."""
    fastest = min(settings, key=lambda setting: costs[setting].value)
    near = [setting for setting in settings if _alike(costs[setting], costs[fastest])]
    doubtful = [setting for setting in settings if _doubtful(costs[setting], costs[fastest])]

    def below(setting: Setting, *, best: bool = False) -> float:
        """How far it is below the defaults under some load, or also 98 % of the *best*."""
        gaps = [_below(found[setting], found[control]) for found in gains.values()]
        for found in gains.values() if best else ():
            top = max(found.values(), key=lambda one: one.value)
            gaps.append(_below(found[setting], top, margin=ALIKE))
        return max(gaps)

    steps = {
        f"takes at most {100 * DOUBTFUL:.0f} % longer than the fastest": near,
        "cannot be distinguished from the fastest": doubtful,
    }
    bounds = {"DeepSpeed's defaults or than 98 % of the best": True, "DeepSpeed's defaults": False}
    for (bound, best), (step, pool) in itertools.product(bounds.items(), steps.items()):
        remaining = [setting for setting in pool if not below(setting, best=best)]
        if remaining:
            place = (
                f"of the {len(remaining)} such settings it is the closest to blocks of "
                f"{format_bytes(PREFERRED_BLOCK_SIZE)} with {format_bytes(PREFERRED_BYTES_IN_FLIGHT)} in flight by one thread"
                if len(remaining) > 1
                else "no other finalist meets both conditions"
            )
            said = f"{step}, it is not measurably slower than {bound} under any load, and {place}"
            return min(remaining, key=preference), said
    return (
        min(near, key=lambda setting: (below(setting), preference(setting))),
        f"{next(iter(steps))}, and all such settings are measurably slower than DeepSpeed's defaults "
        "under some load, this one the least",
    )


def _below(one: _Estimate, other: _Estimate, margin: float = 0.0) -> float:
    """How far *one* is measurably below *other* less the share *margin*, as the log of a ratio."""
    if one is other:
        return 0.0
    return max(0.0, other.value + math.log1p(-margin) - one.value - _reach(one, other))


def _best(
    setting: Setting, gains: dict[Setting, _Estimate], control: Setting, control_speed: float
) -> Best:
    """The `Best` of *setting*; *control_speed* is in bytes per second."""
    gain = gains[setting].value
    reach = _reach(gains[setting], gains[control]) if setting != control else 0.0
    return Best(
        **dataclasses.asdict(setting),
        gb_per_s=control_speed * math.exp(gain) / 1e9,
        relative=math.exp(gain),
        relative_low=math.exp(gain - reach),
        relative_high=math.exp(gain + reach),
    )


def _reasons(
    evidence: Evidence, chosen: Setting, why: str, finalists: int, ranks: int
) -> list[str]:
    tried = len({seen.setting for seen in evidence.observations})
    reasons = [
        f"Chosen from {finalists} finalists of {tried} settings tried: its training step {why}."
    ]
    if ranks > 1:
        reasons.append(
            f"{ranks} ranks, which are processes, ran each setting at the same time on separate files; speeds are sums."
        )
    if chosen == evidence.control:
        reasons.append("These are DeepSpeed's defaults: no finalist is measurably better.")
    if chosen.block_size > 1 << 20:
        reasons.append(
            f"DeepSpeed keeps tensors smaller than block_size in RAM: here those under {format_bytes(chosen.block_size)}."
        )
    return reasons


def _warnings(evidence: Evidence, steadiness: dict[str, steady.Steadiness]) -> list[str]:
    warnings = []
    unsteady = {phase: state for phase, state in steadiness.items() if not state.steady}
    if unsteady:
        spans = ", ".join(f"{phase} {100 * state.range:.0f} %" for phase, state in unsteady.items())
        warnings.append(
            f"The drive did not become steady: in the last runs the speed of DeepSpeed's defaults ranged over a share of its mean: {spans} "
            "(at most 20 %, with a slope of at most 10 %, counts as steady). Ratios compare each setting with runs of the defaults next to it."
        )
    impossible = sum(seen.flaw == "impossible" for seen in evidence.observations)
    if impossible:
        warnings.append(
            f"{impossible} of {len(evidence.observations)} runs were faster than the drive's link allows: a cache answered. "
            "They were left out."
        )
    return warnings


def _trial(seen: Observation, series: list[tuple[float, float]]) -> Trial:
    result = seen.result
    relative = (
        result.bytes_per_second / steady.control_at(seen.at_seconds, series)
        if series and not seen.control
        else 1.0
    )
    return Trial(
        phase=seen.phase,
        **dataclasses.asdict(seen.setting),
        bytes=result.read_bytes + result.write_bytes,
        seconds=result.seconds,
        gb_per_s=result.bytes_per_second / 1e9,
        read_gb_per_s=result.read_bytes / result.seconds / 1e9,
        write_gb_per_s=result.write_bytes / result.seconds / 1e9,
        stage=seen.stage,
        control=seen.control,
        relative=relative,
        started_seconds=seen.started_seconds,
        flaw=seen.flaw,
    )
