"""The report of saved activations, as Markdown. Pure: nothing here looks at the machine."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nvme_offload.errors import UsageError
from nvme_offload.units import format_bytes
from sweeps.peers.report import Spread, spread, table
from sweeps.training.runs import Speeds

from .transformer import Shape
from .ways import Step, Way


@dataclasses.dataclass
class Results:
    """facts: machine and command, by name. speeds: all that fio measured. refused: why a way, by
    name, has no steps.
    """

    facts: dict[str, str]
    shape: Shape
    steps: list[Step]
    speeds: list[Speeds]
    refused: dict[str, str]

    @property
    def rounds(self) -> int:
        """How many were held."""
        return max((step.round + 1 for step in self.steps), default=0)

    def as_json(self) -> dict[str, Any]:
        """All that was measured."""
        rows = {
            "steps": [step._asdict() for step in self.steps],
            "speeds": [speeds._asdict() for speeds in self.speeds],
        }
        return {"facts": self.facts, "shape": self.shape._asdict(), **rows}

    def add(self, document: dict[str, Any]) -> None:
        """Take the rounds of `as_json`. Raises: UsageError when they are of another shape
        or kind.
        """
        if (
            document["shape"] != self.shape._asdict()
            or document["facts"]["computing"] != self.facts["computing"]
        ):
            raise UsageError(
                f"the rounds there are of {document['shape']}, {document['facts']['computing']}"
            )
        self.steps += [Step(**step) for step in document["steps"]]
        self.speeds += [Speeds(**speeds) for speeds in document["speeds"]]

    def speed(self, name: str) -> float:
        """The median of what fio measured, in bytes a second; 0 where it was not run."""
        return (
            statistics.median(getattr(speeds, name) for speeds in self.speeds)
            if self.speeds
            else 0.0
        )


def render(results: Results, ways: Sequence[Way]) -> str:
    """The report."""
    titles = {way.name: way.title for way in ways}
    of = {
        name: [step for step in results.steps if step.way == name and name not in results.refused]
        for name in titles
    }
    parts = [
        "# Saved activations",
        *_summary(results, ways, of),
        "## Time and memory",
        _times(titles, of, results.refused),
    ]
    if any(step.saved_bytes for step in results.steps):
        parts += ["## Through the drive", _drive(titles, of)]
    parts += [
        "## Where, when and how",
        "\n".join(f"- {name}: {value}" for name, value in results.facts.items()),
    ]
    return "\n\n".join([*parts, _how(of), *_fio(results), _equality(titles, of)]) + "\n"


def _summary(results: Results, ways: Sequence[Way], of: dict[str, list[Step]]) -> Iterator[str]:
    shape = results.shape
    size = f"{shape.blocks} blocks of {shape.width} with {shape.heads} heads"
    yield f"{size}; batches of {shape.batch} with {shape.sequence} tokens each. A step is a forward and a backward pass."
    if plain := of.get("none"):
        rate = shape.forward_flops / _median(plain, lambda step: step.forward_seconds) / 1e12
        yield f"Without offload a forward pass computes {rate:.3g} Tflop/s."
    lines = [
        line
        for way in ways
        if (line := _judged(results, way, of[way.name], of.get(way.base, []), ways))
    ]
    if lines:
        yield "\n".join(lines)


def _judged(
    results: Results, way: Way, mine: list[Step], base: list[Step], ways: Sequence[Way]
) -> str:
    if not mine or not base or not mine[0].saved_bytes:
        return ""
    beside = next(other.title for other in ways if other.name == way.base)
    times, memory = (
        _against(mine, base, lambda step: step.seconds),
        _against(mine, base, lambda step: step.peak_bytes),
    )
    said = f"- **{way.title}**, beside {beside}: {_ratio(times)} of the time at {_ratio(memory)} of the activation memory. "
    written, read = (
        _median(mine, lambda step: step.written_bytes),
        _median(mine, lambda step: step.read_bytes),
    )
    if not written and not read:
        return said + "Everything fitted in host memory: nothing went to the drive."
    takes, gives = (
        written / _median(base, lambda step: step.forward_seconds),
        read / _median(base, lambda step: step.backward_seconds),
    )
    said += f"To keep up, a drive has to take {takes / 1e9:.3g} GB/s in the forward pass and give {gives / 1e9:.3g} GB/s in the backward pass"
    if not results.speeds:
        return said + "."
    fast = takes <= results.speed("write") and gives <= results.speed("read")
    return said + (
        f"; this one takes {results.speed('write') / 1e9:.3g} and gives {results.speed('read') / 1e9:.3g} GB/s, "
        f"{results.speed('mixed') / 1e9:.3g} of both at once, and is {'fast enough' if fast else 'too slow'}."
    )


def _times(titles: dict[str, str], of: dict[str, list[Step]], refused: dict[str, str]) -> str:
    lines = []
    for name, title in titles.items():
        mine, base = of[name], of.get("none", [])
        if not mine:
            lines.append((title, refused.get(name, "not run"), "", "", "", "", ""))
            continue
        times = [
            _ratio(_spread(mine, part))
            for part in (
                lambda step: step.forward_seconds,
                lambda step: step.backward_seconds,
                lambda step: step.seconds,
            )
        ]
        peak = format_bytes(int(_median(mine, lambda step: step.peak_bytes)))
        ratios = [
            _ratio(_against(mine, base, what)) if base else ""
            for what in (lambda step: step.seconds, lambda step: step.peak_bytes)
        ]
        lines.append((title, *times, ratios[0], peak, ratios[1]))
    return table(
        (
            "way",
            "forward s",
            "backward s",
            "step s",
            "to none",
            "peak activation memory",
            "to none",
        ),
        lines,
    )


def _drive(titles: dict[str, str], of: dict[str, list[Step]]) -> str:
    lines = []
    for name, title in titles.items():
        mine = of[name]
        if mine and mine[0].saved_bytes:
            sizes = [
                f"{_median(mine, what) / 1e9:.3g}"
                for what in (
                    lambda s: s.saved_bytes,
                    lambda s: s.written_bytes,
                    lambda s: s.read_bytes,
                )
            ]
            rates = [
                f"{_median(mine, lambda s: s.written_bytes / s.forward_seconds) / 1e9:.3g}",
                f"{_median(mine, lambda s: s.read_bytes / s.backward_seconds) / 1e9:.3g}",
            ]
            waits = [
                f"{_median(mine, what):.3f}"
                for what in (lambda s: s.forward_wait_seconds, lambda s: s.backward_wait_seconds)
            ]
            lines.append(
                (title, *sizes, *rates, *waits, format_bytes(max(step.host_bytes for step in mine)))
            )
    head = (
        "way",
        "saved GB",
        "written GB",
        "read GB",
        "written GB/s in forward",
        "read GB/s in backward",
        "forward waits s",
        "backward waits s",
        "host memory",
    )
    return table(head, lines)


def _how(of: dict[str, list[Step]]) -> str:
    rounds = len({step.round for steps in of.values() for step in steps})
    return (
        f"{rounds} rounds; each goes every way, and the next begins with another. A figure is the median over all steps, without the first of each way in a "
        "process; a ratio the median over the rounds of what one round gave; with all of them in brackets. Activation memory is the peak over weights and "
        "gradients: of the GPU, or where there is none of what the process has resident, with all of the way's own host memory. What waits waits on the host, "
        "which on a GPU runs ahead of the computing: a wait there need not make a step longer."
    )


def _fio(results: Results) -> Iterator[str]:
    if results.speeds:
        figures = ", ".join(
            f"{name} {_ratio(spread([getattr(speeds, name) / 1e9 for speeds in results.speeds]))} GB/s"
            for name in Speeds._fields
        )
        yield f"fio, before each round: {figures}; mixed is as many bytes each way at once, the sum."


def _equality(titles: dict[str, str], of: dict[str, list[Step]]) -> str:
    sums = {name: {step.checksum for step in steps} for name, steps in of.items() if steps}
    if len(set().union(*sums.values())) == 1:
        return "The gradients of all steps are equal bit for bit."
    if len(sums.get("none", ())) > 1:
        return "The gradients of two steps without offload differ already, as attention on a GPU may, so that bits tell nothing here."
    differing = [titles[name] for name, found in sums.items() if found != sums.get("none")]
    return f"**Gradients differ** from those without: {', '.join(differing)}."


def _median(steps: Sequence[Step], what: Callable[[Step], float]) -> float:
    return statistics.median(what(step) for step in steps)


def _spread(steps: Sequence[Step], what: Callable[[Step], float]) -> Spread:
    return spread([what(step) for step in steps])


def _against(mine: Sequence[Step], base: Sequence[Step], what: Callable[[Step], float]) -> Spread:
    rounds = sorted({step.round for step in mine} & {step.round for step in base})
    return spread(
        [
            _median([step for step in mine if step.round == number], what)
            / max(_median([step for step in base if step.round == number], what), 1e-9)
            for number in rounds
        ]
    )


def _ratio(found: Spread) -> str:
    return f"{found.median:.2f} [{found.low:.2f} to {found.high:.2f}]"
