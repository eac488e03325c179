"""The tables of the field in docs/benchmarks.md, from the reports that are committed: `python -m
sweeps.compare.readme`.

What stands between the two marks of the page is written anew; --check says whether it is as the
reports have it and changes nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from nvme_offload.errors import UsageError
from nvme_offload.report import wording
from nvme_offload.report.tables import Table

from ..command import run
from .results import Results, Row, TaskFacts, from_json, groups, rows

BEGIN = "<!-- compare: begin; written by python -m sweeps.compare.readme -->"
END = "<!-- compare: end -->"
_ROOT = Path(__file__).parents[2]


def block(reports: Mapping[str, Results]) -> str:
    """What stands between the marks: two tables for each of *reports*, which are by the path of
    their directory. Raises: UsageError where there are none.
    """
    if not reports:
        raise UsageError(
            "there is no report of a comparison: run python -m sweeps.compare DIR --output reports/compare-NAME first"
        )
    return "\n\n".join(_machine(path, results) for path, results in reports.items())


def replaced(text: str, between: str) -> str:
    """*text* with *between* between the marks. Raises: UsageError where they are not there, once
    each and in order.
    """
    lines = text.splitlines()
    if lines.count(BEGIN) != 1 or lines.count(END) != 1 or lines.index(BEGIN) > lines.index(END):
        raise UsageError(f"the file needs the line {BEGIN} and after it the line {END}, once each")
    before, after = lines[: lines.index(BEGIN) + 1], lines[lines.index(END) :]
    return "\n".join([*before, "", between, "", *after]) + "\n"


def _machine(path: str, results: Results) -> str:
    reference = next((side.title for side in results.sides if side.name == results.reference), "")
    facts = results.facts
    head = (
        f"{facts['processor']}; {facts['drive'].partition(';')[0]}, {facts['filesystem'].partition(' ')[0]}; {facts['date']}; "
        f"{wording.plural(results.rounds, 'round')} ([report]({path}/report.md)). GB/s of {reference}, and how many times as fast as each of the others it is:"
    )
    tasks = [task for _, found in groups(results) for task in found]
    tables = [
        _table(results, [task for task in tasks if task.checkpoint == checkpoint])
        for checkpoint in (False, True)
    ]
    skipped = [
        f"{skip.side} at {skip.task}" if skip.task else skip.side for skip in results.skipped
    ]
    left_out = (
        [
            textwrap.fill(
                f"Left out, for the reasons in the report: {', '.join(skipped)}.",
                100,
                break_on_hyphens=False,
            )
        ]
        if skipped
        else []
    )
    return "\n\n".join(
        [
            textwrap.fill(head, 100, break_on_hyphens=False),
            *(table.markdown() for table in tables if table.rows),
            *left_out,
        ]
    )


def _table(results: Results, tasks: Sequence[TaskFacts]) -> Table:
    by_task = {task.name: {row.side.name: row for row in rows(results, task)} for task in tasks}
    others = [
        side
        for side in results.sides
        if not side.name.startswith("ours")
        and any(side.name in found for found in by_task.values())
    ]
    lines = []
    for task in tasks:
        found = by_task[task.name]
        ours = found.get(results.reference)
        if ours is not None:
            cells = (_advantage(found[side.name]) if side.name in found else "" for side in others)
            lines.append((_title(task), wording.speed(ours.gb_per_second.median), *cells))
    return Table("readme", "", ("", "ours", *(side.title for side in others)), tuple(lines))


def _title(task: TaskFacts) -> str:
    if task.checkpoint:
        return f"a checkpoint of {wording.decimal_bytes(task.nbytes)}, {task.title}"
    each = task.nbytes // task.requests // (2 if task.direction == "mixed" else 1)
    return f"{task.requests} {wording.TIMES} {wording.size(each)}, {task.title}"


def _advantage(row: Row) -> str:
    found = row.advantage
    if found is None:
        return ""
    low, high = f"{found.low:.2f}", f"{found.high:.2f}"
    return wording.ratio(found.median) + ("" if low == high else f" ({low}{wording.DASH}{high})")


@click.command()
@click.option(
    "--check",
    is_flag=True,
    help="Change nothing; exit with 1 if the page is not as the reports have it.",
)
@click.option(
    "--page",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=_ROOT / "docs" / "benchmarks.md",
)
@click.option(
    "--reports",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=_ROOT / "reports",
    help="Directory of compare-*/.",
)
def main(check: bool, page: Path, reports: Path) -> None:
    """Write the tables of the field into the page, whose links start in docs/."""
    found = {
        f"../{reports.name}/{path.parent.name}": from_json(path)
        for path in sorted(reports.glob("compare-*/compare.json"))
    }
    text = page.read_text(encoding="utf-8")
    wanted = replaced(text, block(found))
    if text == wanted:
        return
    if check:
        raise click.ClickException(
            f"{page} is not as the reports have it: run python -m sweeps.compare.readme"
        )
    page.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    run(main, "sweeps.compare.readme")
