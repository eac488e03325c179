"""`Plan`: what a way to train takes of a machine, whether it fits, and the seconds of a step, from
the measured profile of its drives.

A step is passes and update. Passes last as long as the slowest of computing, of copies between host
and GPU, and of reading parameters from the drive; the update as long as the slower of the drive and
of the processors, which widen gradients, step the optimizer and give the GPU its parameters:

    step = max(compute, copies, parameters read / drive) + max(streamed / drive, widening + Adam + new parameters)

Host memory is what bounds the processors; all ranks of a machine share it, and its drives. Beside
what the profile and `copy_bytes_per_second` say, the constants below are from steps of 1.6 billion
parameters on an H200 machine with 16 processors (reports/training-h200.md, training-h200-auto.md).

Not in it: communication between ranks, compute that parameters do not tell of (attention over long
sequences), data loading, checkpoints. Only `this_machine` and `drive_at` look at anything; the rest
is pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..ds_config.edit import aio_section
from ..errors import OffloadError, UsageError
from ..hardware import gpu_models
from ..hardware.drive import describe
from ..hardware.machine import Gpu, available_bytes, copy_bytes_per_second, gpu_count, gpus
from ..hardware.profile import Profile
from .model import Model
from .placement import (
    STRATEGIES,
    Strategy,
    Streamed,
    World,
    fewest_bytes,
    needs,
    streamed,
    whole_bytes,
)
from .traffic import (
    GRADIENTS,
    PARAMETERS,
    WEIGHT_BYTES,
    chosen_speeds,
    rated_bytes,
    stripe_speeds,
    transfer,
)

ADAM_TRAFFIC = 28  # bytes of host memory for each parameter: state and gradient read, state written
WIDEN_TRAFFIC = 20  # a gradient to 32 bits: 10 for the copy, and as much for its norm and its place
# a parameter to 16 bits: read 4, write 2, and the 2 that a processor reads before it writes
ROUND_TRAFFIC = 8
OPTIMIZER_SHARE = 1.2  # of what plain copies reach, which wait for what they write to be read
# of the drive's measured speed, that a step reaches: 0.85 to 0.97, DeepSpeed's 0.91
DRIVE_SHARE = 0.92
# of the link to the GPU, that gradients and parameters reach on their way, each by itself
LINK_SHARE = 0.4
# to the GPU after the step, rounding included: DeepSpeed copies them through memory that is not
# registered
NEW_PARAMETERS_BYTES_PER_SECOND = 6.6e9
# of the memory that is available, what the budget takes; the rest is for activations, the data
# loader, the page cache
AUTO_SHARE = 0.7
# of host memory that CUDA, torch and DeepSpeed hold in a rank
PROCESS_BYTES = {"gpu": 2_500_000_000, "cpu": 600_000_000}
CONTEXT_BYTES = 500_000_000  # of GPU memory, likewise
# of 16-bit gradients that DeepSpeed reduces together (reduce_bucket_size)
BUCKET_ELEMENTS = 500_000_000
DEFAULT_HOST_BYTES_PER_SECOND = 20e9  # where nobody measured
DEFAULT_LINK_BYTES_PER_SECOND = 25e9
# of memory that is locked but not registered with CUDA, as DeepSpeed's swap buffers
MLOCKED_LINK_BYTES_PER_SECOND = 8e9
AS_FAST = 1.1  # predictions cannot tell less from each other
UTILISATION = 0.4  # of a GPU's peak, that training reaches
# bytes for each token and unit of width that one layer holds while its gradients are made
# (Korthikanti et al., 2022)
LAYER_ACTIVATIONS = 34

_OTHER_GPU_BYTES_PER_SECOND = 0.5e12


@dataclasses.dataclass(frozen=True)
class Drive:
    """One directory to offload to. speeds: GB/s by phase as swept, {} where it never was;
    rated_bytes: that it may be written in its life.
    """

    path: str
    free_bytes: int
    speeds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    identity: str = ""
    profile: Profile | None = None

    @property
    def rated_bytes(self) -> float | None:
        """Bytes that it is made to be written in its life, where it tells."""
        return rated_bytes(self.profile) if self.profile else None


@dataclasses.dataclass(frozen=True)
class Machine:
    """One of the machines that train. gpu: each of them, None to train on processors. host_bytes:
    of memory that is there to be taken.

    host_bytes_per_second: see `machine.copy_bytes_per_second`. drives: all are used, by their
    speeds.
    """

    gpu: Gpu | None
    host_bytes: int
    host_bytes_per_second: float = DEFAULT_HOST_BYTES_PER_SECOND
    drives: tuple[Drive, ...] = ()

    @property
    def speeds(self) -> dict[str, float]:
        """GB/s of all drives together by phase, as measured together where they were; {} where one
        was never swept.
        """
        for drive in self.drives:
            if drive.profile and {path.path for path in drive.profile.stripe} == {
                each.path for each in self.drives
            }:
                return stripe_speeds(drive.profile)
        # two directories of one drive are not twice as fast
        alone = {drive.identity or drive.path: drive.speeds for drive in self.drives}
        if not alone or not all(alone.values()):
            return {}
        return {
            phase: sum(speeds[phase] for speeds in alone.values())
            for phase in ("read", "write", "mixed")
        }

    @property
    def free_bytes(self) -> int:
        """Of all drives, each once."""
        return sum(
            {drive.identity or drive.path: drive.free_bytes for drive in self.drives}.values()
        )


class Work(NamedTuple):
    """What a rank computes in a step: *micro_batch* sequences of *sequence* tokens. 0: not known,
    and no compute or activations are predicted.
    """

    sequence: int = 0
    micro_batch: int = 1

    @property
    def tokens(self) -> int:
        """Of a rank in a step."""
        return self.sequence * self.micro_batch


class Term(NamedTuple):
    """One thing that takes time, with how that was found."""

    name: str
    seconds: float
    how: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """One strategy on one machine; bytes are of a rank, but *written_bytes*, of a step of all ranks
    to all drives. On a GPU come half a GB of CUDA's and a bucket of gradients on top, which count
    for whether it fits.

    budget_bytes: "host_memory" of this package's swappers, contained in host_bytes. problems: why
    it does not fit; none where it does. seconds: of a step; None where a drive was never swept.
    passes: what goes on at once, the slowest of which counts. Then update, what the processors do
    one after the other, and drive, beside each other.
    """

    strategy: Strategy
    gpu_bytes: int
    host_bytes: int
    drive_bytes: int
    budget_bytes: int | None
    problems: tuple[str, ...]
    passes: tuple[Term, ...]
    update: tuple[Term, ...]
    drive: tuple[Term, ...]
    seconds: float | None
    written_bytes: float

    @property
    def fits(self) -> bool:
        """Whether the machine has what it takes."""
        return not self.problems

    @property
    def passes_seconds(self) -> float:
        """Forward and backward."""
        return max((term.seconds for term in self.passes), default=0.0)

    @property
    def written_bytes_a_day(self) -> float | None:
        """To all drives, by steps that follow each other without a pause."""
        return self.written_bytes / self.seconds * 86400 if self.seconds else None

    @property
    def formula(self) -> str:
        """How the seconds were found."""

        passes, update, drive = (
            [f"{term.name} {term.how} = {term.seconds:.3g} s" for term in terms]
            for terms in (self.passes, self.update, self.drive)
        )
        forward = [_max(passes)] if passes else []
        return " + ".join([*forward, _max([" + ".join(update), *drive])])

    @property
    def update_seconds(self) -> float:
        """The optimizer's part."""
        return max(sum(term.seconds for term in terms) for terms in (self.update, self.drive))


def _max(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"max({'; '.join(texts)})"


def plans(
    model: Model,
    machine: Machine,
    world: World,
    work: Work = Work(),  # noqa: B008  a tuple of numbers
    budget: int | None = None,
) -> list[Plan]:
    """Every strategy for *model* on *machine*, in the order of `STRATEGIES`.

    *budget*: "host_memory" of this package's swappers in bytes, instead of what the machine has to
    give.
    """
    return [_plan(strategy, model, machine, world, work, budget) for strategy in STRATEGIES]


def fastest(found: Sequence[Plan]) -> Plan | None:
    """The plan of *found* with the fewest seconds of those that fit; None where nothing fits.

    Where several are as fast as can be told, within a tenth, it is the simplest of them. One whose
    drive was never swept is taken where there is no other, and one that keeps states in fewer bits
    where none that is exact fits.
    """
    every = [plan for plan in found if plan.fits]
    fitting = [plan for plan in every if plan.strategy.state_format == "exact"] or every
    fewest = min((plan.seconds for plan in fitting if plan.seconds is not None), default=None)
    if fewest is None:
        return next(iter(fitting), None)
    return next(
        plan for plan in fitting if plan.seconds is not None and plan.seconds <= fewest * AS_FAST
    )


def this_machine(paths: Sequence[str], probe_seconds: float = 0.2) -> tuple[Machine, int]:
    """What is here, with the drives of *paths*, and the number of ranks that would train: one for
    each GPU, else one.

    Raises: OSError when a path cannot be looked at.
    """
    found = gpus()
    speed = copy_bytes_per_second(probe_seconds) if probe_seconds else DEFAULT_HOST_BYTES_PER_SECOND
    smallest = min(found, key=lambda gpu: gpu.memory_bytes, default=None)
    return Machine(smallest, available_bytes(), speed, tuple(map(drive_at, paths))), max(
        len(found), gpu_count(), 1
    )


def drive_at(path: str) -> Drive:
    """The drive of the directory *path*, with what a sweep found of it. Raises: OSError."""
    from ..hardware import profile_shelf

    seen = describe(path)
    try:
        profile = profile_shelf.find(path)
    except (OffloadError, OSError):
        profile = None
    return Drive(
        seen.path,
        seen.free_bytes,
        chosen_speeds(profile) if profile else {},
        seen.identity,
        profile,
    )


def _plan(
    strategy: Strategy, model: Model, machine: Machine, world: World, work: Work, budget: int | None
) -> Plan:
    need = needs(strategy, model, world)
    gpu_bytes = need.gpu_bytes + activation_bytes(model, work)
    # not counted by DeepSpeed's estimates, so not shown as theirs
    beside = WEIGHT_BYTES * min(BUCKET_ELEMENTS, model.parameters)
    host_bytes = need.host_bytes + PROCESS_BYTES["gpu" if machine.gpu else "cpu"]
    if machine.gpu is None:
        host_bytes, gpu_bytes = host_bytes + gpu_bytes + beside, 0
    problems = []
    kept: int | None = None
    if strategy.ours:
        share = max(int((machine.host_bytes / world.ranks - host_bytes) * AUTO_SHARE), 0)
        kept = min(share, whole_bytes(strategy, model, world)) if budget is None else budget
        least = fewest_bytes(strategy, model, world)
        if kept < least:
            problems.append(
                f"{_gb(kept)} of host memory a rank for the swapper, and the largest parameter takes {_gb(least)}"
            )
        host_bytes += kept
    if machine.gpu and gpu_bytes + beside + CONTEXT_BYTES > machine.gpu.memory_bytes:
        problems.append(
            f"{_gb(gpu_bytes + beside + CONTEXT_BYTES)} of GPU memory, and a GPU has {_gb(machine.gpu.memory_bytes)}"
        )
    if host_bytes * world.ranks > machine.host_bytes:
        problems.append(
            f"{_gb(host_bytes * world.ranks)} of host memory, and {_gb(machine.host_bytes)} are available"
        )
    if strategy.uses_drive and not machine.drives:
        problems.append("a drive: name one with --path")
    elif need.drive_bytes * world.ranks > machine.free_bytes:
        problems.append(
            f"{_gb(need.drive_bytes * world.ranks)} on the drive, and {_gb(machine.free_bytes)} are free"
        )
    moved = (
        streamed(strategy, model, world, kept) if kept is not None else Streamed(0.0, 0.0, 0.0, 0.0)
    )
    passes, update, drive, known = _times(strategy, model, machine, world, work, moved)
    seconds = max((term.seconds for term in passes), default=0.0) + max(
        sum(term.seconds for term in terms) for terms in (update, drive)
    )
    written = (moved.passes_written + moved.written) * world.ranks
    if strategy.uses_drive and not strategy.ours:
        written = (
            (PARAMETERS if strategy.parameters == "drive" else GRADIENTS).step_write
            * model.parameters
            / world.nodes
        )
    return Plan(
        strategy,
        gpu_bytes,
        host_bytes,
        need.drive_bytes,
        kept,
        tuple(problems),
        tuple(passes),
        tuple(update),
        tuple(drive),
        seconds if known else None,
        written,
    )


def activation_bytes(model: Model, work: Work) -> int:
    """Bytes of GPU memory beside the states, with activation checkpointing and an attention that
    keeps no matrix of scores; 0 where not known.

    The inputs of all layers, what one layer holds while it is computed again, and the logits, in 16
    bit and as their loss is computed.
    """
    if not (work.tokens and model.hidden and model.layers):
        return 0
    return work.tokens * (
        model.hidden * (WEIGHT_BYTES * model.layers + LAYER_ACTIVATIONS)
        + 6 * (model.vocabulary or 0)
    )


_Times = tuple[list[Term], list[Term], list[Term], bool]


def _times(
    strategy: Strategy, model: Model, machine: Machine, world: World, work: Work, moved: Streamed
) -> _Times:
    """Terms of the passes, of the processors' part of the update and of the drive's, and whether
    all are known.
    """
    here, each = model.parameters / world.nodes, model.parameters / world.size
    gpu, on_gpu = machine.gpu, strategy.parameters == "gpu"
    passes: list[Term] = []
    flops, gpu_memory = _gpu_speeds(gpu)
    if work.tokens and flops:
        passes.append(
            _term("compute", 8 * model.parameters * work.tokens, flops * UTILISATION, "T", 1e12)
        )
    host = machine.host_bytes_per_second * OPTIMIZER_SHARE
    if strategy.optimizer == "gpu":
        speed, share = (gpu_memory, each) if gpu else (host, here)
        return passes, [_term("Adam", share * (ADAM_TRAFFIC + ROUND_TRAFFIC), speed)], [], True
    update = [
        _term("gradients widened", here * WIDEN_TRAFFIC, host),
        _term("Adam", here * ADAM_TRAFFIC, host),
    ]
    if gpu and on_gpu:
        update.append(_term("new parameters", WEIGHT_BYTES * each, NEW_PARAMETERS_BYTES_PER_SECOND))
    else:
        update.append(_term("new parameters", here * ROUND_TRAFFIC, host))
    if gpu:
        link = gpu.link_bytes_per_second or DEFAULT_LINK_BYTES_PER_SECOND
        if strategy.uses_drive and not strategy.ours:
            link = min(link, MLOCKED_LINK_BYTES_PER_SECOND / LINK_SHARE)
        passes.append(
            _term("copies", WEIGHT_BYTES * each * (1 if on_gpu else 3), link * LINK_SHARE)
        )
    if not strategy.uses_drive or (strategy.ours and not moved.total):
        return passes, update, [], True
    if not machine.speeds:
        return passes, update, [], False
    speeds = {phase: speed * DRIVE_SHARE for phase, speed in machine.speeds.items()}
    if not strategy.ours:
        load = PARAMETERS if strategy.parameters == "drive" else GRADIENTS
        moved = Streamed(
            load.passes_read * each, 0.0, load.step_read * each, load.step_write * each
        )
    if moved.passes_read:
        passes.append(
            _term("parameters read", moved.passes_read * world.ranks, speeds["read"] * 1e9)
        )
    if moved.passes_written:
        passes.append(
            _term("gradients make room", moved.passes_written * world.ranks, speeds["write"] * 1e9)
        )
    read, written = moved.read * world.ranks, moved.written * world.ranks
    seconds, bound = transfer(read, written, speeds)
    how = f"({read / 1e9:.3g} GB read, {written / 1e9:.3g} GB written; {bound} {speeds[bound]:.3g} GB/s)"
    return passes, update, [Term("drive", seconds, how)], True


def _term(
    name: str, amount: float, per_second: float, unit: str = "GB", scale: float = 1e9
) -> Term:
    return Term(
        name,
        amount / per_second,
        f"{amount / scale:.3g} {unit} / {per_second / scale:.3g} {unit}/s",
    )


def _gb(count: float) -> str:
    return f"{count / 1e9:.3g} GB"


def _gpu_speeds(gpu: Gpu | None) -> tuple[float | None, float]:
    if gpu is None:
        return None, DEFAULT_HOST_BYTES_PER_SECOND
    known = gpu_models.find(gpu.name)
    return (known.flops, known.bytes_per_second) if known else (None, _OTHER_GPU_BYTES_PER_SECOND)


# The configuration.


def ds_config(plan: Plan, machine: Machine, work: Work = Work()) -> dict[str, Any]:  # noqa: B008  a tuple of numbers
    """A DeepSpeed configuration for *plan*: complete but for what a training is about, learning
    rate and batch size, which are there to be edited.

    Raises: UsageError when the plan does not fit.
    """
    strategy = plan.strategy
    if not plan.fits:
        raise UsageError(f"{strategy.title} does not fit: it takes {'; '.join(plan.problems)}")
    zero: dict[str, Any] = {"stage": strategy.stage}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "bf16": {"enabled": True},
        # Lightning's test and predict fail without; it refuses a gradient_accumulation_steps
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    for key, place in (
        ("offload_optimizer", strategy.optimizer),
        ("offload_param", strategy.parameters),
    ):
        if place == "host":
            zero[key] = {"device": "cpu", "pin_memory": True}
        elif place == "drive":
            zero[key] = {"device": "nvme", "nvme_path": machine.drives[0].path, "pin_memory": True}
    if strategy.parameters == "drive" and not strategy.ours:
        # or DeepSpeed would keep the first billion in host memory
        zero["offload_param"] |= {"max_in_cpu": 0}
    if strategy.uses_drive and machine.drives[0].profile:
        config["aio"] = aio_section(machine.drives[0].profile)
    if strategy.ours:
        section: dict[str, Any] = {"host_memory": plan.budget_bytes}
        if strategy.state_format != "exact":
            section["state_format"] = strategy.state_format
        if machine.drives[0].profile and machine.drives[0].profile.chosen.backend != "libaio":
            section["backend"] = machine.drives[0].profile.chosen.backend
        if len(machine.drives) > 1:
            section["paths"] = [drive.path for drive in machine.drives]
            if machine.speeds:
                section["weights"] = weights(machine)
        config["nvme_offload"] = section
    return config


def weights(machine: Machine) -> list[float]:
    """The share of the bytes that belongs on each drive, so that all are done at the same time."""
    for drive in machine.drives:
        if drive.profile and {path.path for path in drive.profile.stripe} == {
            each.path for each in machine.drives
        }:
            by_path = {path.path: path.weight for path in drive.profile.stripe}
            return [round(by_path[each.path], 4) for each in machine.drives]
    if not machine.speeds:
        return [round(1 / len(machine.drives), 4)] * len(machine.drives)
    total = sum(drive.speeds["mixed"] for drive in machine.drives)
    return [round(drive.speeds["mixed"] / total, 4) for drive in machine.drives]
