"""What is compared: tasks, sides and the settings that each side may choose from, read from a plan
in TOML.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvme_offload.errors import UsageError
from nvme_offload.units import format_bytes, parse_bytes

from ..plan import made, read, require_known
from ..turns import rotated

DIRECTIONS = ("read", "write", "mixed")
# sizes are whole ones of these, so that every block size and number of threads divides them
_GRANULE_BYTES = 1 << 20
# a setting that is no better than that is not chosen over an earlier one, which is simpler
_SAME = 1.02

Setting = dict[str, Any]  # as the plan has it, sizes in bytes


@dataclasses.dataclass(frozen=True)
class Task:
    """Bytes to move one way, or both ways at once.

    group: tasks that make one chart, by its title. share: of the size that the command is given.
    request_bytes: of each tensor; 0 for one that has all; checkpoint: the tensors are those of
    `state`, and go to a file in a format.
    """

    name: str
    title: str
    group: str
    direction: str
    share: float = 1.0
    request_bytes: int = 0
    checkpoint: bool = False

    def nbytes(self, size: int) -> int:
        """To be moved each way where the command is given *size*: half of it each way for both ways
        at once.
        """
        each = self.share * size / (2 if self.direction == "mixed" else 1)
        return max(1, round(each / _GRANULE_BYTES)) * _GRANULE_BYTES

    def requests(self, size: int) -> int:
        """Tensors of `request_bytes` that make up `nbytes`."""
        return self.nbytes(size) // self.request_bytes if self.request_bytes else 1


@dataclasses.dataclass(frozen=True)
class Side:
    """Something that moves bytes.

    worker: sides of one share a process. transfer: the name of a side of `sweeps.peers`;
    checkpoint: one of `checkpoints`; either may be none. candidates: its settings, of which the
    fastest at the tasks *tuned_by* is taken. done: what the report says of when its bytes are
    moved.
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
    """reference: the side that ratios are to. ceiling: the one that nobody is expected to pass.
    tuning_share: of a task's bytes, for trying settings.
    """

    rounds: int
    tuning_rounds: int
    tuning_share: float
    reference: str
    ceiling: str
    tasks: tuple[Task, ...]
    sides: tuple[Side, ...]

    def task(self, name: str) -> Task:
        """The task *name*."""
        return next(task for task in self.tasks if task.name == name)

    def side(self, name: str) -> Side:
        """The side *name*."""
        return next(side for side in self.sides if side.name == name)

    def sides_of(self, task: Task) -> list[Side]:
        """The sides that do *task*, in the order of the plan."""
        return [side for side in self.sides if task.name in side.tasks]

    def narrowed(self, only: Sequence[str] | None, tasks: Sequence[str] | None) -> Plan:
        """With only these sides and tasks. Raises: UsageError where one is unknown."""
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


def turns(names: Sequence[str], number: int, rounds: int) -> list[str]:
    """The order of *names* in round *number* of *rounds*: somebody else begins in every round, and
    every other goes in reverse order.
    """
    order = rotated(names, number * max(1, len(names) // rounds)) if names else []
    return [order[0], *order[:0:-1]] if number % 2 and order else order


def fastest(speeds: Sequence[Mapping[str, Sequence[float]]]) -> int:
    """Which of the settings is the best, each given by the speeds at the tasks that it was tried
    with.

    The best has the highest geometric mean over the tasks of the medians; the first of those that
    are as good counts, and none that failed.
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
    """*setting* in words: "block 1 MiB, depth 32, 2 threads"."""
    said = []
    for key, value in setting.items():
        if key == "thread_count":
            said.append(f"{value} thread{'' if value == 1 else 's'}")
        elif key == "options":
            said += value
        elif isinstance(value, bool):
            said.append(key.replace("_", " ") if value else f"no {key.replace('_', ' ')}")
        else:
            names = {
                "block_size": "block",
                "queue_depth": "depth",
                "buffer_size": "buffer",
                "backend": "",
            }
            shown = format_bytes(value) if key.endswith("_size") else str(value)
            said.append(f"{names.get(key, key.replace('_', ' '))} {shown}".strip())
    return ", ".join(said) or "as it comes"


_SETTING_KEYS = {
    *("backend", "block_size", "queue_depth", "thread_count"),
    *("memory", "options", "buffer_size", "crc32"),
}


def read_plan(path: Path) -> Plan:
    """The plan in *path*. Raises: UsageError with what is wrong; OSError."""
    return read(path, _plan)


def _plan(document: dict[str, Any]) -> Plan:
    tasks = tuple(map(_task, document.pop("task")))
    sides = tuple(_side(entry, [task.name for task in tasks]) for entry in document.pop("side"))
    plan = made(Plan, document, tasks=tasks, sides=sides)
    require_known([plan.reference, plan.ceiling], [side.name for side in sides])
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
