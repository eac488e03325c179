"""Where parameters, gradients and optimizer states of a training are, under each way to train, and
the bytes that it takes. Pure.

Adam in mixed precision: 2 bytes a parameter for the weights, 2 for the gradients and 4 for what
these are widened to, 4 for the master weights and 8 for the moments. Where DeepSpeed has an
estimate of its own it is taken as it is, its factor of 1.5 for buffers in host memory included; the
rest is what this package holds by construction, or what was measured.

Source: `estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs` of
DeepSpeed 0.19.8; `optim/budget.py` for the buckets of `NVMeOptimizer`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple, get_args

from . import traffic
from .model import Model
from .traffic import WEIGHT_BYTES, WIDE_BYTES

BUFFER_FACTOR = 1.5  # DeepSpeed's additional_buffer_factor
# What DeepSpeed's optimizer offload to NVMe holds of host memory for each parameter at its peak:
# 30.6 GB at 1.6 billion, 2.4 GB of them CUDA's and torch's.
DEEPSPEED_NVME_HOST_BYTES = 17.5

# How `zero3.stage3` cuts sub-groups, and the room that it wants beside them.
LARGEST_SUB_GROUP = 1 << 26
_PARTS = 16  # sub-groups, or buckets of `NVMeOptimizer`, that a budget is to hold
AHEAD = 2  # sub-groups whose room is for reading ahead
_ROUNDING_SHARE, _ROUNDING_BYTES = 0.01, 64 << 20  # of every value to pages
# `NVMeOptimizer`: bytes of a bucket at most, the places for buckets on a GPU, the part of the budget
# that is kept for what is beside the buckets, and the least budget that is of use.
_LARGEST_BUCKET_BYTES = 128 << 20
_PLACES = 3
_BESIDE_SHARE = 8
_LEAST_BYTES = 64 << 20
_HELD_SHARE, _PASSING = 0.95, 6  # of a budget, for what stays; buckets that pass through the rest
# Beside the states of an element in use: its widened gradient, what is no view, and new states; on
# processors more is kept for packing in 8 bits. Source: `optim.budget.beside_bytes` for AdamW and
# bfloat16.
_BUCKET_BESIDE_BYTES = {"exact": 12, "split": 16, "compact": 16, "compact24": 16}
_PACKING_BYTES = {"exact": 0, "split": 0, "compact": 16, "compact24": 16}

Place = Literal["gpu", "host", "drive"]
Door = Literal["zero", "deepspeed", "zero3", "plain"]
# When `NVMeOptimizer` updates: in `step`; under the next forward pass (`overlap_step`); or during the
# backward pass (`step_in_backward`), for good or, "provisional", with what an update replaces kept,
# to undo it where gradients are changed afterwards. "in both": provisionally, and a part of it
# under the next forward pass.
Updates = Literal["after", "in forward", "provisional", "in both", "in backward"]
UPDATES: tuple[Updates, ...] = get_args(Updates)


class Strategy(NamedTuple):
    """A way to train, or with *optimizer* None to run a model forward only.

    Attributes
    ----------
    name, title : str
        As JSON and as the table has it.
    stage : int
        Of ZeRO; 3 also for `NVMeOptimizer`, whose ranks share as FSDP2 does.
    optimizer, parameters : {"gpu", "host", "drive"}
        Where these are between steps.
    door : {"zero", "deepspeed", "zero3", "plain"}
        ZeRO without a drive, DeepSpeed's own NVMe offload, `nvme_offload.zero3`, or
        `nvme_offload.NVMeOptimizer`.
    state_format : {"exact", "split", "compact", "compact24"}
        Of the states on a drive.
    updates : {"after", "in forward", "provisional", "in both", "in backward"}
        When states are updated. "in backward" excludes clipping by a norm; with "provisional" and
        "in both" a step that is clipped takes longer.
    """

    name: str
    title: str
    stage: int
    optimizer: Place | None
    parameters: Place = "gpu"
    door: Door = "zero"
    state_format: str = "exact"
    updates: Updates = "after"

    @property
    def ours(self) -> bool:
        """Whether this package's swapper holds what is on the drive."""
        return self.door in ("zero3", "plain")

    @property
    def state_bytes(self) -> float:
        """Of the states of a parameter, as they are kept; 0 without an optimizer."""
        return traffic.STATE_BYTES[self.state_format] if self.optimizer else 0.0

    @property
    def gradient_bytes(self) -> int:
        """Of a gradient in the swapper: ZeRO-3's lie there in 16 bits until the update."""
        return WEIGHT_BYTES if self.optimizer and self.door == "zero3" else 0

    @property
    def parameter_bytes(self) -> int:
        """Of a parameter that is on the drive."""
        return WEIGHT_BYTES if self.parameters == "drive" else 0

    @property
    def beside_bytes(self) -> int:
        """Of a parameter in use in the update: its gradient in fp32, and what "compact" unpacks:
        master, moments and the 16-bit weight.
        """
        if self.optimizer is None:
            return 0
        if self.door == "plain":  # on a GPU
            return _BUCKET_BESIDE_BYTES[self.state_format]
        return WIDE_BYTES if self.state_format == "exact" else 4 * WIDE_BYTES + WEIGHT_BYTES

    @property
    def windows(self) -> tuple[str, ...]:
        """The passes that updates run under."""
        return {
            "after": (),
            "in forward": ("forward",),
            "in both": ("forward", "backward"),
        }.get(self.updates, ("backward",))

    @property
    def provisional(self) -> bool:
        """Whether updates may have to be undone, so that what they replace is kept."""
        return self.updates in ("provisional", "in both")

    @property
    def uses_drive(self) -> bool:
        """Whether anything is on a drive."""
        return "drive" in (self.optimizer, self.parameters)


def _ours() -> tuple[Strategy, ...]:
    found: list[Strategy] = []
    for state_format in traffic.STATE_BYTES:
        name = "" if state_format == "exact" else f"-{state_format}"
        title = "" if state_format == "exact" else f", {state_format}"
        for updates in UPDATES:
            called, when = ("", "") if updates == "after" else (f"-{updates}", f", {updates}")
            found.append(
                Strategy(
                    f"plain{called.replace(' ', '-')}{name}",
                    f"NVMeOptimizer{title}{when}",
                    *(3, "drive", "gpu", "plain", state_format, updates),
                )
            )
        found += [
            Strategy(
                f"nvme-optimizer{name}",
                f"ZeRO-3, states on NVMe{title}",
                *(3, "drive", "gpu", "zero3", state_format),
            ),
            Strategy(
                f"nvme-both{name}",
                f"ZeRO-3, all on NVMe{title}",
                *(3, "drive", "drive", "zero3", state_format),
            ),
        ]
    return tuple(found)


# The simpler come first, and win where they are as fast.
STRATEGIES = (
    Strategy("zero1", "ZeRO-1", 1, "gpu"),
    Strategy("zero2", "ZeRO-2", 2, "gpu"),
    Strategy("zero3", "ZeRO-3", 3, "gpu"),
    Strategy("zero2-cpu", "ZeRO-2, states on CPU", 2, "host"),
    Strategy("zero3-cpu-optimizer", "ZeRO-3, states on CPU", 3, "host"),
    Strategy("zero3-cpu", "ZeRO-3, all on CPU", 3, "host", "host"),
    *_ours(),
    Strategy(
        "deepspeed-nvme-optimizer", "DeepSpeed's states on NVMe", 3, "drive", "gpu", "deepspeed"
    ),
    Strategy("deepspeed-nvme-both", "DeepSpeed's all on NVMe", 3, "drive", "drive", "deepspeed"),
)
# Forward passes alone: ZeRO-Inference.
INFERENCE = (
    Strategy("inference-gpu", "ZeRO-Inference, on GPU", 3, None),
    Strategy("inference-cpu", "ZeRO-Inference, on CPU", 3, None, "host"),
    Strategy("inference-nvme", "ZeRO-Inference, on NVMe", 3, None, "drive", "zero3"),
)


@dataclasses.dataclass(frozen=True)
class World:
    """How many processes train.

    Attributes
    ----------
    ranks : int
        Processes on each machine.
    nodes : int
        Machines, all alike.
    zero_init : bool
        Whether the model is made in parts from the first (zero.Init).
    """

    ranks: int = 1
    nodes: int = 1
    zero_init: bool = True

    @property
    def size(self) -> int:
        """All processes."""
        return self.ranks * self.nodes


class Needs(NamedTuple):
    """What the states of a model take, in bytes of a rank.

    Attributes
    ----------
    gpu_bytes : int
        On the GPU. Activations come on top.
    host_bytes : int
        In host memory, beside the budget of this package's swappers.
    drive_bytes : int
        On the drives.
    """

    gpu_bytes: int
    host_bytes: int
    drive_bytes: int


def needs(strategy: Strategy, model: Model, world: World) -> Needs:
    """What a strategy takes of GPU, host and drive for the states of a model.

    Parameters
    ----------
    strategy : Strategy
        The way to train.
    model : Model
        What is trained.
    world : World
        The processes.

    Returns
    -------
    Needs
        Of a rank.
    """
    drive = 0.0
    if strategy.uses_drive:
        gradients = WIDE_BYTES if strategy.door == "deepspeed" else strategy.gradient_bytes
        each = strategy.state_bytes + strategy.parameter_bytes + gradients
        drive = each * model.parameters / world.size
    return Needs(
        _gpu_bytes(strategy, model, world), _host_bytes(strategy, model, world), int(drive)
    )


def _gpu_bytes(strategy: Strategy, model: Model, world: World) -> int:
    total, each = model.parameters, model.parameters / world.size
    if strategy.door == "plain":
        return _plain_gpu_bytes(strategy, model, world)
    if strategy.stage == 1:  # gradients in 16 bits whole on every rank
        return 2 * WEIGHT_BYTES * total + int(16 * each)
    if strategy.stage == 2:
        return WEIGHT_BYTES * total + (int(18 * each) if strategy.optimizer == "gpu" else 0)
    gathered = 2 * WEIGHT_BYTES * model.largest_layer
    if strategy.optimizer == "gpu":
        return gathered + int(18 * each)
    return gathered + (int(WEIGHT_BYTES * each) if strategy.parameters == "gpu" else 0)


def _plain_gpu_bytes(strategy: Strategy, model: Model, world: World) -> int:
    """Weights and gradients in 16 bits, and the buckets that pass through.

    With updates in backward a gradient goes when its bucket is updated, so that those of a layer or
    two are there at once. FSDP2 gathers a layer and the next, and holds the layer's gradients before
    they are reduced.
    """
    each = model.parameters / world.size
    block = max(model.largest_layer, model.parameters // (model.layers or 1))
    gradients = min(2.0 * block, each) if strategy.updates == "in backward" else each
    gathered = 3 * WEIGHT_BYTES * block if world.size > 1 else 0
    bucket = _bucket_elements(strategy, _LARGEST_BUCKET_BYTES * _PARTS)
    staged = (_PLACES * strategy.state_bytes + 2 * strategy.beside_bytes) * min(bucket, each)
    return int(WEIGHT_BYTES * (each + gradients) + gathered + staged)


def _bucket_elements(strategy: Strategy, budget: float, on_gpu: bool = True) -> float:
    """Elements of a bucket of `NVMeOptimizer`. Source: `optim.budget.most_elements`."""
    most = min(_LARGEST_BUCKET_BYTES, budget / _PARTS)
    beside = strategy.beside_bytes + (0 if on_gpu else _PACKING_BYTES[strategy.state_format])
    return most / max(strategy.state_bytes, beside / 2)


def _host_bytes(strategy: Strategy, model: Model, world: World) -> int:
    """Of one rank; DeepSpeed's estimates are of a node."""
    total, ranks = model.parameters, world.ranks
    if strategy.door == "plain":  # the model is made where it trains, or on the meta device
        return 0
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
    if strategy.optimizer is None:
        held = WEIGHT_BYTES * total / world.size if strategy.parameters == "host" else 0.0
        return int(max(held, made))
    if strategy.optimizer == "gpu":
        return int(BUFFER_FACTOR * made)
    if strategy.optimizer == "host":
        held = (18 if strategy.parameters == "host" else 16) * total / world.nodes
        return int(BUFFER_FACTOR * (held if world.zero_init else max(whole * ranks, held)) / ranks)
    held = (0 if strategy.ours else DEEPSPEED_NVME_HOST_BYTES) * total / world.size
    return int(max(held, made))


# The budget of this package's swappers, "host_memory".


def whole_bytes(strategy: Strategy, model: Model, world: World) -> int:
    """The smallest budget with which nothing touches the drive.

    Parameters
    ----------
    strategy : Strategy
        The way to train.
    model : Model
        What is trained.
    world : World
        The processes.

    Returns
    -------
    int
        "host_memory" of a rank, in bytes.
    """
    each = model.parameters / world.size
    kept = strategy.state_bytes + strategy.gradient_bytes + strategy.parameter_bytes
    if strategy.door == "plain":
        whole = kept * each * _BESIDE_SHARE / (_BESIDE_SHARE - 1)
        return int(whole * (1 + _ROUNDING_SHARE)) + _ROUNDING_BYTES
    largest = min(LARGEST_SUB_GROUP, each) + model.largest_parameter / world.size
    widened = strategy.beside_bytes * largest
    return int((kept * each + widened) * (1 + _ROUNDING_SHARE)) + _ROUNDING_BYTES


def fewest_bytes(strategy: Strategy, model: Model, world: World) -> int:
    """The least budget with which training works.

    `NVMeOptimizer` cuts parameters; ZeRO-3 has to hold its part of the largest.

    Parameters
    ----------
    strategy : Strategy
        The way to train.
    model : Model
        What is trained.
    world : World
        The processes.

    Returns
    -------
    int
        "host_memory" of a rank, in bytes.
    """
    if strategy.door == "plain":
        return _LEAST_BYTES
    # parameters that are on the drive are to either side of the states
    kept = strategy.state_bytes + strategy.beside_bytes + 2 * strategy.parameter_bytes
    return math.ceil(-(-model.largest_parameter // world.size) * kept) + (1 << 17)


def beside_budget(
    strategy: Strategy, model: Model, world: World, budget: int, on_gpu: bool = True
) -> int:
    """What the drives need room for beside a budget of host memory.

    Parameters
    ----------
    strategy : Strategy
        The way to train.
    model : Model
        What is trained.
    world : World
        The processes.
    budget : int
        "host_memory" of a rank, in bytes.
    on_gpu : bool
        Whether `NVMeOptimizer` updates on a GPU.

    Returns
    -------
    int
        Bytes of a rank, of what `needs` has on the drives.

    Notes
    -----
    States that `NVMeOptimizer` keeps in memory need no room on the drives, unless gradients come and
    go beside them. Source: `swap.residents.overflow`. ZeRO-3 has room for everything.
    """
    whole = needs(strategy, model, world).drive_bytes
    if strategy.door != "plain" or strategy.gradient_bytes:
        return whole
    each = model.parameters / world.size
    largest = strategy.state_bytes * min(_bucket_elements(strategy, budget, on_gpu), each)
    held = _HELD_SHARE * _values_budget(budget, on_gpu)
    return max(min(whole, int(whole - held + _PASSING * largest)), 0)


def _values_budget(budget: int, on_gpu: bool) -> float:
    """What of a budget `NVMeOptimizer` has for states. Source: `optim.budget.Budget`."""
    return budget if on_gpu else budget - budget / _BESIDE_SHARE


class Streamed(NamedTuple):
    """Bytes that a rank moves in a step.

    Attributes
    ----------
    passes_read, passes_written : float
        Before the optimizer's part.
    read, written : float
        In the optimizer's part.
    """

    passes_read: float
    passes_written: float
    read: float
    written: float

    @property
    def total(self) -> float:
        """In both directions."""
        return self.passes_read + self.passes_written + self.read + self.written


def streamed(
    strategy: Strategy, model: Model, world: World, budget: int, on_gpu: bool = True
) -> Streamed:
    """What a budget leaves to the drive in a step of one micro-batch.

    Parameters
    ----------
    strategy : Strategy
        The way to train.
    model : Model
        What is trained.
    world : World
        The processes.
    budget : int
        "host_memory" of a rank, in bytes.
    on_gpu : bool
        Whether `NVMeOptimizer` updates on a GPU.

    Returns
    -------
    Streamed
        Of a rank.

    Notes
    -----
    With ZeRO-3 everything is there at once at the end of the backward pass, gradients too, and what
    does not fit is on the drive. The swapper keeps whole sub-groups; of those that the budget has
    room for two stand for reading ahead. Gradients push out as much as they are in the backward
    pass, and what comes after them is written in the update. Where parameters are on the drive too,
    which are used three times as often, a budget saves of all reads the share that it has of the
    whole. This follows what `Schedule` does: within a tenth of all.

    `NVMeOptimizer` streams states alone, and keeps what its budget holds beside the buckets in
    flight; on processors an eighth of the budget is for what is beside the buckets.
    """
    each = model.parameters / world.size
    on_drive = strategy.parameters == "drive"
    if budget >= whole_bytes(strategy, model, world):
        return Streamed(0.0, 0.0, 0.0, 0.0)
    states, beside = strategy.state_bytes, strategy.beside_bytes
    if strategy.optimizer is None:
        lacking = max(1 - budget / (WEIGHT_BYTES * each), 0.0)
        return Streamed(WEIGHT_BYTES * each * lacking, 0.0, 0.0, 0.0)
    if strategy.door == "plain":
        bucket = _bucket_elements(strategy, budget, on_gpu)
        stays = _values_budget(budget, on_gpu) - _PLACES * states * bucket
        moved = max(states * each - max(stays, 0.0), 0.0)
        return Streamed(0.0, 0.0, moved, moved)
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
