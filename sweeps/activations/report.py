"""The report of saved activations, as Markdown. Pure: nothing here looks at the machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from nvme_offload.units import format_bytes

from ..report import columns, document, listed, ratios, shown
from .transformer import Shape
from .ways import Step, Way


@dataclasses.dataclass
class Results:
    """facts: machine and command, by name. refused: why a way, by name, did not run."""

    facts: dict[str, str]
    shape: Shape
    steps: list[Step]
    refused: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """All results as JSON."""
        steps = [step._asdict() for step in self.steps]
        return {"facts": self.facts, "shape": self.shape._asdict(), "steps": steps}


def render(results: Results, ways: Sequence[Way], notes: Sequence[str] = ()) -> str:
    """The report."""
    steps = pd.DataFrame(results.steps, columns=Step._fields)
    steps["seconds"] = steps.forward_seconds + steps.backward_seconds
    steps = steps[~steps.way.isin(list(results.refused))]
    of = {way.name: steps[steps.way == way.name] for way in ways}
    drives = [way for way in ways if of[way.name].saved_bytes.any()]
    return document(
        "# Saved activations",
        *_summary(results, ways, of),
        "## Time and memory",
        _times(ways, of, results.refused),
        *(["## Through the drive", _drive(drives, of)] if drives else []),
        "## Where, when and how",
        listed(results.facts),
        *notes,
        _how(steps),
        _equality(ways, of),
    )


def _summary(results: Results, ways: Sequence[Way], of: dict[str, pd.DataFrame]) -> Iterator[str]:
    shape = results.shape
    size = f"{shape.blocks} blocks of {shape.width} with {shape.heads} heads"
    yield f"{size}; batches of {shape.batch} with {shape.sequence} tokens each. A step is a forward and a backward pass."
    titles = {way.name: way.title for way in ways}
    yield "\n".join(
        f"- **{way.title}**, compared with {titles[way.base]}: {_judged(of[way.name], of[way.base])}"
        for way in ways
        if of[way.name].saved_bytes.any() and len(of.get(way.base, ()))
    )


def _judged(mine: pd.DataFrame, base: pd.DataFrame) -> str:
    times, memory = (_against(mine, base, figure) for figure in ("seconds", "peak_bytes"))
    said = f"{times} of the time at {memory} of the activation memory. "
    written, read = mine.written_bytes.median(), mine.read_bytes.median()
    if not written and not read:
        return said + "Everything fitted in host memory: nothing went to the drive."
    takes = written / base.forward_seconds.median()
    gives = read / base.backward_seconds.median()
    said += f"To keep up, a drive has to take {takes / 1e9:.3g} GB/s in the forward pass and give {gives / 1e9:.3g} GB/s in the backward pass"
    return said + "."


def _times(ways: Sequence[Way], of: dict[str, pd.DataFrame], refused: dict[str, str]) -> str:
    def cell(figure: str) -> Any:
        return lambda way: shown(of[way.name][figure])

    def to_none(figure: str) -> Any:
        return lambda way: _against(of[way.name], of["none"], figure) if "none" in of else ""

    def forward(way: Way) -> str:
        missing = refused.get(way.name, "not run")
        return shown(of[way.name].forward_seconds) if len(of[way.name]) else missing

    def peak(way: Way) -> str:
        steps = of[way.name]
        return format_bytes(int(steps.peak_bytes.median())) if len(steps) else ""

    cells = {
        "way": lambda way: way.title,
        "forward s": forward,
        "backward s": cell("backward_seconds"),
        "step s": cell("seconds"),
        "to none": to_none("seconds"),
        "peak activation memory": peak,
        "to none ": to_none("peak_bytes"),
    }
    return columns(ways, cells)


def _drive(ways: Sequence[Way], of: dict[str, pd.DataFrame]) -> str:
    def gigabytes(figure: str, over: str = "") -> Any:
        def cell(way: Way) -> str:
            steps = of[way.name]
            return f"{(steps[figure] / (steps[over] if over else 1)).median() / 1e9:.3g}"

        return cell

    def waited(figure: str) -> Any:
        return lambda way: f"{of[way.name][figure].median():.3f}"

    cells = {
        "way": lambda way: way.title,
        "saved GB": gigabytes("saved_bytes"),
        "written GB": gigabytes("written_bytes"),
        "read GB": gigabytes("read_bytes"),
        "written GB/s in forward": gigabytes("written_bytes", "forward_seconds"),
        "read GB/s in backward": gigabytes("read_bytes", "backward_seconds"),
        "forward waits s": waited("forward_wait_seconds"),
        "backward waits s": waited("backward_wait_seconds"),
        "host memory": lambda way: format_bytes(int(of[way.name].host_bytes.max())),
    }
    return columns(ways, cells)


def _how(steps: pd.DataFrame) -> str:
    return (
        f"{steps['round'].nunique()} rounds; each runs every way, and the next reverses the order. "
        "A figure is the median over all steps, without the first of each way in a "
        "process; a ratio is the median over the rounds of the ratio within one round, with its range. Activation memory is the peak above weights and "
        "gradients: of the GPU, or without one of the resident size of the process, including the host memory of the way. Waits are of the host, "
        "which on a GPU runs ahead of the computing, so a wait need not lengthen a step."
    )


def _equality(ways: Sequence[Way], of: dict[str, pd.DataFrame]) -> str:
    sums = {way.title: set(of[way.name].checksum) for way in ways if len(of[way.name])}
    if len(set().union(*sums.values())) == 1:
        return "The gradients of all steps are equal bit for bit."
    plain = set(of["none"].checksum) if "none" in of else set()
    if len(plain) > 1:
        return "Gradients of two steps without offload differ, since attention on a GPU is not deterministic: bits cannot be compared here."
    differing = ", ".join(title for title, found in sums.items() if found != plain)
    return f"**Gradients differ** from those without: {differing}."


def _against(mine: pd.DataFrame, base: pd.DataFrame, figure: str) -> str:
    each, others = (steps.groupby("round")[figure].median() for steps in (mine, base))
    return shown(ratios(each, others.clip(lower=1e-9)))
