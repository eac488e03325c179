"""Training programs of other projects, each compared with its run without this package: runs the
tests with the marker `outside`, and writes a table of their results.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import click
import pytest

from sweeps import command
from sweeps.machine import facts
from sweeps.report import document, escaped, listed, table, write

HEAD = ("program", "compared with", "steps", "ranks", "result")
EQUAL = "equal bit for bit"


class Outcomes:
    """A plugin of pytest that makes a row of the table for each test with the marker."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[str, ...]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any) -> Generator[None, Any, Any]:
        """Note the result of *item*: its call, or the setup or teardown that failed."""
        report = yield
        if report.when == "call" or not report.passed:
            self.rows[item.nodeid] = row(item, result(report))
        return report


def row(item: Any, found: str) -> tuple[str, ...]:
    """The row of the test *item*. The marker's texts name parameters of the test in braces."""
    texts = item.get_closest_marker("outside").kwargs
    given = item.callspec.params if hasattr(item, "callspec") else {}
    named = (str(texts[key]).format(**given) for key in ("program", "reference", "steps", "ranks"))
    return (*map(escaped, named), found)


def result(report: Any) -> str:
    """The result in *report*, in a few words: equal, or the first line of the difference."""
    if report.passed:
        return EQUAL
    if report.skipped:
        return escaped(f"not run: {report.longrepr[2].removeprefix('Skipped: ')}")
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash else str(report.longrepr)
    return escaped(f"different: {message.strip().splitlines()[0]}"[:200])


def packages() -> str:
    """The versions of the programs' packages."""
    names = ("deepspeed", "accelerate", "transformers", "lightning", "peft")
    found = {name: importlib.util.find_spec(name) for name in names}
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names if found[name])


@click.command()
@command.directory
@click.option("--only", help="An expression for pytest's -k.")
@command.output("Write the table to this path, with .md appended.")
def main(directory: Path, only: str | None, output: Path | None) -> None:
    """Run outside programs on the drive under DIRECTORY and compare them with runs in memory."""
    began, outcomes = facts(directory, "sweeps.outside"), Outcomes()
    with tempfile.TemporaryDirectory(dir=directory, prefix="outside-") as place:
        options = ["-m", "outside", "-p", "no:cacheprovider", f"--basetemp={place}/tests"]
        status = pytest.main([*options, *(["-k", only] if only else [])], plugins=[outcomes])
    rows = list(outcomes.rows.values())
    equal = sum(found == EQUAL for *_, found in rows)
    text = document(
        "# Outside programs, compared with runs without this package",
        f"{len(rows)} runs: {equal} are equal bit for bit. Each row is a test with the marker "
        "`outside`, which compares a run with this package with the second column.",
        table(HEAD, rows),
        listed(
            {**began, "packages": packages(), "seconds": round(time.monotonic() - command.BEGAN)}
        ),
    )
    click.echo(text)
    write(output, text)
    sys.exit(status)


if __name__ == "__main__":
    command.run(main, "sweeps.outside")
