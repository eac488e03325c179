"""`python -m sweeps.peers DIR`: hold the contests of a plan on the drive of DIR, and write the
report.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import platform
import time
from pathlib import Path

import click

from nvme_offload.errors import UnsupportedError
from nvme_offload.units import format_bytes

from .. import command
from ..command import option, say
from ..machine import commit, facts
from ..report import write
from ..turns import interruptible, there_and_back
from . import deepspeed_op, latency
from .plan import Contest, read_plan
from .report import Results, Round, as_json, render
from .rig import Buffers, Rig
from .sides import Peer, make, require_known
from .stopwatch import Measurement

_DEFAULT_PLAN = Path(__file__).parents[1] / "plans" / "engine.toml"
_HOW = (
    "Each round has both sides of every contest, one right after the other, and the next round has them in reverse order. A ratio is the median over the "
    "rounds of what one round gave; in brackets the middle 80 %, or all where there are fewer than ten rounds. A question mark says that the spread holds "
    "both answers. fio is asked for nothing that costs it CPU beside moving bytes, and its memory is on pages of the same size as ours, touched before it "
    "starts. Starting up counts on neither side; CPU seconds are those of all threads in the time that bytes move; fio does not count the kernel's own "
    "threads that io_uring hands blocks to where a file cannot take them at once (tmpfs), ours does. Both have as many bytes in flight and as many threads; "
    "a mixed contest is one request each way at once for us, and two jobs for fio that share depth or threads. The side `bare` is a loop that submits block "
    "by block from the same memory as ours: fio's memory is only what it has in flight, which caches may hold."
)


@click.command()
@command.directory
@option("--plan", "plan_path", type=command.FILE, default=_DEFAULT_PLAN)
@command.rounds
@command.output("Write OUTPUT.md and OUTPUT.json, for example reports/peers-vda.")
@command.note
def main(
    directory: Path,
    plan_path: Path,
    rounds: int | None,
    output: Path | None,
    notes: tuple[str, ...],
) -> None:
    """Compare the engine with fio and DeepSpeed's op on the drive of DIRECTORY, in interleaved
    runs, and print a table in Markdown.
    """
    command.stop_at_sigterm()
    plan = read_plan(plan_path)
    results = Results(facts(directory, "sweeps.peers"), plan, {}, {}, [], [*notes, _HOW])
    with contextlib.ExitStack() as undo, interruptible(results.facts, results.notes):
        _measure(results, directory, rounds or plan.rounds, undo)
    write(output, text := render(results), as_json(results))
    click.echo(text)


def _measure(results: Results, directory: Path, rounds: int, undo: contextlib.ExitStack) -> None:
    plan, skipped = results.plan, results.skipped
    contests = list(dict.fromkeys(contest for case in plan.cases for contest in case.contests))
    peers = _peers(sorted({side for contest in contests for side in contest.sides}), skipped)
    versions = [peer.version for peer in peers.values() if peer.version]
    results.facts["versions"] = ", ".join(
        dict.fromkeys([*versions, commit(), f"Python {platform.python_version()}"])
    )
    contests = [contest for contest in contests if all(side in peers for side in contest.sides)]
    buffers = Buffers(max(job.file_bytes for contest in contests for job in contest.jobs))
    buffers.locked = next(
        (peer.locked for peer in peers.values() if isinstance(peer, deepspeed_op.DeepSpeedOp)), None
    )
    rigs: dict[str | None, Rig] = {}
    for place in dict.fromkeys(contest.directory for contest in contests):
        nbytes = max(
            job.file_bytes
            for contest in contests
            if contest.directory == place
            for job in contest.jobs
        )
        say(f"two files of {format_bytes(nbytes)} in {place or directory}")
        rigs[place] = Rig(Path(place) if place else directory, nbytes, buffers)
        undo.callback(rigs[place].close)
    results.facts["direct I/O"] = ", ".join(
        f"{'yes' if rig.direct else 'no'} in {place or directory}" for place, rig in rigs.items()
    )
    gc.disable()  # its moments are nobody's
    refused: set[Contest] = set()
    started = time.monotonic()
    for number in range(rounds):
        for contest in contests:
            if contest in refused:
                continue
            try:
                held = _hold(contest, number, started, rigs[contest.directory], peers)
            except UnsupportedError as error:
                refused.add(contest)
                skipped[f"{' / '.join(contest.sides)}, {contest.jobs[0]}"] = str(error)
                say(f"without {contest.jobs[0]}: {error}")
            else:
                results.rounds.setdefault(contest, []).append(held)
    backends = dict.fromkeys(job.backend for contest in contests for job in contest.jobs)
    for rig, backend in itertools.product(rigs.values(), backends):
        results.latencies.append(latency.measure(rig, backend, plan.round_trips))


def _peers(names: list[str], skipped: dict[str, str]) -> dict[str, Peer]:
    peers: dict[str, Peer] = {}
    for name in names:
        require_known(name)
        say(f"getting {name} ready")
        try:
            peers[name] = make(name)
        except UnsupportedError as error:
            skipped[name] = str(error)
            say(f"without {name}: {error}")
    return peers


def _hold(contest: Contest, number: int, started: float, rig: Rig, peers: dict[str, Peer]) -> Round:
    order, moment = there_and_back((0, 1), number), time.monotonic() - started
    found: dict[int, Measurement] = {}
    for side in order:
        found[side] = peers[contest.sides[side]].run(rig, contest.jobs[side])
    speeds = [found[side].nbytes / found[side].seconds / 1e9 for side in (0, 1)]
    figures = f"{speeds[0]:.2f} / {speeds[1]:.2f} GB/s = {speeds[0] / speeds[1]:.2f}"
    say(f"round {number + 1}, {' / '.join(contest.sides)}: {contest.jobs[0]}: {figures}")
    return Round(number, order[0], moment, (found[0], found[1]))


if __name__ == "__main__":
    command.run(main, "sweeps.peers")
