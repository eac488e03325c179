"""What is compared with what: a plan in TOML, and the contests that it spells out."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from nvme_offload.units import format_bytes, parse_bytes

from ..plan import made, read, require_known

DIRECTIONS = {"read": ("read",), "write": ("write",), "mixed": ("read", "write")}
MEMORY = {
    "huge": "on huge pages",
    "small": "on 4 KiB pages",
    "locked": "as DeepSpeed allocates it, on 4 KiB pages",
    "locked huge": "as DeepSpeed allocates it, its pages then merged into huge ones",
}


@dataclasses.dataclass(frozen=True)
class Job:
    """What a side has to move: *requests* of *request_bytes*, one behind the other through a file
    for each direction, and that *passes* times.

    direction: "read", "write", or "mixed": both at once, so twice as many bytes, in two files.
    queue_depth: blocks in flight for each thread, the sum of both directions. memory: a key of
    MEMORY. footprint_bytes: of memory for each direction; requests beyond it use it again.
    """

    direction: str
    backend: str
    block_size: int
    queue_depth: int
    thread_count: int
    memory: str
    footprint_bytes: int
    request_bytes: int
    requests: int
    passes: int

    @property
    def directions(self) -> tuple[str, ...]:
        """What happens at once, each in a file of its own."""
        return DIRECTIONS[self.direction]

    @property
    def file_bytes(self) -> int:
        """Of each file."""
        return self.request_bytes * self.requests

    @property
    def nbytes(self) -> int:
        """To be moved in all."""
        return self.file_bytes * self.passes * len(self.directions)

    def __str__(self) -> str:
        return (
            f"{self.direction} {self.requests} x {format_bytes(self.request_bytes)}, {self.backend}, block {format_bytes(self.block_size)}, "
            f"depth {self.queue_depth}, threads {self.thread_count}, memory {self.memory}"
        )


@dataclasses.dataclass(frozen=True)
class Contest:
    """Two sides, by name, and what each has to do. *directory* is where the files are, or None for
    the one that the command was given.
    """

    sides: tuple[str, str]
    jobs: tuple[Job, Job]
    directory: str | None


@dataclasses.dataclass(frozen=True)
class Case:
    """Contests of the same two sides, which make one table.

    speed_target: the least that the first side's speed may be of the second's. cpu_target: the most
    for its CPU seconds a byte. None: not judged.
    """

    title: str
    contests: tuple[Contest, ...]
    speed_target: float | None = None
    cpu_target: float | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """round_trips: of 4 KiB, for each backend and place, to time waking up."""

    rounds: int
    round_trips: int
    cases: tuple[Case, ...]


def read_plan(path: Path) -> Plan:
    """The plan in *path*. Raises: UsageError with what is wrong; OSError."""
    return read(
        path, lambda document: made(Plan, document, cases=tuple(map(_case, document.pop("case"))))
    )


def _case(entry: dict[str, Any]) -> Case:
    first, second = entry.pop("sides")
    opponent = {
        key: parse_bytes(value) if key.endswith(("_bytes", "_size")) else value
        for key, value in entry.pop("opponent", {}).items()
    }
    require_known(opponent, {field.name for field in dataclasses.fields(Job)})
    request_bytes, requests = parse_bytes(entry.pop("request")), entry.pop("requests")
    footprint_bytes = parse_bytes(entry.pop("footprint", request_bytes * requests))
    passes = entry.pop("passes", 1)
    each = [entry.pop(key) for key in ("backends", "directions", "memory", "threads", "grid")]
    require_known(each[1], DIRECTIONS.keys())
    require_known(each[2], MEMORY.keys())
    directory = entry.pop("directory", None)
    contests = []
    for backend, direction, memory, threads, (block_size, depth) in itertools.product(*each):
        setting = (direction, backend, parse_bytes(block_size), depth, threads, memory)
        job = Job(*setting, footprint_bytes, request_bytes, requests, passes)
        jobs = (job, dataclasses.replace(job, **opponent))
        contests.append(Contest((first, second), jobs, directory))
    return made(Case, entry, contests=tuple(contests))
