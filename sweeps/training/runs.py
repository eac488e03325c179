"""What one run of a variant was, put together from its events and from what was sampled beside it.
Pure.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .process import Memory

PHASES = ("forward", "backward", "optimizer")


class Speeds(NamedTuple):
    """Bytes a second that fio reached: reading, writing, and both at once (the sum)."""

    read: float
    write: float
    mixed: float


class Sample(NamedTuple):
    """Memory at a moment of the monotonic clock."""

    moment: float
    memory: Memory


class Phase(NamedTuple):
    """A stretch of a run. *step* is None before the first one. *busy_seconds* are the drive's;
    *uses* is how often a value of the swapper was asked for.
    """

    name: str
    step: int | None
    began: float
    ended: float
    cpu_seconds: float
    read_bytes: int
    written_bytes: int
    peak_bytes: int
    after_bytes: int
    busy_seconds: float
    planning_seconds: float
    uses: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


@dataclasses.dataclass
class Run:
    """One run. *error* is why it ended early, or None. *at_peak* is the memory by kind at the
    sample that was largest; *drive* fio's speeds around it.
    """

    variant: str
    number: int
    started: float
    error: str | None
    phases: tuple[Phase, ...]
    losses: tuple[str, ...]
    step_ends: tuple[float, ...]
    stats: tuple[Mapping[str, Any] | None, ...]
    kinds: Mapping[str, Mapping[str, int]]
    at_peak: Memory | None
    weights: str | None
    facts: Mapping[str, Any]
    drive: Speeds | None = None

    def of(self, name: str, settling_steps: int) -> list[Phase]:
        """The phases of that name, of steps past the first ones."""
        return [
            phase
            for phase in self.phases
            if phase.name == name and phase.step is not None and phase.step >= settling_steps
        ]

    def median(
        self,
        name: str,
        settling_steps: int,
        of: Callable[[Phase], float] = lambda phase: phase.seconds,
    ) -> float | None:
        """The median of a phase's seconds, or of something else, over the steps; None where there
        were none.
        """
        phases = self.of(name, settling_steps)
        return statistics.median(map(of, phases)) if phases else None

    def measure(self, name: str, settling_steps: int) -> float | None:
        """A measure of `plan.MEASURES`, in seconds or bytes; None where the run did not
        come to it.
        """
        if name in PHASES:
            return self.median(name, settling_steps)
        if name == "cold":
            return self.step_ends[0] - self.started if self.step_ends else None
        if name == "peak":
            return self.peak_bytes() if self.error is None else None
        if name == "settled_peak":
            return max(
                (
                    phase.peak_bytes
                    for phase in self.phases
                    if phase.step is not None and phase.step >= settling_steps
                ),
                default=None,
            )
        names = PHASES[1:] if name == "update" else PHASES
        by_step = [self.of(phase, settling_steps) for phase in names]
        sums = [sum(phase.seconds for phase in step) for step in zip(*by_step, strict=False)]
        return statistics.median(sums) if sums else None

    def peak_bytes(self, *names: str) -> float | None:
        """The most that was resident, of all phases or those of these names; steps that settle
        count too.
        """
        peaks = [phase.peak_bytes for phase in self.phases if not names or phase.name in names]
        return max(peaks) if peaks else None

    def moved(self, names: Sequence[str], settling_steps: int) -> tuple[float, float]:
        """Bytes read and written in these phases of a step: medians."""
        reads = [
            self.median(name, settling_steps, lambda phase: phase.read_bytes) or 0 for name in names
        ]
        writes = [
            self.median(name, settling_steps, lambda phase: phase.written_bytes) or 0
            for name in names
        ]
        return sum(reads), sum(writes)

    def share(self, name: str, settling_steps: int) -> float | None:
        """A share of `plan.SHARES`; None where nothing was moved, or fio not run."""
        phase = name.removesuffix("_floor")
        seconds = self.measure(phase, settling_steps)
        read, written = self.moved(PHASES if phase == "step" else (phase,), settling_steps)
        if self.drive is None or not seconds or read + written == 0:
            return None
        return floor_seconds(read, written, self.drive) / seconds


def floor_seconds(read: float, written: float, drive: Speeds) -> float:
    """The least time in which a drive of these speeds moves that many bytes."""
    return max(read / drive.read, written / drive.write, (read + written) / drive.mixed)


def mean_speeds(before: Speeds, after: Speeds) -> Speeds:
    """Of two measurements."""
    return Speeds(*(statistics.fmean(pair) for pair in zip(before, after, strict=True)))


def assemble(
    variant: str,
    number: int,
    started: float,
    error: str | None,
    events: Sequence[Mapping[str, Any]],
    samples: Sequence[Sample],
) -> Run:
    """The run that these events tell of."""
    phases, steps = [], []
    facts: dict[str, Any] = {}
    for event in events:
        values = {key: value for key, value in event.items() if key != "event"}
        if event["event"] == "phase":
            phases.append(Phase(**values))
        elif event["event"] == "step":
            steps.append(values)
        else:
            facts |= values
    measured = [
        sample.memory for sample in samples if not phases or sample.moment <= phases[-1].ended
    ]
    return Run(
        variant,
        number,
        started,
        error,
        tuple(phases),
        tuple(step["loss"] for step in steps),
        tuple(step["ended"] for step in steps),
        tuple(step["stats"] for step in steps),
        facts.pop("kinds", {}),
        max(measured, key=lambda memory: memory.resident, default=None),
        facts.pop("digest", None),
        facts,
    )
