"""The report of saved activations, as Markdown. Pure: nothing here looks at the machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from nvme_offload.units import format_bytes
from sweeps.peers.report import Spread, spread, table

from .transformer import Shape
from .ways import Step, Way

MOST_SLOWER = 1.10


def render(facts: dict[str, str], shape: Shape, count: int, ways: Sequence[Way], steps: Sequence[Step], refused: dict[str, str]) -> str:
    """*refused*: why a way, by name, has no steps. The first *count* blocks went the way, the others kept what they saved."""
    titles = {way.name: way.title for way in ways}
    of = {name: [step for step in steps if step.way == name] for name in titles}
    parts = ["# Saved activations", *_summary(shape, count, ways, of), "## Time and memory", _times(titles, of, refused)]
    if any(step.saved_bytes for step in steps):
        parts += ["## Through the drive", _drive(titles, of)]
    parts += ["## Where, when and how", "\n".join(f"- {name}: {value}" for name, value in facts.items())]
    return "\n\n".join([*parts, _how(of), _equality(titles, of)]) + "\n"


def _summary(shape: Shape, count: int, ways: Sequence[Way], of: dict[str, list[Step]]) -> Iterator[str]:
    some = f"; the first {count} go the way of the table, and the others keep what they save" if count < shape.blocks else ""
    size = f"{shape.blocks} blocks of {shape.width} with {shape.heads} heads"
    yield f"{size}; batches of {shape.batch} with {shape.sequence} tokens each{some}. A step is a forward and a backward pass."
    if plain := of.get("none"):
        rate = shape.forward_flops / _median(plain, lambda step: step.forward_seconds) / 1e12
        yield f"Without offload a forward pass computes {rate:.3g} Tflop/s."
    lines = [line for way in ways if (line := _judged(way, of[way.name], of.get(way.base, []), ways))]
    if lines:
        yield "\n".join(lines)


def _judged(way: Way, mine: list[Step], base: list[Step], ways: Sequence[Way]) -> str:
    if not mine or not base or not mine[0].saved_bytes:
        return ""
    beside = next(other.title for other in ways if other.name == way.base)
    times, memory = _against(mine, base, lambda step: step.seconds), _against(mine, base, lambda step: step.peak_bytes)
    said = f"- **{way.title}**, beside {beside}: {_ratio(times)} of the time at {_ratio(memory)} of the activation memory. "
    written, read = _median(mine, lambda step: step.written_bytes), _median(mine, lambda step: step.read_bytes)
    if not written and not read:
        return said + "Everything fitted in host memory: nothing went to the drive."
    forward, backward = _median(base, lambda step: step.forward_seconds), _median(base, lambda step: step.backward_seconds)
    fast = "The drive is fast enough for this" if times.median <= MOST_SLOWER else "The drive is not fast enough for this"
    return said + (
        f"{fast}: to cost nothing, it would have to take {written / forward / 1e9:.3g} GB/s in the forward pass and give {read / backward / 1e9:.3g} GB/s "
        f"in the backward pass."
    )


def _times(titles: dict[str, str], of: dict[str, list[Step]], refused: dict[str, str]) -> str:
    lines = []
    for name, title in titles.items():
        mine, base = of[name], of.get("none", [])
        if not mine:
            lines.append((title, refused.get(name, "not run"), "", "", "", "", ""))
            continue
        times = [f"{_median(mine, part):.3f}" for part in (lambda step: step.forward_seconds, lambda step: step.backward_seconds, lambda step: step.seconds)]
        peak = format_bytes(int(_median(mine, lambda step: step.peak_bytes)))
        ratios = [_ratio(_against(mine, base, what)) if base else "" for what in (lambda step: step.seconds, lambda step: step.peak_bytes)]
        lines.append((title, *times, ratios[0], peak, ratios[1]))
    return table(("way", "forward s", "backward s", "step s", "to none", "peak activation memory", "to none"), lines)


def _drive(titles: dict[str, str], of: dict[str, list[Step]]) -> str:
    lines = []
    for name, title in titles.items():
        mine = of[name]
        if mine and mine[0].saved_bytes:
            sizes = [f"{_median(mine, what) / 1e9:.3g}" for what in (lambda s: s.saved_bytes, lambda s: s.written_bytes, lambda s: s.read_bytes)]
            rates = [
                f"{_median(mine, lambda s: s.written_bytes / s.forward_seconds) / 1e9:.3g}",
                f"{_median(mine, lambda s: s.read_bytes / s.backward_seconds) / 1e9:.3g}",
            ]
            waits = [f"{_median(mine, what):.3f}" for what in (lambda s: s.forward_wait_seconds, lambda s: s.backward_wait_seconds)]
            lines.append((title, *sizes, *rates, *waits, format_bytes(max(step.host_bytes for step in mine))))
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
        f"{rounds} rounds; each goes every way, and the next begins with another. A figure is the median over all steps but the first of each way; a ratio the "
        "median over the rounds of what one round gave, with all of them in brackets. Activation memory is the peak over what there is before a step, weights "
        "and gradients: of the GPU, or where there is none of the process, whose host memory for offload then counts as well. What waits waits on the host, "
        "which on a GPU runs ahead of the computing: a wait there need not make a step longer."
    )


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


def _against(mine: Sequence[Step], base: Sequence[Step], what: Callable[[Step], float]) -> Spread:
    rounds = sorted({step.round for step in mine} & {step.round for step in base})
    return spread(
        [
            _median([step for step in mine if step.round == number], what) / max(_median([step for step in base if step.round == number], what), 1e-9)
            for number in rounds
        ]
    )


def _ratio(found: Spread) -> str:
    return f"{found.median:.2f} [{found.low:.2f} to {found.high:.2f}]"
