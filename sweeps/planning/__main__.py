"""`python -m sweeps.planning`: CPU time of planning per use, and bytes compared with the minimum,
on the shapes of models and on rounds over many values.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import pandas as pd

from nvme_offload.swap.swapper import TensorSwapper
from sweeps.machine import commit, facts
from sweeps.models import CONFIGS, config_of, split_experts, tensors
from sweeps.null import NullStore, UntouchedPool

from .. import command
from ..command import COUNT, Names, Size, option, say
from ..report import columns, document, listed, write
from . import saved
from .least import least_bytes
from .uses import PERSISTENT_ELEMENTS, Event, groups_of, made, most_in_use, rounds, step

_LEARNING = 2  # steps, from which the order is learned
_ORDERS = {
    "cyclic": (False, False),
    "cyclic, changed": (False, True),
    "there and back": (True, False),
    "there and back, changed": (True, True),
}


@dataclasses.dataclass(frozen=True)
class Figures:
    """The results of a shape: medians over the steps after the learning ones.

    cpu_seconds: of the calls of a step; first_seconds: of the first step, whose order is unknown.
    least_bytes: the minimum, or None without --least. floor_seconds: the drive's time for the bytes
    of a step; seconds: the duration of the step.
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

    @property
    def moved(self) -> int:
        """Bytes in both directions."""
        return self.read_bytes + self.written_bytes


@click.command()
@option(
    "--models",
    type=Names(),
    default="llama2-7b",
    help=f'Of {", ".join(CONFIGS)}, or paths of config.json; "" for none.',
)
@command.width
@option(
    "--rounds",
    "counts",
    type=Names(),
    default="",
    help='Also rounds over these numbers of values, such as "256,2048,16384".',
)
@option(
    "--saved",
    "saved_counts",
    type=Names(),
    default="",
    help="Also these numbers of tensors saved by save_on_nvme.",
)
@option(
    "--directory",
    type=command.DIRECTORY,
    default=tempfile.gettempdir(),
    help="On the drive, for --saved.",
)
@option(
    "--memory-share",
    type=click.FloatRange(0, 1),
    default=0.25,
    help="Of all bytes of parameters and states; at least twice the bytes in concurrent use.",
)
@option("--host-memory", type=Size(), help="Instead of a share, for every shape.")
@option(
    "--share-of-experts",
    type=click.FloatRange(0, 1),
    default=0.5,
    help="Of each layer, active in a step.",
)
@option("--steps", type=COUNT, default=3, help="Measured steps, after two that learn the order.")
@option("--read", "read_speed", type=float, default=2.0, help="GB/s of the drive, reading alone.")
@option("--write", "write_speed", type=float, default=3.0, help="GB/s of the drive, writing alone.")
@option(
    "--timed",
    is_flag=True,
    help="Make transfers take their time; otherwise they end immediately, and the floor is computed.",
)
@option(
    "--least",
    is_flag=True,
    help="Also compute the minimum of bytes: takes minutes from 4,000 uses on, needs scipy.",
)
@command.output("Write OUTPUT.md and OUTPUT.json, after every shape.")
def main(
    models: list[str],
    width: int | None,
    counts: list[str],
    saved_counts: list[str],
    directory: Path,
    memory_share: float,
    host_memory: int | None,
    share_of_experts: float,
    steps: int,
    read_speed: float,
    write_speed: float,
    timed: bool,
    least: bool,
    output: Path | None,
) -> None:
    """Run a swapper through training steps over a store that moves no bytes, and print the cost of
    its calls.
    """
    command.stop_at_sigterm()
    described = facts(directory, "sweeps.planning") | {"versions": commit()}
    speeds = (read_speed * 1e9, write_speed * 1e9)
    found: list[Figures] = []
    added: list[saved.Added] = []

    def keep() -> None:
        figures, tensors = (list(map(dataclasses.asdict, rows)) for rows in (found, added))
        results = {"facts": described, "figures": figures, "saved": tensors}
        write(output, render(described, found, added, speeds, timed), results)

    def measure(
        title: str, begin: Sequence[Event], steps_of: Callable[[], Sequence[Event]]
    ) -> None:
        held = sum(nbytes for nbytes in {event.name: event.nbytes for event in begin}.values())
        memory = host_memory or max(int(held * memory_share), 2 * most_in_use(steps_of()))
        found.append(_measure(title, begin, steps_of, held, memory, steps, speeds, timed, least))
        say(_row(found[-1]))
        keep()

    for name in models:
        config = config_of(name, width)
        experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
        split = split_experts(tensors(config), experts)
        groups = groups_of(split, PERSISTENT_ELEMENTS if width is None else 0)
        chance = random.Random(0)
        share = share_of_experts if any(group.expert for group in groups) else 1.0
        measure(
            name if width is None else f"{name}, width {width}",
            made(groups),
            lambda: step(groups, share, chance),  # noqa: B023 - called within the turn
        )
    for count in map(int, counts):
        for title, (there_and_back, changed) in _ORDERS.items():
            begin, one = rounds(count, there_and_back, changed)
            measure(f"{count} values, {title}", begin, lambda: one)  # noqa: B023
    for count in map(int, saved_counts):
        for fits in (True, False):
            added.append(saved.added(directory, count, fits))
            say(columns(added[-1:], saved.CELLS).splitlines()[-1])
            keep()
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
    records = []
    with NullStore(*(speeds if timed else ())) as store, UntouchedPool(memory) as pool:
        store.reserve(2 * held)
        with TensorSwapper(store, pool) as swapper:
            _go_through(swapper, begin)
            swapper.step()
            for number in range(_LEARNING + steps):
                events = steps_of()
                names |= {event.name for event in events}
                before = swapper.stats()
                gc.collect()
                began, used = time.perf_counter(), time.thread_time()
                _go_through(swapper, events)
                swapper.step()
                record: dict[str, float | None] = {
                    "cpu": time.thread_time() - used,
                    "seconds": time.perf_counter() - began,
                    "read": swapper.stats().bytes_read - before.bytes_read,
                    "written": swapper.stats().bytes_written - before.bytes_written,
                    "uses": sum(event.verb in ("create", "need") for event in events),
                }
                if least and number >= _LEARNING:
                    record["least"] = least_bytes(events, memory)
                records.append(record)
    middle = pd.DataFrame(records[_LEARNING:]).median()
    read, written = int(middle.read), int(middle.written)
    return Figures(
        title,
        len(names),
        held,
        memory,
        int(middle.uses),
        middle.cpu,
        records[0]["cpu"],
        read,
        written,
        middle.least if least else None,
        read / speeds[0] + written / speeds[1],
        middle.seconds,
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
    added: Sequence[saved.Added],
    speeds: tuple[float, float],
    timed: bool,
) -> str:
    """The report in Markdown."""
    about_saved = (
        "## Saved activations",
        "`save_on_nvme` in a chain of operations on one CPU thread, each of which saves its input: CPU time of the process, including the engine's threads, "
        "minus the time of the same chain without it. Half of the rows fit into host memory; the others get an eighth of the needed memory.",
        columns(added, saved.CELLS),
    )
    return document(
        "# The cost of planning on the shapes of models",
        listed(described),
        "A swapper runs the uses of ZeRO-3 with everything on a drive, or rounds over values of 64 KiB to 4 MiB, on a store that moves no bytes. CPU is "
        "the time of the calling thread in the calls of a step, including the store and the engine, as the median of the measured steps. The floor is the "
        f"time of a drive of {speeds[0] / 1e9:g} GB/s read and {speeds[1] / 1e9:g} written, which serves one block after another, for the bytes of a step. "
        f"Transfers {'take that time' if timed else 'end immediately'}.",
        columns(found, _CELLS),
        *(about_saved if added else ()),
    )


def _over_floor(one: Figures) -> str:
    reached = one.moved and one.floor_seconds <= one.seconds * 1.05
    return f"{one.floor_seconds / one.seconds:.2f}" if reached else ""


_CELLS: dict[str, Callable[[Figures], str]] = {
    "shape": lambda one: one.title,
    "values": lambda one: f"{one.values}",
    "GB of values, in memory": lambda one: (
        f"{one.held_bytes / 1e9:.3g}, {one.memory_bytes / 1e9:.3g}"
    ),
    "uses a step": lambda one: f"{one.uses}",
    "CPU us a use": lambda one: f"{one.cpu_seconds / one.uses * 1e6:.0f}",
    "in the first step": lambda one: f"{one.first_seconds / one.uses * 1e6:.0f}",
    "GB read + written": lambda one: f"{one.read_bytes / 1e9:.3g} + {one.written_bytes / 1e9:.3g}",
    "over the least": lambda one: f"{one.moved / one.least_bytes:.3f}" if one.least_bytes else "",
    "floor, s": lambda one: f"{one.floor_seconds:.3g}",
    "CPU / floor": lambda one: f"{one.cpu_seconds / one.floor_seconds:.4f}" if one.moved else "",
    "floor / time": _over_floor,
}


def _row(one: Figures) -> str:
    return columns([one], _CELLS).splitlines()[-1]


if __name__ == "__main__":
    command.run(main, "sweeps.planning")
