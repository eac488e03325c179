"""The report in Markdown, and the results as JSON. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from .. import floor
from ..report import columns, document, escaped, listed, ratios, shown, spread, table, verdict

# steps: to create the states, to learn the order, and to rearrange values
SETTLING = 3
TITLES = {
    "exact": 'NVMeOptimizer, "exact"',
    "split": 'NVMeOptimizer, "split"',
    "compact": 'NVMeOptimizer, "compact"',
    "deepspeed": "DeepSpeed ZeRO-3, optimizer on NVMe",
    "memory": "torch.optim.AdamW in memory",
}


class Drive(NamedTuple):
    """The drive's speeds in bytes per second, measured by fio; and *engine*, the engine's alone,
    reading and writing concurrently through as much memory as a step has.
    """

    read: float
    write: float
    mixed: float
    engine: float


@dataclasses.dataclass
class Run:
    """One process: its *steps* past the settling ones, the *drive* around it, and the *error*, or
    None.
    """

    variant: str
    round: int
    steps: Sequence[Mapping[str, Any]]
    done: Mapping[str, Any]
    drive: Drive | None
    error: str | None

    def figures(self) -> dict[str, float]:
        """Medians over the steps, and the figures of the end; of a run without error.

        floor, engine_seconds: the time that the drive, or the engine alone, needs for the bytes of
        a step; NaN without fio or without bytes.
        """
        found = pd.DataFrame(self.steps).median(numeric_only=True).to_dict() | dict(self.done)
        moved = found["read_bytes"], found["written_bytes"]
        known = self.drive is not None and sum(moved) > 0
        return {
            **found,
            "floor": floor.floor_seconds(*moved, self.drive) if known else math.nan,
            "engine_seconds": sum(moved) / self.drive.engine if known else math.nan,
        }


@dataclasses.dataclass
class Results:
    """facts: machine and command, by name."""

    facts: dict[str, str]
    host_memory: str
    ranks: int
    runs: list[Run]
    speeds: list[Drive]
    notes: list[str]

    def figures(self) -> dict[str, pd.DataFrame]:
        """By variant, in the order of `TITLES`: the figures of the runs that came to their end, by
        round.
        """
        whole = [run for run in self.runs if run.error is None]
        found = {
            name: {run.round: run.figures() for run in whole if run.variant == name}
            for name in TITLES
        }
        return {
            name: pd.DataFrame.from_dict(of, orient="index") for name, of in found.items() if of
        }


def render(results: Results) -> str:
    """The report in Markdown."""
    found = results.figures()
    return document(
        "# Optimizer steps with states on a drive",
        *_targets(found),
        "## Where, when and how",
        listed(results.facts),
        *results.notes,
        *_how(results, found),
        "## A step",
        _times(found),
        *_equality(found),
        "## Memory",
        *_memory(found),
        *_failures(results),
    )


def as_json(results: Results) -> dict[str, Any]:
    """All results as JSON."""
    return {
        **{key: getattr(results, key) for key in ("facts", "host_memory", "ranks", "notes")},
        "runs": [
            {**vars(run), "drive": run.drive and run.drive._asdict(), "floor": _floor(run)}
            for run in results.runs
        ],
        "speeds": [speeds._asdict() for speeds in results.speeds],
    }


def _floor(run: Run) -> float | None:
    found = run.figures()["floor"] if run.error is None else math.nan
    return None if math.isnan(found) else found


def _targets(found: dict[str, pd.DataFrame]) -> Iterator[str]:
    asked: list[tuple[str, str, float | None, float | None, Any]] = []
    if "exact" in found:
        asked.append(("exact", "floor / time", 0.9, None, _share(found["exact"], "floor")))
    for figure, what, most in (
        ("seconds", "time of a step", 0.3),
        ("host_peak_bytes", "peak host memory", 1.0),
    ):
        compared = _against(found, "compact", "deepspeed", figure)
        asked.append(("compact", f"{what} / DeepSpeed's", None, most, compared))
    lines = [
        (
            *(TITLES[name], what, f">= {least:g}" if least else f"<= {most:g}"),
            *(shown(values), verdict(spread(values), least, most)),
        )
        for name, what, least, most, values in asked
        if len(values)
    ]
    if lines:
        yield table(("variant", "what", "target", "median [spread]", ""), lines)


def _how(results: Results, found: dict[str, pd.DataFrame]) -> Iterator[str]:
    whole = [run for run in results.runs if run.error is None]
    if not whole:
        return
    elements, rounds = whole[0].done["elements"], len({run.round for run in whole})
    yield (
        f"{elements / 1e9:.3f}e9 bfloat16 parameters in the shapes of {'the model' if 'model' in results.facts else 'a GPT'}, with the same gradients at each "
        "step; fused AdamW. A run is a process; its first "
        f"{SETTLING} steps, which make the states and settle, count for memory alone, of the {len(whole[0].steps)} others the median counts. {rounds} rounds, "
        "each with every variant once, every second in reverse order; with the range in brackets. Bytes are the kernel's counts. "
        f"host_memory: {results.host_memory}."
    )
    if "deepspeed" in found:
        yield (
            "DeepSpeed gets the same gradients from a backward pass, which also writes offloaded gradients; a step is its engine's step alone. Its host memory "
            "has no limit: 14 buffers of a sub-group, a twelfth of the parameters each, with which it was fastest."
        )
    if results.ranks > 1:
        yield (
            f"FSDP2 shards the parameters over {results.ranks} ranks, a process each. host_memory, bytes, CPU time and host memory are sums over the ranks; "
            "times and memory of the GPU are of the rank with the most."
        )
    if results.speeds:
        yield (
            f"fio, {len(results.speeds)} times between the runs: {floor.described(results.speeds)}. The floor is the longest of read "
            "by read, written by write and both by mixed, at the mean of fio's figures before and after the run. The engine alone, which reads and writes at "
            "once through as much memory as host_memory is, where fio has as much as blocks in flight: "
            f"{shown(speeds.engine / 1e9 for speeds in results.speeds)} GB/s."
        )


def _times(found: dict[str, pd.DataFrame]) -> str:
    def moved(of: pd.DataFrame, digits: int, unit: float) -> str:
        each = of[["read_bytes", "written_bytes"]].median() / unit
        return " + ".join(f"{nbytes:.{digits}f}" for nbytes in each)

    def busy(of: pd.DataFrame) -> str:
        share = (of.busy_seconds / of.seconds).median()
        return f"{min(share, 1):.2f}" if of[["read_bytes", "written_bytes"]].any(axis=None) else ""

    def of(cell: Any, but: str = "") -> Any:
        return lambda name: cell(found[name]) if name != but else ""

    def to(other: str) -> Any:
        return lambda name: shown(_against(found, name, other, "seconds"))

    cells = {
        "variant": TITLES.get,
        "seconds": of(lambda one: shown(one.seconds)),
        **({"ratio to DeepSpeed": to("deepspeed")} if "deepspeed" in found else {}),
        "ratio to in memory": to("memory"),
        "GB read + written": of(lambda one: moved(one, 2, 1e9)),
        "bytes a parameter": of(lambda one: moved(one, 1, one.elements.iloc[0])),
        "floor, s": of(lambda one: _number(one.floor.median(), 2)),
        "floor / time": of(lambda one: shown(_share(one, "floor"))),
        "engine alone / time": of(lambda one: shown(_share(one, "engine_seconds"))),
        "waited, s": of(lambda one: shown(one.waited_seconds), but="deepspeed"),
        "drive busy": of(busy),
        "CPU s": of(lambda one: _number(one.cpu_seconds.median(), 1)),
        "of planning": of(lambda one: _number(one.planning_seconds.median(), 3), but="deepspeed"),
    }
    return columns(found, cells)


def _equality(found: dict[str, pd.DataFrame]) -> Iterator[str]:
    """Whether the exact format's parameters after the last step equal the parameters of the
    optimizer in memory.
    """
    if {"exact", "memory"} <= set(found):
        same = pd.concat([found["exact"], found["memory"]]).checksum.nunique() == 1
        yield f"The parameters that {TITLES['exact']} and {TITLES['memory']} ended with {'have the same sum, bit for bit' if same else '**differ**'}."


def _memory(found: dict[str, pd.DataFrame]) -> Iterator[str]:
    def of(place: str, before: int = 0) -> Any:
        return lambda name: _number(
            (
                found[name][f"{place}_peak_bytes"] - before * found[name][f"{place}_before_bytes"]
            ).median()
            / 1e9,
            2,
        )

    yield (
        "GB. Host: the peak resident size, and its growth since before the optimizer was made; GPU: torch's peak allocation, and its excess over weights "
        "and gradients."
    )
    cells = {
        "variant": TITLES.get,
        "host, peak": of("host"),
        "more than before": of("host", 1),
        "GPU, peak": of("device"),
        "more than before ": of("device", 1),
    }
    yield columns(found, cells)


def _failures(results: Results) -> Iterator[str]:
    lines = [
        (TITLES[run.variant], run.round + 1, escaped(run.error))
        for run in results.runs
        if run.error is not None
    ]
    if lines:
        yield "## Failures"
        yield table(("variant", "round", "error"), lines)


def _share(of: pd.DataFrame, needed: str) -> pd.Series:
    return (of[needed] / of.seconds).dropna()


def _against(found: dict[str, pd.DataFrame], name: str, to: str, figure: str) -> pd.Series:
    if name not in found or to not in found:
        return pd.Series(dtype=float)
    return ratios(found[name][figure], found[to][figure])


def _number(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"
