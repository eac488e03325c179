"""One run of a variant, assembled from its events. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from ..apart import of
from ..floor import Speeds, floor_seconds

PHASES = ("forward", "backward", "optimizer")


class Phase(NamedTuple):
    """A part of a run. step: None before the first step."""

    name: str
    step: int | None
    began: float
    ended: float
    cpu_seconds: float
    read_bytes: int
    written_bytes: int
    peak_bytes: int


@dataclasses.dataclass
class Run:
    """One run. error: why it ended early, or None. drive: fio's speeds around it."""

    variant: str
    number: int
    error: str | None
    phases: tuple[Phase, ...]
    losses: tuple[str, ...]
    step_ends: tuple[float, ...]
    weights: str | None
    facts: Mapping[str, Any]
    drive: Speeds | None = None

    def figures(self, settling_steps: int) -> dict[str, float]:
        """All figures by name, in seconds and bytes; NaN where the run ended before.

        "step", "update" (backward and optimizer), and each phase: seconds; "NAME floor" and
        "NAME_floor": seconds of the floor, and its share; "PHASE FIELD": the median of that field
        over the steps.
        """
        phases = pd.DataFrame(self.phases, columns=Phase._fields)
        phases["seconds"] = phases.ended - phases.began
        settled = phases[pd.to_numeric(phases.step) >= settling_steps]
        medians = settled.groupby("name").median(numeric_only=True).reindex(PHASES)
        steps = settled.pivot(index="step", columns="name", values="seconds")
        steps = steps.reindex(columns=PHASES)
        figures = {
            f"{name} {field}": medians.at[name, field] for name in PHASES for field in medians
        }
        figures |= {name: medians.at[name, "seconds"] for name in PHASES}
        figures["update"] = steps[[*PHASES[1:]]].sum(axis=1, skipna=False).median()
        figures["step"] = steps.sum(axis=1, skipna=False).median()
        figures["peak"] = self.peak_bytes() if self.error is None else math.nan
        figures["gpu peak"] = self.facts.get("gpu_peak_bytes") or math.nan
        for name in (*PHASES, "step"):
            moved = self.moved(PHASES if name == "step" else (name,), settling_steps)
            floor = floor_seconds(*moved, self.drive) if self.drive else math.nan
            figures[f"{name} floor"] = floor
            figures[f"{name}_floor"] = floor / figures[name] if floor else math.nan
        return figures

    def peak_bytes(self) -> float:
        """The peak resident size of all phases, including settling steps."""
        return max((phase.peak_bytes for phase in self.phases), default=math.nan)

    def moved(self, names: Sequence[str], settling_steps: int) -> tuple[float, float]:
        """Bytes read and written in these phases of a step: medians."""
        phases = pd.DataFrame(self.phases, columns=Phase._fields)
        settled = phases[pd.to_numeric(phases.step) >= settling_steps]
        each = settled[settled.name.isin(names)].groupby("name")
        return float(each.read_bytes.median().sum()), float(each.written_bytes.median().sum())


def assemble(
    variant: str,
    number: int,
    error: str | None,
    events: Sequence[dict[str, Any]],
) -> Run:
    """Make the run of these events."""
    phases = tuple(Phase(**event) for event in of(events, "phase"))
    steps = of(events, "step")
    facts = {
        key: value
        for kind in ("done", "weights")
        for event in of(events, kind)
        for key, value in event.items()
    }
    return Run(
        variant,
        number,
        error,
        phases,
        tuple(step["loss"] for step in steps),
        tuple(step["ended"] for step in steps),
        facts.pop("digest", None),
        facts,
    )
