"""Statistics of what was measured, and the report for people (Markdown) and for programs (JSON).
Pure: nothing here looks at the machine.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from nvme_offload.units import format_bytes

from .latency import Latencies
from .plan import MEMORY, Case, Contest, Job, Plan
from .stopwatch import Measurement

SUBMISSION_TARGET_MICROSECONDS = 20.0
WAKE_TARGET_MICROSECONDS = 50.0
_LEAST_CPU_SECONDS = 0.0005  # fio tells whole milliseconds, so none is half of one
_ENOUGH_FOR_DECILES = 10
_SMALL_BLOCK = 64 << 10  # up to here what counts is the cost of a block


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


class Spread(NamedTuple):
    """A median, and between which values the rest is: the middle 80 % of ten or more, otherwise
    all.
    """

    low: float
    median: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Of one value or more."""
    middle = statistics.median(values)
    if len(values) < _ENOUGH_FOR_DECILES:
        return Spread(min(values), middle, max(values))
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return Spread(deciles[0], middle, deciles[-1])


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that *percent* of all do not exceed; the largest where there are too few to
    tell.
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


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
    pairs = [entry.measurements for entry in rounds]
    speeds = [tuple(side.nbytes / side.seconds for side in pair) for pair in pairs]
    costs = [
        tuple(max(side.cpu_seconds, _LEAST_CPU_SECONDS) / side.nbytes for side in pair)
        for pair in pairs
    ]
    return Row(
        contest,
        len(rounds),
        (
            statistics.median(a for a, _ in speeds) / 1e9,
            statistics.median(b for _, b in speeds) / 1e9,
        ),
        (
            statistics.median(a for a, _ in costs) * (1 << 30),
            statistics.median(b for _, b in costs) * (1 << 30),
        ),
        spread([a / b for a, b in speeds]),
        spread([a / b for a, b in costs]),
    )


def verdict(found: Spread, least: float | None = None, most: float | None = None) -> str:
    """Whether the median meets the target; a question mark where the spread holds both answers.
    Empty without a target.
    """
    target = least if least is not None else most
    if target is None:
        return ""
    met = found.median >= target if least is not None else found.median <= target
    return ("met" if met else "missed") + ("?" if found.low < target < found.high else "")


def rows_of(results: Results) -> Iterator[tuple[Case, list[Row]]]:
    """The rows of every case, of the contests that were held."""
    for case in results.plan.cases:
        yield (
            case,
            [
                row(contest, results.rounds[contest])
                for contest in case.contests
                if results.rounds.get(contest)
            ],
        )


def render(results: Results) -> str:
    """The report in Markdown."""
    cases = list(rows_of(results))
    parts = ["# The engine against its peers", *_summary(cases), *_circumstances(results)]
    for case, rows in cases:
        parts += _case(case, rows, results)
    parts += _submissions(results)
    parts += _latencies(results.latencies)
    return "\n\n".join(parts) + "\n"


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
                "backend": entry.backend,
                "place": entry.place,
                **{
                    name: _summed_up(getattr(entry, name))
                    for name in ("pread", "polled", "waited", "stats")
                },
            }
            for entry in results.latencies
        ],
    }


def _contest_as_json(contest: Contest, rounds: Sequence[Round]) -> dict[str, Any]:
    return {
        "directory": contest.directory,
        "sides": [
            {"name": side, "job": dataclasses.asdict(job)}
            for side, job in zip(contest.sides, contest.jobs, strict=True)
        ],
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
    found: dict[str, Any] = {
        "bytes": measurement.nbytes,
        "seconds": round(measurement.seconds, 6),
        "cpu_seconds": round(measurement.cpu_seconds, 6),
    }
    if measurement.submit_seconds:
        found["submit_seconds"] = _summed_up(measurement.submit_seconds)
    return found


def _summed_up(seconds: Sequence[float]) -> dict[str, float]:
    figures = {
        "median": statistics.median(seconds),
        "percentile_99": percentile(seconds, 99),
        "most": max(seconds),
    }
    return {"count": len(seconds), **{name: round(value, 8) for name, value in figures.items()}}


def _summary(cases: Sequence[tuple[Case, list[Row]]]) -> list[str]:
    lines = []
    for case, rows in cases:
        if rows:
            speed = _tally([row.speed for row in rows], least=case.speed_target)
            cpu = _tally([row.cpu for row in rows], most=case.cpu_target)
            lines.append(
                (case.title, " / ".join(rows[0].contest.sides), str(len(rows)), *speed, *cpu)
            )
    head = (
        "case",
        "sides",
        "rows",
        "speed ratio, median of the rows",
        "target",
        "rows that meet it",
        "CPU ratio, median of the rows",
        "target",
        "rows that meet it",
    )
    return [
        "A ratio is the first side's figure over the second's: speed should be high, CPU low.",
        table(head, lines),
    ]


def _tally(
    spreads: Sequence[Spread], least: float | None = None, most: float | None = None
) -> tuple[str, str, str]:
    middle = f"{statistics.median(found.median for found in spreads):.2f}"
    verdicts = [verdict(found, least, most) for found in spreads]
    if not any(verdicts):
        return middle, "", ""
    met = sum(word.startswith("met") for word in verdicts)
    return (
        middle,
        f">= {least:g}" if least is not None else f"<= {most:g}",
        f"{met} of {len(verdicts)}",
    )


def _circumstances(results: Results) -> list[str]:
    facts = [f"- {name}: {value}" for name, value in results.facts.items()]
    facts += [f"- {side} was skipped: {reason}" for side, reason in results.skipped.items()]
    return ["## Where, when and how", "\n".join(facts), *results.notes]


def _case(case: Case, rows: Sequence[Row], results: Results) -> list[str]:
    if not rows:
        return [f"## {case.title}", "Skipped: a side is missing."]
    names = ("direction", "backend", "memory", "block_size", "queue_depth", "thread_count")
    labels = dict(zip(names, ("", "backend", "memory", "block", "depth", "threads"), strict=True))
    varying = [
        name for name in names if len({_setting(row.contest.jobs[0], name) for row in rows}) > 1
    ]
    job = rows[0].contest.jobs[0]
    first, second = rows[0].contest.sides
    fixed = [
        f"{labels[name]} {_setting(job, name)}".strip()
        for name in names
        if name not in varying and name != "memory"
    ]
    said = [
        f"{job.requests} request{'s' if job.requests > 1 else ''} of {format_bytes(job.request_bytes)}",
        *fixed,
    ]
    if job.passes > 1:
        said.append(f"{job.passes} times, one queued behind the other")
    if job.footprint_bytes < job.file_bytes:
        said.append(
            f"the memory of {first} only {format_bytes(job.footprint_bytes)}, used again and again, like fio's"
        )
    blocks = all(row.contest.jobs[0].block_size <= _SMALL_BLOCK for row in rows)
    head = [labels[name] for name in varying]
    head += [
        f"{first} GB/s",
        f"{second} GB/s",
        "speed ratio",
        *(["speed"] if case.speed_target is not None else []),
    ]
    head += [
        f"{first} CPU s/GiB",
        f"{second} CPU s/GiB",
        "CPU ratio",
        *(["CPU"] if case.cpu_target is not None else []),
    ]
    if blocks:
        head += [
            f"{first} blocks/s",
            f"{second} blocks/s",
            f"{first} blocks/CPU s",
            f"{second} blocks/CPU s",
        ]
    lines = []
    for entry in rows:
        line = [_setting(entry.contest.jobs[0], name) for name in varying]
        line += [f"{value:.2f}" for value in entry.gb_per_second] + [_ratio(entry.speed)]
        line += (
            [verdict(entry.speed, least=case.speed_target)] if case.speed_target is not None else []
        )
        line += [f"{value:.4f}" for value in entry.cpu_seconds_per_gib] + [_ratio(entry.cpu)]
        line += [verdict(entry.cpu, most=case.cpu_target)] if case.cpu_target is not None else []
        if blocks:
            line += [
                _thousands(speed * 1e9 / job_.block_size)
                for speed, job_ in zip(entry.gb_per_second, entry.contest.jobs, strict=True)
            ]
            line += [
                _thousands((1 << 30) / job_.block_size / cost)
                for cost, job_ in zip(entry.cpu_seconds_per_gib, entry.contest.jobs, strict=True)
            ]
        lines.append(line)
    memory = "; ".join(
        f"{kind}: {MEMORY[kind]}"
        for kind in dict.fromkeys(row.contest.jobs[0].memory for row in rows)
    )
    sentences = [f"{', '.join(said)}; {min(row.rounds for row in rows)} rounds. Memory {memory}."]
    if rows[0].contest.directory is not None:
        sentences.append(f"In {rows[0].contest.directory}.")
    others = dict.fromkeys(
        (labels[name], _setting(row.contest.jobs[1], name))
        for row in rows
        for name in names
        if _differs(row.contest, name)
    )
    if others:
        sentences.append(
            f"{second} has {', '.join(f'{label} {value}' for label, value in others)}."
        )
    return [f"## {case.title}: {first} / {second}", " ".join(sentences), table(head, lines)]


def _submissions(results: Results) -> list[str]:
    groups: dict[tuple[str, int], list[float]] = {}
    for contest, rounds in results.rounds.items():
        for side, job in enumerate(contest.jobs):
            for entry in rounds:
                if submits := entry.measurements[side].submit_seconds:
                    groups.setdefault((job.backend, job.request_bytes), []).extend(
                        1e6 * seconds for seconds in submits
                    )
    if not groups:
        return []
    lines = [
        (
            backend,
            format_bytes(nbytes),
            str(len(found)),
            *(
                f"{value:.1f}"
                for value in (statistics.median(found), percentile(found, 99), max(found))
            ),
        )
        for (backend, nbytes), found in sorted(groups.items())
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
        pread, polled, waited, stats = (
            [1e6 * seconds for seconds in values] for values in entry[2:]
        )
        wake = statistics.median(waited) - statistics.median(polled)
        figures = (
            statistics.median(pread),
            statistics.median(polled),
            statistics.median(waited),
            percentile(waited, 99),
            wake,
        )
        asked = (statistics.median(stats), percentile(stats, 99)) if stats else ()
        lines.append(
            (entry.place, entry.backend, *(f"{value:.1f}" for value in (*figures, *asked)))
        )
    head = (
        "in",
        "backend",
        "pread",
        "polled",
        "waited",
        "waited, 99 %",
        "waking up",
        "stats()",
        "stats(), 99 %",
    )
    return [
        "## Waiting for 4 KiB",
        f"Microseconds. A request costs what `polled` and `waited` are above `pread`; waking up is `waited` less `polled`, medians both: at most "
        f"{WAKE_TARGET_MICROSECONDS:g} is the target. `stats()` was asked while a large read was under way. Caller and worker were kept on different cores. "
        f"{len(latencies[0].pread)} times each, interleaved.",
        table(head, lines),
    ]


def _differs(contest: Contest, name: str) -> bool:
    return bool(getattr(contest.jobs[0], name) != getattr(contest.jobs[1], name))


def _setting(job: Job, name: str) -> str:
    value = getattr(job, name)
    return format_bytes(value) if name == "block_size" else str(value)


def _ratio(found: Spread) -> str:
    return f"{found.median:.2f} [{found.low:.2f} to {found.high:.2f}]"


def _thousands(value: float) -> str:
    return f"{value / 1000:.0f} k"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))
