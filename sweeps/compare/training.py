"""The rows that a report of `sweeps.training` has to say beside a comparison: seconds a step and
peak memory, to DeepSpeed's own offload.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from nvme_offload.errors import UsageError

from ..report import ratios, spread
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
        frame = pd.DataFrame(
            {"variant": run["variant"], "round": run["number"], **run["measures"]}
            for run in document["runs"]
            if run["error"] is None and run["measures"]["step"] is not None
        )
        titles = {variant["name"]: variant["title"] for variant in plan["variants"]}
        by_name = {name: runs.set_index("round") for name, runs in frame.groupby("variant")}
        base = by_name.get(plan["baseline"])
        found = []
        for name_of, title in titles.items():
            if (runs := by_name.get(name_of)) is None:
                continue
            step, peak = (
                _ratio(runs[measure], base[measure])
                if base is not None and runs is not base
                else None
                for measure in ("step", "peak")
            )
            found.append(
                TrainingRow(
                    name,
                    document["facts"]["date"],
                    machine(document["facts"]),
                    f"{Model(**plan['model']).parameters / 1e9:.1f} B parameters",
                    titles[plan["baseline"]],
                    title,
                    float(runs.step.median()),
                    step,
                    float(runs.peak.median()),
                    peak,
                    len(runs),
                )
            )
        return found
    except (KeyError, TypeError, ValueError, AttributeError) as error:
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


def _ratio(own: pd.Series, base: pd.Series) -> tuple[float, float, float] | None:
    shared = ratios(own, base)
    low, median, high = spread(shared) if len(shared) else (0.0, 0.0, 0.0)
    return (median, low, high) if len(shared) else None
