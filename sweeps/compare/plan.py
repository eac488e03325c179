"""The plan of a comparison in TOML: tasks, sides, and each side's candidate settings."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvme_offload.errors import UsageError
from nvme_offload.units import format_bytes, parse_bytes

from ..peers.job import DIRECTIONS
from ..plan import made, read, require_known

# sizes are multiples of this, so that every block size and number of threads divides them
_GRANULE_BYTES = 1 << 20
# a later candidate must be faster than an earlier, simpler one by this factor to be chosen
_SAME = 1.02

Setting = dict[str, Any]  # as the plan has it, sizes in bytes


@dataclasses.dataclass(frozen=True)
class Task:
    """Bytes to move in one direction, or in both concurrently.

    share: of the argument of `--size`. request_bytes: of each tensor; 0 for a single tensor.
    checkpoint: saves or loads the tensors of `state` in one file.
    """

    name: str
    title: str
    direction: str
    share: float = 1.0
    request_bytes: int = 0
    checkpoint: bool = False

    def nbytes(self, size: int) -> int:
        """Bytes per direction for `--size` *size*; "mixed" moves half of it in each direction."""
        each = self.share * size / (2 if self.direction == "mixed" else 1)
        return max(1, round(each / _GRANULE_BYTES)) * _GRANULE_BYTES

    def requests(self, size: int) -> int:
        """Number of tensors."""
        return self.nbytes(size) // self.request_bytes if self.request_bytes else 1


@dataclasses.dataclass(frozen=True)
class Side:
    """A library that moves bytes.

    worker: sides with the same worker share a process. transfer: its name in `sweeps.peers.sides`;
    checkpoint: its name in `checkpoints`; "" for none. candidates: settings, the fastest of which at
    the tasks *tuned_by* is used. done: when its clock stops, for the report.
    """

    name: str
    title: str
    worker: str
    tasks: tuple[str, ...]
    done: str
    transfer: str = ""
    checkpoint: str = ""
    candidates: tuple[Setting, ...] = ({},)
    tuned_by: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """reference: the side that ratios refer to. tuning_share: of a task's bytes, to try settings."""

    rounds: int
    tuning_rounds: int
    tuning_share: float
    reference: str
    tasks: tuple[Task, ...]
    sides: tuple[Side, ...]

    def task(self, name: str) -> Task:
        """The task *name*."""
        return next(task for task in self.tasks if task.name == name)

    def side(self, name: str) -> Side:
        """The side *name*."""
        return next(side for side in self.sides if side.name == name)

    def sides_of(self, task: Task) -> list[Side]:
        """The sides with *task*, in the order of the plan."""
        return [side for side in self.sides if task.name in side.tasks]

    def narrowed(self, only: Sequence[str] | None, tasks: Sequence[str] | None) -> Plan:
        """Keep only these sides and tasks. Raises: UsageError where one is unknown."""
        for names, known in (
            (only, [side.name for side in self.sides]),
            (tasks, [task.name for task in self.tasks]),
        ):
            for name in names or ():
                if name not in known:
                    raise UsageError(f"{name!r} is none of {', '.join(known)}")
        sides = tuple(side for side in self.sides if only is None or side.name in only)
        return dataclasses.replace(
            self,
            sides=sides,
            tasks=tuple(task for task in self.tasks if tasks is None or task.name in tasks),
        )


def fastest(speeds: Sequence[Mapping[str, Sequence[float]]]) -> int:
    """The index of the best setting, given the speeds of each by task: the highest geometric mean
    over the tasks of the median speeds. The first within `_SAME` of the best wins; a setting with a
    failed task counts as 0.
    """
    means = [
        math.exp(statistics.fmean(math.log(statistics.median(found)) for found in by_task.values()))
        if by_task and all(by_task.values())
        else 0.0
        for by_task in speeds
    ]
    most = max(means)
    return next(number for number, mean in enumerate(means) if mean * _SAME >= most)


def describe(setting: Setting) -> str:
    """Describe *setting*: "block_size 1 MiB, queue_depth 32, thread_count 2"."""
    said = (
        f"{key} {format_bytes(value) if key.endswith('_size') else value}"
        for key, value in setting.items()
    )
    return ", ".join(said) or "defaults"


_SETTING_KEYS = {
    *("backend", "block_size", "queue_depth", "thread_count"),
    *("memory", "sequential", "buffer_size", "crc32"),
}


def read_plan(path: Path) -> Plan:
    """Read the plan in *path*. Raises: UsageError naming the wrong key; OSError."""
    return read(path, _plan)


def _plan(document: dict[str, Any]) -> Plan:
    tasks = tuple(map(_task, document.pop("task")))
    sides = tuple(_side(entry, [task.name for task in tasks]) for entry in document.pop("side"))
    plan = made(Plan, document, tasks=tasks, sides=sides)
    require_known([plan.reference], [side.name for side in sides])
    return plan


def _task(entry: dict[str, Any]) -> Task:
    require_known([entry["direction"]], DIRECTIONS)
    return made(Task, entry, request_bytes=parse_bytes(entry.pop("request", 0)))


def _side(entry: dict[str, Any], tasks: Sequence[str]) -> Side:
    require_known([*entry["tasks"], *entry.get("tuned_by", [])], tasks)
    candidates = entry.get("candidates", [{}])
    for setting in candidates:
        require_known(setting, _SETTING_KEYS)
        sizes = {key: parse_bytes(setting[key]) for key in setting if key.endswith("_size")}
        setting |= sizes
    lists = {key: tuple(entry.get(key, ())) for key in ("tasks", "tuned_by")}
    return made(Side, entry, candidates=tuple(candidates), **lists)
