"""The seconds of a step: `Step` divides it into phases, whose terms are concurrent or one after another.

docs/planning.md has the formulas ("How it is computed"). The constants are from measured steps, which
tests/unit/test_plan_reports.py compares with their predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..hardware import gpu_models
from ..hardware.machine import Gpu
from ..sizes import AHEAD_PARTS, FORWARD_SHARE
from ..units import format_digits
from .model import Model
from .passes import Work, operations
from .placement import Strategy, World
from .traffic import NOTHING, WEIGHT_BYTES, Streamed, transfer

# Bytes of host memory for each parameter. Adam: state and gradient read, state written.
ADAM_TRAFFIC = 28
WIDEN_TRAFFIC = 20  # a gradient to 32 bits: 10 for the copy, 10 for its norm and the scatter
# a parameter to 16 bits: read 4, write 2, and read 2 for the cache line before the write
ROUND_TRAFFIC = 8
# Unpack and pack: "compact" reads 4 and writes 12, and back; "split" joins the 2 of the weight and 2
# more to the 4 of the master, and back.
PACK_TRAFFIC = {"exact": 0, "split": 16, "compact": 32, "compact24": 30}
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
DEFAULT_LINK_BYTES_PER_SECOND = 25e9
# of memory that is locked but not registered with CUDA, as DeepSpeed's swap buffers
MLOCKED_LINK_BYTES_PER_SECOND = 8e9
# the share of a GPU's peak that forward and backward passes reach: 0.46 to 0.52 for Llama-2 7B
# (reports/big-models-h100.md, systems-h100.md), 0.48 for long sequences (reports/activations-h200.md)
UTILISATION = 0.48

_OTHER_GPU_BYTES_PER_SECOND = 0.5e12


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
    def bound(self) -> str:
        """The name of the first term of the longest sequence; "" if there is none."""
        longest = max(
            self.beside, key=lambda terms: sum(term.seconds for term in terms), default=()
        )
        return longest[0].name if longest else ""

    @property
    def formula(self) -> str:
        """The formula of the seconds."""
        texts = [
            " + ".join(
                f"{term.name} {term.how} = {format_digits(term.seconds)} s" for term in terms
            )
            for terms in self.beside
        ]
        times = f"{self.times} x " if self.times > 1 else ""
        longest = texts[0] if len(texts) == 1 else f"max({'; '.join(texts)})"
        return f"{self.name}: {times}{longest}"


_Concurrent = tuple[tuple[Term, ...], ...]


class Step(NamedTuple):
    """A step with *strategy*. *speeds*: of all drives, in GB/s by phase. *moved*: bytes that a rank
    transfers; *spilled*: bytes of activations that a forward pass writes to the drive. *second*: the
    share of the states of which host memory keeps the old version. *resident*: the share of
    streamed weights that stays on the GPU.
    """

    strategy: Strategy
    model: Model
    gpu: Gpu | None
    host_bytes_per_second: float
    speeds: Mapping[str, float]
    world: World
    work: Work
    moved: Streamed
    spilled: float
    second: float = 0.0
    resident: float = 0.0

    @property
    def flops(self) -> float | None:
        """Of the GPU; None if unknown."""
        known = gpu_models.find(self.gpu.name) if self.gpu else None
        return known.flops if known else None

    @property
    def link(self) -> float:
        """Bytes a second between host memory and the GPU."""
        speed = self.gpu.link_bytes_per_second if self.gpu else None
        return speed or DEFAULT_LINK_BYTES_PER_SECOND

    def free_tokens(self) -> float | None:
        """Tokens from which compute in the passes with updates takes as long as the drive."""
        speeds, tokens = self.speeds, self.work.tokens
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
            phases.append(Phase("update", 1, self._update(NOTHING if hidden else self.moved, left)))
        return tuple(phase for phase in phases if phase.times)

    def _hidden(self) -> dict[str, tuple[float, float]]:
        """By pass, the shares of the parameters and of the bytes that are updated during it."""
        strategy, on_drive, rest = self.strategy, 1.0, 1 - FORWARD_SHARE
        if strategy.provisional:  # states in host memory without a second version are updated later
            model = self.model
            states = strategy.state_bytes * model.trained / self.world.size
            on_drive = self.moved.states_written(model.trained / model.parameters) / states
        if strategy.updates != "in both":
            whole = on_drive + self.second
            return {name: (whole, 1.0) for name in strategy.windows if whole}
        backward = rest * on_drive + self.second
        if not backward:
            return {"forward": (1.0, 1.0)}
        return {"forward": (1 - backward, FORWARD_SHARE), "backward": (backward, rest)}

    def _passes(self, moved: Streamed) -> tuple[_Concurrent, _Concurrent]:
        """The concurrent terms of a forward and of a backward pass."""
        strategy, model, ranks = self.strategy, self.model, self.world.ranks
        plain, trains = strategy.door == "plain", strategy.optimizer is not None
        found: tuple[list[Term], list[Term]] = ([], [])
        if self.work.tokens and self.flops:
            for terms, count in zip(found, operations(model, self.work), strict=True):
                terms.append(_term("compute", count, self.flops, UTILISATION, "T", 1e12))
        if self.gpu:
            link, share = self.link, LINK_SHARE
            if strategy.door == "deepspeed":
                link = min(link, MLOCKED_LINK_BYTES_PER_SECOND / LINK_SHARE)
            elif plain:  # pinned, and both ways at the same time
                share = BOTH_WAYS_SHARE
            streamed = 0.0 if strategy.parameters == "gpu" else 1 - self.resident
            inward = streamed * WEIGHT_BYTES * model.parameters
            offloaded = strategy.optimizer in ("host", "drive") and strategy.gradients == "host"
            offloaded &= not plain or strategy.updates == "host gradients"
            outward = WEIGHT_BYTES * model.trained if offloaded else 0
            both = max(inward, outward) if plain else inward + outward
            for terms, amount in zip(found, (inward, both), strict=True):
                if amount:
                    terms.append(_term("copies", amount / self.world.size, link, share))
        if self.speeds:
            read, saved = moved.passes_read / (2 if trains else 1), self.spilled
            transfers = (read, saved), (read + saved, moved.passes_written)
            for terms, amounts in zip(found, transfers, strict=True):
                if any(amounts):
                    terms.append(self._drive(*(amount * ranks for amount in amounts)))
        forward, backward = (tuple((term,) for term in terms) for terms in found)
        return forward, backward

    def _update(self, moved: Streamed, share: float) -> _Concurrent:
        """The concurrent terms of the update of this *share* of the parameters."""
        strategy, world = self.strategy, self.world
        each = share * self.model.trained / world.size
        drive: tuple[Term, ...] = ()
        if self.speeds and (moved.read or moved.written):
            drive = (self._drive(moved.read * world.ranks, moved.written * world.ranks),)
        if self.gpu and strategy.update_device == "gpu":
            known = gpu_models.find(self.gpu.name)
            memory = known.bytes_per_second if known else _OTHER_GPU_BYTES_PER_SECOND
            traffic = 3 * WEIGHT_BYTES + 2 * strategy.state_bytes  # the gradient is only read
            beside = [(_term("Adam", each * traffic, memory),)]
            if strategy.ours:
                copied = strategy.state_bytes
                if not (strategy.streams and strategy.windows):  # there since the pass
                    copied += strategy.parameter_bytes
                copied += strategy.gradient_bytes if strategy.gradients == "host" else 0
                copied *= each
                if strategy.door == "plain" and not self.moved.total:
                    copied -= min(copied / AHEAD_PARTS, self._idle_link_bytes())
                beside.append((_term("copies", copied, self.link, BOTH_WAYS_SHARE),))
            return (*beside, drive) if drive else tuple(beside)
        update = self._update_on_cpu(each)
        if not drive:
            return (update,)
        share = SLOWED_SHARE[strategy.door]
        busy = sum(term.seconds for term in update)
        slowed = Term(
            "slowed by the processors", share * busy, f"{share:g} x {format_digits(busy)} s"
        )
        return update, (*drive, slowed)

    def _idle_link_bytes(self) -> float:
        """Bytes that the link can copy to the GPU during a forward pass that copies nothing."""
        copies = self.strategy.streams or "forward" in self.strategy.windows
        if copies or not (self.work.tokens and self.flops):
            return 0.0
        seconds = operations(self.model, self.work).forward / (self.flops * UTILISATION)
        return seconds * self.link * BOTH_WAYS_SHARE

    def _update_on_cpu(self, each: float) -> tuple[Term, ...]:
        strategy, here = self.strategy, each * self.world.ranks

        def passing(name: str, traffic: int) -> Term:
            return _term(name, here * traffic, self.host_bytes_per_second, OPTIMIZER_SHARE)

        adam = ADAM_TRAFFIC + PACK_TRAFFIC[strategy.state_format]
        if strategy.optimizer == "gpu" or strategy.door == "plain":  # gradients are there
            return (passing("Adam", adam + ROUND_TRAFFIC),)
        new = passing("new parameters", ROUND_TRAFFIC)
        if self.gpu and strategy.parameters == "gpu":
            new = _term("new parameters", WEIGHT_BYTES * each, NEW_PARAMETERS_BYTES_PER_SECOND)
        return passing("gradients widened", WIDEN_TRAFFIC), passing("Adam", adam), new

    def _drive(self, read: float, written: float) -> Term:
        share, speeds = DRIVE_SHARE[self.strategy.door], self.speeds
        seconds, bound = transfer(read, written, speeds)
        # of mixed, the rest of the larger amount is alone
        reached = (read + written) / seconds / 1e9 if bound == "mixed" else speeds[bound]
        speed = f"{bound} {share:g} x {reached:.3g} GB/s"
        how = f"({format_digits(read / 1e9)} GB read, {format_digits(written / 1e9)} GB written; {speed})"
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
    speed = f"{format_digits(per_second / scale)} {unit}/s"
    if share != 1:
        speed = f"({share:g} x {speed})"
    return Term(
        name, amount / per_second / share, f"{format_digits(amount / scale)} {unit} / {speed}"
    )
