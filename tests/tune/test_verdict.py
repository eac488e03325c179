"""The recommendation, from recorded speeds of the finals."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS, PHASES, Setting
from nvme_offload.tune.verdict import Evidence, Observation, Result, Verdict, decide

KIB, MIB = 1 << 10, 1 << 20
ROUNDS = 4
CONTROL = {"read": 3.0e9, "write": 1.5e9, "mixed": 2.0e9}  # bytes per second
FAST = {"mixed": 1.10}
ROOMY = Setting(MIB, 32, 1)
SHALLOW = Setting(2 * MIB, 2, 1)


def finals(
    ratios: Mapping[Setting, Mapping[str, float]], scatter: float = 0.005, **scatters: float
) -> Evidence:
    """The finals in which each setting had *ratios* to the defaults by load, 1.0 for a load that is
    missing. Its runs are above and below that by the share *scatter*, alternately, or by the scatter
    of the load in *scatters*.
    """
    evidence = Evidence(DEEPSPEED_DEFAULTS)
    now = 0.0

    def run(setting: Setting, phase: str, ratio: float) -> None:
        nonlocal now
        speed = CONTROL[phase] * ratio
        read = {"read": speed, "write": 0.0, "mixed": speed / 2}[phase]
        planned = setting, phase, 1.0, "final", setting == DEEPSPEED_DEFAULTS
        result = Result(round(read), round(speed - read), 1.0)
        evidence.observations.append(Observation(*planned, result, now, now + 1))
        now += 1

    for number in range(ROUNDS):
        for phase in PHASES:
            run(DEEPSPEED_DEFAULTS, phase, 1.0)
            for place, (setting, by_phase) in enumerate(ratios.items()):
                sign = (-1) ** (number + place)
                run(
                    setting,
                    phase,
                    by_phase.get(phase, 1.0) * (1 + scatters.get(phase, scatter)) ** sign,
                )
    for phase in PHASES:
        run(DEEPSPEED_DEFAULTS, phase, 1.0)
    return evidence


def reason(verdict: Verdict) -> str:
    (found,) = [reason for reason in verdict.reasons if reason.startswith("Chosen from ")]
    return found


@pytest.mark.parametrize("load", ["read", "write"])
def test_a_setting_that_is_slower_than_the_defaults_in_one_load_is_not_recommended(
    load: str,
) -> None:
    verdict = decide(finals({SHALLOW: {**FAST, load: 0.95}, Setting(4 * MIB, 8, 1): FAST}))
    assert verdict.chosen == Setting(4 * MIB, 8, 1)
    assert all(best.relative_high >= 1 for best in verdict.performance.values())
    assert "no other finalist meets both conditions" in reason(verdict)


def test_a_setting_that_is_slower_than_the_best_in_one_load_is_not_recommended() -> None:
    """It equals the defaults, but another finalist writes 6 % faster."""
    better = Setting(2 * MIB, 16, 1)
    verdict = decide(finals({ROOMY: FAST, better: {**FAST, "write": 1.06}}))
    assert verdict.chosen == better


def test_a_loss_that_may_be_noise_does_not_exclude_a_setting() -> None:
    evidence = finals({ROOMY: {**FAST, "read": 0.985}, SHALLOW: FAST}, scatter=0.03)
    assert decide(evidence).chosen == ROOMY


@pytest.mark.parametrize(
    ("alike", "wanted"),
    [
        ((SHALLOW, Setting(256 * KIB, 64, 1), ROOMY), ROOMY),
        ((Setting(MIB, 4, 1), Setting(MIB, 16, 1)), Setting(MIB, 16, 1)),
        ((Setting(MIB, 2, 1), Setting(MIB, 64, 1)), Setting(MIB, 64, 1)),
        ((Setting(MIB, 16, 2), Setting(MIB, 16, 1)), Setting(MIB, 16, 2)),
        # threads take the CPU from training
        ((Setting(MIB, 8, 4), ROOMY), ROOMY),
        # DeepSpeed keeps tensors that are smaller than a block in RAM
        ((Setting(2 * MIB, 16, 1), Setting(512 * KIB, 64, 1)), Setting(512 * KIB, 64, 1)),
    ],
)
def test_of_equally_fast_settings_the_preferred_is_recommended(
    alike: tuple[Setting, ...], wanted: Setting
) -> None:
    verdict = decide(finals(dict.fromkeys(alike, FAST)))
    assert verdict.chosen == wanted
    assert "closest to blocks of 1 MiB with 32 MiB in flight by one thread" in reason(verdict)


def test_a_doubtful_gain_does_not_outweigh_a_loss() -> None:
    """As a sweep of one second found: the fastest step, within the noise, with slow writes."""
    slow_writes = {"mixed": 1.4, "write": 0.8}
    evidence = finals({SHALLOW: slow_writes, ROOMY: {"mixed": 1.2, "write": 1.2}}, mixed=0.3)
    verdict = decide(evidence)
    assert verdict.chosen == ROOMY
    assert "its training step cannot be distinguished from the fastest" in reason(verdict)


def test_the_defaults_are_recommended_where_each_setting_has_a_loss_and_no_gain_is_certain() -> (
    None
):
    """No setting is within 2 % of the best under every load, the defaults neither."""
    uncertain = {"mixed": 1.09, "read": 1.27, "write": 0.8}
    assert decide(finals({ROOMY: uncertain}, mixed=0.15)).chosen == DEEPSPEED_DEFAULTS


def test_the_fastest_step_decides_where_every_setting_loses_something() -> None:
    """A small loss in reading does not outweigh half of the time of a step."""
    evidence = finals({ROOMY: {"mixed": 2.0, "read": 0.9}, SHALLOW: {"mixed": 2.0, "read": 0.95}})
    verdict = decide(evidence)
    assert verdict.chosen == SHALLOW
    assert "all such settings are measurably slower than DeepSpeed's defaults" in reason(verdict)


def test_the_defaults_are_recommended_only_if_nothing_preferred_is_as_fast() -> None:
    assert decide(finals({ROOMY: {}})).chosen == ROOMY
    assert decide(finals({ROOMY: {"write": 0.9}})).chosen == DEEPSPEED_DEFAULTS
    assert decide(finals({ROOMY: {"mixed": 0.9}})).chosen == DEEPSPEED_DEFAULTS
