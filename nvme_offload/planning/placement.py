"""The place of parameters, gradients and optimizer states under each way to train, and their bytes.

DeepSpeed's own estimates are used where they exist, with their factor of 1.5 for buffers in host
memory.

Source: `estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs` of
DeepSpeed 0.19.8; `sizes.py` for the buckets of `NVMeOptimizer`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from ..sizes import (
    IN_MEMORY,
    LARGEST_IN_MEMORY_BYTES,
    LARGEST_SUB_GROUP,
    LEAST_BUDGET_BYTES,
    PLACES,
    SCRATCH_PARTS,
    STREAMED_BUCKET_BYTES,
    STREAMED_SLOTS,
    Footprint,
    bucket_elements,
    kept_for_later,
    overflow,
)
from . import traffic
from .model import Model
from .traffic import NOTHING, WEIGHT_BYTES, WIDE_BYTES, Streamed

BUFFER_FACTOR = 1.5  # DeepSpeed's additional_buffer_factor
# Peak host memory of DeepSpeed's optimizer offload to NVMe for each parameter: 30.6 GB at 1.6 billion,
# of which CUDA and torch take 2.4 GB.
DEEPSPEED_NVME_HOST_BYTES = 17.5

AHEAD = 2  # sub-groups of memory for reading ahead
_ROUNDING_SHARE, _ROUNDING_BYTES = 0.01, 64 << 20  # values are rounded up to pages

# Scratch bytes of an element during its update: the widened gradient, copies and new states; on CPUs
# also for packing in 8 bits. Source: `optim.budget.beside_bytes` for AdamW and bfloat16.
_BUCKET_BESIDE_BYTES = {"exact": 12, "split": 16, "compact": 16, "compact24": 16}
_PACKING_BYTES = {"exact": 0, "split": 0, "compact": 16, "compact24": 16}

Place = Literal["gpu", "host", "drive"]
Door = Literal["zero", "deepspeed", "zero3", "plain"]
# When `NVMeOptimizer` updates; docs/planning.md has the settings
Updates = Literal["after", "in forward", "host gradients", "provisional", "in both", "in backward"]
UPDATES: tuple[Updates, ...] = get_args(Updates)


class Strategy(NamedTuple):
    """A way to train, or with *optimizer* None to run a model forward only.

    *name*, *title*: in JSON and in the table. *stage*: of ZeRO; 3 also for `NVMeOptimizer`, whose
    ranks share as with FSDP2. *optimizer*, *parameters*: their place between steps. *door*: ZeRO
    without a drive, DeepSpeed's own NVMe offload, `nvme_offload.zero3`, or `NVMeOptimizer`, with
    `Offload.parameters` where parameters are on the drive. *update_device*, *gradients*: chosen by
    the GPU's memory.
    """

    name: str
    title: str
    stage: int
    optimizer: Place | None
    parameters: Place = "gpu"
    door: Door = "zero"
    state_format: str = "exact"
    updates: Updates = "after"
    update_device: Literal["gpu", "cpu"] = "gpu"
    gradients: Place = "host"

    @property
    def ours(self) -> bool:
        """Whether this package's swapper does the offload."""
        return self.door in ("zero3", "plain")

    @property
    def state_bytes(self) -> float:
        """Bytes of a parameter's packed states; 0 without an optimizer."""
        return traffic.STATE_BYTES[self.state_format] if self.optimizer else 0.0

    @property
    def gradient_bytes(self) -> int:
        """Bytes that the swapper reserves for a 16-bit gradient; ZeRO-3's even if it is on the GPU."""
        swapped = self.door == "zero3" or self.updates == "host gradients"
        return WEIGHT_BYTES if self.optimizer and swapped else 0

    @property
    def parameter_bytes(self) -> int:
        """Bytes of a parameter on the drive."""
        return WEIGHT_BYTES if self.parameters == "drive" else 0

    @property
    def beside_bytes(self) -> int:
        """Scratch bytes of a parameter during its update: the fp32 gradient, and unpacked states
        and weights.
        """
        if self.optimizer is None:
            return 0
        if self.door == "plain":
            return _BUCKET_BESIDE_BYTES[self.state_format]
        return WIDE_BYTES if self.state_format == "exact" else 4 * WIDE_BYTES + WEIGHT_BYTES

    @property
    def scratch_bytes(self) -> int:
        """The part of `beside_bytes` that ZeRO-3 has in host memory."""
        return self.beside_bytes if self.update_device == "cpu" else 0

    @property
    def windows(self) -> tuple[str, ...]:
        """The passes during which updates run."""
        return {
            "in forward": ("forward",),
            "provisional": ("backward",),
            "in both": ("forward", "backward"),
            "in backward": ("backward",),
        }.get(self.updates, ())

    @property
    def provisional(self) -> bool:
        """Whether updates may be undone, so that old values are kept."""
        return self.updates in ("provisional", "in both")

    @property
    def streams(self) -> bool:
        """Whether `Offload.parameters` brings the weights."""
        return self.door == "plain" and self.parameters == "drive"

    @property
    def uses_drive(self) -> bool:
        """Whether a drive is used."""
        return "drive" in (self.optimizer, self.parameters)


def _ours(state_format: str) -> Iterator[Strategy]:
    """The strategies of this package with states in *state_format*."""
    exact = state_format == "exact"
    name, title = ("", "") if exact else (f"-{state_format}", f", {state_format}")

    def made(key: str, said: str, parameters: Place, door: Door, updates: Updates) -> Strategy:
        key = f"{key.replace(' ', '-')}{name}"
        return Strategy(key, said, 3, "drive", parameters, door, state_format, updates)

    plain: tuple[tuple[str, str, Place, Sequence[Updates]], ...] = (
        ("plain", "NVMeOptimizer", "gpu", UPDATES),
        # without `overlap_step`
        ("streamed", "Offload", "drive", ("after", "host gradients", "provisional", "in backward")),
    )
    for key, said, parameters, ways in plain:
        for updates in ways:
            way, when = ("", "") if updates == "after" else (f"-{updates}", f", {updates}")
            yield made(f"{key}{way}", f"{said}{title}{when}", parameters, "plain", updates)
    yield made("nvme-optimizer", f"ZeRO-3, states on NVMe{title}", "gpu", "zero3", "after")
    yield made("nvme-both", f"ZeRO-3, all on NVMe{title}", "drive", "zero3", "after")


# The simplest first: of equally fast ones the first is recommended.
STRATEGIES = (
    Strategy("zero1", "ZeRO-1", 1, "gpu"),
    Strategy("zero2", "ZeRO-2", 2, "gpu"),
    Strategy("zero3", "ZeRO-3", 3, "gpu"),
    Strategy("zero2-cpu", "ZeRO-2, states on CPU", 2, "host"),
    Strategy("zero3-cpu-optimizer", "ZeRO-3, states on CPU", 3, "host"),
    Strategy("zero3-cpu", "ZeRO-3, all on CPU", 3, "host", "host"),
    *itertools.chain.from_iterable(map(_ours, traffic.STATE_BYTES)),
    Strategy(
        "deepspeed-nvme-optimizer", "DeepSpeed's states on NVMe", 3, "drive", "gpu", "deepspeed"
    ),
    Strategy("deepspeed-nvme-both", "DeepSpeed's all on NVMe", 3, "drive", "drive", "deepspeed"),
)
# Forward passes only; the simplest first.
INFERENCE = (
    Strategy("inference-gpu", "ZeRO-Inference, on GPU", 3, None),
    Strategy("inference-offload", "Offload", 3, None, "drive", "plain"),
    Strategy("inference-cpu", "ZeRO-Inference, on CPU", 3, None, "host"),
    Strategy("inference-nvme", "ZeRO-Inference, on NVMe", 3, None, "drive", "zero3"),
)


@dataclasses.dataclass(frozen=True)
class World:
    """The processes: *ranks* on each of *nodes* identical machines. *zero_init*: the model is made
    in parts.
    """

    ranks: int = 1
    nodes: int = 1
    zero_init: bool = True

    @property
    def size(self) -> int:
        """All processes."""
        return self.ranks * self.nodes


class Needs(NamedTuple):
    """Bytes of a rank; in host memory without the budget of this package's swappers."""

    gpu_bytes: int
    host_bytes: int
    drive_bytes: int


def needs(
    strategy: Strategy,
    model: Model,
    world: World,
    activations: int = 0,
    accumulation: int = 1,
    gpu_memory: int = 0,
) -> Needs:
    """The bytes of *strategy* for the states of *model*, and on the GPU for *activations* bytes,
    which are freed before an update, after *accumulation* passes. *gpu_memory*: of the GPU, if host
    memory holds all states; otherwise 0.
    """
    drive = 0.0
    if strategy.uses_drive:
        gradients = WIDE_BYTES if strategy.door == "deepspeed" else strategy.gradient_bytes
        drive = (strategy.state_bytes + gradients) * model.trained / world.size
        drive += strategy.parameter_bytes * model.parameters / world.size
    gpu_bytes = (
        _plain_gpu_bytes(strategy, model, world, accumulation, gpu_memory)
        if strategy.door == "plain"
        else _gpu_bytes(strategy, model, world)
    )
    if strategy.door == "zero3" and strategy.update_device == "gpu":  # sub-groups, one unpacked
        sub_group = _sub_group(model, world)
        unpacked = int((strategy.beside_bytes + strategy.gradient_bytes) * sub_group)
        gpu_bytes += int(PLACES * strategy.state_bytes * sub_group)
        activations = max(activations, unpacked)
    return Needs(gpu_bytes + activations, _host_bytes(strategy, model, world), int(drive))


def _gpu_bytes(strategy: Strategy, model: Model, world: World) -> int:
    """Under ZeRO: weights, gradients in 16 bits, and 16 bytes of states and widened gradients."""
    weights, trained, size = WEIGHT_BYTES * model.parameters, model.trained, world.size
    if strategy.stage == 1:  # gradients in 16 bits whole on every rank
        return weights + WEIGHT_BYTES * trained + int(16 * trained / size)
    if strategy.stage == 2:
        return weights + (int(18 * trained / size) if strategy.optimizer == "gpu" else 0)
    gathered = 2 * WEIGHT_BYTES * model.largest_layer
    if strategy.optimizer == "gpu":
        return gathered + int((weights + 16 * trained) / size)
    held = weights if strategy.parameters == "gpu" else 0
    held += strategy.gradient_bytes * trained if strategy.gradients == "gpu" else 0
    return gathered + int(held / size)


def _plain_gpu_bytes(
    strategy: Strategy, model: Model, world: World, accumulation: int, gpu_memory: int
) -> int:
    """Weights and gradients in 16 bits, and the buckets in flight."""
    # gradients that are updated or copied in the backward pass exist for a layer or two at a time
    trained, block = model.trained / world.size, min(model.block, model.trained)
    passing = strategy.updates == "host gradients" or (
        strategy.updates == "in backward" and accumulation == 1
    )
    gradients = min(2 * block / world.size, trained) if passing else trained
    # FSDP2 gathers a layer and the next, and holds the layer's gradients before they are reduced
    gathered = 2 * model.block + block if world.size > 1 else 0
    weights = WEIGHT_BYTES * model.parameters / world.size
    if strategy.optimizer is None:
        gradients = trained = 0
    if strategy.streams:
        largest = WEIGHT_BYTES * model.largest_parameter
        each = max(STREAMED_BUCKET_BYTES, largest)
        # an embedding and a head stay, if they are more than twice as large as a bucket
        stays = 2 * largest if largest > 2 * STREAMED_BUCKET_BYTES else 0
        weights = min(STREAMED_SLOTS * (STREAMED_BUCKET_BYTES if stays else each) + stays, weights)
    bucket = _bucket_elements(strategy, LARGEST_IN_MEMORY_BYTES * IN_MEMORY, gpu_memory)
    beside = 2 * strategy.beside_bytes
    if gpu_memory and strategy.state_format != "exact":  # one kernel, which unpacks no value
        beside = 3 * WEIGHT_BYTES
    staged = (PLACES * strategy.state_bytes + beside) * min(bucket, trained)
    return int(weights + WEIGHT_BYTES * (gradients + gathered) + staged)


def _footprint(strategy: Strategy, model: Model, world: World) -> Footprint:
    parameter = strategy.parameter_bytes
    return Footprint(
        strategy.state_bytes,
        strategy.gradient_bytes,
        strategy.scratch_bytes,
        parameter,
        parameter * -(-model.largest_parameter // world.size),
    )


def _sub_group(model: Model, world: World, wanted: float = LARGEST_SUB_GROUP) -> float:
    """Elements of the largest sub-group of a rank, which has at least one parameter."""
    return max(min(LARGEST_SUB_GROUP, wanted, model.trained / world.size), _largest(model, world))


def _largest(model: Model, world: World) -> float:
    """A rank's elements of the largest trained parameter, or more."""
    return min(model.largest_parameter, model.trained) / world.size


def _bucket_elements(strategy: Strategy, budget: int, gpu_memory: int = 0) -> float:
    """Elements of a bucket of `NVMeOptimizer`, at most. *gpu_memory*: see `bucket_elements`."""
    packing = 0 if strategy.update_device == "gpu" else _PACKING_BYTES[strategy.state_format]
    beside = strategy.beside_bytes + packing
    return bucket_elements(budget, strategy.state_bytes, beside, gpu_memory)


def _host_bytes(strategy: Strategy, model: Model, world: World) -> int:
    """Of one rank; DeepSpeed's estimates are for a node."""
    total, trained, ranks = model.parameters, model.trained, world.ranks
    if strategy.door == "plain":  # the model is made on the GPU or on the meta device
        return 0
    whole = WIDE_BYTES * total  # if every rank makes the whole model
    if strategy.stage < 3:
        offloaded = max(whole * world.size, 16 * trained) / ranks
        return int(BUFFER_FACTOR * (whole if strategy.optimizer == "gpu" else offloaded))
    made = WIDE_BYTES * model.largest_layer if world.zero_init else whole
    if strategy.optimizer is None:
        held = WEIGHT_BYTES * total / world.size if strategy.parameters == "host" else 0.0
        return int(max(held, made))
    if strategy.optimizer == "gpu":
        return int(BUFFER_FACTOR * made)
    if strategy.optimizer == "host":
        weights = WEIGHT_BYTES * total if strategy.parameters == "host" else 0
        held = (weights + 16 * trained) / world.nodes
        return int(BUFFER_FACTOR * (held if world.zero_init else max(whole * ranks, held)) / ranks)
    held = (0 if strategy.ours else DEEPSPEED_NVME_HOST_BYTES) * trained / world.size
    return int(max(held, made))


def whole_bytes(strategy: Strategy, model: Model, world: World) -> int:
    """The smallest "host_memory" of a rank with which the drive is not used."""
    # at the end of a backward pass, at most
    whole = (strategy.state_bytes + strategy.gradient_bytes) * model.trained
    whole = (whole + strategy.parameter_bytes * model.parameters) / world.size
    if strategy.door == "plain":
        whole *= SCRATCH_PARTS / (SCRATCH_PARTS - 1) if strategy.optimizer else 1
    else:
        largest = min(LARGEST_SUB_GROUP, model.trained / world.size) + _largest(model, world)
        whole += strategy.scratch_bytes * largest
    return int(whole * (1 + _ROUNDING_SHARE)) + _ROUNDING_BYTES


def fewest_bytes(strategy: Strategy, model: Model, world: World) -> int:
    """The smallest "host_memory" of a rank with which training works: ZeRO-3 holds a part of the
    largest parameter, which `NVMeOptimizer` splits.
    """
    if strategy.door == "plain":
        each = max(STREAMED_BUCKET_BYTES, WEIGHT_BYTES * model.largest_parameter)
        each = min(each, WEIGHT_BYTES * model.parameters)
        return LEAST_BUDGET_BYTES + (2 * each if strategy.streams else 0)
    footprint = _footprint(strategy, model, world)
    return footprint.least_bytes(math.ceil(_largest(model, world)))


def beside_budget(strategy: Strategy, model: Model, world: World, budget: int) -> int:
    """The drive space of a rank with *budget* bytes of "host_memory". ZeRO-3 allocates space for
    everything, `NVMeOptimizer` for states that do not fit in memory, unless it accumulates
    gradients there.
    """
    whole = needs(strategy, model, world).drive_bytes
    if strategy.door != "plain" or strategy.updates == "host gradients":
        return whole
    each = model.trained / world.size
    largest = int(strategy.state_bytes * min(_bucket_elements(strategy, budget), each))
    return overflow(whole, int(_values_budget(strategy, budget)), largest)


def parameters_budget(model: Model, budget: int) -> int:
    """The part of the budget of `Offload` for parameters that stream."""
    needed = int(WEIGHT_BYTES * model.parameters * (1 + _ROUNDING_SHARE)) + _ROUNDING_BYTES
    return min(needed, budget - kept_for_later(budget, 2))


def _values_budget(strategy: Strategy, budget: int) -> float:
    """The part of a budget that `NVMeOptimizer` uses for states. Source: `optim.budget.Budget`."""
    return budget if strategy.update_device == "gpu" else budget - budget / SCRATCH_PARTS


def streamed(strategy: Strategy, model: Model, world: World, budget: int) -> Streamed:
    """Bytes that a rank with *budget* bytes of "host_memory" transfers in a step of one
    micro-batch: what exceeds the budget at the end of the backward pass, less the parts in flight.
    Gradients displace as many bytes of states in the backward pass. The total agrees with `Schedule`
    within a fifth.
    """
    trained, weights = model.trained / world.size, WEIGHT_BYTES * model.parameters / world.size
    if budget >= whole_bytes(strategy, model, world):
        return NOTHING
    if strategy.optimizer is None:
        return Streamed(max(weights - budget, 0.0), 0.0, 0.0, 0.0)
    if strategy.streams:  # read twice, written if trained
        own = parameters_budget(model, budget)
        lacking = max(1 - own / weights, 0.0)
        others = streamed(strategy._replace(parameters="gpu"), model, world, budget - own)
        written = others.written + lacking * WEIGHT_BYTES * trained
        return others._replace(passes_read=2 * lacking * weights, written=written)
    states, beside = strategy.state_bytes, strategy.scratch_bytes
    if strategy.door == "plain":
        stays = _values_budget(strategy, budget)
        stays -= PLACES * states * _bucket_elements(strategy, budget)
    else:
        wanted = _footprint(strategy, model, world).wanted_elements(budget)
        stays = budget - (beside + AHEAD * states) * _sub_group(model, world, wanted)
    stays = max(stays, 0.0)
    on_host = strategy.door == "plain" or strategy.gradients == "host"
    gradients = strategy.gradient_bytes * trained if on_host else 0
    # Parameters stay first: staying saves three transfers of a parameter, and two of a state.
    parameters = strategy.parameter_bytes * model.parameters / world.size
    missing = max(parameters - stays, 0.0)
    changed = max(states * trained + gradients - max(stays - parameters, 0.0), 0.0)
    written = changed + missing * model.trained / model.parameters
    in_backward = min(gradients, written)
    return Streamed(2 * missing, in_backward, changed, written - in_backward)
