"""Runs of `training.py`: `Case`, which says what to train, and `train`, which has processes of
their own do it, one for each rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import forked
import nodes

import nvme_offload

sys.path.append(str(Path(__file__).parents[1]))
from patience import PATIENCE
from ports import free_port

SCRIPT = Path(__file__).with_name("training.py")


@dataclasses.dataclass(frozen=True)
class Case:
    """One training run; every field has the plainest value unless given.

    parameters, states: the device of parameters and of optimizer states, "none", "cpu" or "nvme"; a
    run on stock DeepSpeed has "cpu" for "nvme". overflow_step: the step whose loss is too large for
    16 bit. groups: parameter groups, which differ in learning rate and weight decay. persistence:
    elements up to which DeepSpeed keeps a parameter on the accelerator. evaluate: forward passes
    without gradients after each step. fragments: get and set what DeepSpeed's fragment functions
    can. engines: how many train interleaved. lives: how often the engine is made and destroyed. loop:
    of `outside.LOOPS` or `looking.LOOPS`, the function called after each step. program: of `outside.PROGRAMS`, instead
    of our steps. default_dtype: torch's, in the whole run. zero, section, top: more keys of "zero_optimization", of "nvme_offload" (only
    read by this package) and of the whole configuration.
    """

    name: str = ""
    model: str = "odd"
    dtype: str = "bf16"
    optimizer: str = "adamw"
    parameters: str = "none"
    states: str = "nvme"
    steps: int = 3
    groups: int = 1
    accumulation: int = 1
    clipping: float = 0.0
    sub_group_size: int = 1_000_000_000
    persistence: int = 0
    zero_init: bool = False
    overflow_step: int | None = None
    evaluate: bool = False
    fragments: bool = False
    engines: int = 1
    lives: int = 1
    loop: str = ""
    program: str = ""
    default_dtype: str = "float32"
    zero: dict[str, Any] = dataclasses.field(default_factory=dict)
    section: dict[str, Any] = dataclasses.field(default_factory=dict)
    top: dict[str, Any] = dataclasses.field(default_factory=dict)

    def but(self, **changes: Any) -> Case:
        """This case with *changes*."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass
class Rank:
    """The report of one rank: a result for each case it finished, its exit status (None: killed when
    time was up) and the end of its complaints.
    """

    results: list[dict[str, Any]]
    status: int | None
    complaints: str


class Process(NamedTuple):
    """A rank under way, and the files that it writes."""

    process: forked.Program | subprocess.Popen[bytes]
    answers: IO[str]
    complaints: IO[str]


def train(
    cases: Sequence[Case],
    directory: Path,
    *,
    ours: bool = True,
    ranks: int = 1,
    timeout: float = PATIENCE,
    **request: Any,
) -> list[dict[str, Any]]:
    """The results of rank 0 for *cases*, on this package or on stock DeepSpeed, with other keys of
    `training.main`'s *request*.

    What goes wrong in a case is in its result, as "error", and takes no other case with it.
    """
    return each_by_itself(
        cases, lambda rest: run(rest, directory, ours=ours, ranks=ranks, timeout=timeout, **request)
    )


def in_groups(cases: Mapping[str, Case], count: int = 8) -> list[dict[str, Case]]:
    """*cases* in up to *count* groups, each for one `train`: a process takes seconds to start."""
    names = [*cases]
    groups = [names[first::count] for first in range(min(count, len(names)))]
    return [{name: cases[name] for name in group} for group in groups]


def each_by_itself(
    work: Sequence[Any], begin: Callable[[Sequence[Any]], list[Rank]]
) -> list[dict[str, Any]]:
    """A result for each piece of *work*, with the other ranks' results under "ranks"; *begin* makes
    new processes do the work that it receives, in order.

    A piece at which a process ends, or a rank fails that others wait for, has an "error", and new
    processes go on with the next.
    """
    results: list[dict[str, Any]] = []
    while len(results) < len(work):
        rest = work[len(results) :]
        every = begin(rest)
        done = min(len(rank.results) for rank in every)
        results += [
            {**every[0].results[number], "ranks": [rank.results[number] for rank in every[1:]]}
            for number in range(done)
        ]
        if done < len(rest):
            results.append(_failure(every, done))
    return results


def _failure(every: list[Rank], at: int) -> dict[str, Any]:
    """The outcome of piece *at*, which not every rank finished: the error that a rank reported, or
    else how the first rank without a report ended.
    """
    reported = next(
        (
            rank.results[at]
            for rank in every
            if len(rank.results) > at and "error" in rank.results[at]
        ),
        None,
    )
    number, silent = next(
        (number, rank) for number, rank in enumerate(every) if len(rank.results) <= at
    )
    ended = {
        "error": "Ended",
        "message": f"rank {number} of {len(every)} ended with {silent.status}:\n{silent.complaints}",
    }
    return {**(reported or ended), "ranks": []}


def run(
    cases: Sequence[Case],
    directory: Path,
    *,
    ours: bool = True,
    ranks: int = 1,
    timeout: float = PATIENCE,
    **request: Any,
) -> list[Rank]:
    """What each rank made of *cases*."""
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(start(cases, directory, ours=ours, ranks=ranks, **request))
        return [finish(process, timeout) for process in started]


@contextlib.contextmanager
def start(
    cases: Sequence[Case],
    directory: Path,
    *,
    ours: bool = True,
    ranks: int = 1,
    script: Path = SCRIPT,
    accelerator: str = "cpu",
    on_nodes: list[nodes.Node] | None = None,
    **request: Any,
) -> Iterator[list[Process]]:
    """One process for each rank, killed at the end of the context if it has not ended by then;
    *on_nodes*: one for each node instead.
    """
    text = json.dumps(
        {
            "cases": [dataclasses.asdict(case) for case in cases],
            "directory": str(directory),
            "ours": ours,
            **request,
        }
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            filter(
                None, [str(Path(nvme_offload.__file__).parents[1]), os.environ.get("PYTHONPATH")]
            )
        ),
        "DS_ACCELERATOR": accelerator,
        "OMP_NUM_THREADS": "1",  # how a sum is cut over threads is part of its result
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(ranks if on_nodes is None else len(on_nodes)):
            # Files, not pipes: a rank whose pipe is full would block while another is read, and every
            # rank with it.
            answers, complaints = (
                stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)
            )
            begin = forked.start if accelerator == "cpu" else _anew
            of_rank = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            if on_nodes is not None:
                of_rank |= on_nodes[rank].environment(len(on_nodes))
            process = begin(
                [str(script), text],
                env=of_rank,
                cwd=directory,
                stdout=answers,
                stderr=complaints,
            )
            stack.callback(_end, process)
            processes.append(Process(process, answers, complaints))
        yield processes


def finish(process: Process, timeout: float = PATIENCE) -> Rank:
    """The report of *process*; it is killed when it takes longer than *timeout* seconds."""
    try:
        status: int | None = process.process.wait(timeout)
    except subprocess.TimeoutExpired:
        _end(process.process)
        status = None
    reported, complaints = (
        file.seek(0) or file.read() for file in (process.answers, process.complaints)
    )
    return Rank([json.loads(line) for line in reported.splitlines()], status, complaints[-4000:])


def run_script(script: Path, directory: Path, **request: Any) -> list[Rank]:
    """The report of each rank of *script*, which end well; *request* as for `start`."""
    with start([], directory, script=script, **request) as processes:
        ended = [finish(process) for process in processes]
    for rank in ended:
        assert rank.status == 0, rank.complaints
    return ended


COMPARED = (
    "losses",
    "norms",
    "scales",
    "skipped",
    "weights",
    "masters",
    "states",
    "scalars",
    "observed",
)


def differences(result: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """The names whose bits differ between both, on any rank; empty when everything is equal."""
    for one, other in (("result", result), ("reference", reference)):
        if "error" in other:
            return [f"{one}: {other['error']}: {other['message']}"]
    found = []
    for rank, (mine, theirs) in enumerate(
        zip([result, *result["ranks"]], [reference, *reference["ranks"]], strict=True)
    ):
        if "error" in mine or "error" in theirs:
            found.append(f"rank {rank}: {mine.get('message')} / {theirs.get('message')}")
            continue
        for key in COMPARED:
            found += [f"rank {rank}: {key} {at}" for at in _unlike(mine[key], theirs[key])]
    return found


def _unlike(mine: Any, theirs: Any) -> list[Any]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return [
            key
            for key in [*mine, *(theirs.keys() - mine.keys())]
            if key not in mine or key not in theirs or mine[key] != theirs[key]
        ]
    if len(mine) != len(theirs):
        return [f"{len(mine)} != {len(theirs)}"]
    return [
        f"{index}: {one} != {other}"
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True))
        if one != other
    ]


def _anew(arguments: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """A new interpreter, as CUDA does not work after a fork."""
    return subprocess.Popen([sys.executable, "-W", "ignore::FutureWarning", *arguments], **options)


def _end(process: forked.Program | subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
