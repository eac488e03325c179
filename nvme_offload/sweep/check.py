"""`nvme-sweep check`: whether the settings in a config still hold on a drive, by a brief
measurement beside the profile's best and the control.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence

from nvme_offload.hardware.profile import PHASES, Profile, Setting
from nvme_offload.hardware.profile_grade import quantile

from .progress import describe
from .verdict import ALIKE, STEP_BYTES

LEAST_ROUNDS = 3
# of a step's time on the drive, beyond noise: more, and the settings no longer hold
MOST_LOSS = 0.05


@dataclasses.dataclass(frozen=True)
class Checked:
    """What was found. *loss*: by how much a step takes longer on the drive with the config's
    setting than with the best of the others, with the middle 90 % of where it may be; *better*:
    that other setting, None when the config's is as good. speeds: bytes per second by setting and
    phase.
    """

    holds: bool
    loss: float
    loss_low: float
    loss_high: float
    better: Setting | None
    speeds: dict[Setting, dict[str, float]]


def rounds(
    settings: Sequence[Setting],
    run: Callable[[Setting, str, float], float],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[dict[tuple[Setting, str], float]]:
    """Run *settings*, interleaved, under every phase for about *seconds*, every other round the
    other way about; returns bytes per second of each round.
    """
    window = min(1.0, max(0.1, seconds / (len(settings) * len(PHASES) * 2 * LEAST_ROUNDS)))
    began = clock()
    found: list[dict[tuple[Setting, str], float]] = []
    while len(found) < LEAST_ROUNDS or (clock() - began) * (len(found) + 1) / len(found) < seconds:
        order = list(settings) if len(found) % 2 == 0 else list(reversed(settings))
        found.append(
            {(setting, phase): run(setting, phase, window) for phase in PHASES for setting in order}
        )
    return found


def judged(config: Setting, measured: Sequence[dict[tuple[Setting, str], float]]) -> Checked:
    """Whether *config* is as good as the others of *measured*, by what a training step takes on the
    drive. Pure.
    """
    settings = list(dict.fromkeys(setting for setting, _ in measured[0]))
    logs = {setting: [_step_log(each, setting) for each in measured] for setting in settings}
    best = min(settings, key=lambda setting: statistics.fmean(logs[setting]))
    gaps = [one - other for one, other in zip(logs[config], logs[best], strict=True)]
    gap = statistics.fmean(gaps)
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    reach = quantile(len(gaps) - 1) * error
    worse = gap > math.log1p(MOST_LOSS) and gap - reach > math.log1p(ALIKE)
    return Checked(
        holds=not worse,
        loss=math.expm1(gap),
        loss_low=math.expm1(gap - reach),
        loss_high=math.expm1(gap + reach),
        better=best if worse else None,
        speeds={
            setting: {
                phase: statistics.median(each[setting, phase] for each in measured)
                for phase in PHASES
            }
            for setting in settings
        },
    )


def lines(checked: Checked, config: Setting, profile: Profile) -> list[str]:
    """What to print."""
    roles = {profile.chosen: "chosen by the sweep", config: "in the config"}
    said = ["           " + "  ".join(f"{phase:>6}" for phase in PHASES) + "  GB/s"]
    for setting, speeds in checked.speeds.items():
        numbers = "  ".join(f"{speeds[phase] / 1e9:6.2f}" for phase in PHASES)
        role = (
            "in the config, and chosen by the sweep"
            if setting == config == profile.chosen
            else roles.get(setting, "DeepSpeed's defaults")
        )
        said.append(f"           {numbers}  {describe(setting)}: {role}")
    before = {phase: profile.performance[phase].gb_per_s for phase in PHASES}
    now = checked.speeds.get(profile.chosen)
    if now:
        moved = ", ".join(
            f"{phase} {100 * (now[phase] / 1e9 / before[phase] - 1):+.0f} %" for phase in PHASES
        )
        said += [
            "",
            f"The drive itself, beside the sweep of {profile.created[:10]}, at the setting chosen then: {moved}.",
        ]
    percent = [100 * value for value in (checked.loss, checked.loss_low, checked.loss_high)]
    if checked.better is None:
        said.append(
            f"The settings hold: a step takes {percent[0]:+.1f} % ({percent[1]:+.1f} to {percent[2]:+.1f} %) beside the best of these."
        )
    else:
        said.append(
            f"The settings no longer hold: a step takes {percent[0]:+.1f} % ({percent[1]:+.1f} to {percent[2]:+.1f} %) beside {describe(checked.better)}. "
            "Run nvme-sweep again with --config."
        )
    return said


def _step_log(each: dict[tuple[Setting, str], float], setting: Setting) -> float:
    return math.log(sum(STEP_BYTES[phase] / each[setting, phase] for phase in PHASES))
