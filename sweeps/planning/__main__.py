"""`python -m sweeps.planning`: CPU of planning a use, and bytes beside the least, on the shapes of
models and on rounds of many values.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from nvme_offload.swap.swapper import TensorSwapper
from nvme_offload.units import parse_bytes
from sweeps.machine import commit, facts
from sweeps.models import CONFIGS, config_of, split_experts, tensors
from sweeps.null import NullStore, UntouchedPool

from ..command import run, stop_at_sigterm
from . import saved
from .least import least_bytes
from .uses import PERSISTENT_ELEMENTS, Event, groups_of, made, most_in_use, rounds, step

_ORDERS = {
    "cyclic": (False, False),
    "cyclic, changed": (False, True),
    "there and back": (True, False),
    "there and back, changed": (True, True),
}


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a shape gave: medians over the steps after the learning ones.

    cpu_seconds: of the calls of a step; first_seconds: of the first one, whose order is not known.
    least_bytes: None where that was not asked for. floor_seconds: that the drive needs for what a
    step moved; seconds: that the step took.
    """

    title: str
    values: int
    held_bytes: int
    memory_bytes: int
    uses: int
    cpu_seconds: float
    first_seconds: float
    read_bytes: int
    written_bytes: int
    least_bytes: float | None
    floor_seconds: float
    seconds: float


@click.command()
@click.option(
    "--models",
    default="llama2-7b",
    show_default=True,
    help=f'Of {", ".join(CONFIGS)}, or paths of config.json; "" for none.',
)
@click.option(
    "--width",
    type=click.IntRange(min=8),
    help="Of the small-width forms of the models, instead of the models.",
)
@click.option(
    "--rounds",
    "counts",
    default="",
    help='Also rounds over so many values, with commas between, such as "256,2048,16384".',
)
@click.option(
    "--saved",
    "saved_counts",
    default="",
    help="Also so many tensors saved by save_on_nvme, with commas between.",
)
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=tempfile.gettempdir(),
    help="Of the drive that those go to. [default: that of temporary files]",
)
@click.option(
    "--memory-share",
    type=click.FloatRange(0, 1),
    default=0.25,
    show_default=True,
    help="Of all bytes of parameters and states; at least twice what is in use at once.",
)
@click.option("--host-memory", help="Instead of a share, for every shape.")
@click.option(
    "--share-of-experts",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    help="Of each layer, that take part in a step.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="That are measured, after two that the order is learned from.",
)
@click.option(
    "--read",
    "read_speed",
    type=float,
    default=2.0,
    show_default=True,
    help="GB/s of the drive; the next likewise. Both at once share it.",
)
@click.option("--write", "write_speed", type=float, default=3.0, show_default=True)
@click.option(
    "--timed",
    is_flag=True,
    help="Let transfers take their time; without, they end at once, and the floor is reckoned.",
)
@click.option(
    "--least",
    is_flag=True,
    help="Reckon the least that any choice could move, too: minutes from 4,000 uses on. Wants scipy.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Write OUTPUT.md and OUTPUT.json, after every shape.",
)
def main(
    models: str,
    width: int | None,
    counts: str,
    saved_counts: str,
    directory: Path,
    memory_share: float,
    host_memory: str | None,
    share_of_experts: float,
    steps: int,
    read_speed: float,
    write_speed: float,
    timed: bool,
    least: bool,
    output: Path | None,
) -> None:
    """Take a swapper through training steps over a store that moves no byte, and print what its
    calls cost.
    """
    stop_at_sigterm()
    described = facts(directory, "sweeps.planning") | {"versions": commit()}
    speeds = (read_speed * 1e9, write_speed * 1e9)
    found: list[Figures] = []
    added: list[saved.Added] = []

    def write() -> None:
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.with_name(output.name + ".md").write_text(
                render(described, found, added, speeds, timed)
            )
            figures = {
                "facts": described,
                "figures": list(map(dataclasses.asdict, found)),
                "saved": list(map(dataclasses.asdict, added)),
            }
            output.with_name(output.name + ".json").write_text(json.dumps(figures, indent=1))

    def measure(
        title: str, begin: Sequence[Event], steps_of: Callable[[], Sequence[Event]]
    ) -> None:
        held = sum(nbytes for nbytes in {event.name: event.nbytes for event in begin}.values())
        memory = (
            parse_bytes(host_memory)
            if host_memory
            else max(int(held * memory_share), 2 * most_in_use(steps_of()))
        )
        found.append(_measure(title, begin, steps_of, held, memory, steps, speeds, timed, least))
        click.echo(_lines(found[-1:])[-1], err=True)
        write()

    for name in filter(None, models.split(",")):
        config = config_of(name, width)
        split = split_experts(
            tensors(config), int(config.get("num_experts") or config.get("num_local_experts") or 0)
        )
        groups = groups_of(split, PERSISTENT_ELEMENTS if width is None else 0)
        chance = random.Random(0)
        share = share_of_experts if any(group.expert for group in groups) else 1.0
        measure(
            name if width is None else f"{name}, width {width}",
            made(groups),
            lambda: step(groups, share, chance),  # noqa: B023 - called within the turn
        )
    for count in map(int, filter(None, counts.split(","))):
        for title, (there_and_back, changed) in _ORDERS.items():
            begin, one = rounds(count, there_and_back, changed)
            measure(f"{count} values, {title}", begin, lambda: one)  # noqa: B023
    for count in map(int, filter(None, saved_counts.split(","))):
        for fits in (True, False):
            added.append(saved.added(directory, count, fits))
            click.echo(saved.table(added[-1:])[-1], err=True)
            write()
    click.echo(render(described, found, added, speeds, timed))


def _measure(
    title: str,
    begin: Sequence[Event],
    steps_of: Callable[[], Sequence[Event]],
    held: int,
    memory: int,
    steps: int,
    speeds: tuple[float, float],
    timed: bool,
    least: bool,
) -> Figures:
    names: set[str] = set()
    cpu: list[float] = []
    seconds: list[float] = []
    moved: list[tuple[int, int]] = []
    uses: list[int] = []
    bound: list[float] = []
    with NullStore(*(speeds if timed else ())) as store, UntouchedPool(memory) as pool:
        store.reserve(2 * held)
        with TensorSwapper(store, pool) as swapper:
            _go_through(swapper, begin)
            swapper.step()
            for number in range(2 + steps):
                events = steps_of()
                names |= {event.name for event in events}
                before = swapper.stats()
                gc.collect()
                began, used = time.perf_counter(), time.thread_time()
                _go_through(swapper, events)
                swapper.step()
                cpu.append(time.thread_time() - used)
                seconds.append(time.perf_counter() - began)
                after = swapper.stats()
                moved.append(
                    (
                        after.bytes_read - before.bytes_read,
                        after.bytes_written - before.bytes_written,
                    )
                )
                uses.append(sum(event.verb in ("create", "need") for event in events))
                if least and number >= 2:
                    bound.append(least_bytes(events, memory))
    read, written = (int(statistics.median(way)) for way in zip(*moved[2:], strict=True))
    return Figures(
        title,
        len(names),
        held,
        memory,
        int(statistics.median(uses[2:])),
        statistics.median(cpu[2:]),
        cpu[0],
        read,
        written,
        statistics.median(bound) if bound else None,
        read / speeds[0] + written / speeds[1],
        statistics.median(seconds[2:]),
    )


def _go_through(swapper: TensorSwapper, events: Sequence[Event]) -> None:
    for verb, name, nbytes, _ in events:
        if verb == "need":
            swapper.swap_in(name)
        elif verb == "create":
            swapper.create(name, nbytes)
        elif verb == "drop":
            swapper.discard(name)
        else:
            swapper.release(name, changed=verb == "change")


def render(
    described: dict[str, str],
    found: Sequence[Figures],
    added: list[saved.Added],
    speeds: tuple[float, float],
    timed: bool,
) -> str:
    """The report in Markdown."""
    parts = [
        "# What planning costs on the shapes of models",
        "\n".join(f"- {name}: {value}" for name, value in described.items()),
        "A swapper goes through the uses of ZeRO-3 with everything on a drive, or through rounds over values of 64 KiB to 4 MiB, on a store that moves "
        "no byte. "
        "CPU is that of the thread that calls, for the calls of a step, its part of the store and the engine included; of the measured steps the median. "
        f"The floor is the time that a drive of {speeds[0] / 1e9:g} GB/s read and {speeds[1] / 1e9:g} written, which serves one block after another, needs "
        f"for what a step moved. Transfers {'take that time' if timed else 'end at once'}.",
        "\n".join(_lines(found)),
    ]
    if added:
        parts += [
            "## Saved activations",
            "`save_on_nvme` in a chain of operations on the CPU with one thread, each of which saves its input: the CPU of the whole process, the engine's "
            "threads included, beyond that of the same chain without. Half of the rows fit into host memory; the others have an eighth of what they need.",
            "\n".join(saved.table(added)),
        ]
    return "\n\n".join(parts) + "\n"


def _lines(found: Sequence[Figures]) -> list[str]:
    head = (
        "shape",
        "values",
        "GB of values, in memory",
        "uses a step",
        "CPU us a use",
        "in the first step",
        "GB read + written",
        "over the least",
        "floor, s",
    )
    rows = [(*head, "CPU / floor", "floor / time"), ("---",) * (len(head) + 2)]
    for one in found:
        moved = one.read_bytes + one.written_bytes
        rows.append(
            (
                one.title,
                f"{one.values}",
                f"{one.held_bytes / 1e9:.3g}, {one.memory_bytes / 1e9:.3g}",
                f"{one.uses}",
                f"{one.cpu_seconds / one.uses * 1e6:.0f}",
                f"{one.first_seconds / one.uses * 1e6:.0f}",
                f"{one.read_bytes / 1e9:.3g} + {one.written_bytes / 1e9:.3g}",
                f"{moved / one.least_bytes:.3f}" if one.least_bytes else "",
                f"{one.floor_seconds:.3g}",
                f"{one.cpu_seconds / one.floor_seconds:.4f}" if moved else "",
                f"{one.floor_seconds / one.seconds:.2f}"
                if moved and one.floor_seconds <= one.seconds * 1.05
                else "",
            )
        )
    return [f"| {' | '.join(row)} |" for row in rows]


if __name__ == "__main__":
    run(main, "sweeps.planning")
