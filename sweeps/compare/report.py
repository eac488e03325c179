"""The results of a comparison, and its report in Markdown. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pandas as pd

from nvme_offload.units import format_bytes

from ..report import Spread, document, escaped, listed, ratios, spread, table
from .plan import Setting, describe

HOW = (
    "Each round runs every task, and each task runs all sides one after another; the next round reverses the order. A ratio is "
    "the median over the rounds of the ratio within one round, with the range of all rounds (the middle 80 % of ten or more) in brackets. Sides of different "
    "libraries run in separate processes. Sides that take the caller's memory get equal buffers: huge pages, touched "
    "before the clock starts. DeepSpeed's op gets memory from its own allocator, because it copies any other.",
    "All clocks stop after fdatasync or its equivalent. A file to read is dropped from the page cache before the clock starts, which mincore confirms, and is "
    "fully in memory when it stops: sides that map a file touch every page. The first round compares every byte outside the timed part. fio uses its own "
    "memory, whose contents are not checked.",
    "Each side gets the fastest of its candidate settings, measured just before by the geometric mean over large and 1 MiB tensors (for a checkpoint: "
    "by writing one). A setting within 2 % of the fastest that stands earlier in the plan is preferred.",
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a side. position: in the order of its round. Other fields as in `Measurement`."""

    task: str
    side: str
    round: int
    position: int
    nbytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class TaskFacts:
    """A task of the run: *nbytes* in total, *requests* tensors per direction."""

    name: str
    title: str
    direction: str
    nbytes: int
    requests: int
    checkpoint: bool = False

    @property
    def text(self) -> str:
        """For people: "read 1024 x 1 MiB"."""
        if self.checkpoint:
            return f"{self.title} {self.requests} tensors, {self.nbytes / 1e9:.2f} GB"
        each = self.nbytes // self.requests // (2 if self.direction == "mixed" else 1)
        return f"{self.title} {self.requests} x {format_bytes(each)}"


@dataclasses.dataclass(frozen=True)
class SideFacts:
    """A side of the run. done: when the report counts its bytes as moved."""

    name: str
    title: str
    version: str
    done: str
    setting: Setting


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A side, by its title, that did not run *task* (or any task, where that is empty)."""

    side: str
    task: str
    reason: str


@dataclasses.dataclass
class Results:
    """facts: machine and command, by name. size_bytes: the argument of `--size`."""

    facts: dict[str, str]
    size_bytes: int
    reference: str
    tasks: list[TaskFacts]
    sides: list[SideFacts] = dataclasses.field(default_factory=list)
    runs: list[Run] = dataclasses.field(default_factory=list)
    skipped: list[Skipped] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Row:
    """A side at a task. advantage: the reference's speed over this side's in the same round, or None
    without common rounds.
    """

    gb_per_second: Spread
    advantage: Spread | None


def rows(results: Results, task: TaskFacts) -> dict[str, Row]:
    """The sides that ran *task*, by name."""
    frame = pd.DataFrame([run for run in results.runs if run.task == task.name])
    if frame.empty:
        return {}
    frame["speed"] = frame.nbytes / frame.seconds
    by_side = {name: runs.set_index("round") for name, runs in frame.groupby("side")}
    reference = by_side.get(results.reference)
    found = {}
    for name, runs in by_side.items():
        common = [] if reference is None else ratios(reference.speed, runs.speed)
        found[name] = Row(
            spread(runs.speed / 1e9),
            spread(common) if len(common) else None,
        )
    return found


def render(results: Results) -> str:
    """The report in Markdown."""
    by_task = {task: found for task in results.tasks if (found := rows(results, task))}
    tensors = [task for task in by_task if not task.checkpoint]
    checkpoints = [task for task in by_task if task.checkpoint]
    reference = next(
        (side.title for side in results.sides if side.name == results.reference), results.reference
    )
    parts = ["# This engine compared with others", listed(results.facts), *results.notes]
    parts += [f"## Speed: {reference} in GB/s, and how many times as fast as each other side it is"]
    parts += [_advantages(results, by_task, tasks) for tasks in (tensors, checkpoints) if tasks]
    parts.append("## All sides, medians in GB/s")
    parts += [_matrix(results, by_task, tasks) for tasks in (tensors, checkpoints) if tasks]
    settings = [
        (side.title, side.version, describe(side.setting), side.done) for side in results.sides
    ]
    columns = ("side", "version", "setting", "its clock stops after")
    parts += ["## Versions and settings", table(columns, _escaped(settings))]
    if results.skipped:
        skipped = [(skip.side, skip.task or "all", skip.reason) for skip in results.skipped]
        parts += ["Skipped:", table(("side", "task", "reason"), _escaped(skipped))]
    return document(*parts, "## How it was measured", *HOW)


def _advantages(
    results: Results, by_task: dict[TaskFacts, dict[str, Row]], tasks: Sequence[TaskFacts]
) -> str:
    """A row per task: the reference's speed, and its ratio to each side of other libraries."""
    others = [
        side
        for side in results.sides
        if not side.name.startswith("ours") and any(side.name in by_task[task] for task in tasks)
    ]
    lines = [
        (
            task.text,
            f"{ours.gb_per_second.median:.2f}" if (ours := found.get(results.reference)) else "",
            *(_advantage(found.get(side.name)) for side in others),
        )
        for task in tasks
        for found in [by_task[task]]
    ]
    return table(("", "ours", *(escaped(side.title) for side in others)), lines)


def _advantage(row: Row | None) -> str:
    if row is None or row.advantage is None:
        return ""
    low, median, high = (f"{value:.2f}" for value in row.advantage)
    return f"{median}×" if low == high else f"{median}× ({low}–{high})"  # noqa: RUF001


def _matrix(
    results: Results,
    by_task: dict[TaskFacts, dict[str, Row]],
    tasks: Sequence[TaskFacts],
) -> str:
    """A row per side, a column per task."""
    lines = [
        (escaped(side.title), *(f"{row.gb_per_second.median:.3g}" if row else "" for row in found))
        for side in results.sides
        if any(found := [by_task[task].get(side.name) for task in tasks])
    ]
    return table(("", *(task.text for task in tasks)), lines)


def _escaped(lines: Sequence[Sequence[Any]]) -> list[list[str]]:
    return [[escaped(" ".join(str(cell).split())) for cell in line] for line in lines]
