"""`Plan`: the bytes of a way to train on a machine, whether it fits, and the seconds of a step, predicted
from the measured profile of its drives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ..errors import OffloadError
from ..hardware.drive import describe
from ..hardware.machine import Gpu, available_bytes, copy_bytes_per_second, gpu_count, gpus
from ..hardware.profile import PHASES, Profile
from ..sizes import AHEAD_PARTS, AUTO_SHARE, FORWARD_SHARE, MARGIN_PARTS
from ..units import format_gb
from .model import Model
from .passes import Work, activation_bytes, saved_bytes
from .placement import (
    STRATEGIES,
    Strategy,
    World,
    beside_budget,
    fewest_bytes,
    needs,
    streamed,
    whole_bytes,
)
from .seconds import Phase, Step, Term
from .traffic import (
    GRADIENTS,
    NOTHING,
    PARAMETERS,
    STATE_BYTES,
    WEIGHT_BYTES,
    Streamed,
    chosen_speeds,
    rated_bytes,
    stripe_speeds,
)

__all__ = [
    "Drive",
    "Machine",
    "Phase",
    "Plan",
    "Term",
    "drive_at",
    "drive_described",
    "fastest",
    "measured_together",
    "plans",
    "this_machine",
]

# host memory of CUDA, torch and DeepSpeed in a rank; and without DeepSpeed
PROCESS_BYTES = {"gpu": 2_500_000_000, "cpu": 600_000_000}
PLAIN_PROCESS_BYTES = {"gpu": 1_200_000_000, "cpu": 600_000_000}
# GPU memory that the driver reserves, 0.4 to 0.5 GB of the memory that nvidia-smi reports, and that
# CUDA takes in a rank
CONTEXT_BYTES = 900_000_000
# of 16-bit gradients that DeepSpeed reduces together (reduce_bucket_size)
BUCKET_ELEMENTS = 500_000_000
DEFAULT_HOST_BYTES_PER_SECOND = 50e9  # of a described machine, unless given
AS_FAST = 1.1  # predictions do not distinguish smaller ratios
DESCRIBED_PATH = "/local_nvme"  # of a drive that is given by its speeds
UNLIMITED_BYTES = 1 << 62


@dataclasses.dataclass(frozen=True)
class Drive:
    """One directory to offload to.

    Attributes
    ----------
    path, free_bytes : str, int
        The directory, and the bytes that are free on its filesystem.
    speeds, profile : mapping of str to float, Profile or None
        GB/s by phase, and the profile that has them; {} without one.
    identity : str
        As of `nvme_offload.hardware.drive.Drive`; "" for a drive that is given by its speeds.
    rating : int or None
        The bytes that its data sheet allows to write in its life.
    """

    path: str
    free_bytes: int
    speeds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    identity: str = ""
    profile: Profile | None = None
    rating: int | None = None

    @property
    def rated_bytes(self) -> float | None:
        """Bytes that can be written in its rated life; None if unknown."""
        return self.rating or (rated_bytes(self.profile) if self.profile else None)


@dataclasses.dataclass(frozen=True)
class Machine:
    """One of the machines that train.

    Attributes
    ----------
    gpu : Gpu or None
        Each of its GPUs; None to train on processors.
    host_bytes, host_bytes_per_second : int, float
        Available host memory, and `machine.copy_bytes_per_second`.
    drives : tuple of Drive
        All are used, in proportion to their speeds.
    """

    gpu: Gpu | None
    host_bytes: int
    host_bytes_per_second: float = DEFAULT_HOST_BYTES_PER_SECOND
    drives: tuple[Drive, ...] = ()

    @property
    def speeds(self) -> dict[str, float]:
        """GB/s by phase of all drives, measured together if possible; {} if one has no profile."""
        if together := measured_together(self.drives):
            return stripe_speeds(together)
        # two directories of one drive count once
        alone = {drive.identity or drive.path: drive.speeds for drive in self.drives}
        if not alone or not all(alone.values()):
            return {}
        return {phase: sum(each[phase] for each in alone.values()) for phase in PHASES}

    @property
    def free_bytes(self) -> int:
        """Free bytes of all drives."""
        free = {drive.identity or drive.path: drive.free_bytes for drive in self.drives}
        return sum(free.values())


def measured_together(drives: Sequence[Drive]) -> Profile | None:
    """The profile of a sweep of exactly the paths of *drives*; None if they were not swept
    together.
    """
    paths = {drive.path for drive in drives}
    for drive in drives:
        if drive.profile and {path.path for path in drive.profile.stripe} == paths:
            return drive.profile
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """One strategy on one machine.

    Attributes
    ----------
    strategy : Strategy
        The way to train.
    gpu_bytes, host_bytes, drive_bytes : int
        Of a rank. On a GPU, `CONTEXT_BYTES` and DeepSpeed's bucket of gradients must fit in addition.
    budget_bytes : int or None
        "host_memory" of this package's swappers, contained in *host_bytes*.
    problems, shortage : tuple of str, float
        Why it does not fit, and how many times more it needs of a resource than there is.
    phases, seconds, written_bytes : tuple of Phase, float or None, float
        Of a step; *seconds* is None if a drive's speed is unknown, and all ranks of a machine write the
        bytes to all of its drives.
    tokens_per_second : float or None
        Of all ranks; None if the tokens or the GPU's speed are unknown.
    free_tokens : float or None
        Tokens of a rank in a micro-batch from which the passes with updates hide the drive; None if
        updates run after the passes, or if nothing is known of tokens, GPU or drive.
    """

    strategy: Strategy
    gpu_bytes: int
    host_bytes: int
    drive_bytes: int
    budget_bytes: int | None
    problems: tuple[str, ...]
    shortage: float
    phases: tuple[Phase, ...]
    seconds: float | None
    written_bytes: float
    tokens_per_second: float | None = None
    free_tokens: float | None = None

    @property
    def fits(self) -> bool:
        """Whether it fits the machine."""
        return not self.problems

    @property
    def written_bytes_a_day(self) -> float | None:
        """Bytes written to all drives in a day of steps without a pause."""
        return self.written_bytes / self.seconds * 86400 if self.seconds else None

    @property
    def concession(self) -> tuple[int, int]:
        """Its cost in clipping, which weighs more, and in precision."""
        return self.clipping, self.rounding

    @property
    def rounding(self) -> int:
        """The index of the state format in `STATE_BYTES`."""
        return list(STATE_BYTES).index(self.strategy.state_format)

    @property
    def clipping(self) -> int:
        """1 if clipping by a norm makes steps slow (`step_in_backward="provisional"`), 2 if it is
        impossible (`True`).
        """
        return 1 if self.strategy.provisional else 2 * (self.strategy.updates == "in backward")


def plans(
    model: Model,
    machine: Machine,
    world: World,
    work: Work = Work(),  # noqa: B008  a tuple of numbers
    budget: int | None = None,
    strategies: Sequence[Strategy] = STRATEGIES,
) -> list[Plan]:
    """Predict each of *strategies* for *model* on *machine*, one of ``world.nodes`` alike in
    *world*, with *work* as the work of a rank in a step. *budget*: "host_memory" of this package's
    swappers in bytes, instead of the machine's available memory.
    """
    return [_plan(strategy, model, machine, world, work, budget) for strategy in strategies]


def fastest(found: Sequence[Plan]) -> Plan | None:
    """Choose the plan to recommend of *found*, the simplest first: of those that fit with the least
    concession, the first within a tenth of the fastest, or the first of all if no drive has a known
    speed.
    """
    every = [plan for plan in found if plan.fits]
    least = min((plan.concession for plan in every), default=(0, 0))
    fitting = [plan for plan in every if plan.concession == least]
    timed = [(plan.seconds, plan) for plan in fitting if plan.seconds is not None]
    if not timed:
        return next(iter(fitting), None)
    fewest = min(seconds for seconds, _ in timed)
    return next(plan for seconds, plan in timed if seconds <= fewest * AS_FAST)


def this_machine(paths: Sequence[str], probe_seconds: float = 0.2) -> tuple[Machine, int]:
    """Describe this machine, with its smallest GPU and the drives of *paths*, and its number of
    ranks: one for each GPU, or one. The memory bandwidth is measured for *probe_seconds*; 0 assumes
    `DEFAULT_HOST_BYTES_PER_SECOND`.
    """
    found = gpus()
    speed = copy_bytes_per_second(probe_seconds) if probe_seconds else DEFAULT_HOST_BYTES_PER_SECOND
    smallest = min(found, key=lambda gpu: gpu.memory_bytes, default=None)
    machine = Machine(smallest, available_bytes(), speed, tuple(map(drive_at, paths)))
    return machine, max(len(found), gpu_count(), 1)


def drive_at(path: str) -> Drive:
    """Describe the drive of *path*, an existing directory, with its profile; without a readable
    profile, speeds are unknown.
    """
    from ..hardware import profile_shelf

    seen = describe(path)
    try:
        profile = profile_shelf.find(path)
    except (OffloadError, OSError):
        profile = None
    speeds = chosen_speeds(profile) if profile else {}
    return Drive(seen.path, seen.free_bytes, speeds, seen.identity, profile)


def drive_described(
    read: float, write: float, mixed: float | None = None, free_bytes: int | None = None
) -> Drive:
    """Describe a drive, on the path `DESCRIBED_PATH`, by its speeds in GB/s and *free_bytes*,
    unlimited unless given. *mixed* is the speed of concurrent reads and writes of as many bytes, by
    default the harmonic mean of *read* and *write*, which agrees with the drives of reports/ within
    a tenth.
    """
    both = mixed or 2 / (1 / read + 1 / write)
    speeds = {"read": read, "write": write, "mixed": both}
    return Drive(DESCRIBED_PATH, free_bytes or UNLIMITED_BYTES, speeds)


def _plan(
    strategy: Strategy, model: Model, machine: Machine, world: World, work: Work, budget: int | None
) -> Plan:
    trains, plain = strategy.optimizer is not None, strategy.door == "plain"
    saved = saved_bytes(model, work) if trains else 0.0
    activations = activation_bytes(model, work) if trains else 0
    problems: dict[str, float] = {}  # with the times that a resource is too small

    def require(needed: int, available: int, said: str) -> None:
        if needed > available:
            text = said.format(format_gb(needed), format_gb(available))
            problems[text] = needed / max(available, 1)

    # DeepSpeed's estimates do not contain it, so it is not shown
    reduced = WEIGHT_BYTES * min(BUCKET_ELEMENTS, model.trained) if trains and not plain else 0
    strategy = _placed(strategy, model, machine.gpu, world, activations, reduced)
    asked = strategy, model, world, activations, work.accumulation
    gpu_bytes, host_bytes, space = needs(*asked)
    if (strategy.updates == "host gradients" or strategy.streams) and world.size > 1:
        cause = "Offload.parameters" if strategy.streams else 'accumulate="host"'
        problems[f"one rank, since {cause} does not take parameters of FSDP2"] = math.inf
    process = PLAIN_PROCESS_BYTES if plain else PROCESS_BYTES
    host_bytes += process["gpu" if machine.gpu else "cpu"]
    host_bytes += int(min(saved, work.activation_host_bytes))
    if machine.gpu is None:
        host_bytes, gpu_bytes = host_bytes + gpu_bytes + reduced, 0
    kept: int | None = None
    second = 0.0  # the share of the states that has two versions in host memory
    if strategy.ours:
        share = max(int((machine.host_bytes / world.ranks - host_bytes) * AUTO_SHARE), 0)
        whole = whole_bytes(strategy, model, world)
        kept = min(share, whole) if budget is None else budget
        least = min(fewest_bytes(strategy, model, world), whole)
        said = "{1} of host memory a rank for the swapper, which needs at least {0}"
        require(least, kept, said)
        host_bytes += min(kept, whole)
        if machine.gpu and kept >= whole:
            gpu_bytes = needs(*asked, machine.gpu.memory_bytes).gpu_bytes
            if strategy.provisional:
                trained = model.trained / world.size
                room = _left_on(machine.gpu, gpu_bytes)
                more = (share if budget is None else budget) - whole
                second = min(
                    more / (strategy.state_bytes * trained),
                    room / (WEIGHT_BYTES * trained),
                    1 - FORWARD_SHARE * (strategy.updates == "in both"),
                )
                host_bytes += int(second * strategy.state_bytes * trained)
                gpu_bytes += int(second * WEIGHT_BYTES * trained)
    moved = _moved(strategy, model, world, kept)
    spilled = max(saved - work.activation_host_bytes, 0.0)
    drive_bytes = space if kept is None else beside_budget(strategy, model, world, kept)
    drive_bytes += int(spilled)
    if strategy.provisional:  # old states and the new ones, and old weights
        drive_bytes += int(moved.written)
        replaced = moved.states_written(model.trained / model.parameters)
        replaced = int(WEIGHT_BYTES * replaced / strategy.state_bytes)
        if machine.gpu is None:
            host_bytes += replaced
        else:
            gpu_bytes += replaced
    if machine.gpu:
        needed = gpu_bytes + reduced + CONTEXT_BYTES
        own = "CUDA's context" + (" and DeepSpeed's buffers" if reduced else "")
        said = f"{{}} of GPU memory with {own}, and a GPU has {{}}"
        require(needed, machine.gpu.memory_bytes, said)
    resident = 0.0  # the share of streamed weights that stays on the GPU
    if machine.gpu and strategy.streams:
        room = _left_on(machine.gpu, gpu_bytes)
        resident = min(room / (WEIGHT_BYTES * model.parameters), 1.0)
        if not trains:
            read = max(moved.passes_read - resident * WEIGHT_BYTES * model.parameters, 0.0)
            moved = moved._replace(passes_read=read)
    needed = host_bytes * world.ranks
    require(needed, machine.host_bytes, "{} of host memory, and {} are available")
    if drive_bytes and not machine.drives:
        problems["a drive: no drive given, pass --path"] = 1.0
    else:
        require(drive_bytes * world.ranks, machine.free_bytes, "{} on the drive, and {} are free")
    host_speed, speeds = machine.host_bytes_per_second, machine.speeds
    step = Step(
        strategy,
        model,
        machine.gpu,
        host_speed,
        speeds,
        world,
        work,
        moved,
        spilled,
        second,
        resident,
    )
    phases = step.phases()
    # While copies take longer than backward, states are copied to the GPU before their updates.
    stay = strategy.ours and not (moved.total or strategy.streams)
    if machine.gpu and stay and strategy.windows == ("backward",) and phases[-1].bound == "copies":
        states = strategy.state_bytes * model.trained / world.size
        gpu_bytes += int(min(states / AHEAD_PARTS, _left_on(machine.gpu, gpu_bytes)))
    known = bool(speeds) or not (moved.total or spilled)
    seconds = sum(phase.seconds for phase in phases) if known else None
    tokens = work.tokens * work.accumulation * world.size
    return Plan(
        strategy,
        gpu_bytes,
        host_bytes,
        drive_bytes,
        kept,
        tuple(problems),
        max(problems.values(), default=0.0),
        phases,
        seconds,
        (moved.written + moved.passes_written + work.accumulation * spilled) * world.ranks,
        tokens / seconds if tokens and step.flops and seconds else None,
        step.free_tokens(),
    )


def _left_on(gpu: Gpu, needed: int) -> float:
    """The bytes of *gpu*, in addition to *needed*, for values that host memory could hold."""
    return max(gpu.memory_bytes * (1 - 1 / MARGIN_PARTS) - needed - CONTEXT_BYTES, 0.0)


def _placed(
    strategy: Strategy, model: Model, gpu: Gpu | None, world: World, activations: int, reduced: int
) -> Strategy:
    """*strategy* with the places of updates and of ZeRO-3's gradients that fit *gpu*'s memory."""
    if gpu is None or not (strategy.ours or strategy.optimizer == "gpu"):
        return strategy._replace(update_device="cpu")
    if strategy.door != "zero3" or strategy.update_device == "cpu":
        return strategy
    room = gpu.memory_bytes - CONTEXT_BYTES - reduced
    holding = strategy._replace(gradients="gpu")
    for tried, margin in ((holding, gpu.memory_bytes // MARGIN_PARTS), (strategy, 0)):
        if needs(tried, model, world, activations).gpu_bytes + margin <= room:
            return tried
    return strategy._replace(update_device="cpu")


def _moved(strategy: Strategy, model: Model, world: World, kept: int | None) -> Streamed:
    """Bytes that a rank transfers: with this package's swapper depending on its budget."""
    if kept is not None:
        return streamed(strategy, model, world, kept)
    if not strategy.uses_drive:
        return NOTHING
    trained = model.trained / world.size
    each = PARAMETERS if strategy.parameters == "drive" else GRADIENTS
    read = each.passes_read * model.parameters / world.size
    return Streamed(read, 0.0, each.read * trained, each.written * trained)
