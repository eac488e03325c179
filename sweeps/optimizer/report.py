"""What was measured, for people (Markdown) and for programs (JSON). Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sweeps.peers.report import Spread, spread, verdict
from sweeps.training.runs import Speeds, floor_seconds, mean_speeds

# steps: one makes the states, by one the order is learned, in one values change places
SETTLING = 3
TITLES = {
    "exact": 'NVMeOptimizer, "exact"',
    "split": 'NVMeOptimizer, "split"',
    "compact": 'NVMeOptimizer, "compact"',
    "deepspeed": "DeepSpeed ZeRO-3, optimizer on NVMe",
    "memory": "torch.optim.AdamW in memory",
}


class Drive(NamedTuple):
    """What the drive gave: to fio, and to the engine by itself, bytes a second of reading and
    writing at once through as much memory as a step has.
    """

    fio: Speeds
    engine: float

    @classmethod
    def mean(cls, before: Drive, after: Drive) -> Drive:
        """Of two measurements."""
        return cls(
            mean_speeds(before.fio, after.fio), statistics.fmean((before.engine, after.engine))
        )


@dataclasses.dataclass
class Run:
    """One process. *steps* past the settling ones, as it told of them; *drive* as it was around it;
    *error* why there is nothing.
    """

    variant: str
    round: int
    steps: Sequence[Mapping[str, Any]]
    done: Mapping[str, Any]
    drive: Drive | None
    error: str | None

    def median(self, key: str) -> float:
        """Of a step's figure."""
        return float(statistics.median(step[key] for step in self.steps))

    @property
    def floor(self) -> float | None:
        """Seconds that the drive needs for what a step moved; None where fio is not there or
        nothing was moved.
        """
        moved = self.median("read_bytes"), self.median("written_bytes")
        return (
            floor_seconds(*moved, self.drive.fio)
            if self.drive is not None and sum(moved) > 0
            else None
        )

    @property
    def engine_seconds(self) -> float | None:
        """Seconds that the engine by itself needs for the same."""
        moved = self.median("read_bytes") + self.median("written_bytes")
        return moved / self.drive.engine if self.drive is not None and moved > 0 else None


@dataclasses.dataclass
class Results:
    """facts: machine and command, by name."""

    facts: dict[str, str]
    host_memory: str
    ranks: int
    runs: list[Run]
    speeds: list[Drive]
    notes: list[str]

    def of(self, variant: str) -> list[Run]:
        """The runs of a variant that came to their end."""
        return [run for run in self.runs if run.variant == variant and run.error is None]

    def ratios(self, variant: str, to: str, figure: Callable[[Run], float]) -> list[float]:
        """Of a figure of *variant* to that of *to* in the same round."""
        others = {run.round: figure(run) for run in self.of(to)}
        return [figure(run) / others[run.round] for run in self.of(variant) if run.round in others]


def render(results: Results) -> str:
    """The report in Markdown."""
    parts = [
        "# Optimizer steps with states on a drive",
        *_targets(results),
        "## Where, when and how",
    ]
    parts += [
        "\n".join(f"- {name}: {value}" for name, value in results.facts.items()),
        *results.notes,
        *_how(results),
    ]
    parts += [
        "## A step",
        _times(results),
        *_equality(results),
        "## Memory",
        *_memory(results),
        *_failures(results),
    ]
    return "\n\n".join(parts) + "\n"


def as_json(results: Results) -> dict[str, Any]:
    """All that was measured."""
    runs = [
        {
            **{field.name: getattr(run, field.name) for field in dataclasses.fields(run)},
            "drive": run.drive and _drive(run.drive),
            "floor": _floor(run),
        }
        for run in results.runs
    ]
    return {
        "facts": results.facts,
        "host_memory": results.host_memory,
        "ranks": results.ranks,
        "notes": results.notes,
        "runs": runs,
        "speeds": [_drive(speeds) for speeds in results.speeds],
    }


def _drive(speeds: Drive) -> dict[str, float]:
    return {**speeds.fio._asdict(), "engine": speeds.engine}


def _floor(run: Run) -> float | None:
    return run.floor if run.error is None else None


def _targets(results: Results) -> Iterator[str]:
    lines = []
    shares = [run.floor / run.median("seconds") for run in results.of("exact") if run.floor]
    if shares:
        lines.append(
            (
                TITLES["exact"],
                "floor / time",
                ">= 0.9",
                _ratio(found := spread(shares)),
                verdict(found, least=0.9),
            )
        )
    for what, figure, most in (
        ("time of a step", _seconds, 0.3),
        ("peak host memory", _host_peak, 1.0),
    ):
        if ratios := results.ratios("compact", "deepspeed", figure):
            lines.append(
                (
                    TITLES["compact"],
                    f"{what} / DeepSpeed's",
                    f"<= {most:g}",
                    _ratio(found := spread(ratios)),
                    verdict(found, most=most),
                )
            )
    if lines:
        yield _table(("variant", "what", "target", "median [spread]", ""), lines)


def _how(results: Results) -> Iterator[str]:
    whole = [run for run in results.runs if run.error is None]
    if not whole:
        return
    elements, rounds = whole[0].done["elements"], len({run.round for run in whole})
    yield (
        f"{elements / 1e9:.3f}e9 bfloat16 parameters in the shapes of {'the model' if 'model' in results.facts else 'a GPT'}, with the same gradients at each "
        "step; fused AdamW. A run is a process; its first "
        f"{SETTLING} steps, which make the states and settle, count for memory alone, of the {len(whole[0].steps)} others the median counts. {rounds} rounds, "
        "each with every variant once, every second in reverse order; in brackets all of them. Bytes are those that the kernel counts. "
        f"host_memory: {results.host_memory}."
    )
    if results.of("deepspeed"):
        yield (
            "DeepSpeed has the same gradients from a backward pass, in which it writes what it offloads of them; a step is its engine's alone. Its host memory "
            "is what it takes: 14 buffers of a sub-group, a twelfth of the parameters each, with which it was fastest."
        )
    if results.ranks > 1:
        yield (
            f"FSDP2 shards the parameters over {results.ranks} ranks, a process each. host_memory, bytes, CPU time and memory of the host are of all of them "
            "together; times and memory of the GPU are of the rank with the most."
        )
    if results.speeds:
        figures = ", ".join(
            f"{name} {_ratio(spread([getattr(speeds.fio, name) / 1e9 for speeds in results.speeds]))} GB/s"
            for name in Speeds._fields
        )
        yield (
            f"fio, {len(results.speeds)} times between the runs: {figures}; mixed is as many bytes each way at once, the sum. The floor is the longest of read "
            "by read, written by write and both by mixed, at the mean of fio's figures before and after the run. The engine alone, which reads and writes at "
            f"once through as much memory as host_memory is, where fio has as much as blocks in flight: "
            f"{_ratio(spread([speeds.engine / 1e9 for speeds in results.speeds]))} GB/s."
        )


def _times(results: Results) -> str:
    lines = []
    for variant in _variants(results):
        runs = results.of(variant)
        floors = [run.floor for run in runs if run.floor is not None]
        shares = [run.floor / run.median("seconds") for run in runs if run.floor is not None]
        alone = [
            run.engine_seconds / run.median("seconds")
            for run in runs
            if run.engine_seconds is not None
        ]
        to_deepspeed, to_memory = (
            results.ratios(variant, other, _seconds) for other in ("deepspeed", "memory")
        )
        elements = runs[0].done["elements"]
        moved = [
            statistics.median(run.median(key) for run in runs)
            for key in ("read_bytes", "written_bytes")
        ]
        lines.append(
            (
                TITLES[variant],
                _ratio(spread([run.median("seconds") for run in runs])),
                _ratio(spread(to_deepspeed)) if to_deepspeed else "",
                _ratio(spread(to_memory)) if to_memory else "",
                " + ".join(f"{nbytes / 1e9:.2f}" for nbytes in moved),
                " + ".join(f"{nbytes / elements:.1f}" for nbytes in moved),
                f"{statistics.median(floors):.2f}" if floors else "",
                _ratio(spread(shares)) if shares else "",
                _ratio(spread(alone)) if alone else "",
                _ratio(spread([run.median("waited_seconds") for run in runs]))
                if variant != "deepspeed"
                else "",
                f"{min(statistics.median(run.median('busy_seconds') / run.median('seconds') for run in runs), 1):.2f}"
                if sum(moved)
                else "",
                f"{statistics.median(run.median('cpu_seconds') for run in runs):.1f}",
                f"{statistics.median(run.median('planning_seconds') for run in runs):.3f}"
                if variant != "deepspeed"
                else "",
            )
        )
    head = (
        "variant",
        "seconds",
        "ratio to DeepSpeed" if results.of("deepspeed") else "",
        "ratio to in memory",
        "GB read + written",
        "bytes a parameter",
        "floor, s",
        "floor / time",
    )
    return _table(
        (*head, "engine alone / time", "waited, s", "drive busy", "CPU s", "of planning"), lines
    )


def _seconds(run: Run) -> float:
    return run.median("seconds")


def _host_peak(run: Run) -> float:
    return float(run.done["host_peak_bytes"])


def _equality(results: Results) -> Iterator[str]:
    """Of the exact format's parameters after the last step with those of an optimizer in memory."""
    sums = [
        {run.done["checksum"] for run in results.of(variant)} for variant in ("exact", "memory")
    ]
    if all(sums):
        same = len(sums[0] | sums[1]) == 1
        yield f"The parameters that {TITLES['exact']} and {TITLES['memory']} ended with {'have the same sum, bit for bit' if same else '**differ**'}."


def _memory(results: Results) -> Iterator[str]:
    yield (
        "GB. Of the host what was resident at most, and how much more than before the optimizer was made; of the GPU what torch had allocated at most, and how "
        "much more than weights and gradients take."
    )
    lines = []
    for variant in _variants(results):
        runs = results.of(variant)
        cells: list[Callable[[Mapping[str, Any]], float]] = [
            lambda done: done["host_peak_bytes"],
            lambda done: done["host_peak_bytes"] - done["host_before_bytes"],
            lambda done: done["device_peak_bytes"],
            lambda done: done["device_peak_bytes"] - done["device_before_bytes"],
        ]
        lines.append(
            (
                TITLES[variant],
                *(
                    f"{statistics.median(cell(run.done) for run in runs) / 1e9:.2f}"
                    for cell in cells
                ),
            )
        )
    yield _table(
        ("variant", "host, peak", "more than before", "GPU, peak", "more than before"), lines
    )


def _failures(results: Results) -> Iterator[str]:
    lines = [
        (TITLES[run.variant], str(run.round + 1), run.error.replace("|", "\\|"))
        for run in results.runs
        if run.error is not None
    ]
    if lines:
        yield "## What failed"
        yield _table(("variant", "round", "what it said"), lines)


def _variants(results: Results) -> list[str]:
    return [variant for variant in TITLES if results.of(variant)]


def _ratio(found: Spread) -> str:
    return f"{found.median:.2f} [{found.low:.2f} to {found.high:.2f}]"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    kept = [index for index, name in enumerate(head) if name or any(line[index] for line in lines)]
    return "\n".join(
        f"| {' | '.join(line[index] for index in kept)} |"
        for line in (head, ["---"] * len(head), *lines)
    )
