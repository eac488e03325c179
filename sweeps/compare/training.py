"""The rows that a report of `sweeps.training` has to say beside a comparison: seconds a step and
peak memory, to DeepSpeed's own offload.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nvme_offload.errors import UsageError

from ..report import spread
from ..training.plan import Model


@dataclasses.dataclass(frozen=True)
class TrainingRow:
    """A way to train. The ratios are the row's over the baseline's, median, least and most of the
    rounds; None for the baseline itself.
    """

    report: str
    date: str
    machine: str
    model: str
    baseline: str
    title: str
    step_seconds: float
    step_ratio: tuple[float, float, float] | None
    peak_bytes: float
    peak_ratio: tuple[float, float, float] | None
    rounds: int


def read(path: Path, name: str) -> list[TrainingRow]:
    """The rows of the report *path*, which a reader finds under *name*. Raises: UsageError where it
    is none; OSError.
    """
    try:
        document = json.loads(path.read_text())
        plan = document["plan"]
        whole = [
            run
            for run in document["runs"]
            if run["error"] is None and run["measures"]["step"] is not None
        ]
        found = []
        for variant in plan["variants"]:
            runs = {
                run["number"]: run["measures"] for run in whole if run["variant"] == variant["name"]
            }
            if not runs:
                continue
            base = {
                run["number"]: run["measures"]
                for run in whole
                if run["variant"] == plan["baseline"]
            }
            compared = runs if variant["name"] != plan["baseline"] else {}
            found.append(
                TrainingRow(
                    name,
                    document["facts"]["date"],
                    machine(document["facts"]),
                    _model(plan["model"]),
                    next(
                        other["title"]
                        for other in plan["variants"]
                        if other["name"] == plan["baseline"]
                    ),
                    variant["title"],
                    statistics.median(measures["step"] for measures in runs.values()),
                    _ratio(compared, base, "step"),
                    statistics.median(measures["peak"] for measures in runs.values()),
                    _ratio(compared, base, "peak"),
                    len(runs),
                )
            )
        return found
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        raise UsageError(f"{path} is not a report of sweeps.training: {error}") from None


def machine(facts: dict[str, str]) -> str:
    """What must be the same for two reports to be of such a machine: the processor and its cores.
    The memory of some machines grows with its use.
    """
    return ", ".join(facts["processor"].split(", ")[:2])


def of_this_machine(reports: Iterable[Path], facts: dict[str, str]) -> list[Path]:
    """Those of the *reports* of sweeps.training that were made on a machine with such a processor,
    by their dates.
    """
    dated = []
    for path in sorted(reports):
        try:
            found = json.loads(path.read_text())["facts"]
            if machine(found) == machine(facts):
                dated.append((found["date"], path))
        except (KeyError, TypeError, ValueError):
            continue
    return [path for _, path in sorted(dated)]


def _ratio(
    own: dict[int, Any], base: dict[int, Any], measure: str
) -> tuple[float, float, float] | None:
    values = [
        measures[measure] / base[number][measure]
        for number, measures in own.items()
        if number in base
    ]
    if not values:
        return None
    found = spread(values)
    return (found.median, found.low, found.high)


def _model(model: dict[str, Any]) -> str:
    return f"{Model(**model).parameters / 1e9:.1f} B parameters"
