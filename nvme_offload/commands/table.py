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
from nvme_offload.planning.advice import Change, Question, faster, hiding, shown
from nvme_offload.planning.paste import weights
from nvme_offload.planning.plan import DESCRIBED_PATH, UNLIMITED_BYTES, Drive, Machine, Plan
from nvme_offload.units import format_digits, format_gb

from .script import script

SCHEMA = 2  # of the JSON; docs/planning.md describes it
_HEAD = ("", "way to train", "GPU GB", "host GB", "drive GB", "s/step", "tokens/s")
_TITLES = 1  # the column of titles, which is to the left
_ROWS = 6  # of the table, unless all are asked for
_USUAL_RATING = 1200e12  # bytes that a consumer drive of 2 TB is rated to write
_ROUNDS = {  # a state format in the answer, and as the condition of another plan
    "exact": ("", ""),
    "split": (
        'states are in "split", which rounds last bits another way',
        "last bits may be rounded another way",
    ),
    "compact": ('states are rounded to 8 bits ("compact")', "states may be rounded to 8 bits"),
    "compact24": (
        'states are rounded to 8 bits and masters to 24 ("compact24")',
        "states may be rounded to 8 bits and masters to 24",
    ),
}
_EXCLUDES = {  # by `Strategy.updates`
    "in forward": "After a use of torch.compile, updates no longer run under the forward pass.",
    "host gradients": "It excludes FSDP2, tensor parallelism and operations on several gradients together.",
    "provisional": "A step that is clipped by a norm takes longer.",
    "in both": "A step that is clipped by a norm takes longer.",
    "in backward": "It excludes clipping by a norm, GradScaler and DDP; the Hugging Face Trainer needs max_grad_norm=0.",
}


def text(
    question: Question,
    found: Sequence[Plan],
    chosen: Plan | None,
    change: Change | None,
    width: int = 100,
    every: bool = False,
) -> str:
    """The output, wrapped at *width* columns. *every*: with all rows of the table."""
    blocks = [_lines([_answer(question, found, chosen, change)], width)]
    if chosen is not None:
        blocks.append(_lines(_price_and_faster(question, found, chosen), width))
        blocks.append(list(_to_paste(question, chosen)))
        blocks.append(_lines(_found_how(question, found, chosen), width))
    best = change.plan if change else chosen
    rows = list(found) if every else shown(found, best, _ROWS)
    blocks.append(list(_table(rows, chosen, width)))
    if len(rows) < len(found):
        blocks[-1].append(f"--all shows {len(found) - len(rows)} more.")
    blocks.append(_lines(_given(question), width))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def as_json(
    question: Question, found: Sequence[Plan], chosen: Plan | None, change: Change | None
) -> dict[str, Any]:
    """The output as plain values, by the schema in docs/planning.md."""
    machine = question.machine
    drives = [
        {
            "path": drive.path,
            "free_bytes": None if drive.free_bytes >= UNLIMITED_BYTES else drive.free_bytes,
            "gb_per_s": dict(drive.speeds),
        }
        for drive in machine.drives
    ]
    gpu = machine.gpu._asdict() if machine.gpu else None
    described = dataclasses.asdict(dataclasses.replace(machine, drives=()))
    has_config = chosen is not None and chosen.strategy.door != "plain"
    return {
        "schema": SCHEMA,
        "answer": _answer(question, found, chosen, change),
        "model": dataclasses.asdict(question.model),
        "machine": {**described, "gpu": gpu, "drives": drives},
        "world": dataclasses.asdict(question.world),
        "work": question.work._asdict(),
        "plans": [_plain(plan) for plan in found],
        "fastest": chosen.strategy.name if chosen else None,
        "change": {"words": change.words, "plan": _plain(change.plan)} if change else None,
        "script": script(chosen, question) if chosen else None,
        "ds_config": paste.ds_config(chosen, question) if chosen and has_config else None,
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
    shown = "gpu_bytes host_bytes drive_bytes budget_bytes seconds tokens_per_second free_tokens"
    return {
        "name": plan.strategy.name,
        "title": plan.strategy.title,
        "fits": plan.fits,
        "problems": list(plan.problems),
        **{name: getattr(plan, name) for name in shown.split()},
        "phases": phases,
        "written_bytes_a_step": plan.written_bytes,
        "written_bytes_a_day": plan.written_bytes_a_day,
    }


def _lines(texts: Iterator[str] | Sequence[str], width: int) -> list[str]:
    """Wrap each of *texts*, keeping its indentation."""
    found: list[str] = []
    for each in texts:
        first = " " * (len(each) - len(each.lstrip()))
        rest = first + "  " * bool(first)
        wrapper = textwrap.TextWrapper(
            max(width, 40), first, rest, break_long_words=False, break_on_hyphens=False
        )
        found += wrapper.wrap(each.strip()) or [""]
    return found


# The answer.


def _answer(
    question: Question, found: Sequence[Plan], chosen: Plan | None, change: Change | None
) -> str:
    verb = "Run" if question.inference else "Train"
    if chosen is not None:
        title = chosen.strategy.title
        return f"{verb} it with {title}: it fits, {_speed(question, chosen)}.{_conceded(question, found, chosen)}"
    if change is None:
        return "Nothing fits, whatever is changed of format, way, activations, host memory and drive: larger or more GPUs are needed."
    return (
        f"Nothing fits as asked. The cheapest change that helps: {change.words}; then {change.plan.strategy.title} "
        f"fits, {_speed(question, change.plan)}.{_conceded(question, change.found, change.plan, change.finer)}"
    )


def _conceded(
    question: Question, found: Sequence[Plan], plan: Plan, roomy: Plan | None = None
) -> str:
    """The unasked concessions of *plan*, and the features that it excludes. *roomy*: a plan that concedes
    less and needs more space on the drive.
    """
    said = _ROUNDS[plan.strategy.state_format][0]
    excludes = _EXCLUDES.get(plan.strategy.updates)
    text = f" {excludes}" if excludes else ""
    if said and not question.state_format and question.way != plan.strategy.title:
        finer = [other for other in found if other.fits and other.rounding < plan.rounding]
        text += f" {said[0].upper()}{said[1:]}"
        if finer:  # which concede more in clipping
            other = min(finer, key=lambda other: (other.concession, other.seconds or math.inf))
            text += f"; without that, {_price(other)}, {other.strategy.title} fits, {_speed(question, other)}"
        elif roomy is None:
            text += "; no way without that fits"
        text += "."
    places = {plan.strategy.optimizer, plan.strategy.parameters}
    if places == {"gpu"} and question.world.ranks * question.world.nodes == 1:
        where = "on one GPU" if question.machine.gpu else "in host memory"
        text += f" Everything fits {where}, so torch.optim.AdamW does without DeepSpeed, too."
    if roomy is not None:
        space = format_gb(roomy.drive_bytes * question.world.ranks)
        text += f" With {space} free on the drive, {roomy.strategy.title} fits."
    return text


def _speed(question: Question, plan: Plan) -> str:
    """Seconds of a step and tokens per second, if known."""
    per = "pass" if question.inference else "step"
    if plan.seconds is None:
        drives = [drive.path for drive in question.machine.drives if not drive.speeds]
        cure = f"run `nvme-sweep {drives[0]}`" if drives else "give --drive-read and --drive-write"
        return f"and its speed is not known before the drive is measured ({cure})"
    said = f"{format_digits(plan.seconds)} s a {per}"
    if plan.tokens_per_second is not None:
        return f"{said}, {format_digits(plan.tokens_per_second)} tokens a second"
    return f"{said} without compute"


def _to_paste(question: Question, chosen: Plan) -> Iterator[str]:
    if chosen.strategy.door != "plain":
        yield "ds_config.json (--write FILE writes it):"
        yield ""
        config = paste.ds_config(chosen, question)
        yield from textwrap.indent(json.dumps(config, indent=2), "    ").splitlines()
        yield ""
    yield "The training script, for your `model` and `batches`, where model(**batch).loss is the loss:"
    yield ""
    yield from textwrap.indent(script(chosen, question), "    ").splitlines()


def _price_and_faster(question: Question, found: Sequence[Plan], chosen: Plan) -> Iterator[str]:
    yield from _wear(question.machine, chosen)
    if quicker := faster(found, chosen):
        yield "Faster, if you accept the condition (--way TITLE prints the code of one):"
        for plan in quicker:
            dry = chosen.written_bytes and not plan.written_bytes
            yield (
                f"  {_speed(question, plan)}: {plan.strategy.title}, {_price(plan)}"
                f"{'; it does not write to the drive' if dry else ''}"
            )


def _found_how(question: Question, found: Sequence[Plan], chosen: Plan) -> Iterator[str]:
    if chosen.seconds is not None:
        yield "How the seconds were found:"
        yield from (f"  {phase.formula}" for phase in chosen.phases if phase.beside)
    if chosen.written_bytes and (hidden := hiding(question, found)):
        plan, batch = hidden
        yield (
            f"With --micro-batch {batch}, the drive no longer limits {plan.strategy.title}: its transfers "
            f"end within the {' and the '.join(plan.strategy.windows)} pass."
        )


def _price(plan: Plan) -> str:
    rounding = _ROUNDS[plan.strategy.state_format][1]
    clipping = ("", "gradients are clipped in few steps", "gradients are not clipped by a norm")
    said = filter(None, (rounding, clipping[plan.clipping]))
    return f"if {' and '.join(said)}"


def _wear(machine: Machine, chosen: Plan) -> Iterator[str]:
    a_day = chosen.written_bytes_a_day
    if not a_day:
        return
    for drive, share in zip(machine.drives, weights(machine), strict=True):
        rated = drive.rated_bytes or _USUAL_RATING
        days = rated / (a_day * share)
        lasts = f"{days:.0f} days" if days < 730 else f"{days / 365:.0f} years"
        yield (
            f"It writes {format_digits(chosen.written_bytes * share / 1e9)} GB a step and {format_digits(a_day * share / 1e12)} TB a day to "
            f"{_name(drive)}: a drive that is rated for {rated / 1e12:,.4g} TB lasts {lasts}."
        )


# The table.


def _table(found: Sequence[Plan], chosen: Plan | None, width: int) -> Iterator[str]:
    """A line for each plan; in a narrow terminal one for its title, and one for its figures."""
    rows = [_HEAD, *(_row(plan, chosen) for plan in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gap = next((gap for gap in ("  ", " ") if len(gap.join("x" * w for w in widths)) <= width), "")
    for row, plan in zip(rows, (None, *found), strict=True):
        cells = [
            cell.ljust(size) if column <= _TITLES else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        if gap:
            yield gap.join(cells).rstrip()
        elif plan is not None:
            yield f"{row[0] or ' '} {row[_TITLES]}"
            named = map(" ".join, zip(_HEAD[2:], row[2:], strict=True))
            yield from _lines([f"    {', '.join(named)}"], width)
        if plan is not None and not plan.fits:
            yield from _lines([f"    {' ' * bool(gap)}needs {'; '.join(plan.problems)}"], width)


def _row(plan: Plan, chosen: Plan | None) -> tuple[str, ...]:
    sizes = (
        f"{amount / 1e9:.1f}" if amount else "-"
        for amount in (plan.gpu_bytes, plan.host_bytes, plan.drive_bytes)
    )
    seconds = "?" if plan.seconds is None else format_digits(plan.seconds)
    rate = plan.tokens_per_second
    tokens = "?" if rate is None else format_digits(rate).replace(",", "")
    return ("*" if plan is chosen else "", plan.strategy.title, *sizes, seconds, tokens)


# The inputs.


def _given(question: Question) -> Iterator[str]:
    model, machine, world, work = question.model, question.machine, question.world, question.work
    idle = f", {model.active / 1e9:.4g} of them for a token" if model.idle else ""
    source = "" if model.assumed else f"{model.source}, "
    usual = ", if the model has the usual shape" if model.assumed else ""
    yield (
        f"Model: {source}{model.parameters / 1e9:.4g} billion parameters{idle}; the largest layer has "
        f"{model.largest_layer / 1e6:.4g} million{usual}."
    )
    if work.tokens:
        unknown = "; activations are not counted, since the model's shape is not known"
        yield (
            f"Batch: {work.micro_batch} x {work.sequence} tokens per rank, {work.accumulation} "
            f"time{_s(work.accumulation)} a step; activations: {work.activations}{'' if model.hidden else unknown}."
        )
    gpu = "no GPU"
    if machine.gpu:
        known = gpu_models.find(machine.gpu.name)
        speed = "speed unknown: compute is left out"
        speed = f"{known.flops / 1e12:.4g} Tflop/s" if known else speed
        gpu = f"GPU {machine.gpu.name} with {machine.gpu.memory_bytes / 1e9:.4g} GB ({speed})"
    each = f" on each of {world.nodes} machines" if world.nodes > 1 else ""
    yield (
        f"Machine: {world.ranks} rank{_s(world.ranks)}{each}, {gpu}, {machine.host_bytes / 1e9:.4g} GB of host "
        f"memory at {machine.host_bytes_per_second / 1e9:.3g} GB/s."
    )
    for drive in machine.drives:
        yield f"Drive: {_described(drive)}."
    yield (
        "Bytes are per rank. Host memory of DeepSpeed includes its own factor of 1.5. "
        f"Seconds are per {'pass' if question.inference else 'step'}, without {', '.join(_not_modelled(question))}."
    )


def _s(count: int) -> str:
    """The ending of a plural."""
    return "s" if count > 1 else ""


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
        yield "compute (the speed of this GPU is not known)"
    elif not work.tokens:
        yield "compute and activations (give --seq)"
    yield "communication between ranks"
    yield "data loading and checkpoints"
