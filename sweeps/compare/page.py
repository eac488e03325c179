"""A comparison for people: one page that asks for nothing else, and the same in Markdown. Pure but
for `write`.

`python -m sweeps.compare.page reports/compare-NAME` writes them again from the JSON that is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nvme_offload.errors import OffloadError
from nvme_offload.report import wording
from nvme_offload.report.charts.canvas import Chart
from nvme_offload.report.render import environment_of_pages, page_parts
from nvme_offload.report.tables import Table
from nvme_offload.units import format_bytes

from . import charts
from .plan import describe
from .results import Results, Row, TaskFacts, as_json, from_json, groups, rows

HOW = (
    "Each round has every task, and each task everybody in turn; the next round begins with somebody else and goes in reverse order. A ratio is the "
    "median over the rounds of what one round gave, in brackets all rounds, or the middle 80 % of ten or more. Every side is a process or shares one with "
    "its kin, so that memory and CPU are its own. Those that take their caller's memory have the same: on huge pages, every page of it there before the "
    "clock starts; DeepSpeed's op has its own allocator's, without which it copies.",
    "Done means the same for all. Written is on the drive to stay: every clock stops after fdatasync or its like. What is read is in no cache before, which "
    "mincore confirms, and in memory after: what only maps a file has every page looked at. The first round compares every byte that was read, and every byte "
    "that was written, with what it should be; not in the time that is measured. fio has memory of its own, which nobody looks at.",
    "Everybody has the fastest of the settings that were tried for it just before, by the geometric mean over reading and writing of a large tensor and of "
    "tensors of 1 MiB (checkpoints: of writing one); the first of those within 2 % of the fastest.",
    "The process is what was resident at most beyond what was when the clock started, with the data to write or the memory to read into already there; only a "
    "checkpoint is read into memory that is allocated on the way, and before its clock starts as much is taken and given back, for everybody alike. Locked "
    "counts what is locked or pinned, the data included. fio's is all of its process. The kernel counts to within a MB or two.",
)


_SPEED = ("speed", "advantage", "speed-checkpoint", "advantage-checkpoint")
_CPU = ("cpu", "cpu-checkpoint")
_HELD = (
    "process",
    "cached",
    "locked",
    "process-checkpoint",
    "cached-checkpoint",
    "locked-checkpoint",
)


def write(results: Results, directory: Path) -> list[Path]:
    """Write report.html, report.md and compare.json into *directory*, over what is there; their
    paths. Raises: OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    texts = {
        "compare.json": as_json(results),
        "report.md": markdown(results),
        "report.html": html(results),
    }
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    return [directory / name for name in reversed(texts)]


def html(results: Results) -> str:
    """The page."""
    import jinja2
    from markupsafe import Markup

    environment = environment_of_pages()
    assert environment.loader is not None
    environment.loader = jinja2.ChoiceLoader(
        [environment.loader, jinja2.FileSystemLoader(Path(__file__).parent)]
    )
    drawn = {
        name: [(chart, Markup(chart.svg())) for chart in found]
        for name, found in _charts(results).items()
    }
    return environment.get_template("page.html.j2").render(
        _context(results), charts=drawn, **page_parts(environment)
    )


def markdown(results: Results) -> str:
    """The same for a pull request, without charts."""
    context = _context(results)
    parts = [
        f"# {context['title']}",
        context["lead"],
        *(f"- {name}: {value}" for name, value in results.facts.items()),
    ]
    parts[2:] = ["\n".join(parts[2:])]
    parts += results.notes
    for heading, names in (
        ("Speed", _SPEED),
        ("CPU", _CPU),
        ("Memory", _HELD),
        ("Training", ("training",)),
        ("Who took part, and how", ("sides", "skipped", "tried")),
    ):
        found = [context["tables"][name] for name in names if context["tables"][name].rows]
        if found:
            parts.append(f"## {heading}")
        for table in found:
            parts += [f"{table.caption}:", table.markdown()]
    parts += ["## How it was measured", *HOW]
    return "\n\n".join(parts) + "\n"


def _context(results: Results) -> dict[str, Any]:
    return {
        "results": results,
        "title": "The field, side by side",
        "lead": _lead(results),
        "tables": {table.name: table for table in _tables(results)},
        "how": HOW,
        "speed_tables": _SPEED,
        "cpu_tables": _CPU,
        "memory_tables": _HELD,
        "machine": results.facts.get("processor", ""),
    }


def _lead(results: Results) -> str:
    """What to take from it: three cases that are always named, and the worst of all."""
    said = []
    for task in results.tasks:
        if task.name in ("read-1MiB", "write-1MiB", "checkpoint-write") and (
            others := _others(results, task)
        ):
            best = max(others, key=lambda other: other.gb_per_second.median)
            said.append(f"{wording.ratio(_median(best))} at {_doing(task)} ({best.side.title})")
    if not said:
        return f"{wording.plural(len(results.sides), 'side')} on one drive, interleaved."
    every = [(task, other) for task in results.tasks for other in _others(results, task)]
    task, slowest = min(every, key=lambda pair: _median(pair[1]))
    worst = f"{wording.ratio(_median(slowest))} at {_doing(task)} ({slowest.side.title})"
    return (
        f"The speed of ours with libaio over the fastest of the others each time: {', '.join(said)}. "
        f"The worst of all {len(every)} cases: {worst}. All moved the same bytes, in interleaved runs."
    )


def _others(results: Results, task: TaskFacts) -> list[Row]:
    """Everybody at *task* but ours and the ceiling, whom ours was run beside."""
    return [
        row
        for row in rows(results, task)
        if row.advantage
        and not row.side.name.startswith("ours")
        and row.side.name != results.ceiling
    ]


def _median(row: Row) -> float:
    """How many times as fast as it ours was."""
    assert row.advantage is not None
    return row.advantage.median


def _doing(task: TaskFacts) -> str:
    verb = {"read": "reading", "write": "writing", "mixed": "reading and writing"}[task.direction]
    return (
        f"{verb} a checkpoint"
        if task.checkpoint
        else f"{verb} {task.requests} tensor{'s' * (task.requests > 1)} of {wording.size(task.nbytes // task.requests)}"
    )


def _charts(results: Results) -> dict[str, list[Chart]]:
    found: dict[str, list[Chart]] = {"speed": [], "cpu": [], "memory": []}
    for group, tasks in groups(results):
        found["speed"].append(charts.speeds(results, group, tasks))
        found["cpu"].append(charts.costs(results, group, tasks))
        # many tensors take what a large one does
        if any(
            task.checkpoint or (task.requests == 1 and task.direction != "mixed") for task in tasks
        ):
            found["memory"].append(charts.memory(results, group, tasks))
    return found


def _tables(results: Results) -> Iterator[Table]:
    reference = next(
        (side.title for side in results.sides if side.name == results.reference), results.reference
    )
    for checkpoint in (False, True):
        kind = "-checkpoint" if checkpoint else ""
        tasks = [
            task for _, found in groups(results) for task in found if task.checkpoint == checkpoint
        ]
        about = "A checkpoint: " if checkpoint else ""
        yield _matrix(
            results,
            tasks,
            f"speed{kind}",
            f"{about}GB/s, medians",
            lambda row: wording.speed(row.gb_per_second.median),
        )
        yield _matrix(
            results,
            tasks,
            f"advantage{kind}",
            f"{about}the speed of {reference} over each, in the same round",
            _advantage,
        )
        yield _matrix(
            results,
            tasks,
            f"cpu{kind}",
            f"{about}CPU seconds a GiB",
            lambda row: f"{row.cpu_seconds_per_gib:.3f}",
        )
        for name, caption, measure in _MEMORY:
            yield _matrix(
                results,
                tasks,
                f"{name}{kind}",
                f"{about}{caption}, MB",
                lambda row, measure=measure: _megabytes(measure(row)),
                measure,
            )  # type: ignore[misc]
    yield _training(results)
    sides = tuple(
        (side.title, side.version, describe(side.setting), str(len(side.tried) or 1), side.done)
        for side in results.sides
    )
    yield Table(
        "sides",
        "Versions and settings",
        ("Side", "Version", "Setting", "Tried", "When its bytes are moved"),
        sides,
        words=frozenset({0, 1, 2, 4}),
    )
    skipped = tuple((skip.side, skip.task or "everything", skip.reason) for skip in results.skipped)
    yield Table("skipped", "Skipped", ("Side", "At", "Why"), skipped, words=frozenset({0, 1, 2}))
    yield _tried(results)


_MEMORY: tuple[tuple[str, str, Callable[[Row], int]], ...] = (
    ("process", "memory of the process beyond the data", lambda row: row.extra_bytes),
    ("cached", "left in the page cache", lambda row: row.cached_bytes),
    ("locked", "locked or pinned, the data included", lambda row: row.locked_bytes),
)


def _matrix(
    results: Results,
    tasks: Sequence[TaskFacts],
    name: str,
    caption: str,
    shown: Callable[[Row], str],
    counts: Callable[[Row], float] | None = None,
) -> Table:
    """Sides by *tasks*; with *counts* only the sides where that is ever above 0."""
    by_side: dict[str, dict[str, Row]] = {}
    for task in tasks:
        for row in rows(results, task):
            by_side.setdefault(row.side.name, {})[task.name] = row
    lines: list[tuple[str, ...]] = []
    strong: set[int] = set()
    for side in results.sides:
        mine = by_side.get(side.name, {})
        if not mine or (counts is not None and not any(counts(row) for row in mine.values())):
            continue
        if side.name.startswith("ours"):
            strong.add(len(lines))
        lines.append(
            (
                side.title,
                *(shown(mine[task.name]) if task.name in mine else wording.NONE for task in tasks),
            )
        )
    return Table(
        name,
        f"{caption[:1].upper()}{caption[1:]}",
        ("", *(_short(task, "\n") for task in tasks)),
        tuple(lines),
        frozenset(strong),
    )


def _short(task: TaskFacts, between: str) -> str:
    if task.checkpoint:
        return f"{task.title}{between}{task.requests} tensors, {wording.decimal_bytes(task.nbytes)}"
    each = task.nbytes // task.requests // (2 if task.direction == "mixed" else 1)
    return f"{task.title}{between}{task.requests} {wording.TIMES} {wording.size(each)}"


def _advantage(row: Row) -> str:
    found = row.advantage
    if found is None:
        return wording.NONE
    low, high = f"{found.low:.2f}", f"{found.high:.2f}"
    return (
        f"{found.median:.2f}" if low == high else f"{found.median:.2f} ({low}{wording.DASH}{high})"
    )


def _training(results: Results) -> Table:
    lines = []
    for row in results.training:
        step = "1" if row.step_ratio is None else _three(row.step_ratio)
        peak = "1" if row.peak_ratio is None else _three(row.peak_ratio)
        figures = (
            f"{row.step_seconds:.3g}",
            step,
            f"{row.peak_bytes / 1e9:.1f}",
            peak,
            str(row.rounds),
        )
        lines.append((row.title, row.model, *figures, f"{row.report}, {row.date}"))
    columns = (
        "What is where",
        "Model",
        "Step, s",
        "Over\nthe first",
        "Peak memory,\nGB",
        "Over\nthe first",
        "Rounds",
        "Report",
    )
    return Table(
        "training",
        "A training step with DeepSpeed ZeRO-3, from reports made on a machine with this processor",
        columns,
        tuple(lines),
        words=frozenset({0, 1, 7}),
    )


def _three(values: tuple[float, float, float]) -> str:
    middle, low, high = (f"{value:.2f}" for value in values)
    return middle if low == high else f"{middle} ({low}{wording.DASH}{high})"


def _tried(results: Results) -> Table:
    tasks = {task.name: task for task in results.tasks}
    lines = []
    for side in results.sides:
        for entry in side.tried:
            speeds = ", ".join(
                f"{_short(tasks[name], ' ')} {wording.speed(value)}"
                for name, value in entry["gb_per_second"].items()
                if name in tasks
            )
            mark = "taken" if entry["setting"] == side.setting else ""
            lines.append((side.title, describe(entry["setting"]), speeds or "failed", mark))
    size = format_bytes(results.size_bytes)
    return Table(
        "tried",
        f"What was tried before a size of {size}, GB/s",
        ("Side", "Setting", "Reached", ""),
        tuple(lines),
        words=frozenset({0, 1, 2, 3}),
    )


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.0f}" if nbytes >= 9.5e5 or nbytes < 5e4 else f"{nbytes / 1e6:.1f}"


def main(arguments: Sequence[str]) -> None:
    """Write the pages of each directory of *arguments* again."""
    for argument in arguments:
        directory = Path(argument)
        for path in write(from_json(directory / "compare.json"), directory):
            print(path)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OffloadError, OSError) as error:
        print(f"sweeps.compare.page: {error}", file=sys.stderr)
        sys.exit(1)
