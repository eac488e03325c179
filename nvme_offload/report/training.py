"""What a drive's speeds mean for training: the bytes of a step, the time that they take at the least, and the wear. Pure.

Mixed-precision Adam keeps 12 bytes of state for each parameter (fp32 master, two moments), which every step reads and writes. ZeRO-Infinity also
passes the fp32 gradient through the drive, 4 more each way. Parameters on the drive are read in 16 bits for the forward and for the backward
pass, and written once after the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nvme_offload.profile import PHASES, Profile

from .summary import control_gb_per_s

MODELS = (7e9, 13e9, 70e9)
GPUS = 8  # of a large node, beside a machine with one
LIFE_BYTES = 100e12  # what wear is told for where a drive does not say what it is rated for


class Load(NamedTuple):
    """What of a training is on the drive: bytes for each parameter, in the optimizer step and in the passes before it."""

    name: str
    step_read: int
    step_write: int
    passes_read: int


STATES = Load("Optimizer states; gradients stay in host memory", 12, 12, 0)
GRADIENTS = Load("Optimizer states and gradients (ZeRO-Infinity)", 16, 16, 0)
PARAMETERS = Load("Optimizer states, gradients and parameters", 16, 18, 4)
LOADS = (STATES, GRADIENTS, PARAMETERS)


class Floor(NamedTuple):
    """The least time of a step on the drive, and which of its speeds sets it: "read", "write" or "mixed"."""

    seconds: float
    bound: str


def floor(load: Load, parameters: float, speeds: Mapping[str, float]) -> Floor:
    """Reads and writes of the step overlap: it takes as long as the slowest of reading, of writing, and of both through one drive.

    Reads for the passes come before.

    Units: *speeds* by phase in GB/s.
    """
    bytes_by_phase = {"read": load.step_read, "write": load.step_write, "mixed": load.step_read + load.step_write}
    seconds = {phase: amount * parameters / (speeds[phase] * 1e9) for phase, amount in bytes_by_phase.items()}
    bound = max(seconds, key=lambda phase: seconds[phase])
    return Floor(seconds[bound] + load.passes_read * parameters / (speeds["read"] * 1e9), bound)


class Step(NamedTuple):
    """An optimizer step on a node with *gpus* ranks that share *drives* alike drives; bytes of both directions together."""

    parameters: float
    gpus: int
    drives: int
    rank_bytes: float
    drive_bytes: float
    seconds: float
    default_seconds: float


def chosen_speeds(profile: Profile) -> dict[str, float]:
    """GB/s of the chosen setting by phase; {} unless all phases were measured."""
    speeds = {phase: best.gb_per_s for phase, best in profile.performance.items() if best.gb_per_s > 0}
    return speeds if set(speeds) >= set(PHASES) else {}


def default_speeds(profile: Profile) -> dict[str, float]:
    """GB/s of the control by phase; {} unless all phases were measured."""
    speeds = {phase: speed for phase in PHASES if (speed := control_gb_per_s(profile, phase))}
    return speeds if set(speeds) >= set(PHASES) else {}


def steps(profile: Profile, load: Load = GRADIENTS, models: Sequence[float] = MODELS) -> list[Step]:
    """Each model on one GPU, on eight that share the drive, and on eight with a drive each; nothing without all three speeds."""
    chosen, defaults = chosen_speeds(profile), default_speeds(profile)
    if not chosen or not defaults:
        return []
    found = []
    for parameters in models:
        total = parameters * (load.step_read + load.step_write + load.passes_read)
        before, after = (floor(load, parameters, speeds).seconds for speeds in (defaults, chosen))
        for gpus, drives in ((1, 1), (GPUS, 1), (GPUS, GPUS)):
            found.append(Step(parameters, gpus, drives, total / gpus, total / drives, after / drives, before / drives))
    return found


def stripe_speeds(profile: Profile) -> dict[str, float]:
    """GB/s of all paths together by phase; {} for one path, or unless all phases were measured."""
    if not profile.stripe or any(path.together.get(phase, 0.0) <= 0 for path in profile.stripe for phase in PHASES):
        return {}
    return {phase: sum(path.together[phase] for path in profile.stripe) for phase in PHASES}


class Wear(NamedTuple):
    """What a step of a model writes to one drive, and the steps until *LIFE_BYTES* are written."""

    parameters: float
    written_bytes: float
    steps: float


def wear(load: Load = GRADIENTS, models: Sequence[float] = MODELS) -> list[Wear]:
    """By model."""
    return [Wear(parameters, parameters * load.step_write, LIFE_BYTES / (parameters * load.step_write)) for parameters in models]


def life_seconds(profile: Profile, load: Load = GRADIENTS) -> float | None:
    """How soon *LIFE_BYTES* are written by a drive that does nothing but steps; None without all three speeds."""
    speeds = chosen_speeds(profile)
    return floor(load, LIFE_BYTES / load.step_write, speeds).seconds if speeds else None


def rated_bytes(profile: Profile) -> float | None:
    """What the drive is rated to write in its life, by what it says of its wear so far; None while it cannot tell, which takes a few per cent."""
    health = profile.health_after or profile.health_before
    if health is None or not health.wear or not health.written_bytes or health.wear < 0.03:
        return None
    return health.written_bytes / health.wear
