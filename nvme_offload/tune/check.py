"""`nvme-sweep check`: a brief measurement of the settings in use, interleaved with the setting that the
sweep chose and the control.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from nvme_offload.ds_config import edit as ds_config
from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS, PHASES, Profile, Setting
from nvme_offload.hardware.profile_grade import quantile

from .verdict import ALIKE, STEP_BYTES

LEAST_ROUNDS = 3
# an unsteady drive is measured for at most this multiple of the given time
MOST_PATIENCE = 4
# of a step's time on the drive: with a larger loss, beyond noise, the settings no longer hold
MOST_LOSS = 0.05


@dataclasses.dataclass(frozen=True)
class Checked:
    """*holds* is None where the drive is too unsteady for a result. *loss*: how much longer a step takes on
    the drive with the config's setting than with the best alternative, with its 90 % interval; *better*:
    that alternative, if the config no longer holds. speeds: bytes per second by setting and phase.
    """

    holds: bool | None
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
    """Run *settings*, the config's first, interleaved, under every phase, for about *seconds* or until
    there is a result, but at most `MOST_PATIENCE` times as long. Returns bytes per second of each round.
    """
    window = min(1.0, max(0.1, seconds / (len(settings) * len(PHASES) * 2 * LEAST_ROUNDS)))
    began = clock()
    found: list[dict[tuple[Setting, str], float]] = []

    def enough() -> bool:
        if len(found) < LEAST_ROUNDS:
            return False
        after_another = (clock() - began) * (len(found) + 1) / len(found)
        if judged(settings[0], found).holds is None:
            return after_another >= MOST_PATIENCE * seconds
        return after_another >= seconds

    while not enough():
        order = list(settings) if len(found) % 2 == 0 else list(reversed(settings))
        found.append(
            {(setting, phase): run(setting, phase, window) for phase in PHASES for setting in order}
        )
    return found


def judged(config: Setting, measured: Sequence[dict[tuple[Setting, str], float]]) -> Checked:
    """Compare *config* with the other settings by the time of a training step on the drive."""
    settings = list(dict.fromkeys(setting for setting, _ in measured[0]))
    # a config that was measured alone is compared with itself
    others = [setting for setting in settings if setting != config] or [config]
    gaps = {other: _gap(config, other, measured) for other in others}
    best = max(others, key=lambda other: gaps[other][0])
    gap, reach = gaps[best]
    worse = gap > math.log1p(MOST_LOSS) and gap - reach > math.log1p(ALIKE)
    # the interval must exclude a loss of twice the limit
    unclear = any(sum(each) > math.log1p(2 * MOST_LOSS) for each in gaps.values())
    speeds = {
        setting: {
            phase: statistics.median(each[setting, phase] for each in measured) for phase in PHASES
        }
        for setting in settings
    }
    holds = False if worse else None if unclear else True
    loss, low, high = (math.expm1(each) for each in (gap, gap - reach, gap + reach))
    return Checked(holds, loss, low, high, best if worse else None, speeds)


def setting_of(aio: dict[str, Any], backend: str = "libaio") -> Setting:
    """The setting of an aio section, with DeepSpeed's defaults for missing keys. Raises: UsageError."""
    defaults = ds_config.aio_section(DEEPSPEED_DEFAULTS)
    given = {key: value for key, value in aio.items() if key in defaults}
    known: dict[str, Any] = ds_config.aio_section({**defaults, **given})
    threads = known.pop("intra_op_parallelism")
    return Setting(**known, thread_count=threads, backend=backend)


def lines(checked: Checked, config: Setting | None, profile: Profile) -> list[str]:
    """What to print. *config*: the setting of the config, if one is checked."""
    roles = {profile.chosen: "chosen by the sweep", config: "in the config"}
    said = ["           " + "  ".join(f"{phase:>6}" for phase in PHASES) + "  GB/s"]
    for setting, speeds in checked.speeds.items():
        numbers = "  ".join(f"{speeds[phase] / 1e9:6.2f}" for phase in PHASES)
        role = (
            "in the config, and chosen by the sweep"
            if setting == config == profile.chosen
            else roles.get(setting, "DeepSpeed's defaults")
        )
        said.append(f"           {numbers}  {setting}: {role}")
    before = {phase: profile.performance[phase].gb_per_s for phase in PHASES}
    now = checked.speeds.get(profile.chosen)
    if now:
        moved = ", ".join(
            f"{phase} {100 * (now[phase] / 1e9 / before[phase] - 1):+.0f} %" for phase in PHASES
        )
        said += [
            "",
            f"The drive itself, compared with the sweep of {profile.created[:10]}, at the setting chosen then: {moved}.",
        ]
    if len(checked.speeds) == 1:
        said.append(
            "The settings hold: the sweep chose DeepSpeed's defaults, and no other setting was measured."
        )
        return said
    loss, low, high = (100 * value for value in (checked.loss, checked.loss_low, checked.loss_high))
    sign = "less" if loss < 0 else "more"
    takes = f"a step takes {abs(loss):.1f} % {sign} time ({low:+.1f} to {high:+.1f} %) than with"
    if checked.better is not None:
        said.append(
            f"The settings no longer hold: {takes} {checked.better}. "
            f"Run nvme-sweep again{'' if config is None else ' with --config'}."
        )
    elif checked.holds:
        said.append(f"The settings hold: {takes} the best alternative.")
    else:
        said.append(
            f"The drive is too unsteady for a result: {takes} the best alternative. "
            "Check again while nothing else uses it, or with more --seconds."
        )
    return said


def _gap(
    config: Setting, other: Setting, measured: Sequence[dict[tuple[Setting, str], float]]
) -> tuple[float, float]:
    """The mean of log(a step's time with *config* / with *other*), and half of its 90 % interval."""
    gaps = [_step_log(each, config) - _step_log(each, other) for each in measured]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    return statistics.fmean(gaps), quantile(len(gaps) - 1) * error


def _step_log(each: dict[tuple[Setting, str], float], setting: Setting) -> float:
    return math.log(sum(STEP_BYTES[phase] / each[setting, phase] for phase in PHASES))
