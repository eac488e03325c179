"""Where parameters, gradients and optimizer states of a training are, under each way to train with
DeepSpeed, and the bytes that it takes. Pure.

Adam in mixed precision: 2 bytes a parameter for the weights, 2 for the gradients and 4 for what
these are widened to, 4 for the master weights and 8 for the moments. Where DeepSpeed has an
estimate of its own it is taken as it is, its factor of 1.5 for buffers in host memory included; the
rest is what this package holds by construction, or what was measured.

Source: `estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs` of
DeepSpeed 0.19.8.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

from . import traffic
from .model import Model
from .traffic import WEIGHT_BYTES, WIDE_BYTES

BUFFER_FACTOR = 1.5  # DeepSpeed's additional_buffer_factor
# What DeepSpeed's optimizer offload to NVMe holds of host memory for each parameter at its peak:
# 30.6 GB at 1.6 billion, 2.4 GB of them CUDA's and torch's.
DEEPSPEED_NVME_HOST_BYTES = 17.5

# How `zero3.stage3` cuts sub-groups, and the room that it wants beside them.
LARGEST_SUB_GROUP = 1 << 26
_PARTS = 16  # sub-groups that a budget is to hold
AHEAD = 2  # sub-groups whose room is for reading ahead
_ROUNDING_SHARE, _ROUNDING_BYTES = 0.01, 64 << 20  # of every value to pages

Place = Literal["gpu", "host", "drive"]


class Strategy(NamedTuple):
    """A way to train. *ours*: with this package's swappers; otherwise DeepSpeed's own."""

    name: str
    title: str
    stage: int
    optimizer: Place
    parameters: Place = "gpu"
    ours: bool = False
    state_format: str = "exact"

    @property
    def state_bytes(self) -> float:
        """Of the states of a parameter, as they are kept."""
        return traffic.STATE_BYTES[self.state_format]

    @property
    def beside_bytes(self) -> int:
        """Of a parameter of the sub-group in use: its gradient in fp32, and what "compact" unpacks:
        master, moments and the 16-bit weight.
        """
        return WIDE_BYTES if self.state_format == "exact" else 4 * WIDE_BYTES + WEIGHT_BYTES

    @property
    def uses_drive(self) -> bool:
        """Whether anything is on a drive."""
        return "drive" in (self.optimizer, self.parameters)


# The simpler come first, and win where they are as fast.
STRATEGIES = (
    Strategy("zero1", "ZeRO-1", 1, "gpu"),
    Strategy("zero2", "ZeRO-2", 2, "gpu"),
    Strategy("zero3", "ZeRO-3", 3, "gpu"),
    Strategy("zero2-cpu", "ZeRO-2, optimizer on CPU", 2, "host"),
    Strategy("zero3-cpu-optimizer", "ZeRO-3, optimizer on CPU", 3, "host"),
    Strategy("zero3-cpu", "ZeRO-3, both on CPU", 3, "host", "host"),
    Strategy("nvme-optimizer", "nvme_offload, optimizer on NVMe", 3, "drive", ours=True),
    Strategy("nvme-both", "nvme_offload, both on NVMe", 3, "drive", "drive", ours=True),
    Strategy(
        "nvme-optimizer-compact",
        "nvme_offload, optimizer on NVMe, compact",
        3,
        "drive",
        ours=True,
        state_format="compact",
    ),
    Strategy(
        "nvme-both-compact",
        "nvme_offload, both on NVMe, compact",
        3,
        "drive",
        "drive",
        ours=True,
        state_format="compact",
    ),
    Strategy("deepspeed-nvme-optimizer", "DeepSpeed, optimizer on NVMe", 3, "drive"),
    Strategy("deepspeed-nvme-both", "DeepSpeed, both on NVMe", 3, "drive", "drive"),
)


@dataclasses.dataclass(frozen=True)
class World:
    """How many processes train: *ranks* on each of *nodes* alike machines. zero_init: whether the
    model is made in parts from the first (zero.Init).
    """

    ranks: int = 1
    nodes: int = 1
    zero_init: bool = True

    @property
    def size(self) -> int:
        """All processes."""
        return self.ranks * self.nodes


class Needs(NamedTuple):
    """Bytes a rank. Of the host those beside the budget of this package's swappers; activations
    come on top of the GPU's.
    """

    gpu_bytes: int
    host_bytes: int
    drive_bytes: int


def needs(strategy: Strategy, model: Model, world: World) -> Needs:
    """What *strategy* takes of GPU, host and drive for the states of *model*."""
    drive = 0.0
    if strategy.uses_drive:
        each = (
            strategy.state_bytes
            + (WEIGHT_BYTES if strategy.parameters == "drive" else 0)
            + (WEIGHT_BYTES if strategy.ours else WIDE_BYTES)
        )
        drive = each * model.parameters / world.size
    return Needs(
        _gpu_bytes(strategy, model, world), _host_bytes(strategy, model, world), int(drive)
    )


def _gpu_bytes(strategy: Strategy, model: Model, world: World) -> int:
    total, each = model.parameters, model.parameters / world.size
    if strategy.stage == 1:  # gradients in 16 bits whole on every rank
        return 2 * WEIGHT_BYTES * total + int(16 * each)
    if strategy.stage == 2:
        return WEIGHT_BYTES * total + (int(18 * each) if strategy.optimizer == "gpu" else 0)
    gathered = 2 * WEIGHT_BYTES * model.largest_layer
    if strategy.optimizer == "gpu":
        return gathered + int(18 * each)
    return gathered + (int(WEIGHT_BYTES * each) if strategy.parameters == "gpu" else 0)


def _host_bytes(strategy: Strategy, model: Model, world: World) -> int:
    """Of one rank; DeepSpeed's estimates are of a node."""
    total, ranks = model.parameters, world.ranks
    whole = WIDE_BYTES * total  # of a model that every rank makes for itself
    if strategy.stage < 3:
        return int(
            BUFFER_FACTOR
            * (
                whole
                if strategy.optimizer == "gpu"
                else total * max(WIDE_BYTES * world.size, 16) / ranks
            )
        )
    made = WIDE_BYTES * model.largest_layer if world.zero_init else whole
    if strategy.optimizer == "gpu":
        return int(BUFFER_FACTOR * made)
    if strategy.optimizer == "host":
        held = (18 if strategy.parameters == "host" else 16) * total / world.nodes
        return int(BUFFER_FACTOR * (held if world.zero_init else max(whole * ranks, held)) / ranks)
    held = (0 if strategy.ours else DEEPSPEED_NVME_HOST_BYTES) * total / world.size
    return int(max(held, made))


# The budget of this package's swappers, "host_memory".


def whole_bytes(strategy: Strategy, model: Model, world: World) -> int:
    """The budget of a rank with which nothing touches the drive."""
    each = model.parameters / world.size
    kept = strategy.state_bytes + WEIGHT_BYTES * (2 if strategy.parameters == "drive" else 1)
    largest = min(LARGEST_SUB_GROUP, each) + model.largest_parameter / world.size
    widened = strategy.beside_bytes * largest
    return int((kept * each + widened) * (1 + _ROUNDING_SHARE)) + _ROUNDING_BYTES


def fewest_bytes(strategy: Strategy, model: Model, world: World) -> int:
    """The least budget of a rank that holds its part of the largest parameter."""
    # to either side of the states
    kept = strategy.state_bytes + strategy.beside_bytes
    kept += 2 * WEIGHT_BYTES if strategy.parameters == "drive" else 0
    return math.ceil(-(-model.largest_parameter // world.size) * kept) + (1 << 17)


class Streamed(NamedTuple):
    """Bytes that a rank moves in a step: read and written before the optimizer's part, and
    in it.
    """

    passes_read: float
    passes_written: float
    read: float
    written: float

    @property
    def total(self) -> float:
        """In both directions."""
        return self.passes_read + self.passes_written + self.read + self.written


def streamed(strategy: Strategy, model: Model, world: World, budget: int) -> Streamed:
    """What a *budget* leaves to the drive.

    At the end of the backward pass everything is there at once, gradients too, and what does not
    fit is on the drive. The swapper keeps whole sub-groups; of those that the budget has room for
    two stand for reading ahead. Gradients push out as much as they are in the backward pass, and
    what comes after them is written in the update. Where parameters are on the drive too, which are
    used three times as often, a budget saves of all reads the share that it has of the whole. This
    follows what `Schedule` does: within a tenth of all.
    """
    each = model.parameters / world.size
    on_drive = strategy.parameters == "drive"
    if budget >= whole_bytes(strategy, model, world):
        return Streamed(0.0, 0.0, 0.0, 0.0)
    states, beside = strategy.state_bytes, strategy.beside_bytes
    wanted = budget / (_PARTS * (states + WEIGHT_BYTES) + beside)
    sub_group = max(min(LARGEST_SUB_GROUP, wanted), model.largest_parameter / world.size)
    stays = max(budget - (beside + AHEAD * states) * sub_group, 0.0)
    written = max((states + WEIGHT_BYTES * (2 if on_drive else 1)) * each - stays, 0.0)
    in_backward = min(WEIGHT_BYTES * each, written)
    if not on_drive:
        return Streamed(0.0, in_backward, written, written - in_backward)
    lacking = max(1 - budget / ((states + 2 * WEIGHT_BYTES) * each), 0.0)
    return Streamed(
        2 * WEIGHT_BYTES * each * lacking,
        in_backward,
        (states + WEIGHT_BYTES) * each * lacking,
        written - in_backward,
    )
