"""`python -m sweeps.compare DIR`: compare the engine with other libraries on the drive of DIR."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from nvme_offload.errors import IOFailure, NoSpaceError, UnsupportedError, UsageError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine
from nvme_offload.units import format_bytes

from .. import apart, command
from ..command import Names, Size, option, say
from ..machine import commit, facts
from ..peers.buffers import allocated, fill
from ..peers.page_cache import evict
from ..report import write
from ..turns import interruptible, there_and_back
from ..turns import rounds as rounds_of
from .plan import Plan, Setting, Side, Task, describe, fastest, read_plan
from .report import Results, Run, SideFacts, Skipped, TaskFacts, render
from .state import shapes
from .team import SideFailed, Team
from .worker import READ_SEED

_DEFAULT_PLAN = apart.ROOT / "sweeps" / "plans" / "compare.toml"
_LEAST_BYTES = 8 << 20
_TIMEOUT_SECONDS = 60.0  # plus the time of a drive of 50 MB/s
_SLOWEST_BYTES_PER_SECOND = 50e6
_SPARE = 1.1
_TUNING_SEED = 1


@click.command()
@command.directory
@option(
    "--size", type=Size("8 MiB"), default="1GiB", help="Bytes of a task; of a checkpoint, twice."
)
@option("--plan", "plan_path", type=command.FILE, default=_DEFAULT_PLAN)
@command.rounds
@command.seconds(340)
@option("--only", type=Names(), help="Sides of the plan, separated by commas.")
@option("--tasks", type=Names(), help="Tasks of the plan, separated by commas.")
@command.output("Write OUTPUT.md and OUTPUT.json.")
@command.note
def main(
    directory: Path,
    size: int,
    plan_path: Path,
    rounds: int | None,
    seconds: float,
    only: list[str] | None,
    tasks: list[str] | None,
    output: Path | None,
    notes: tuple[str, ...],
) -> None:
    """Compare this package's engine with other libraries on the drive of DIRECTORY in interleaved
    runs, and print a report in Markdown.
    """
    command.stop_at_sigterm()
    plan = read_plan(plan_path).narrowed(only, tasks)
    done = [_task_facts(task, size) for task in plan.tasks]
    machine = facts(directory, "sweeps.compare")
    results = Results(machine, size, plan.reference, done, notes=list(notes))
    with (
        interruptible(results.facts, results.notes),
        apart.place("compare", directory) as place,
        _team(results, plan, place, directory) as team,
    ):
        comparison = _Comparison(results, plan, team)
        comparison.prepare()
        comparison.tune()
        for number in rounds_of(rounds or plan.rounds, seconds, results.notes):
            comparison.run_round(number)
    if not results.runs:
        reasons = "; ".join(f"{skip.side}: {skip.reason}" for skip in results.skipped)
        raise UsageError(f"no side ran: {reasons or 'interrupted before the first run'}")
    text = render(results)
    write(output, text, dataclasses.asdict(results))
    click.echo(text)


@contextlib.contextmanager
def _team(results: Results, plan: Plan, place: Path, directory: Path) -> Iterator[Team]:
    """The workers, with their shared files in *place*."""
    largest = max(task.nbytes(results.size_bytes) for task in plan.tasks)
    _require_room(plan, results.size_bytes, place)
    say(f"two files of {format_bytes(largest)} in {place}")
    direct = _make_files(place, largest)
    try:
        evict(place / "read")
    except IOFailure as error:
        raise UnsupportedError(
            f"files in {directory} stay in memory, so all sides would read from memory: name a directory on a drive ({error})"
        ) from None
    results.facts["direct I/O"] = (
        "yes" if direct else "no: the filesystem lacks it, so all sides use the page cache"
    )
    most = max(task.share for task in plan.tasks) * results.size_bytes
    with Team(place, direct, _TIMEOUT_SECONDS + 2 * most / _SLOWEST_BYTES_PER_SECOND) as team:
        yield team


class _Comparison:
    """The available sides, with their settings."""

    def __init__(self, results: Results, plan: Plan, team: Team) -> None:
        self._results = results
        self._plan = plan
        self._team = team
        self._sides: dict[str, Side] = {}
        self._versions: dict[str, str] = {}
        self._settings: dict[str, Setting] = {}
        self._refused: set[tuple[str, str]] = set()  # side and task

    def prepare(self) -> None:
        """Load every side; workers load theirs concurrently."""
        tasks = {task.name for task in self._plan.tasks}
        wanted = [side for side in self._plan.sides if tasks & set(side.tasks)]
        for side in wanted:
            job = {
                "verb": "prepare",
                "side": side.name,
                "transfer": side.transfer,
                "checkpoint": side.checkpoint,
                "setting": side.candidates[0],
            }
            self._team.start(side.worker, job)
        for side in wanted:
            say(f"preparing {side.title}")
            try:
                self._versions[side.name] = self._team.prepared(side.worker)["version"]
                self._sides[side.name] = side
            except (UnsupportedError, SideFailed) as error:
                self._skip(side, "", error)
        versions = {version for found in self._versions.values() for version in found.split(", ")}
        self._results.facts["versions"] = ", ".join(
            [*sorted(versions), f"Python {platform.python_version()}", commit()]
        )

    def tune(self) -> None:
        """Choose the setting of every side, from the speeds of its candidates."""
        for side in list(self._sides.values()):
            tasks = [task for task in self._plan.tasks if task.name in side.tuned_by]
            chosen = 0
            if len(side.candidates) > 1 and tasks:
                speeds = self._try(side, tasks)
                if not any(any(found.values()) for found in speeds):
                    continue  # every setting failed; `_try` has recorded the reason
                chosen = fastest(speeds)
                say(f"{side.title}: {describe(side.candidates[chosen])}")
            self._settings[side.name] = side.candidates[chosen]
            about = (side.name, side.title, self._versions[side.name], side.done)
            self._results.sides.append(SideFacts(*about, side.candidates[chosen]))

    def _try(self, side: Side, tasks: list[Task]) -> list[dict[str, list[float]]]:
        speeds: list[dict[str, list[float]]] = [
            {task.name: [] for task in tasks} for _ in side.candidates
        ]
        size = max(_LEAST_BYTES, int(self._plan.tuning_share * self._results.size_bytes))
        failed: dict[int, Exception] = {}
        for number in range(self._plan.tuning_rounds):
            for task in tasks:
                for index in there_and_back(range(len(side.candidates)), number):
                    if index in failed:
                        continue
                    setting = side.candidates[index]
                    try:
                        found = self._run(side, task, setting, size, _TUNING_SEED, keep=True)
                        speeds[index][task.name].append(found["nbytes"] / found["seconds"])
                    except (UnsupportedError, SideFailed) as error:
                        failed[index] = error
                        speeds[index] = {}
                        say(f"{side.title}, {describe(setting)}: {error}")
        if len(failed) == len(side.candidates):
            self._skip(side, "", failed[0])
            del self._sides[side.name]
        return speeds

    def run_round(self, number: int) -> None:
        """Run every task on every side; the first round checks every byte."""
        for task in self._plan.tasks:
            sides = [side for side in self._plan.sides_of(task) if side.name in self._settings]
            for position, name in enumerate(there_and_back([side.name for side in sides], number)):
                side = self._plan.side(name)
                if (name, task.name) in self._refused:
                    continue
                # a task uses this seed and the next one, for its two buffers
                seed = _TUNING_SEED + 2 * (1 + len(self._plan.sides) * number + position)
                setting, size = self._settings[name], self._results.size_bytes
                try:
                    found = self._run(side, task, setting, size, seed, verify=number == 0)
                except (UnsupportedError, SideFailed) as error:
                    self._refused.add((name, task.name))
                    self._skip(side, task.name, error)
                    continue
                self._results.runs.append(Run(task.name, name, number, position, **found))
                speed = found["nbytes"] / found["seconds"] / 1e9
                say(f"round {number + 1}, {task.name}: {side.title} {speed:.2f} GB/s")

    def _run(
        self,
        side: Side,
        task: Task,
        setting: Setting,
        size: int,
        seed: int,
        *,
        verify: bool = False,
        keep: bool = False,
    ) -> dict[str, Any]:
        """Run *task* once in the side's worker."""
        nbytes = task.nbytes(size)
        job: dict[str, Any] = {
            "side": side.name,
            "direction": task.direction,
            "setting": setting,
            "verify": verify,
            "keep": keep,
        }
        if task.checkpoint and side.checkpoint:
            job |= {"verb": "checkpoint", "checkpoint": side.checkpoint, "nbytes": nbytes}
        else:
            requests = task.requests(size)
            job |= {"verb": "transfer", "transfer": side.transfer, "seed": seed}
            job |= {"request_bytes": nbytes // requests, "requests": requests}
        return self._team.ask(side.worker, job)

    def _skip(self, side: Side, task: str, error: Exception) -> None:
        self._results.skipped.append(Skipped(side.title, task, str(error)))
        say(f"skipping {side.title}{f' at {task}' if task else ''}: {error}")


def _task_facts(task: Task, size: int) -> TaskFacts:
    nbytes = task.nbytes(size) * (2 if task.direction == "mixed" else 1)
    requests = task.requests(size)
    if task.checkpoint:
        tensors = shapes(nbytes)
        nbytes, requests = sum(tensor.nbytes for tensor in tensors), len(tensors)
    return TaskFacts(task.name, task.title, task.direction, nbytes, requests, task.checkpoint)


def _require_room(plan: Plan, size: int, place: Path) -> None:
    """Raises: NoSpaceError where the files of all sides do not fit on the drive."""
    largest = max(task.nbytes(size) for task in plan.tasks)
    formats = len({side.checkpoint for side in plan.sides if side.checkpoint})
    checkpoints = max((task.nbytes(size) for task in plan.tasks if task.checkpoint), default=0)
    needed = int(_SPARE * (4 * largest + (formats + 1) * checkpoints))
    free = shutil.disk_usage(place).free
    if free < needed:
        reason = f"No space left on device: a comparison with --size {format_bytes(size)} needs {format_bytes(needed)} there, and {format_bytes(free)} are free"
        raise NoSpaceError(
            28, reason, operation="allocation", path=str(place), offset=0, nbytes=needed, done=0
        )


def _make_files(place: Path, nbytes: int) -> bool:
    """Write the shared file to read and the one to write; whether they support direct I/O."""
    buffer = allocated("huge", nbytes)
    fill(buffer, READ_SEED)
    with Engine(AioConfig(direct="auto")) as engine:
        for name in ("read", "write"):
            with engine.open(place / name, "w", nbytes) as file:
                engine.write(buffer, file).wait()
                file.sync()
                direct = file.direct
    return direct


if __name__ == "__main__":
    command.run(main, "sweeps.compare")
