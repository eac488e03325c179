"""What `nvme-offload plan` prints. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from nvme_offload.hardware import gpu_models
from nvme_offload.planning.model import Model
from nvme_offload.planning.placement import World
from nvme_offload.planning.plan import Machine, Plan, Work, weights

_HEAD = ("", "way to train", "GPU, GB", "host, GB", "drive, GB", "s a step", "")
_WORN_AFTER = 5 * 365  # days that a drive should last


def text(
    model: Model,
    machine: Machine,
    world: World,
    work: Work,
    found: Sequence[Plan],
    chosen: Plan | None,
) -> str:
    """The table, the plan that was chosen, and what is not in it."""
    return "\n".join(
        [
            *_heading(model, machine, world),
            "",
            *_table(found, chosen),
            "",
            *_answer(machine, found, chosen),
            *_notes(model, machine, work),
        ]
    )


def as_json(
    model: Model,
    machine: Machine,
    world: World,
    work: Work,
    found: Sequence[Plan],
    chosen: Plan | None,
    config: dict[str, Any] | None,
) -> dict[str, Any]:
    """The same as plain values; bytes of a rank, GB are 10**9."""
    drives = [
        {"path": drive.path, "free_bytes": drive.free_bytes, "gb_per_s": dict(drive.speeds)}
        for drive in machine.drives
    ]
    return {
        "model": dataclasses.asdict(model),
        "machine": {
            **dataclasses.asdict(dataclasses.replace(machine, drives=())),
            "gpu": machine.gpu._asdict() if machine.gpu else None,
            "drives": drives,
        },
        "world": dataclasses.asdict(world),
        "work": work._asdict(),
        "plans": [_plain(plan) for plan in found],
        "fastest": chosen.strategy.name if chosen else None,
        "ds_config": config,
        "not_modelled": list(_not_modelled(machine, work)),
    }


def _plain(plan: Plan) -> dict[str, Any]:
    terms = {
        name: [term._asdict() for term in getattr(plan, name)]
        for name in ("passes", "update", "drive")
    }
    return {
        "name": plan.strategy.name,
        "title": plan.strategy.title,
        "fits": plan.fits,
        "problems": list(plan.problems),
        **{
            name: getattr(plan, name)
            for name in ("gpu_bytes", "host_bytes", "drive_bytes", "budget_bytes", "seconds")
        },
        "formula": plan.formula,
        "terms": terms,
        "written_bytes_a_step": plan.written_bytes,
        "written_bytes_a_day": plan.written_bytes_a_day,
    }


def _heading(model: Model, machine: Machine, world: World) -> Iterator[str]:
    yield (
        f"{model.source}: {model.parameters / 1e9:.4g} billion parameters, the largest layer {model.largest_layer / 1e6:.4g} million"
        + (" (of the usual shape)" if model.assumed else "")
    )
    gpu = (
        f"{machine.gpu.name} with {machine.gpu.memory_bytes / 1e9:.4g} GB"
        if machine.gpu
        else "no GPU"
    )
    ranks = f"{world.ranks} rank{'s' if world.ranks > 1 else ''}" + (
        f" on each of {world.nodes} machines" if world.nodes > 1 else ""
    )
    yield f"{ranks}, {gpu}; {machine.host_bytes / 1e9:.4g} GB of host memory, which streams {machine.host_bytes_per_second / 1e9:.3g} GB/s"
    for drive in machine.drives:
        speeds = ", ".join(f"{phase} {speed:.3g}" for phase, speed in drive.speeds.items())
        swept = f"{speeds} GB/s" if speeds else f"not swept: run `nvme-sweep {drive.path}`"
        yield f"{drive.path}: {drive.free_bytes / 1e9:.4g} GB free; {swept}"


def _table(found: Sequence[Plan], chosen: Plan | None) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [_HEAD]
    for plan in found:
        sizes = [
            f"{amount / 1e9:.1f}" if amount else "-"
            for amount in (plan.gpu_bytes, plan.host_bytes, plan.drive_bytes)
        ]
        seconds = "?" if plan.seconds is None else f"{plan.seconds:.3g}"
        rows.append(
            (
                "*" if plan is chosen else "",
                plan.strategy.title,
                *sizes,
                seconds,
                "fits" if plan.fits else f"needs {'; '.join(plan.problems)}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    for row in rows:
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        yield "  ".join([*cells, row[6]]).rstrip()


def _answer(machine: Machine, found: Sequence[Plan], chosen: Plan | None) -> Iterator[str]:
    if chosen is None:
        yield "Nothing fits. " + (
            "More ranks share the states; a larger drive holds them."
            if machine.drives
            else "Name a directory on a drive with --path."
        )
        return
    unknown = chosen.seconds is None
    yield f"Fastest that fits: {chosen.strategy.title}" + (
        ", whose drive was never swept." if unknown else f", {chosen.seconds:.3g} s a step ="
    )
    if not unknown:
        yield f"  {chosen.formula}"
    if chosen.budget_bytes is not None:
        yield f'  with "host_memory": {chosen.budget_bytes} a rank, call nvme_offload.zero3.enable() before deepspeed.initialize'
    if chosen.strategy.state_format != "exact":
        yield (
            f'  and "state_format": "{chosen.strategy.state_format}", which rounds optimizer states: '
            "nothing that keeps them as they are fits"
        )
    yield from _wear(machine, chosen)


def _wear(machine: Machine, chosen: Plan) -> Iterator[str]:
    a_day = chosen.written_bytes_a_day
    if not a_day:
        return
    for drive, share in zip(machine.drives, weights(machine), strict=True):
        line = f"  writes {chosen.written_bytes * share / 1e9:.3g} GB a step and {a_day * share / 1e12:.3g} TB a day to {drive.path}"
        if drive.rated_bytes:
            days = drive.rated_bytes / (a_day * share)
            line += f", which is made for {drive.rated_bytes / 1e12:.3g} TB" + (
                f": {days:.0f} days of that" if days < _WORN_AFTER else ""
            )
        yield line


def _notes(model: Model, machine: Machine, work: Work) -> Iterator[str]:
    yield ""
    yield (
        "Bytes are of a rank, with DeepSpeed's own factor of 1.5 on what it keeps in host memory; seconds are of a step, without "
        + ", ".join(_not_modelled(machine, work))
    )
    if work.tokens and not model.hidden:
        yield "Activations are not counted: the shape of the model is not known."


def _not_modelled(machine: Machine, work: Work) -> Iterator[str]:
    if not (work.tokens and machine.gpu):
        yield "compute and activations (--seq predicts them on a GPU)"
    elif not gpu_models.find(machine.gpu.name):
        yield f"compute of a GPU {machine.gpu.name!r}, whose speed is not known here"
    yield "packing of compact states on the processors"
    yield "communication between ranks"
    yield "attention over long sequences"
    yield "data loading and checkpoints."
