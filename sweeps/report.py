"""Statistics over rounds, and Markdown. Pure, but for `write`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pandas as pd

Key = TypeVar("Key")
_ENOUGH_FOR_DECILES = 10


class Spread(NamedTuple):
    """A median with the range of the values: the middle 80 % of ten or more, otherwise all."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return self.text()

    def text(self, digits: int = 2) -> str:
        """With so many digits after the point."""
        low, median, high = (f"{value:.{digits}f}" for value in self)
        return f"{median} [{low} to {high}]"


def spread(values: Iterable[float]) -> Spread:
    """The spread of one value or more."""
    found = pd.Series(values, dtype=float)
    few = len(found) < _ENOUGH_FOR_DECILES
    return Spread(*map(float, found.quantile([0, 0.5, 1] if few else [0.1, 0.5, 0.9])))


def shown(values: Iterable[float], digits: int = 2) -> str:
    """The spread of *values* as text; empty where there is none, or one is not a number."""
    found = pd.Series(values, dtype=float).dropna()
    return spread(found).text(digits) if len(found) else ""


def ratios(mine: pd.Series, others: pd.Series) -> pd.Series:
    """*mine* over *others* in each round that has both; both are indexed by round."""
    return (mine / others[others != 0]).dropna()


def table(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def columns(keys: Iterable[Key], cells: Mapping[str, Callable[[Key], Any]]) -> str:
    """A table with a row for each of *keys*, and a column for each of *cells*, by its heading.

    Headings that are alike but for spaces at the end are shown alike.
    """
    lines = [[cell(key) for cell in cells.values()] for key in keys]
    return table([head.rstrip() for head in cells], lines)


class Medians:
    """Cells of a table with a row for each side of a comparison: medians over the rounds.

    *figures*: of each run, with "name", "round", "count" (of measured steps or tokens; if it is 0, the
    run has no other figures) and "seconds".
    """

    def __init__(self, figures: Iterable[Mapping[str, Any]]) -> None:
        runs = pd.DataFrame(figures)
        self.names = list(dict.fromkeys(runs["name"])) if len(runs) else []
        self._runs = {name: runs[runs["name"] == name].set_index("round") for name in self.names}

    def count(self, name: str) -> int:
        """How much the runs of *name* measured in total."""
        return int(self._runs[name]["count"].sum())

    def cell(self, text: Callable[[pd.Series], str]) -> Callable[[str], str]:
        """The *text* of a side's medians; empty if it measured nothing."""
        return lambda name: (
            text(self._runs[name].median(numeric_only=True)) if self.count(name) else ""
        )

    def ratio(self, name: str) -> str:
        """The seconds of *name* over the seconds of the first side."""
        if not self.count(name) or not self.count(self.names[0]):
            return ""
        return shown(ratios(self._runs[name].seconds, self._runs[self.names[0]].seconds))


def escaped(text: str) -> str:
    """*text* for a cell of a table."""
    return text.replace("|", "\\|")


def listed(facts: Mapping[str, Any]) -> str:
    """Facts by name, as a list in Markdown."""
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def document(*parts: str) -> str:
    """A document of these paragraphs; empty ones are left out."""
    return "\n\n".join(filter(None, parts)) + "\n"


def write(output: Path | None, text: str, results: Any = None, indent: int | None = 1) -> None:
    """Write *results* to *output*.json, where there are any, and *text* to *output*.md; nothing
    where *output* is None.
    """
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        if results is not None:
            kept = json.dumps(results, indent=indent) + "\n"
            output.with_name(output.name + ".json").write_text(kept, encoding="utf-8")
        output.with_name(output.name + ".md").write_text(text, encoding="utf-8")
