"""The search on simulated drives, whose best setting is known."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvme_offload.errors import UnsupportedError
from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS, PHASES, Setting
from nvme_offload.hardware.profile_grade import LEAST_TRIAL_SECONDS
from nvme_offload.planning.traffic import STATES, floor
from nvme_offload.tune import space
from nvme_offload.tune.search import GROUP, Search
from nvme_offload.tune.verdict import ALIKE, STEP_BYTES, PlannedTrial, Result, Verdict, decide


@dataclasses.dataclass
class SimulatedDrive:
    """Its speed rises with the bytes in flight, by half at *half_bytes*, and with the block size;
    what else it does is in the other fields.

    noise: of a run of 0.2 s, as a share. drift: the factor by which the speed swings within 53 s.
    jumps: spread of changes that last some seconds. dips: the share of runs in which it all but
    stops. cliff_bytes: after so many written, writes go at a third, as behind an SLC cache.
    deep_loss: lost for each doubling over 16 MiB in flight. thread_gain: won for each doubling of
    threads.
    """

    seed: int = 0
    peak: float = 1e9
    half_bytes: float = 2 << 20
    block_bytes: float = 20_000
    noise: float = 0.05
    drift: float = 1.0
    jumps: float = 0.0
    dips: float = 0.0
    cliff_bytes: float = math.inf
    deep_loss: float = 0.0
    thread_gain: float = 0.0
    overhead_seconds: float = 0.1
    now: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.level = 0.0
        self.level_at = 0.0
        self.written = 0.0
        self.asked: list[PlannedTrial] = []

    def speed(self, setting: Setting, phase: str) -> float:
        depth = setting.bytes_in_flight
        speed = (
            self.peak
            * depth
            / (depth + self.half_bytes)
            * setting.block_size
            / (setting.block_size + self.block_bytes)
        )
        speed *= 1 - self.deep_loss * max(0.0, math.log2(depth / (16 << 20)))
        speed *= 1 + self.thread_gain * math.log2(setting.thread_count)
        return speed * {"read": 1.3, "write": 1.1, "mixed": 1.0}[phase]

    def measure(self, planned: PlannedTrial) -> Result:
        self.asked.append(planned)
        self.now += self.overhead_seconds / 2
        if self.jumps:
            kept = math.exp(-(self.now - self.level_at) / 3)
            self.level = kept * self.level + math.sqrt(1 - kept**2) * self.random.gauss(
                0, self.jumps
            )
            self.level_at = self.now
        speed = self.speed(planned.setting, planned.phase) * self.drift ** (
            0.5 - 0.5 * math.cos(self.now / 17)
        )
        speed *= math.exp(
            self.level + self.random.gauss(0, self.noise * math.sqrt(0.2 / planned.seconds))
        )
        if self.random.random() < self.dips:
            speed *= 0.3
        if planned.phase != "read" and self.written > self.cliff_bytes:
            speed *= 0.3
        self.now += planned.seconds + self.overhead_seconds / 2
        total = speed * planned.seconds
        read = {"read": total, "write": 0.0, "mixed": total / 2}[planned.phase]
        self.written += total - read
        return Result(int(read), int(total - read), planned.seconds)

    def step_seconds(self, setting: Setting) -> float:
        return sum(STEP_BYTES[phase] / self.speed(setting, phase) for phase in PHASES)

    def grid(self) -> list[Setting]:
        return space.grid("libaio", 2, self.peak)

    def sweep(self, seconds: float = 54.0, ceiling: float | None = None) -> Search:
        search = Search(self.grid(), DEEPSPEED_DEFAULTS, seconds, lambda: self.now, ceiling)
        search.run(self.measure)
        return search

    def regret(self, chosen: Setting) -> float:
        return self.step_seconds(chosen) / min(map(self.step_seconds, self.grid())) - 1


KINDS = {
    "shallow": {},
    "deep": {"half_bytes": 16 << 20},
    "very deep": {"peak": 6e9, "half_bytes": 8 << 20},
    "slow": {"peak": 2e8},
    "peaked": {"half_bytes": 4 << 20, "deep_loss": 0.08},
    "threads": {"thread_gain": 0.15},
    "drifts threefold": {"drift": 3.0},
    "falls off a cliff": {"cliff_bytes": 8e9},
    "jumps and dips": {"half_bytes": 16 << 20, "jumps": 0.2, "dips": 0.04},
}


@pytest.mark.parametrize("kind", KINDS)
def test_choice_is_nearly_the_best(kind: str) -> None:
    regrets = []
    for seed in range(20):
        simulated = SimulatedDrive(seed, **KINDS[kind])
        regrets.append(simulated.regret(decide(simulated.sweep().evidence).chosen))
    regrets.sort()
    assert regrets[17] <= 0.05, regrets
    assert regrets[-1] <= 0.12, regrets


@pytest.mark.parametrize("kind", ["shallow", "deep", "threads"])
def test_ten_seconds_give_an_answer(kind: str) -> None:
    regrets = sorted(
        simulated.regret(decide(simulated.sweep(9).evidence).chosen)
        for seed in range(10)
        for simulated in [SimulatedDrive(seed, **KINDS[kind])]
    )
    assert regrets[8] <= 0.12, regrets


def test_where_all_are_alike_the_choice_has_room_to_spare_and_claims_nothing() -> None:
    for seed in range(10):
        simulated = SimulatedDrive(seed, half_bytes=0, block_bytes=0, noise=0.01)
        verdict = decide(simulated.sweep().evidence)
        assert verdict.chosen.block_size == 1 << 20
        assert verdict.chosen.bytes_in_flight >= DEEPSPEED_DEFAULTS.bytes_in_flight
        for phase in PHASES:
            assert verdict.performance[phase].relative == pytest.approx(1, abs=0.03)


def test_the_defaults_win_where_nothing_is_better() -> None:
    simulated = SimulatedDrive(noise=0.01)
    best = simulated.speed(DEEPSPEED_DEFAULTS, "mixed")
    simulated.speed = lambda setting, phase: best * (1 if setting == DEEPSPEED_DEFAULTS else 0.8)  # type: ignore[method-assign]
    verdict = decide(simulated.sweep().evidence)
    assert verdict.chosen == DEEPSPEED_DEFAULTS
    assert {best.relative for best in verdict.performance.values()} == {1.0}
    assert any("DeepSpeed's defaults" in reason for reason in verdict.reasons)


def test_drift_cancels() -> None:
    """Every setting is as fast as the control at any moment, whatever the drive does meanwhile."""
    simulated = SimulatedDrive(half_bytes=0, block_bytes=0, noise=0.0, drift=3.0)
    trials = simulated.sweep().evidence.trials()
    speeds = [trial.gb_per_s for trial in trials if trial.phase == "mixed"]
    assert max(speeds) > 2.5 * min(speeds)
    for trial in trials:
        assert trial.relative == pytest.approx(1, abs=0.06)


def test_intervals_hold_the_truth() -> None:
    held = 0
    for seed in range(40):
        simulated = SimulatedDrive(seed, half_bytes=8 << 20, drift=2.0)
        best = decide(simulated.sweep().evidence).best["mixed"]
        assert best.relative_low < best.relative < best.relative_high
        truth = simulated.speed(best.setting, "mixed") / simulated.speed(
            DEEPSPEED_DEFAULTS, "mixed"
        )
        held += best.relative_low <= truth <= best.relative_high
    assert held >= 32  # 90 %, less what being picked as the best flatters it


def test_the_control_is_never_far() -> None:
    simulated = SimulatedDrive()
    simulated.sweep()
    since = 0
    for planned in simulated.asked:
        since = 0 if planned.control else since + 1
        assert since <= GROUP * len(PHASES)
        assert planned.control == (planned.setting == DEEPSPEED_DEFAULTS)
    for phase in PHASES:
        assert sum(planned.control and planned.phase == phase for planned in simulated.asked) >= 5


def test_trials_between_jumps_of_the_control_are_repeated() -> None:
    simulated = SimulatedDrive(noise=0.0)
    speed = simulated.speed
    simulated.speed = lambda setting, phase: (
        speed(setting, phase) * (0.4 if simulated.now > 6 else 1)
    )  # type: ignore[method-assign]
    search = simulated.sweep()
    drifted = [seen for seen in search.evidence.observations if seen.flaw == "drifted"]
    assert drifted
    assert not any(planned.control for planned in drifted)
    for planned in drifted:
        again = [
            seen
            for seen in search.evidence.observations
            if seen.setting == planned.setting and seen.phase == planned.phase and not seen.flaw
        ]
        assert again
        for trial in search.evidence.trials():
            if (
                trial.setting == planned.setting
                and trial.stage == planned.stage
                and not (trial.control or trial.flaw)
            ):
                truth = speed(trial.setting, trial.phase) / speed(DEEPSPEED_DEFAULTS, trial.phase)
                assert trial.relative == pytest.approx(truth, rel=0.01)
    assert [trial.flaw for trial in search.evidence.trials()].count("drifted") == len(drifted)


def test_what_the_link_cannot_carry_is_left_out() -> None:
    simulated = SimulatedDrive()
    speed = simulated.speed
    impostor = Setting(1 << 20, 32, 1)
    simulated.speed = lambda setting, phase: 22e9 if setting == impostor else speed(setting, phase)  # type: ignore[method-assign]
    search = simulated.sweep(ceiling=4e9)
    verdict = decide(search.evidence)
    assert impostor in {planned.setting for planned in simulated.asked}
    assert impostor not in {verdict.chosen, *(best.setting for best in verdict.best.values())}
    assert {trial.flaw for trial in search.evidence.trials() if trial.setting == impostor} == {
        "impossible"
    }
    assert any("faster than the drive's link" in warning for warning in verdict.warnings)


def test_nothing_but_cache_is_an_error() -> None:
    search = SimulatedDrive(peak=30e9).sweep(ceiling=4e9)
    with pytest.raises(UnsupportedError, match="faster than the drive's link"):
        decide(search.evidence)


def test_steady_is_said_of_a_steady_drive_only() -> None:
    quiet = decide(SimulatedDrive(noise=0.01).sweep().evidence)
    assert quiet.steady
    assert not quiet.warnings
    for wild in (SimulatedDrive(jumps=0.4), SimulatedDrive(noise=0.3)):
        verdict = decide(wild.sweep().evidence)
        assert not verdict.steady
        assert any("did not become steady" in warning for warning in verdict.warnings)


def test_every_speed_is_at_the_level_that_its_ratio_is_of() -> None:
    """The chosen setting and the best come from the same finals: the quotient of two speeds equals
    the quotient of their ratios, the best is never slower than the chosen one, and both were
    candidates.
    """
    for seed in range(20):
        simulated = SimulatedDrive(seed, half_bytes=16 << 20, jumps=0.3, drift=2.0)
        verdict = decide(simulated.sweep().evidence)
        for phase in PHASES:
            chosen, best = verdict.performance[phase], verdict.best[phase]
            assert best.gb_per_s / chosen.gb_per_s == pytest.approx(best.relative / chosen.relative)
            assert best.gb_per_s >= chosen.gb_per_s
            assert chosen in verdict.finals[phase]
            assert best == max(verdict.finals[phase], key=lambda one: one.relative)
            # no setting that ran under one load only
            others = {other.setting for other in verdict.finals["mixed"]}
            assert {one.setting for one in verdict.finals[phase]} == others


def test_what_a_report_has_as_slower_than_the_defaults_is_not_chosen() -> None:
    """In the time that `plan` and the report say a step takes, which one slow load can set."""
    drives = [SimulatedDrive(seed, half_bytes=16 << 20, jumps=0.5, noise=0.3) for seed in range(20)]
    writes_badly = SimulatedDrive(half_bytes=16 << 20)
    speed = writes_badly.speed
    writes_badly.speed = lambda setting, phase: (  # type: ignore[method-assign]
        speed(setting, phase) * (0.15 if phase == "write" and setting != DEEPSPEED_DEFAULTS else 1)
    )
    for simulated in [*drives, writes_badly]:
        verdict = decide(simulated.sweep(12.0).evidence)
        chosen = {phase: best.gb_per_s for phase, best in verdict.performance.items()}
        defaults = {
            phase: best.gb_per_s / best.relative for phase, best in verdict.performance.items()
        }
        slower = floor(STATES, 1, chosen).seconds / floor(STATES, 1, defaults).seconds
        assert slower <= 1 + ALIKE
    assert verdict.chosen == DEEPSPEED_DEFAULTS


def test_a_setting_with_a_far_shorter_step_is_rejected_only_if_it_is_slow_under_some_load() -> None:
    for seed in range(20):
        simulated = SimulatedDrive(seed, half_bytes=16 << 20, jumps=0.3)
        verdict = decide(simulated.sweep().evidence)

        def step(setting: Setting, verdict: Verdict = verdict) -> float:
            speeds = {
                phase: next(one for one in found if one.setting == setting).gb_per_s
                for phase, found in verdict.finals.items()
            }
            return sum(STEP_BYTES[phase] / speed for phase, speed in speeds.items())

        fastest = min(map(step, (one.setting for one in verdict.finals["mixed"])))
        near = step(verdict.chosen) <= 1.031 * fastest
        assert near or "cannot be distinguished from the fastest" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("seconds", "rounds"), [(8, 2), (15, 2), (20, 2), (35, 4), (54, 4), (300, 4)]
)
def test_the_finals_have_whole_windows_where_there_is_the_time(seconds: float, rounds: int) -> None:
    simulated = SimulatedDrive()
    search = simulated.sweep(seconds)
    chosen = decide(search.evidence).chosen
    finals = [
        seen
        for seen in search.evidence.observations
        if seen.stage == "final" and seen.setting == chosen and not seen.flaw
    ]
    whole = [seen.phase for seen in finals if seen.result.seconds >= LEAST_TRIAL_SECONDS]
    assert len(whole) == len(finals) or seconds == 8
    assert whole.count("mixed") >= (rounds if seconds > 8 else 0)


@pytest.mark.parametrize("ranks", [1, 4])
def test_reasons_explain_the_choice(ranks: int) -> None:
    for seed in range(10):
        verdict = decide(SimulatedDrive(seed).sweep().evidence, ranks)
        assert sum(reason.startswith("Chosen from ") for reason in verdict.reasons) == 1
        assert any(reason.startswith("4 ranks") for reason in verdict.reasons) == (ranks > 1)
        large = verdict.chosen.block_size > 1 << 20
        assert large == any("keeps tensors smaller" in reason for reason in verdict.reasons)


@settings(max_examples=60, deadline=None)
@given(
    seconds=st.floats(1, 200),
    peak=st.floats(1e8, 20e9),
    overhead=st.floats(0.0, 0.5),
    noise=st.floats(0, 0.4),
    dips=st.floats(0, 0.2),
    seed=st.integers(0, 1000),
)
def test_any_drive_gets_a_whole_answer_in_time(
    seconds: float, peak: float, overhead: float, noise: float, dips: float, seed: int
) -> None:
    simulated = SimulatedDrive(seed, peak=peak, overhead_seconds=overhead, noise=noise, dips=dips)
    search = simulated.sweep(seconds)
    verdict = decide(search.evidence)
    assert verdict.chosen in [*simulated.grid(), DEEPSPEED_DEFAULTS]
    assert set(verdict.best) == set(verdict.performance) == set(PHASES)
    for phase in PHASES:
        assert verdict.performance[phase].setting == verdict.chosen
        assert verdict.best[phase].relative >= verdict.performance[phase].relative
    # A round of the finals may begin just before the end, and even a second of budget gets two of
    # them.
    assert simulated.now <= 1.1 * seconds + 45 * (0.2 + overhead)
    assert search.seconds_left() == pytest.approx(max(0.0, seconds - simulated.now))
