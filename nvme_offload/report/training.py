"""Training with the drive's speeds: steps of models of three sizes, and wear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nvme_offload.hardware.profile import PHASES, Profile
from nvme_offload.planning.traffic import STATES, Load, chosen_speeds, floor

from .summary import control_gb_per_s

# the default load of a report
LOAD = STATES
MODELS = (7e9, 13e9, 70e9)
GPUS = 8  # of a large node; the other rows are for one GPU
LIFE_BYTES = 100e12  # for drives that do not report their rated life


class Step(NamedTuple):
    """An optimizer step on a node with *gpus* ranks that share *drives* alike drives; bytes of both
    directions together.
    """

    parameters: float
    gpus: int
    drives: int
    rank_bytes: float
    drive_bytes: float
    seconds: float
    default_seconds: float


def default_speeds(profile: Profile) -> dict[str, float]:
    """GB/s of the control by phase; {} unless all phases were measured."""
    speeds = {phase: speed for phase in PHASES if (speed := control_gb_per_s(profile, phase))}
    return speeds if set(speeds) >= set(PHASES) else {}


def steps(profile: Profile, load: Load = LOAD, models: Sequence[float] = MODELS) -> list[Step]:
    """Each model on one GPU, on eight that share the drive, and on eight with a drive each; nothing
    without all three speeds.
    """
    chosen, defaults = chosen_speeds(profile), default_speeds(profile)
    if not chosen or not defaults:
        return []
    found = []
    for parameters in models:
        total = parameters * (load.step_read + load.step_write + load.passes_read)
        before, after = (floor(load, parameters, speeds).seconds for speeds in (defaults, chosen))
        for gpus, drives in ((1, 1), (GPUS, 1), (GPUS, GPUS)):
            found.append(
                Step(
                    parameters,
                    gpus,
                    drives,
                    total / gpus,
                    total / drives,
                    after / drives,
                    before / drives,
                )
            )
    return found


class Wear(NamedTuple):
    """The bytes that a step of a model writes to one drive, and the steps that write *LIFE_BYTES*."""

    parameters: float
    written_bytes: float
    steps: float


def wear(load: Load = LOAD, models: Sequence[float] = MODELS) -> list[Wear]:
    """By model."""
    return [
        Wear(parameters, parameters * load.step_write, LIFE_BYTES / (parameters * load.step_write))
        for parameters in models
    ]


def life_seconds(profile: Profile, load: Load = LOAD) -> float | None:
    """The time in which continuous steps write *LIFE_BYTES*; None without all three speeds."""
    speeds = chosen_speeds(profile)
    return floor(load, LIFE_BYTES / load.step_write, speeds).seconds if speeds else None
