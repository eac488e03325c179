"""What a comparison found: its runs, their statistics, and the file that it is kept in. Pure:
nothing here looks at the machine.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from nvme_offload.errors import UsageError

from ..report import Spread, ratios, spread
from .plan import Setting
from .training import TrainingRow

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Run:
    """A side's turn at a task. position: in the order of the round. The memory is as in
    `sweeps.peers.stopwatch.Measurement`.
    """

    task: str
    side: str
    round: int
    position: int
    nbytes: int
    seconds: float
    cpu_seconds: float
    extra_bytes: int
    locked_bytes: int
    cached_bytes: int


@dataclasses.dataclass(frozen=True)
class TaskFacts:
    """A task as it was done: *nbytes* in all, in *requests* tensors each way."""

    name: str
    title: str
    group: str
    direction: str
    nbytes: int
    requests: int
    checkpoint: bool = False


@dataclasses.dataclass(frozen=True)
class SideFacts:
    """A side as it was: its version, what "done" means for it, the setting it had, and how many it
    chose from.
    """

    name: str
    title: str
    version: str
    done: str
    setting: Setting
    tried: tuple[dict[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Why *side*, by its title, did not do *task*, or anything where that is empty."""

    side: str
    task: str
    reason: str


@dataclasses.dataclass
class Results:
    """facts: what the machine and the command were, by name. size_bytes: what the command was
    given. training: rows of a report of its own.
    """

    facts: dict[str, str]
    size_bytes: int
    reference: str
    ceiling: str
    tasks: list[TaskFacts]
    sides: list[SideFacts]
    runs: list[Run] = dataclasses.field(default_factory=list)
    skipped: list[Skipped] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    training: list[TrainingRow] = dataclasses.field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Rounds that were begun."""
        return len({run.round for run in self.runs})

    def side(self, name: str) -> SideFacts:
        """The side *name*."""
        return next(side for side in self.sides if side.name == name)


@dataclasses.dataclass(frozen=True)
class Row:
    """A side at a task. advantage: the speed of the reference over its own in the same round; None
    without both. Memory and CPU are medians.
    """

    task: TaskFacts
    side: SideFacts
    gb_per_second: Spread
    advantage: Spread | None
    cpu_seconds_per_gib: float
    extra_bytes: int
    locked_bytes: int
    cached_bytes: int


def rows(results: Results, task: TaskFacts) -> list[Row]:
    """The sides that did *task*, in the order of the plan."""
    frame = pd.DataFrame([run for run in results.runs if run.task == task.name])
    if frame.empty:
        return []
    frame["speed"] = frame.nbytes / frame.seconds
    frame["cpu"] = frame.cpu_seconds / frame.nbytes * (1 << 30)
    by_side = {name: runs.set_index("round") for name, runs in frame.groupby("side")}
    reference = by_side.get(results.reference)
    found = []
    for side in results.sides:
        if (runs := by_side.get(side.name)) is not None:
            shared = [] if reference is None else ratios(reference.speed, runs.speed)
            middle = runs.median(numeric_only=True)
            memory = (middle.extra_bytes, middle.locked_bytes, middle.cached_bytes)
            advantage = spread(shared) if len(shared) else None
            speed = spread(runs.speed / 1e9)
            found.append(Row(task, side, speed, advantage, middle.cpu, *map(int, memory)))
    return found


def groups(results: Results) -> Iterator[tuple[str, list[TaskFacts]]]:
    """The tasks that somebody did, by what they have in common."""
    done = {run.task for run in results.runs}
    by_group: dict[str, list[TaskFacts]] = {}
    for task in results.tasks:
        if task.name in done:
            by_group.setdefault(task.group, []).append(task)
    yield from by_group.items()


def as_json(results: Results) -> str:
    """Everything, for `from_json`."""
    return json.dumps({"schema": SCHEMA, **dataclasses.asdict(results)}, indent=1) + "\n"


def from_json(path: Path) -> Results:
    """The results in *path*. Raises: UsageError where it is no such file; OSError."""
    try:
        document = json.loads(path.read_text())
        if document.pop("schema") != SCHEMA:
            raise UsageError(f"{path} is of another version of this comparison: run it again")
        kinds: dict[str, type[Any]] = {
            "tasks": TaskFacts,
            "sides": SideFacts,
            "runs": Run,
            "skipped": Skipped,
            "training": TrainingRow,
        }
        fields: dict[str, Any] = {
            key: [kinds[key](**entry) for entry in value] if key in kinds else value
            for key, value in document.items()
        }
        return Results(**fields)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} is not what sweeps.compare wrote: {error}") from None
