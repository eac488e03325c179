"""`Plan`: the bytes of a way to train on a machine, whether it fits, and the seconds of a step, predicted
from the measured profile of its drives.

docs/planning.md has the formulas ("How it is computed"). The constants are from measured steps, which
tests/unit/test_plan_reports.py compares with their predictions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..errors import OffloadError
from ..hardware import gpu_models
from ..hardware.drive import describe
from ..hardware.machine import Gpu, available_bytes, copy_bytes_per_second, gpu_count, gpus
from ..hardware.profile import PHASES, Profile
from ..sizes import AUTO_SHARE, FORWARD_SHARE, MARGIN_PARTS
from ..units import format_gb
from .model import Model
from .passes import Work, activation_bytes, operations, saved_bytes
from .placement import (
    STRATEGIES,
    Strategy,
    Streamed,
    World,
    beside_budget,
    fewest_bytes,
    needs,
    streamed,
    whole_bytes,
)
from .traffic import (
    GRADIENTS,
    PARAMETERS,
    STATE_BYTES,
    WEIGHT_BYTES,
    chosen_speeds,
    rated_bytes,
    stripe_speeds,
    transfer,
)

# Bytes of host memory for each parameter. Adam: state and gradient read, state written.
ADAM_TRAFFIC = 28
WIDEN_TRAFFIC = 20  # a gradient to 32 bits: 10 for the copy, 10 for its norm and the scatter
# a parameter to 16 bits: read 4, write 2, and read 2 for the cache line before the write
ROUND_TRAFFIC = 8
# Unpack and pack: "compact" reads 4 and writes 12, and back; "split" joins the 2 of the weight and 2
# more to the 4 of the master, and back.
PACK_TRAFFIC = {"exact": 0, "split": 16, "compact": 32, "compact24": 30}
# Parameters a second that a GPU unpacks and packs, if it takes longer to queue the kernels than to run
# them: a bucket of 128 MiB in 0.26, 0.55 and 0.64 ms, whatever its size. In reports/packing-h100.md the
# processor takes as long as the GPU. 7B "compact" takes 1.07 to 1.36 s with updates in backward, and 1.02
# s of them without packing.
PACKED_PER_SECOND = {"split": 52e9, "compact": 61e9, "compact24": 70e9}
OPTIMIZER_SHARE = 1.2  # of the speed of plain copies, which also read the lines that they write
# The share of the drive's measured speed that a step reaches: the median of `NVMeOptimizer` in
# reports/optimizer-*.md and h100-llama2-7b.md, and of DeepSpeed in training-h200*.md.
DRIVE_SHARE = {"zero": 0.96, "zero3": 0.96, "plain": 0.96, "deepspeed": 0.92}
# While the CPUs use the memory, a drive reaches 0.6 of its speed (reports/h200-llama2-7b.md), so a
# second of CPU time costs it 0.4 s. DeepSpeed's own swapper overlaps less: the value is fitted to
# reports/training-vda.md and optimizer-vda.md.
SLOWED_SHARE = {"zero3": 0.4, "plain": 0.4, "deepspeed": 0.7}
# of the link to the GPU: DeepSpeed's copies of gradients or parameters; and this package's while others
# run in the opposite direction, 47 to 51 of 54.8 GB/s in an H200's steps of 7B, 13B and 33B
LINK_SHARE, BOTH_WAYS_SHARE = 0.4, 0.91
# to the GPU after the step, rounding included: DeepSpeed copies them through unregistered memory
NEW_PARAMETERS_BYTES_PER_SECOND = 6.6e9
# host memory of CUDA, torch and DeepSpeed in a rank; and without DeepSpeed
PROCESS_BYTES = {"gpu": 2_500_000_000, "cpu": 600_000_000}
PLAIN_PROCESS_BYTES = {"gpu": 1_200_000_000, "cpu": 600_000_000}
# GPU memory that the driver reserves, 0.4 to 0.5 GB of the memory that nvidia-smi reports, and that
# CUDA takes in a rank
CONTEXT_BYTES = 900_000_000
# of 16-bit gradients that DeepSpeed reduces together (reduce_bucket_size)
BUCKET_ELEMENTS = 500_000_000
DEFAULT_HOST_BYTES_PER_SECOND = 50e9  # of a described machine, unless given
DEFAULT_LINK_BYTES_PER_SECOND = 25e9
# of memory that is locked but not registered with CUDA, as DeepSpeed's swap buffers
MLOCKED_LINK_BYTES_PER_SECOND = 8e9
AS_FAST = 1.1  # predictions do not distinguish smaller ratios
# the share of a GPU's peak that forward and backward passes reach: 0.46 to 0.52 for Llama-2 7B
# (reports/big-models-h100.md, systems-h100.md), 0.48 for long sequences (reports/activations-h200.md)
UTILISATION = 0.48

_OTHER_GPU_BYTES_PER_SECOND = 0.5e12
_NOTHING = Streamed(0.0, 0.0, 0.0, 0.0)

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
    """Find the profile of a sweep of several paths.

    Parameters
    ----------
    drives : sequence of Drive
        The paths. The profile is None unless exactly these were swept together.
    """
    paths = {drive.path for drive in drives}
    for drive in drives:
        if drive.profile and {path.path for path in drive.profile.stripe} == paths:
            return drive.profile
    return None


class Term(NamedTuple):
    """One thing that takes time, such as "compute", "copies", "drive" or "Adam".

    Attributes
    ----------
    name, seconds, how : str, float, str
        *how* is the formula for the seconds.
    """

    name: str
    seconds: float
    how: str


class Phase(NamedTuple):
    """A part of a step.

    Attributes
    ----------
    name, times : str, int
        "forward", "backward", "update", or "backward and update"; its number in a step.
    beside : tuple of tuples of Term
        Concurrent sequences of terms.
    """

    name: str
    times: int
    beside: tuple[tuple[Term, ...], ...]

    @property
    def seconds(self) -> float:
        """Total seconds in a step."""
        sums = (sum(term.seconds for term in terms) for terms in self.beside)
        return self.times * max(sums, default=0.0)

    @property
    def formula(self) -> str:
        """The formula of the seconds."""
        texts = [
            " + ".join(f"{term.name} {term.how} = {term.seconds:.3g} s" for term in terms)
            for terms in self.beside
        ]
        times = f"{self.times} x " if self.times > 1 else ""
        longest = texts[0] if len(texts) == 1 else f"max({'; '.join(texts)})"
        return f"{self.name}: {times}{longest}"


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
    """Predict every strategy for a model.

    Parameters
    ----------
    model, machine, world, work, strategies
        The machine is one of ``world.nodes`` alike; the work is the work of a rank in a step.
    budget : int, optional
        "host_memory" of this package's swappers in bytes, instead of the machine's available memory.
    """
    return [_plan(strategy, model, machine, world, work, budget) for strategy in strategies]


def fastest(found: Sequence[Plan]) -> Plan | None:
    """Choose the plan to recommend: of those that fit with the least concession, the first within a
    tenth of the fastest, or the first of all if no drive has a known speed.

    Parameters
    ----------
    found : sequence of Plan
        The simplest first.
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
    """Describe this machine, with its smallest GPU, and its number of ranks: one for each GPU, or one.

    Parameters
    ----------
    paths : sequence of str
        Directories to offload to.
    probe_seconds : float
        For a measurement of the memory bandwidth; 0 assumes `DEFAULT_HOST_BYTES_PER_SECOND`.
    """
    found = gpus()
    speed = copy_bytes_per_second(probe_seconds) if probe_seconds else DEFAULT_HOST_BYTES_PER_SECOND
    smallest = min(found, key=lambda gpu: gpu.memory_bytes, default=None)
    machine = Machine(smallest, available_bytes(), speed, tuple(map(drive_at, paths)))
    return machine, max(len(found), gpu_count(), 1)


def drive_at(path: str) -> Drive:
    """Describe the drive of a directory, with its profile.

    Parameters
    ----------
    path : str
        An existing directory. Without a readable profile, speeds are unknown.
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
    """Describe a drive, on the path `DESCRIBED_PATH`, by its speeds.

    Parameters
    ----------
    read, write, mixed : float
        GB/s; *mixed* of concurrent reads and writes of as many bytes, by default the harmonic mean of
        *read* and *write*, which agrees with the drives of reports/ within a tenth.
    free_bytes : int, optional
        Unlimited unless given.
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
    gpu_bytes, host_bytes, space = needs(strategy, model, world, activations, work.accumulation)
    if (strategy.updates == "host gradients" or strategy.streams) and world.size > 1:
        cause = "Offload.parameters" if strategy.streams else 'accumulate="host"'
        problems[f"one rank, since {cause} does not take parameters of FSDP2"] = math.inf
    process = PLAIN_PROCESS_BYTES if plain else PROCESS_BYTES
    host_bytes += process["gpu" if machine.gpu else "cpu"]
    host_bytes += int(min(saved, work.activation_host_bytes))
    if machine.gpu is None:
        host_bytes, gpu_bytes = host_bytes + gpu_bytes + reduced, 0
    kept: int | None = None
    if strategy.ours:
        share = max(int((machine.host_bytes / world.ranks - host_bytes) * AUTO_SHARE), 0)
        whole = whole_bytes(strategy, model, world)
        kept = min(share, whole) if budget is None else budget
        least = min(fewest_bytes(strategy, model, world), whole)
        said = "{1} of host memory a rank for the swapper, which needs at least {0}"
        require(least, kept, said)
        host_bytes += min(kept, whole)
    moved = _moved(strategy, model, world, kept)
    spilled = max(saved - work.activation_host_bytes, 0.0)
    drive_bytes = space if kept is None else beside_budget(strategy, model, world, kept)
    drive_bytes += int(spilled)
    if strategy.provisional:  # old states and the new ones, and old weights
        drive_bytes += int(moved.written)
        replaced = int(WEIGHT_BYTES * moved.written / strategy.state_bytes)
        if machine.gpu is None:
            host_bytes += replaced
        else:
            gpu_bytes += replaced
    if machine.gpu:
        needed = gpu_bytes + reduced + CONTEXT_BYTES
        require(needed, machine.gpu.memory_bytes, "{} of GPU memory, and a GPU has {}")
    needed = host_bytes * world.ranks
    require(needed, machine.host_bytes, "{} of host memory, and {} are available")
    if space and not machine.drives:
        problems["a drive: no drive given, pass --path"] = 1.0
    else:
        require(drive_bytes * world.ranks, machine.free_bytes, "{} on the drive, and {} are free")
    step = _Step(strategy, model, machine, world, work, moved, spilled)
    phases = step.phases()
    known = bool(machine.speeds) or not (moved.total or spilled)
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
        return _NOTHING
    trained = model.trained / world.size
    load = PARAMETERS if strategy.parameters == "drive" else GRADIENTS
    read = load.passes_read * model.parameters / world.size
    return Streamed(read, 0.0, load.step_read * trained, load.step_write * trained)


_Concurrent = tuple[tuple[Term, ...], ...]


class _Step(NamedTuple):
    """A step with *strategy*. *moved*: bytes that a rank transfers; *spilled*: bytes of activations
    that a forward pass writes to the drive.
    """

    strategy: Strategy
    model: Model
    machine: Machine
    world: World
    work: Work
    moved: Streamed
    spilled: float

    @property
    def flops(self) -> float | None:
        """Of the GPU; None if unknown."""
        known = gpu_models.find(self.machine.gpu.name) if self.machine.gpu else None
        return known.flops if known else None

    @property
    def link(self) -> float:
        """Bytes a second between host memory and the GPU."""
        speed = self.machine.gpu.link_bytes_per_second if self.machine.gpu else None
        return speed or DEFAULT_LINK_BYTES_PER_SECOND

    def free_tokens(self) -> float | None:
        """Tokens from which compute in the passes with updates takes as long as the drive."""
        speeds, tokens = self.machine.speeds, self.work.tokens
        if not (self.strategy.windows and self.flops and speeds and tokens):
            return None
        counts = operations(self.model, self.work)
        compute: float = sum(getattr(counts, window) for window in self.strategy.windows)
        speed = speeds["mixed"] * 1e9 * DRIVE_SHARE["plain"]
        transfers = self.moved.total * self.world.ranks / speed
        return tokens * transfers / (compute / (self.flops * UTILISATION))

    def phases(self) -> tuple[Phase, ...]:
        """The phases of the step."""
        count, hidden, phases = self.work.accumulation, self._hidden(), []
        for name, beside in zip(("forward", "backward"), self._passes(self.moved), strict=True):
            if self.strategy.optimizer is None:
                return (Phase(name, count, beside),)
            if name == "backward" and count > 1 and self.moved.passes_written:
                # the gradients of the first backward pass displace states, and stay
                _, later = self._passes(self.moved._replace(passes_written=0.0))
                phases += [Phase(name, 1, beside), Phase(name, count - 1, later)]
                continue
            phases.append(Phase(name, count - (name in hidden), beside))
            if name in hidden:
                share, part = hidden[name]
                update = self._update(Streamed(*(part * each for each in self.moved)), share)
                phases.append(Phase(f"{name} and update", 1, _together(beside, update)))
        left = 1 - sum(share for share, _ in hidden.values())
        if left > 0:
            phases.append(
                Phase("update", 1, self._update(_NOTHING if hidden else self.moved, left))
            )
        return tuple(phase for phase in phases if phase.times)

    def _hidden(self) -> dict[str, tuple[float, float]]:
        """By pass, the shares of the parameters and of the bytes that are updated during it."""
        strategy, whole = self.strategy, 1.0
        if strategy.updates == "in both":
            rest = 1 - FORWARD_SHARE
            return {"forward": (FORWARD_SHARE, FORWARD_SHARE), "backward": (rest, rest)}
        if strategy.provisional:  # states in host memory are updated in the step
            states = strategy.state_bytes * self.model.trained
            whole = self.moved.written * self.world.size / states
        return {name: (whole, 1.0) for name in strategy.windows if whole}

    def _passes(self, moved: Streamed) -> tuple[_Concurrent, _Concurrent]:
        """The concurrent terms of a forward and of a backward pass."""
        strategy, model, ranks = self.strategy, self.model, self.world.ranks
        plain, trains = strategy.door == "plain", strategy.optimizer is not None
        found: tuple[list[Term], list[Term]] = ([], [])
        if self.work.tokens and self.flops:
            for terms, count in zip(found, operations(model, self.work), strict=True):
                terms.append(_term("compute", count, self.flops, UTILISATION, "T", 1e12))
        if self.machine.gpu:
            link, share = self.link, LINK_SHARE
            if strategy.door == "deepspeed":
                link = min(link, MLOCKED_LINK_BYTES_PER_SECOND / LINK_SHARE)
            elif plain:  # pinned, and both ways at the same time
                share = BOTH_WAYS_SHARE
            inward = 0 if strategy.parameters == "gpu" else WEIGHT_BYTES * model.parameters
            offloaded = strategy.optimizer in ("host", "drive") and strategy.gradients == "host"
            offloaded &= not plain or strategy.updates == "host gradients"
            outward = WEIGHT_BYTES * model.trained if offloaded else 0
            both = max(inward, outward) if plain else inward + outward
            for terms, amount in zip(found, (inward, both), strict=True):
                if amount:
                    terms.append(_term("copies", amount / self.world.size, link, share))
        if self.machine.speeds:
            read, saved = moved.passes_read / (2 if trains else 1), self.spilled
            transfers = (read, saved), (read + saved, moved.passes_written)
            for terms, amounts in zip(found, transfers, strict=True):
                if any(amounts):
                    terms.append(self._drive(*(amount * ranks for amount in amounts)))
        forward, backward = (tuple((term,) for term in terms) for terms in found)
        return forward, backward

    def _update(self, moved: Streamed, share: float) -> _Concurrent:
        """The concurrent terms of the update of this *share* of the parameters."""
        strategy, machine, world = self.strategy, self.machine, self.world
        each = share * self.model.trained / world.size
        drive: tuple[Term, ...] = ()
        if machine.speeds and (moved.read or moved.written):
            drive = (self._drive(moved.read * world.ranks, moved.written * world.ranks),)
        if machine.gpu and strategy.update_device == "gpu":
            beside = [self._update_on_gpu(each, machine.gpu)]
            if strategy.ours:
                copied = strategy.state_bytes
                if not (strategy.streams and strategy.windows):  # there since the pass
                    copied += strategy.parameter_bytes
                copied += strategy.gradient_bytes if strategy.gradients == "host" else 0
                beside.append((_term("copies", copied * each, self.link, BOTH_WAYS_SHARE),))
            return (*beside, drive) if drive else tuple(beside)
        update = self._update_on_cpu(each)
        if not drive:
            return (update,)
        share = SLOWED_SHARE[strategy.door]
        busy = sum(term.seconds for term in update)
        slowed = Term("slowed by the processors", share * busy, f"{share:g} x {busy:.3g} s")
        return update, (*drive, slowed)

    def _update_on_gpu(self, each: float, gpu: Gpu) -> tuple[Term, ...]:
        known = gpu_models.find(gpu.name)
        memory = known.bytes_per_second if known else _OTHER_GPU_BYTES_PER_SECOND
        adam = _term("Adam", each * (ADAM_TRAFFIC + ROUND_TRAFFIC), memory)
        packed = PACKED_PER_SECOND.get(self.strategy.state_format)
        if packed is None:
            return (adam,)
        packed = min(packed, memory / PACK_TRAFFIC[self.strategy.state_format])
        return adam, _term("packing", each, packed, 1.0, "billion")

    def _update_on_cpu(self, each: float) -> tuple[Term, ...]:
        strategy, host = self.strategy, self.machine.host_bytes_per_second
        here = each * self.world.ranks

        def passing(name: str, traffic: int) -> Term:
            return _term(name, here * traffic, host, OPTIMIZER_SHARE)

        adam = ADAM_TRAFFIC + PACK_TRAFFIC[strategy.state_format]
        if strategy.optimizer == "gpu" or strategy.door == "plain":  # gradients are there
            return (passing("Adam", adam + ROUND_TRAFFIC),)
        new = passing("new parameters", ROUND_TRAFFIC)
        if self.machine.gpu and strategy.parameters == "gpu":
            new = _term("new parameters", WEIGHT_BYTES * each, NEW_PARAMETERS_BYTES_PER_SECOND)
        return passing("gradients widened", WIDEN_TRAFFIC), passing("Adam", adam), new

    def _drive(self, read: float, written: float) -> Term:
        share, speeds = DRIVE_SHARE[self.strategy.door], self.machine.speeds
        seconds, bound = transfer(read, written, speeds)
        speed = f"{bound} {share:g} x {speeds[bound]:.3g} GB/s"
        how = f"({read / 1e9:.3g} GB read, {written / 1e9:.3g} GB written; {speed})"
        return Term("drive", seconds / share, how)


def _together(a_pass: _Concurrent, update: _Concurrent) -> _Concurrent:
    """The concurrent terms of a pass with an *update*, which share the GPU and the drive."""
    found: dict[str, tuple[Term, ...]] = {}
    for terms in (*a_pass, *update):
        by = {"Adam": "compute"}.get(terms[0].name, terms[0].name)
        found[by] = (*found.get(by, ()), *terms)
    return tuple(found.values())


def _term(
    name: str,
    amount: float,
    per_second: float,
    share: float = 1.0,
    unit: str = "GB",
    scale: float = 1e9,
) -> Term:
    """The time for *amount* at a *share* of a speed."""
    speed = f"{per_second / scale:.3g} {unit}/s"
    if share != 1:
        speed = f"({share:g} x {speed})"
    return Term(name, amount / per_second / share, f"{amount / scale:.3g} {unit} / {speed}")
