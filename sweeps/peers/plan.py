"""What is compared with what: a plan in TOML, and the contests that it spells out."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from nvme_offload.errors import UsageError
from nvme_offload.units import format_bytes, parse_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it along

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
    speed_target: float | None
    cpu_target: float | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """round_trips: of 4 KiB, for each backend and place, to time waking up."""

    rounds: int
    round_trips: int
    cases: tuple[Case, ...]


_CASE_KEYS = {
    "title",
    "sides",
    "directions",
    "backends",
    "grid",
    "threads",
    "memory",
    "request",
    "requests",
    "passes",
    "footprint",
    "opponent",
    "directory",
}
_TARGET_KEYS = {"speed_target", "cpu_target"}


def read_plan(path: Path) -> Plan:
    """The plan in *path*.

    Raises: UsageError naming what is missing, unknown or not possible; OSError.
    """
    try:
        document = tomllib.loads(path.read_text())
        _require_known(document, {"rounds", "round_trips", "case"})
        return Plan(
            document["rounds"],
            document["round_trips"],
            tuple(_case(entry) for entry in document["case"]),
        )
    except KeyError as error:
        raise UsageError(f"{path}: {error} is missing") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None


def _case(entry: dict[str, Any]) -> Case:
    _require_known(entry, _CASE_KEYS | _TARGET_KEYS)
    first, second = entry["sides"]
    opponent: dict[str, Any] = {
        key: parse_bytes(value) if key.endswith(("_bytes", "_size")) else value
        for key, value in entry.get("opponent", {}).items()
    }
    _require_known(opponent, {field.name for field in dataclasses.fields(Job)})
    request_bytes, requests, passes = (
        parse_bytes(entry["request"]),
        entry["requests"],
        entry.get("passes", 1),
    )
    footprint_bytes = parse_bytes(entry.get("footprint", request_bytes * requests))
    jobs = [
        Job(
            direction,
            backend,
            parse_bytes(block_size),
            queue_depth,
            threads,
            memory,
            footprint_bytes,
            request_bytes,
            requests,
            passes,
        )
        for backend, direction, memory, threads, (block_size, queue_depth) in itertools.product(
            entry["backends"], entry["directions"], entry["memory"], entry["threads"], entry["grid"]
        )
    ]
    _require_known({job.direction for job in jobs}, DIRECTIONS.keys())
    _require_known({job.memory for job in jobs}, MEMORY.keys())
    directory = entry.get("directory")
    contests = tuple(
        Contest((first, second), (job, dataclasses.replace(job, **opponent)), directory)
        for job in jobs
    )
    return Case(entry["title"], contests, entry.get("speed_target"), entry.get("cpu_target"))


def _require_known(found: Iterable[str], known: Collection[str]) -> None:
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(sorted(known))}")
