"""The output of `nvme-offload plan`: the answer, code to paste, formulas, the table."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from nvme_offload.hardware import gpu_models
from nvme_offload.planning import paste
from nvme_offload.planning.advice import Change, Question
from nvme_offload.planning.paste import weights
from nvme_offload.planning.plan import (
    AS_FAST,
    DESCRIBED_PATH,
    UNLIMITED_BYTES,
    Drive,
    Machine,
    Plan,
)

SCHEMA = 2  # of the JSON; docs/planning.md describes it
_HEAD = ("", "way to train", "GPU GB", "host GB", "drive GB", "s/step", "tokens/s")
_TITLES = 1  # the column of titles, which is to the left
_WORN_AFTER = 5 * 365  # days that a drive should last


def text(
    question: Question,
    found: Sequence[Plan],
    chosen: Plan | None,
    change: Change | None,
    width: int = 100,
) -> str:
    """The output, in lines of at most *width* columns unless a word is longer."""
    blocks = [_lines([_answer(question, chosen, change)], width)]
    if chosen is not None:
        blocks.append(list(_to_paste(question, chosen)))
        blocks.append(_lines(_found_how(question, found, chosen), width))
    blocks.append(list(_table(found, chosen, width)))
    blocks.append(_lines(_given(question), width))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def as_json(
    question: Question, found: Sequence[Plan], chosen: Plan | None, change: Change | None
) -> dict[str, Any]:
    """The output as plain values, by the schema in docs/planning.md."""
    model, machine, work = question.model, question.machine, question.work
    drives = [
        {
            "path": drive.path,
            "free_bytes": None if drive.free_bytes >= UNLIMITED_BYTES else drive.free_bytes,
            "gb_per_s": dict(drive.speeds),
        }
        for drive in machine.drives
    ]
    has_config = chosen is not None and chosen.strategy.door != "plain"
    return {
        "schema": SCHEMA,
        "answer": _answer(question, chosen, change),
        "model": dataclasses.asdict(model),
        "machine": {
            **dataclasses.asdict(dataclasses.replace(machine, drives=())),
            "gpu": machine.gpu._asdict() if machine.gpu else None,
            "drives": drives,
        },
        "world": dataclasses.asdict(question.world),
        "work": work._asdict(),
        "plans": [_plain(plan) for plan in found],
        "fastest": chosen.strategy.name if chosen else None,
        "change": {"words": change.words, "plan": _plain(change.plan)} if change else None,
        "script": paste.script(chosen, machine, work) if chosen else None,
        "ds_config": paste.ds_config(chosen, machine, work) if chosen and has_config else None,
        "not_modelled": list(_not_modelled(question)),
    }


def _plain(plan: Plan) -> dict[str, Any]:
    phases = [
        {
            "name": phase.name,
            "times": phase.times,
            "seconds": phase.seconds,
            "beside": [[term._asdict() for term in terms] for terms in phase.beside],
        }
        for phase in plan.phases
    ]
    return {
        "name": plan.strategy.name,
        "title": plan.strategy.title,
        "fits": plan.fits,
        "problems": list(plan.problems),
        **{
            name: getattr(plan, name)
            for name in (
                *("gpu_bytes", "host_bytes", "drive_bytes", "budget_bytes", "seconds"),
                *("tokens_per_second", "free_tokens"),
            )
        },
        "phases": phases,
        "written_bytes_a_step": plan.written_bytes,
        "written_bytes_a_day": plan.written_bytes_a_day,
    }


def _lines(texts: Iterator[str] | Sequence[str], width: int) -> list[str]:
    """Wrap each of *texts*, keeping its indentation."""
    found: list[str] = []
    for each in texts:
        indent = " " * (len(each) - len(each.lstrip()))
        found += textwrap.wrap(
            each.strip(),
            max(width, 40),
            initial_indent=indent,
            subsequent_indent=indent + ("  " if indent else ""),
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return found


# The answer.


def _answer(question: Question, chosen: Plan | None, change: Change | None) -> str:
    verb = "Run" if question.inference else "Train"
    if chosen is not None:
        return f"{verb} it with {chosen.strategy.title}: it fits, {_speed(question, chosen)}.{_conceded(question, chosen)}"
    if change is None:
        return "Nothing fits, whatever is changed of format, way, activations, host memory and drive: a larger GPU is needed."
    return (
        f"Nothing fits. The cheapest change that does: {change.words}; "
        f"then {change.plan.strategy.title} fits, {_speed(question, change.plan)}.{_conceded(question, change.plan)}"
    )


def _conceded(question: Question, plan: Plan) -> str:
    """The concessions of the plan that the options did not ask for."""
    said = []
    if plan.strategy.state_format == "split" and not question.state_format:
        said.append('states are in "split", which rounds last bits another way')
    if plan.strategy.state_format == "compact" and not question.state_format:
        said.append('states are rounded to 8 bits ("compact")')
    if plan.strategy.state_format == "compact24" and not question.state_format:
        said.append('states are rounded to 8 bits and masters to 24 ("compact24")')
    if plan.strategy.updates == "in backward":
        said.append("gradients cannot be clipped by a norm")
    return f" Nothing fits without this: {' and '.join(said)}." if said else ""


def _speed(question: Question, plan: Plan) -> str:
    """Seconds of a step and tokens per second, if known."""
    per = "pass" if question.inference else "step"
    if plan.seconds is None:
        drives = [drive.path for drive in question.machine.drives if not drive.speeds]
        cure = f"run `nvme-sweep {drives[0]}`" if drives else "give --drive-read and --drive-write"
        return f"and its speed is not known before the drive is measured ({cure})"
    said = f"{plan.seconds:.3g} s a {per}"
    if plan.tokens_per_second is not None:
        return f"{said}, {plan.tokens_per_second:,.0f} tokens a second"
    return f"{said} without compute"


def _to_paste(question: Question, chosen: Plan) -> Iterator[str]:
    machine, work = question.machine, question.work
    if chosen.strategy.door != "plain":
        yield "ds_config.json (--write FILE writes it):"
        yield ""
        config = paste.ds_config(chosen, machine, work)
        yield from textwrap.indent(json.dumps(config, indent=2), "    ").splitlines()
        yield ""
    yield "In the training script, with your model as `model`:"
    yield ""
    yield from textwrap.indent(paste.script(chosen, machine, work), "    ").splitlines()


def _found_how(question: Question, found: Sequence[Plan], chosen: Plan) -> Iterator[str]:
    machine = question.machine
    if chosen.seconds is not None:
        yield "How the seconds were found:"
        for formula in chosen.formulas:
            yield f"  {formula}"
    yield from _faster(question, found, chosen)
    hidden = [plan for plan in found if plan.fits and plan.free_tokens]
    if hidden:
        plan = min(hidden, key=lambda plan: (plan.rounding, plan.free_tokens))
        yield (
            f"From {plan.free_tokens:,.0f} tokens a rank in a micro-batch on, "
            f"{plan.strategy.title}, hides the drive under the {' and the '.join(plan.strategy.windows)} pass."
        )
    yield from _wear(machine, chosen)


def _faster(question: Question, found: Sequence[Plan], chosen: Plan) -> Iterator[str]:
    """Plans that are faster than every plan with fewer concessions."""
    better = [chosen]
    for plan in sorted(found, key=lambda plan: (plan.concession, plan.seconds or math.inf)):
        seconds = plan.seconds if plan.fits else None
        if seconds is None or not all(
            other.seconds is not None and seconds * AS_FAST < other.seconds
            for other in better
            if plan.concedes_all_of(other)
        ):
            continue
        better.append(plan)
        yield f"Faster, {_price(plan)}: {plan.strategy.title}, {_speed(question, plan)}."


def _price(plan: Plan) -> str:
    rounding = {
        "exact": "",
        "split": "last bits may be rounded another way",
        "compact": "states may be rounded to 8 bits",
        "compact24": "states may be rounded to 8 bits and masters to 24",
    }[plan.strategy.state_format]
    clipping = ""
    if plan.strategy.provisional:
        clipping = "gradients are clipped in few steps"
    elif plan.strategy.updates == "in backward":
        clipping = "gradients are not clipped by a norm"
    return f"if {' and '.join(filter(None, (rounding, clipping)))}"


def _wear(machine: Machine, chosen: Plan) -> Iterator[str]:
    a_day = chosen.written_bytes_a_day
    if not a_day:
        return
    for drive, share in zip(machine.drives, weights(machine), strict=True):
        line = f"It writes {chosen.written_bytes * share / 1e9:.3g} GB a step and {a_day * share / 1e12:.3g} TB a day to {_name(drive)}"
        if drive.rated_bytes:
            days = drive.rated_bytes / (a_day * share)
            line += f", which is rated for {drive.rated_bytes / 1e12:.3g} TB" + (
                f": {days:.0f} days of that" if days < _WORN_AFTER else ""
            )
        yield f"{line}."


# The table.


def _table(found: Sequence[Plan], chosen: Plan | None, width: int) -> Iterator[str]:
    rows = [_HEAD, *(_row(plan, chosen) for plan in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    gap = next((gap for gap in ("  ", " ") if len(gap.join("x" * w for w in widths)) <= width), "")
    if not gap:
        yield from _stacked(found, chosen, width)
        return
    for row, plan in zip(rows, (None, *found), strict=True):
        cells = [
            cell.ljust(size) if column <= _TITLES else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        yield gap.join(cells).rstrip()
        if plan is not None and not plan.fits:
            yield from _lines([f"     needs {'; '.join(plan.problems)}"], width)


def _stacked(found: Sequence[Plan], chosen: Plan | None, width: int) -> Iterator[str]:
    """A line for the title of each plan, and one for its figures."""
    for plan in found:
        mark, title, *figures = _row(plan, chosen)
        yield f"{mark or ' '} {title}"
        named = [f"{name} {figure}" for name, figure in zip(_HEAD[2:], figures, strict=True)]
        yield from _lines([f"    {', '.join(named)}"], width)
        if not plan.fits:
            yield from _lines([f"    needs {'; '.join(plan.problems)}"], width)


def _row(plan: Plan, chosen: Plan | None) -> tuple[str, ...]:
    sizes = (
        f"{amount / 1e9:.1f}" if amount else "-"
        for amount in (plan.gpu_bytes, plan.host_bytes, plan.drive_bytes)
    )
    seconds = "?" if plan.seconds is None else f"{plan.seconds:.3g}"
    tokens = "?" if plan.tokens_per_second is None else f"{plan.tokens_per_second:.0f}"
    return ("*" if plan is chosen else "", plan.strategy.title, *sizes, seconds, tokens)


# The inputs.


def _given(question: Question) -> Iterator[str]:
    model, machine, world, work = question.model, question.machine, question.world, question.work
    idle = f", {model.active / 1e9:.4g} of them for a token" if model.idle else ""
    yield (
        f"Model: {model.source}, {model.parameters / 1e9:.4g} billion parameters{idle}, the largest layer {model.largest_layer / 1e6:.4g} million"
        + (" (of the usual shape)." if model.assumed else ".")
    )
    if work.tokens:
        shape = (
            ""
            if model.hidden
            else "; activations are not counted, since the model's shape is not known"
        )
        yield (
            f"Batch: {work.micro_batch} x {work.sequence} tokens a rank, {work.accumulation} times a step; activations: {work.activations}{shape}."
        )
    gpu = "no GPU"
    if machine.gpu:
        known = gpu_models.find(machine.gpu.name)
        speed = (
            f"{known.flops / 1e12:.4g} Tflop/s" if known else "speed unknown: compute is left out"
        )
        gpu = f"GPU {machine.gpu.name} with {machine.gpu.memory_bytes / 1e9:.4g} GB ({speed})"
    ranks = f"{world.ranks} rank{'s' if world.ranks > 1 else ''}" + (
        f" on each of {world.nodes} machines" if world.nodes > 1 else ""
    )
    yield f"Machine: {ranks}, {gpu}, {machine.host_bytes / 1e9:.4g} GB of host memory at {machine.host_bytes_per_second / 1e9:.3g} GB/s."
    for drive in machine.drives:
        yield f"Drive: {_described(drive)}."
    yield (
        "Bytes are of a rank, with DeepSpeed's own factor of 1.5 for its host memory. "
        "What a way needs of GPU memory counts CUDA's context and DeepSpeed's buckets too. "
        f"Seconds are of a step, without {', '.join(_not_modelled(question))}."
    )


def _name(drive: Drive) -> str:
    return "the drive" if drive.path == DESCRIBED_PATH and not drive.identity else drive.path


def _described(drive: Drive) -> str:
    speeds = ", ".join(f"{phase} {speed:.3g}" for phase, speed in drive.speeds.items())
    swept = f"{speeds} GB/s" if speeds else f"not swept: run `nvme-sweep {drive.path}`"
    if drive.free_bytes >= UNLIMITED_BYTES:
        return f"{_name(drive)}, any size; {swept}"
    return f"{_name(drive)}, {drive.free_bytes / 1e9:.4g} GB free; {swept}"


def _not_modelled(question: Question) -> Iterator[str]:
    machine, work = question.machine, question.work
    if machine.gpu is None:
        yield "compute on processors"
    elif not gpu_models.find(machine.gpu.name):
        yield f"compute of a GPU {machine.gpu.name!r}, whose speed is not known here"
    elif not work.tokens:
        yield "compute and activations (give --seq)"
    yield "communication between ranks"
    yield "data loading and checkpoints"
