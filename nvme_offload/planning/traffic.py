"""Bytes between memory and a drive in a training step, and the least time that a drive takes for them.

Every step reads and writes the fp32 master and two moments of a 16-bit parameter, in the bytes of the
state format. ZeRO-Infinity also writes and reads the fp32 gradient. Parameters on the drive are read in
16 bits for the forward and for the backward pass, and written once after the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..hardware.profile import PHASES, Profile

WEIGHT_BYTES = 2  # of a parameter or a gradient in 16 bits
WIDE_BYTES = 4  # of one in fp32
# Bytes of the states of a parameter under Adam, by state format. A test compares it with
# `StateFormat.element_bytes`.
STATE_BYTES = {"exact": 12.0, "split": 10.0, "compact": 4 + 2 / 256, "compact24": 3 + 2 / 256}


class Streamed(NamedTuple):
    """Bytes to and from the drive, of a rank or of a parameter, in a step: before the update (passes_read,
    passes_written), and in it.
    """

    passes_read: float
    passes_written: float
    read: float
    written: float

    @property
    def total(self) -> float:
        """In both directions."""
        return self.passes_read + self.passes_written + self.read + self.written

    def states_written(self, trained_share: float) -> float:
        """Of `NVMeOptimizer`'s states, without weights that stream: each pass reads those that an update
        writes, and the frozen ones.
        """
        return self.written - self.passes_read / 2 * trained_share


NOTHING = Streamed(0.0, 0.0, 0.0, 0.0)
STATES = Streamed(0.0, 0.0, STATE_BYTES["exact"], STATE_BYTES["exact"])
# with ZeRO-Infinity's gradients
GRADIENTS = Streamed(0.0, 0.0, STATES.read + WIDE_BYTES, STATES.written + WIDE_BYTES)
PARAMETERS = Streamed(2 * WEIGHT_BYTES, 0.0, GRADIENTS.read, GRADIENTS.written + WEIGHT_BYTES)
# written by a step of the optimizer of 7 billion parameters, gradients in host memory
STEP_BYTES_7B = 7e9 * STATES.written


class Floor(NamedTuple):
    """The least time of a step on the drive, and which of its speeds sets it: "read", "write" or
    "mixed".
    """

    seconds: float
    bound: str


def floor(each: Streamed, parameters: float, speeds: Mapping[str, float]) -> Floor:
    """The least time for a model with *parameters*, and *each* bytes of one; reads for the passes precede
    the step.

    Units: *speeds* by phase in GB/s.
    """
    step = transfer(each.read * parameters, each.written * parameters, speeds)
    return Floor(step.seconds + each.passes_read * parameters / (speeds["read"] * 1e9), step.bound)


def transfer(read_bytes: float, written_bytes: float, speeds: Mapping[str, float]) -> Floor:
    """Reads and writes at the same time: they take as long as the slowest of reading, of writing,
    and, if there are both, of equal amounts of both through one drive and then the rest alone.

    Units: *speeds* by phase in GB/s.
    """
    seconds = {"read": read_bytes / speeds["read"], "write": written_bytes / speeds["write"]}
    if both := min(read_bytes, written_bytes):
        alone = (read_bytes - both) / speeds["read"] + (written_bytes - both) / speeds["write"]
        seconds["mixed"] = 2 * both / speeds["mixed"] + alone
    bound = max(seconds, key=lambda phase: seconds[phase])
    return Floor(seconds[bound] / 1e9, bound)


def chosen_speeds(profile: Profile) -> dict[str, float]:
    """GB/s of the chosen setting by phase; {} unless all phases were measured."""
    speeds = {
        phase: best.gb_per_s for phase, best in profile.performance.items() if best.gb_per_s > 0
    }
    return speeds if set(speeds) >= set(PHASES) else {}


def stripe_speeds(profile: Profile) -> dict[str, float]:
    """GB/s of all paths together by phase; {} for one path, or unless all phases were measured."""
    if not profile.stripe or any(
        path.together.get(phase, 0.0) <= 0 for path in profile.stripe for phase in PHASES
    ):
        return {}
    return {phase: sum(path.together[phase] for path in profile.stripe) for phase in PHASES}


def rated_bytes(profile: Profile) -> float | None:
    """The bytes that the drive can write in its rated life, estimated from its wear; None below 3 % of
    wear, which drives count in whole per cents.
    """
    health = profile.health_after or profile.health_before
    if health is None or not health.wear or not health.written_bytes or health.wear < 0.03:
        return None
    return health.written_bytes / health.wear
