"""The report on the engine and its peers, for people (Markdown) and for programs (JSON). Pure:
nothing here looks at the machine.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from nvme_offload.units import format_bytes

from ..report import (
    Spread,
    columns,
    document,
    listed,
    percentile,
    spread,
    summed_up,
    table,
    verdict,
)
from .latency import Latencies
from .plan import MEMORY, Case, Contest, Plan
from .stopwatch import Measurement

SUBMISSION_TARGET_MICROSECONDS = 20.0
WAKE_TARGET_MICROSECONDS = 50.0
_LEAST_CPU_SECONDS = 0.0005  # fio tells whole milliseconds, so none is half of one
_SMALL_BLOCK = 64 << 10  # up to here what counts is the cost of a block
_LABELS = {
    "direction": "",
    "backend": "backend",
    "memory": "memory",
    "block_size": "block",
    "queue_depth": "depth",
    "thread_count": "threads",
}


@dataclasses.dataclass(frozen=True)
class Round:
    """Both sides once, one right after the other; *first* is the side that began."""

    number: int
    first: int
    started_seconds: float
    measurements: tuple[Measurement, Measurement]


@dataclasses.dataclass
class Results:
    """facts: what the machine, the versions and the command were, by name. rounds: by contest, in
    the order of the plan; skipped: why, by side.
    """

    facts: dict[str, str]
    plan: Plan
    rounds: dict[Contest, list[Round]]
    skipped: dict[str, str]
    latencies: list[Latencies]
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class Row:
    """A contest, summed up. *speed* and *cpu* are ratios of the first side to the second, of each
    round; cpu for the same bytes.
    """

    contest: Contest
    rounds: int
    gb_per_second: tuple[float, float]
    cpu_seconds_per_gib: tuple[float, float]
    speed: Spread
    cpu: Spread


def row(contest: Contest, rounds: Sequence[Round]) -> Row:
    """The row of a contest that had one round or more."""
    sides = [pd.DataFrame([entry.measurements[side] for entry in rounds]) for side in (0, 1)]
    speeds = [side.nbytes / side.seconds for side in sides]
    costs = [side.cpu_seconds.clip(lower=_LEAST_CPU_SECONDS) / side.nbytes for side in sides]
    return Row(
        contest,
        len(rounds),
        (speeds[0].median() / 1e9, speeds[1].median() / 1e9),
        (costs[0].median() * (1 << 30), costs[1].median() * (1 << 30)),
        spread(speeds[0] / speeds[1]),
        spread(costs[0] / costs[1]),
    )


def render(results: Results) -> str:
    """The report in Markdown."""
    cases = [
        (case, [row(one, results.rounds[one]) for one in case.contests if results.rounds.get(one)])
        for case in results.plan.cases
    ]
    skipped = {f"{side} was skipped": reason for side, reason in results.skipped.items()}
    return document(
        "# The engine against its peers",
        "A ratio is the first side's figure over the second's: speed should be high, CPU low.",
        columns([(case, rows) for case, rows in cases if rows], _SUMMARY),
        "## Where, when and how",
        listed({**results.facts, **skipped}),
        *results.notes,
        *(part for case, rows in cases for part in _case(case, rows)),
        *_submissions(results),
        *_latencies(results.latencies),
    )


def as_json(results: Results) -> dict[str, Any]:
    """Everything that was measured, each run by itself; what is measured thousands of times within
    one is summed up.
    """
    return {
        "facts": results.facts,
        "notes": results.notes,
        "skipped": results.skipped,
        "cases": [
            {
                **{key: getattr(case, key) for key in ("title", "speed_target", "cpu_target")},
                "contests": [
                    _contest_as_json(contest, results.rounds.get(contest, []))
                    for contest in case.contests
                ],
            }
            for case in results.plan.cases
        ],
        "latencies": [
            {
                key: value if isinstance(value, str) else summed_up(value)
                for key, value in entry._asdict().items()
            }
            for entry in results.latencies
        ],
    }


def _contest_as_json(contest: Contest, rounds: Sequence[Round]) -> dict[str, Any]:
    sides = zip(contest.sides, contest.jobs, strict=True)
    return {
        "directory": contest.directory,
        "sides": [{"name": side, "job": dataclasses.asdict(job)} for side, job in sides],
        "rounds": [
            {
                "number": entry.number,
                "first": entry.first,
                "started_seconds": round(entry.started_seconds, 3),
                "sides": [_measurement_as_json(measurement) for measurement in entry.measurements],
            }
            for entry in rounds
        ],
    }


def _measurement_as_json(measurement: Measurement) -> dict[str, Any]:
    submits = measurement.submit_seconds
    return {
        "bytes": measurement.nbytes,
        "seconds": round(measurement.seconds, 6),
        "cpu_seconds": round(measurement.cpu_seconds, 6),
        **({"submit_seconds": summed_up(submits)} if submits else {}),
    }


def _target(least: float | None, most: float | None) -> str:
    return "" if least is most is None else f">= {least:g}" if most is None else f"<= {most:g}"


def _met(spreads: list[Spread], least: float | None = None, most: float | None = None) -> str:
    verdicts = [verdict(found, least, most) for found in spreads]
    met = sum(word.startswith("met") for word in verdicts)
    return f"{met} of {len(verdicts)}" if any(verdicts) else ""


def _middle(rows: Sequence[Row], of: str) -> str:
    return f"{statistics.median(getattr(row, of).median for row in rows):.2f}"


_SUMMARY: dict[str, Any] = {
    "case": lambda one: one[0].title,
    "sides": lambda one: " / ".join(one[1][0].contest.sides),
    "rows": lambda one: len(one[1]),
    "speed ratio, median of the rows": lambda one: _middle(one[1], "speed"),
    "target": lambda one: _target(one[0].speed_target, None),
    "rows that meet it": lambda one: _met([row.speed for row in one[1]], one[0].speed_target),
    "CPU ratio, median of the rows": lambda one: _middle(one[1], "cpu"),
    "target ": lambda one: _target(None, one[0].cpu_target),
    "rows that meet it ": lambda one: _met([row.cpu for row in one[1]], None, one[0].cpu_target),
}


def _case(case: Case, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return [f"## {case.title}", "Skipped: a side is missing."]
    varying = [name for name in _LABELS if len({_setting(row, name) for row in rows}) > 1]
    job = rows[0].contest.jobs[0]
    first, second = rows[0].contest.sides
    fixed = [
        f"{label} {_setting(rows[0], name)}".strip()
        for name, label in _LABELS.items()
        if name not in varying and name != "memory"
    ]
    plural = "s" if job.requests > 1 else ""
    said = [f"{job.requests} request{plural} of {format_bytes(job.request_bytes)}", *fixed]
    if job.passes > 1:
        said.append(f"{job.passes} times, one queued behind the other")
    if job.footprint_bytes < job.file_bytes:
        said.append(
            f"the memory of {first} only {format_bytes(job.footprint_bytes)}, used again and again, like fio's"
        )
    memory = "; ".join(
        f"{kind}: {MEMORY[kind]}"
        for kind in dict.fromkeys(row.contest.jobs[0].memory for row in rows)
    )
    sentences = [f"{', '.join(said)}; {min(row.rounds for row in rows)} rounds. Memory {memory}."]
    if rows[0].contest.directory is not None:
        sentences.append(f"In {rows[0].contest.directory}.")
    others = {
        f"{label} {_setting(row, name, 1)}": None
        for row in rows
        for name, label in _LABELS.items()
        if _setting(row, name) != _setting(row, name, 1)
    }
    if others:
        sentences.append(f"{second} has {', '.join(others)}.")
    cells = dict(_cells(case, rows, varying))
    return [f"## {case.title}: {first} / {second}", " ".join(sentences), columns(rows, cells)]


def _cells(case: Case, rows: Sequence[Row], varying: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The columns of a case's table."""
    sides = list(enumerate(rows[0].contest.sides))
    for name in varying:
        yield _LABELS[name], lambda row, name=name: _setting(row, name)
    for side, title in sides:
        yield f"{title} GB/s{' ' * side}", lambda row, side=side: f"{row.gb_per_second[side]:.2f}"
    yield "speed ratio", lambda row: row.speed
    if case.speed_target is not None:
        yield "speed", lambda row: verdict(row.speed, least=case.speed_target)
    for side, title in sides:
        yield (
            f"{title} CPU s/GiB{' ' * side}",
            lambda row, side=side: f"{row.cpu_seconds_per_gib[side]:.4f}",
        )
    yield "CPU ratio", lambda row: row.cpu
    if case.cpu_target is not None:
        yield "CPU", lambda row: verdict(row.cpu, most=case.cpu_target)
    if all(row.contest.jobs[0].block_size <= _SMALL_BLOCK for row in rows):

        def thousands(row: Row, side: int, blocks_per_byte: float) -> str:
            return f"{blocks_per_byte / row.contest.jobs[side].block_size / 1000:.0f} k"

        for side, title in sides:
            yield (
                f"{title} blocks/s{' ' * side}",
                lambda row, side=side: thousands(row, side, row.gb_per_second[side] * 1e9),
            )
        for side, title in sides:
            yield (
                f"{title} blocks/CPU s{' ' * side}",
                lambda row, side=side: thousands(
                    row, side, (1 << 30) / row.cpu_seconds_per_gib[side]
                ),
            )


def _setting(row: Row, name: str, side: int = 0) -> str:
    value = getattr(row.contest.jobs[side], name)
    return format_bytes(value) if name == "block_size" else str(value)


def _submissions(results: Results) -> list[str]:
    found = [
        (job.backend, job.request_bytes, 1e6 * seconds)
        for contest, rounds in results.rounds.items()
        for side, job in enumerate(contest.jobs)
        for entry in rounds
        for seconds in entry.measurements[side].submit_seconds
    ]
    if not found:
        return []
    frame = pd.DataFrame(found, columns=["backend", "nbytes", "us"])
    lines = [
        (
            backend,
            format_bytes(nbytes),
            len(us),
            *_tenths(us.median(), percentile(us, 99), us.max()),
        )
        for (backend, nbytes), us in frame.groupby(["backend", "nbytes"]).us
    ]
    return [
        "## Submitting a request",
        f"How long `engine.read` and `engine.write` took to return, over all runs above; at most {SUBMISSION_TARGET_MICROSECONDS:g} us is the target.",
        table(("backend", "request", "requests", "median us", "99 % us", "most us"), lines),
    ]


def _latencies(latencies: Sequence[Latencies]) -> list[str]:
    if not latencies:
        return []
    lines = []
    for entry in latencies:
        pread, polled, waited, stats = ([1e6 * one for one in values] for values in entry[2:])
        middle = [statistics.median(values) for values in (pread, polled, waited)]
        figures = (*middle, percentile(waited, 99), middle[2] - middle[1])
        asked = (statistics.median(stats), percentile(stats, 99)) if stats else ()
        lines.append((entry.place, entry.backend, *_tenths(*figures, *asked)))
    head = "in, backend, pread, polled, waited, waited; 99 %, waking up, stats(), stats(); 99 %"
    return [
        "## Waiting for 4 KiB",
        f"Microseconds. A request costs what `polled` and `waited` are above `pread`; waking up is `waited` less `polled`, medians both: at most "
        f"{WAKE_TARGET_MICROSECONDS:g} is the target. `stats()` was asked while a large read was under way. Caller and worker were kept on different cores. "
        f"{len(latencies[0].pread)} times each, interleaved.",
        table([title.replace(";", ",") for title in head.split(", ")], lines),
    ]


def _tenths(*values: float) -> list[str]:
    return [f"{value:.1f}" for value in values]
