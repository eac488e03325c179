"""What the engine itself costs, without a drive: `python -m sweeps.peers.overhead DIR`, from the
root of the repository.

A backend that completes every block at once, without touching a byte, leaves the cutting, the
queues, the threads and the calls.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine, File, allocate
from nvme_offload.units import format_bytes

from .. import command
from ..command import COUNT, option, say
from ..machine import commit, facts
from ..report import columns, document, listed, percentile, shown, write
from .report import SUBMISSION_TARGET_MICROSECONDS
from .rig import Bytes
from .stopwatch import cpu_seconds

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_BLOCKS = (4 * _KIB, 128 * _KIB, _MIB)
_THREADS = (1, 2, 4, 8)
_DEPTH = 32
_LEAST_SECONDS = 0.1
_LARGE_REQUESTS = 8  # under way at once, so that no thread waits for the caller
_SMALL_REQUESTS = 1024
_CALLS = 512
_BUSY_BYTES = 64 * _MIB  # keeps a queue of depth 1 full for longer than the calls take
_PAUSES = 20
_PAUSE_SECONDS = 0.005
_HOW = (
    "Every round measures each row once. The figures are medians over the rounds; in brackets the middle 80 %, or all where there are fewer than ten rounds. "
    "CPU is that of all threads, the caller's too. A row of several engines has one thread in each: what that costs less is what threads of one engine "
    "pay for sharing it; what it costs more than one engine with one thread is the machine's."
)


class Row(NamedTuple):
    """*engines* with *threads* each, and requests of *request_bytes* in turn for each of them."""

    block_size: int
    request_bytes: int
    engines: int
    threads: int


class Cost(NamedTuple):
    """Of one round: blocks moved in a second, and for each second of CPU time."""

    blocks_per_second: float
    blocks_per_cpu_second: float


class Calls(NamedTuple):
    """Of one round: seconds for one call of each kind."""

    submit: float
    wait: float
    done: float
    drop: float


@click.command()
@command.directory
@option("--rounds", type=COUNT, default=11)
@command.output("Write OUTPUT.md, for example reports/overhead-vda.")
@command.note
def main(directory: Path, rounds: int, output: Path | None, notes: tuple[str, ...]) -> None:
    """Measure the engine's own overhead, and print tables in Markdown. Calls that need a busy drive
    use a file of 64 MiB in DIRECTORY.
    """
    found = facts(directory, "sweeps.peers.overhead")
    found["versions"] = commit()
    memory = np.frombuffer(allocate(_GIB), np.uint8)
    gc.disable()  # its moments are nobody's
    costs: dict[Row, list[Cost]] = {row: [] for row in rows()}
    calls: dict[str, list[Calls]] = {}
    pauses: dict[tuple[int, bool], list[float]] = {}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for row, of_row in costs.items():
            of_row.append(cost(row, memory, directory))
        for kind, pieces in buffers(memory).items():
            calls.setdefault(kind, []).append(time_calls(pieces, memory, directory))
        for threads, apart in itertools.product(_THREADS, (True, False)):
            pauses.setdefault((threads, apart), []).extend(
                submissions_after_a_pause(threads, apart, memory, directory)
            )
    write(output, text := render(found, [*notes, _HOW], costs, calls, pauses))
    click.echo(text)


def rows() -> Iterator[Row]:
    """What is measured, in the order of the table."""
    for block_size in _BLOCKS:
        for request_bytes in (block_size, _GIB):
            for threads in _THREADS:
                yield Row(block_size, request_bytes, 1, threads)
        for engines in _THREADS[1:]:
            yield Row(block_size, _GIB, engines, 1)


def cost(row: Row, memory: Bytes, directory: Path) -> Cost:
    """Move requests until there is enough to tell."""
    config = AioConfig(row.block_size, _DEPTH, row.threads)
    with ExitStack() as stack:
        lanes: list[tuple[Engine, File]] = []
        for _ in range(row.engines):
            engine = stack.enter_context(Engine(config, _backend="null"))
            lanes.append((engine, stack.enter_context(engine.open_anonymous(directory))))
        buffer = memory[: row.request_bytes]
        count = _LARGE_REQUESTS if row.request_bytes == _GIB else _SMALL_REQUESTS
        requests, seconds = 0, 0.0
        cpu, began = cpu_seconds(), time.perf_counter()
        while seconds < _LEAST_SECONDS:
            tickets = [engine.read(buffer, file) for _ in range(count) for engine, file in lanes]
            for ticket in tickets:
                ticket.wait()
            requests += len(tickets)
            seconds = time.perf_counter() - began
        cpu = cpu_seconds() - cpu
    blocks = requests * row.request_bytes // row.block_size
    return Cost(blocks / seconds, blocks / cpu)


def buffers(memory: Bytes) -> dict[str, list[Any]]:
    """Pieces of *memory* as what people hand to an engine."""
    pieces: list[Any] = [memory[index * 4096 : (index + 1) * 4096] for index in range(_CALLS)]
    found = {"memoryview": [piece.data for piece in pieces], "ndarray": pieces}
    try:
        import torch
    except ModuleNotFoundError:
        return found
    return {**found, "torch.Tensor": [torch.from_numpy(piece) for piece in pieces]}


def time_calls(pieces: list[Any], memory: Bytes, directory: Path) -> Calls:
    """Calls while the queue is full, as it is in a training that waits for its drive: no thread has
    to be woken.
    """
    clock = time.perf_counter
    with (
        Engine(AioConfig(block_size=4 * _MIB, queue_depth=1)) as engine,
        engine.open_anonymous(directory) as file,
    ):
        engine.write(memory[:_BUSY_BYTES], file).wait()
        busy = engine.read(memory[:_BUSY_BYTES], file)
        moments = [clock()]
        tickets = [engine.read(piece, file) for piece in pieces]
        moments.append(clock())
        for ticket in (busy, *tickets):
            ticket.wait()
        for act in (_wait_for, _ask):
            moments.append(clock())
            act(tickets)
        moments.append(clock())
        del ticket
        tickets.clear()
        moments.append(clock())
    submit, _, wait, done, drop = (after - before for before, after in itertools.pairwise(moments))
    return Calls(*(seconds / len(pieces) for seconds in (submit, wait, done, drop)))


def _wait_for(tickets: Sequence[Any]) -> None:
    for ticket in tickets:
        ticket.wait()


def _ask(tickets: Sequence[Any]) -> None:
    for ticket in tickets:
        ticket.done()


def submissions_after_a_pause(
    threads: int, apart: bool, memory: Bytes, directory: Path
) -> list[float]:
    """Seconds that handing over 1 GiB took while every thread slept; with *apart*, caller and
    threads have no core in common.
    """
    everywhere = os.sched_getaffinity(0)
    here = {min(everywhere)}
    found = []
    try:
        # threads inherit where they may run
        os.sched_setaffinity(0, (everywhere - here if apart else everywhere) or here)
        with (
            Engine(AioConfig(_MIB, _DEPTH, threads), _backend="null") as engine,
            engine.open_anonymous(directory) as file,
        ):
            os.sched_setaffinity(0, here if apart else everywhere)
            for _ in range(_PAUSES):
                time.sleep(_PAUSE_SECONDS)
                began = time.perf_counter()
                ticket = engine.read(memory, file)
                found.append(time.perf_counter() - began)
                ticket.wait()
    finally:
        os.sched_setaffinity(0, everywhere)
    return found


def render(
    found: dict[str, str],
    notes: Sequence[str],
    costs: dict[Row, list[Cost]],
    calls: dict[str, list[Calls]],
    pauses: dict[tuple[int, bool], list[float]],
) -> str:
    """The report in Markdown."""

    def cost(figure: str, scale: Callable[[float], float]) -> Callable[[Row], str]:
        return lambda row: shown((scale(getattr(one, figure)) for one in costs[row]), 0)

    def call(figure: str) -> Callable[[str], str]:
        return lambda kind: shown((getattr(one, figure) * 1e6 for one in calls[kind]), 2)

    def pause(of: Callable[[Sequence[float]], float]) -> Callable[[tuple[int, bool]], str]:
        return lambda key: f"{of(pauses[key]) * 1e6:.1f}"

    of_costs: dict[str, Callable[[Row], Any]] = {
        "block": lambda row: format_bytes(row.block_size),
        "request": lambda row: (
            "1 block" if row.request_bytes == row.block_size else format_bytes(row.request_bytes)
        ),
        "engines": lambda row: row.engines,
        "threads in each": lambda row: row.threads,
        "thousand blocks/s": cost("blocks_per_second", lambda value: value / 1e3),
        "thousand blocks/s and core": cost("blocks_per_cpu_second", lambda value: value / 1e3),
        "CPU ns a block": cost("blocks_per_cpu_second", lambda value: 1e9 / value),
    }
    of_calls = {
        "buffer": str,
        "read": call("submit"),
        "wait": call("wait"),
        "done": call("done"),
        "dropping the ticket": call("drop"),
    }
    of_pauses: dict[str, Callable[[tuple[int, bool]], Any]] = {
        "threads": lambda key: key[0],
        "cores": lambda key: "apart" if key[1] else "anywhere",
        "median": pause(statistics.median),
        "90 %": pause(lambda seconds: percentile(seconds, 90)),
        "most": pause(max),
    }
    return document(
        "# The engine's own overhead",
        listed(found),
        *notes,
        "## Blocks that no drive moves",
        f"Depth {_DEPTH}. {_LARGE_REQUESTS} requests of 1 GiB, or {_SMALL_REQUESTS} of one block, are submitted and then waited for.",
        columns(costs, of_costs),
        "## Calls from Python",
        f"Microseconds for each of {_CALLS} reads of 4 KiB while the queue is full. `wait` and `done` are of tickets that are through; dropping lets go of "
        "ticket and request.",
        columns(calls, of_calls),
        "## Submitting 1 GiB while every thread sleeps",
        f"Microseconds until `read` returns, after {_PAUSE_SECONDS * 1e3:g} ms without a request; at most {SUBMISSION_TARGET_MICROSECONDS:g} is the target. "
        "Apart: the caller has a core that the threads may not run on. Anywhere: the kernel may wake a thread on the caller's core, where it comes first and "
        "fills its queue before the caller goes on.",
        columns(pauses, of_pauses),
    )


if __name__ == "__main__":
    command.run(main, "sweeps.peers.overhead")
