"""The report for people (Markdown) and for programs (JSON). Pure: nothing here looks at the
machine.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nvme_offload.units import format_bytes
from sweeps.peers.report import Spread, spread, verdict

from .plan import MEASURES, SHARES, Plan, Target, Variant
from .runs import PHASES, Run, Speeds, floor_seconds

_PRELUDE = ("import", "init")


@dataclasses.dataclass
class Results:
    """facts: machine, versions and command, by name. runs and cold_runs: in the order in which they
    were made. speeds: all that fio measured.
    """

    facts: dict[str, str]
    plan: Plan
    runs: list[Run]
    cold_runs: list[Run]
    speeds: list[Speeds]
    notes: list[str]

    def of(self, variant: str) -> list[Run]:
        """The runs of a variant."""
        return [run for run in self.runs if run.variant == variant]


def ratios(
    first: Sequence[Run], second: Sequence[Run], measure: Callable[[Run], float | None]
) -> Spread | None:
    """The first variant's figure over the second's, of each round that has both; None where there
    is no such round.
    """
    others = {run.number: measure(run) for run in second}
    pairs = [(measure(run), others.get(run.number)) for run in first]
    found = [mine / other for mine, other in pairs if mine is not None and other]
    return spread(found) if found else None


def reached(results: Results, target: Target) -> Spread | None:
    """What there is to hold against a target."""
    settling = results.plan.settling_steps
    if target.against is None:
        shares = [
            share
            for run in results.of(target.variant)
            if (share := run.share(target.measure, settling)) is not None
        ]
        return spread(shares) if shares else None
    runs = results.cold_runs if target.measure == "cold" and results.cold_runs else results.runs
    first, second = (
        [run for run in runs if run.variant == name] for name in (target.variant, target.against)
    )
    return ratios(first, second, lambda run: run.measure(target.measure, settling))


def unequal(results: Results) -> list[str]:
    """The variants among those that should be equal whose losses or weights are not those of the
    first of them, or not those of another run.
    """
    names = [variant.name for variant in results.plan.variants if variant.equal]
    whole = [run for name in names for run in results.of(name) if run.error is None]
    weights = next((run.weights for run in whole if run.weights is not None), None)
    return list(
        dict.fromkeys(
            run.variant
            for run in whole
            if run.losses != whole[0].losses or run.weights not in (None, weights)
        )
    )


def render(results: Results) -> str:
    """The report in Markdown."""
    parts = [
        "# Training steps with offload",
        *_targets(results),
        *_equality(results),
        *_circumstances(results),
    ]
    parts += [
        *_times(results),
        *_drive(results),
        *_phases(results),
        *_memory(results),
        *_cold(results),
        *_failures(results),
    ]
    return "\n\n".join(parts) + "\n"


def as_json(results: Results) -> dict[str, Any]:
    """Everything that was measured, each run by itself."""
    plan = results.plan
    return {
        "facts": results.facts,
        "notes": results.notes,
        "plan": dataclasses.asdict(plan),
        "speeds": [speeds._asdict() for speeds in results.speeds],
        **{
            name: [_run_as_json(run, plan.settling_steps) for run in getattr(results, name)]
            for name in ("runs", "cold_runs")
        },
    }


def _run_as_json(run: Run, settling: int) -> dict[str, Any]:
    shown = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    shown["phases"] = [phase._asdict() for phase in run.phases]
    shown["at_peak"] = run.at_peak and run.at_peak._asdict()
    shown["drive"] = run.drive and run.drive._asdict()
    return {
        **shown,
        "measures": {name: run.measure(name, settling) for name in MEASURES},
        "shares": {name: run.share(name, settling) for name in SHARES},
    }


def _targets(results: Results) -> Iterator[str]:
    lines = []
    for target in results.plan.targets:
        found = reached(results, target)
        about = MEASURES.get(target.measure) or SHARES[target.measure]
        against = f"over {_title(results, target.against)}" if target.against else "beside fio"
        wanted = f"<= {target.most:g}" if target.most is not None else f">= {target.least:g}"
        judged = verdict(found, target.least, target.most) if found else "not measured"
        lines.append(
            (_title(results, target.variant), about, against, wanted, _ratio(found), judged)
        )
    if lines:
        yield "A ratio is of times or of bytes: less is better. A share of the floor should be near 1."
        yield _table(("variant", "what", "", "target", "median [spread]", ""), lines)


def _equality(results: Results) -> Iterator[str]:
    plan = results.plan
    expected = [
        variant
        for variant in plan.variants
        if variant.equal and any(run.error is None for run in results.of(variant.name))
    ]
    whole = [run for variant in expected for run in results.of(variant.name) if run.error is None]
    if not whole:
        return
    differing = unequal(results)
    asked = ", ".join(variant.title for variant in expected)
    hashed = sum(run.weights is not None for run in whole)
    if differing:
        yield f"**Losses or weights differ** between {asked}: in {', '.join(_title(results, name) for name in differing)}."
    else:
        yield (
            f"Losses of every step, {len(whole[0].losses)} in each of {len(whole)} runs, and all weights at the end, looked at in {hashed} of them, are equal "
            f"bit for bit: {asked}."
        )
    for variant in plan.variants:
        others = [
            run for run in results.of(variant.name) if run.error is None and not variant.equal
        ]
        if others:
            same = all(
                run.losses == whole[0].losses and run.weights == whole[0].weights for run in others
            )
            yield f"Nothing of the kind is asked of {variant.title}; its are {'the same' if same else 'others'}."


def _circumstances(results: Results) -> Iterator[str]:
    plan, facts = results.plan, [f"- {name}: {value}" for name, value in results.facts.items()]
    model = plan.model
    rounds = len({run.number for run in results.runs})
    size = (
        f"{model.parameters / 1e9:.2f}e9"
        if model.parameters >= 1e9
        else f"{model.parameters / 1e6:.0f}e6"
    )
    yield "## Where, when and how"
    yield "\n".join(facts)
    yield from results.notes
    yield (
        f"The model: {model.title}, {size} parameters. A run is a process of {plan.steps} steps, of which the first "
        f"{plan.settling_steps} count for the peak of memory alone. {rounds} rounds; each has every variant once, and the next has them in reverse order. "
        f"A figure is the median over the rounds of a run's median; a ratio is the median over the rounds of what one round gave, to "
        f"{_title(results, plan.baseline)} where nothing else is said; in brackets all rounds, or the middle 80 % of ten or more. A question mark says that "
        "the spread holds both answers. Bytes are those that the kernel counts for the process on its way to drives."
    )


def _times(results: Results) -> Iterator[str]:
    settling, plan = results.plan.settling_steps, results.plan
    lines = []
    for variant, runs in _whole(results):
        base = results.of(plan.baseline)
        seconds = [
            _number(_middle(runs, lambda run, name=name: run.measure(name, settling)))
            for name in (*PHASES, "update", "step")
        ]  # type: ignore[misc]
        cpu = _middle(
            runs,
            lambda run: sum(
                run.median(name, settling, lambda phase: phase.cpu_seconds) or 0 for name in PHASES
            ),
        )
        compared = [
            _ratio(ratios(runs, base, lambda run, name=name: run.measure(name, settling)))
            for name in ("update", "step")
        ]  # type: ignore[misc]
        lines.append((variant.title, *seconds, *compared, _number(cpu)))
    head = (
        *PHASES,
        "backward + optimizer",
        "step",
        "ratio of backward + optimizer",
        "ratio of step",
        "CPU s a step",
    )
    yield "## Seconds a step"
    yield _table(("variant", *head), lines)


def _drive(results: Results) -> Iterator[str]:
    settling, aio = results.plan.settling_steps, results.plan.aio
    yield "## Bytes moved, beside what the drive gives"
    if results.speeds:
        figures = [
            f"{name} {_ratio(spread([getattr(speeds, name) / 1e9 for speeds in results.speeds]))} GB/s"
            for name in Speeds._fields  # read, write, mixed
        ]
        yield (
            f"fio, {len(results.speeds)} times between the runs, with block {format_bytes(int(aio['block_size']))}, depth {aio['queue_depth']}, threads "
            f"{aio['intra_op_parallelism']}: {', '.join(figures)}; mixed is as many bytes each way at once, the sum. The floor is the least time in which a "
            "phase's bytes can be moved: the longest of read by read, written by write and both by mixed, at the mean of fio's figures before and after."
        )
    lines = []
    for variant, runs in _whole(results):
        if not variant.drives:
            continue
        moved = []
        for name in PHASES:
            read, written = (
                _middle(runs, lambda run, name=name, way=way: run.moved((name,), settling)[way])
                or 0
                for way in (0, 1)
            )  # type: ignore[misc]
            moved.append(f"{read / 1e9:.2f} + {written / 1e9:.2f}")
        floor = _middle(
            runs,
            lambda run: (
                floor_seconds(*run.moved(("optimizer",), settling), run.drive)
                if run.drive
                else None
            ),
        )
        shares = []
        for name in SHARES:
            found = [share for run in runs if (share := run.share(name, settling)) is not None]
            shares.append(_ratio(spread(found) if found else None))
        lines.append((variant.title, *moved, _number(floor), *shares))
    head = (
        "variant",
        *(f"{name}: GB read + written" for name in PHASES),
        "optimizer: floor, s",
        *SHARES.values(),
    )
    yield _table(head, lines)


def _phases(results: Results) -> Iterator[str]:
    """What the drive did in each phase, and what planning it took."""
    settling = results.plan.settling_steps
    lines = []
    for variant, runs in _whole(results):
        for name in PHASES if variant.drives else ():
            read, written = (
                _middle(runs, lambda run, name=name, way=way: run.moved((name,), settling)[way])
                or 0
                for way in (0, 1)
            )  # type: ignore[misc]
            seconds, busy, planning, uses = (
                _middle(
                    runs,
                    lambda run, name=name, of=of: run.median(
                        name, settling, lambda phase: getattr(phase, of)
                    ),
                )
                or 0  # type: ignore[misc]
                for of in ("seconds", "busy_seconds", "planning_seconds", "uses")
            )
            shares = [
                floor_seconds(*run.moved((name,), settling), run.drive) / took
                for run in runs
                if read + written and run.drive and (took := run.median(name, settling))
            ]
            a_use = f"{planning / uses * 1e6:.0f}" if uses else ""
            speed = f"{(read + written) / seconds / 1e9:.2f}" if seconds else ""
            share = f"{min(busy / seconds, 1):.2f}" if seconds else ""
            lines.append(
                (
                    variant.title,
                    name,
                    _number(seconds),
                    share,
                    speed,
                    _ratio(spread(shares) if shares else None),
                    f"{planning:.3f}",
                    a_use,
                )
            )
    yield "In each phase: the share of it in which the drive had anything in flight, whoever asked, and the CPU seconds of the swapper's calls."
    yield _table(
        (
            "variant",
            "phase",
            "s",
            "drive busy",
            "GB/s",
            "floor / time",
            "planning CPU s",
            "us a use",
        ),
        lines,
    )


def _memory(results: Results) -> Iterator[str]:
    base, settling = results.of(results.plan.baseline), results.plan.settling_steps
    lines, held, kinds = [], [], []
    for variant, runs in _whole(results):
        phases = [
            _gigabytes(_middle(runs, lambda run, names=names: run.peak_bytes(*names)))
            for names in (_PRELUDE, *((name,) for name in PHASES))
        ]  # type: ignore[misc]
        after = _middle(
            runs,
            lambda run: next(phase.after_bytes for phase in run.phases if phase.name == "init"),
        )
        last = _middle(runs, lambda run: run.phases[-1].after_bytes)
        peak = _middle(runs, lambda run: run.peak_bytes())
        ratio = _ratio(ratios(runs, base, lambda run: run.measure("peak", settling)))
        settled = _gigabytes(_middle(runs, lambda run: run.measure("settled_peak", settling)))
        settled_ratio = _ratio(
            ratios(runs, base, lambda run: run.measure("settled_peak", settling))
        )
        lines.append(
            (
                variant.title,
                _gigabytes(peak),
                ratio,
                settled,
                settled_ratio,
                *phases,
                _gigabytes(after),
                _gigabytes(last),
            )
        )
        if peaks := [run.at_peak for run in runs if run.at_peak is not None]:
            values = [
                statistics.median(getattr(peak, name) for peak in peaks)
                for name in ("resident", "anonymous", "file", "shared", "locked", "pinned")
            ]
            held.append((variant.title, *map(_gigabytes, values)))
        kinds += [
            (
                variant.title,
                moment,
                ", ".join(f"{kind} {size / 1e9:.2f}" for kind, size in found.items() if size > 5e7),
            )
            for moment, found in runs[0].kinds.items()
        ]
    yield "## Host memory"
    yield (
        "Resident bytes of the process, GB. Peaks are the kernel's own, of each phase by itself; init has also what importing took."
    )
    head = (
        "variant",
        "peak",
        "ratio",
        "peak past the first steps",
        "ratio",
        "init",
        *PHASES,
        "left after init",
        "left after the last step",
    )
    yield _table(head, lines)
    yield "At the moment when most was resident, of those looked at every 50 ms; locked and pinned are among the others:"
    yield _table(("variant", "resident", "anonymous", "file", "shared", "locked", "pinned"), held)
    yield "What it was when nothing went on, GB, of the first round:"
    yield _table(("variant", "after", "resident"), kinds)


def _cold(results: Results) -> Iterator[str]:
    settling = results.plan.settling_steps
    lines = []
    for variant in results.plan.variants:
        cells = []
        for runs in (results.runs, results.cold_runs):
            mine, base = (
                [run for run in runs if run.variant == name]
                for name in (variant.name, results.plan.baseline)
            )
            seconds = _middle(mine, lambda run: run.measure("cold", settling))
            cells += [
                _number(seconds),
                _ratio(ratios(mine, base, lambda run: run.measure("cold", settling))),
            ]
        lines.append((variant.title, *cells))
    yield "## Cold start"
    yield "Seconds from the start of a process to the end of its first step: with all compiled by an earlier run, and with an empty TORCH_EXTENSIONS_DIR."
    yield _table(("variant", "compiled before", "ratio", "nothing compiled", "ratio"), lines)


def _failures(results: Results) -> Iterator[str]:
    lines = []
    for run in [*results.runs, *results.cold_runs]:
        if run.error is not None:
            done = f"after {len(run.step_ends)} step{'' if len(run.step_ends) == 1 else 's'}"
            peak = _gigabytes(run.peak_bytes())
            lines.append((_title(results, run.variant), done, peak, run.error.replace("|", "\\|")))
    if lines:
        yield "## What failed"
        yield _table(
            ("variant", "when", "peak memory, GB", "what it said"), list(dict.fromkeys(lines))
        )


def _whole(results: Results) -> Iterator[tuple[Variant, list[Run]]]:
    """The variants with those of their runs that came to the end."""
    for variant in results.plan.variants:
        runs = [run for run in results.of(variant.name) if run.error is None]
        if runs:
            yield variant, runs


def _middle(runs: Sequence[Run], measure: Callable[[Run], float | None]) -> float | None:
    found = [value for run in runs if (value := measure(run)) is not None]
    return statistics.median(found) if found else None


def _title(results: Results, name: str | None) -> str:
    return results.plan.named(name).title if name is not None else ""


def _ratio(found: Spread | None) -> str:
    return "" if found is None else f"{found.median:.2f} [{found.low:.2f} to {found.high:.2f}]"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _gigabytes(value: float | None) -> str:
    return "" if value is None else f"{value / 1e9:.2f}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))
