"""`python -m sweeps.scheduling`: what a use of a value costs in planning, and how many bytes move
beside the least that could.

Transfers end at once and move nothing, so what is timed is `Schedule` alone, in CPU seconds of the
thread, after the order is learned. `python -m sweeps.planning` measures `TensorSwapper` on real
shapes.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import click

from nvme_offload.swap.schedule import Schedule, Transfer

KIB = 1024


class Call(NamedTuple):
    """What a user does: *action* "create", "need", "release" or "discard"."""

    action: str
    name: str
    nbytes: int
    changed: bool


def cyclic(count: int, size: int) -> Iterator[Call]:
    """All values, changed, in one order."""
    for number in range(count):
        yield Call("need", f"v{number}", size, True)
        yield Call("release", f"v{number}", size, True)


def there_and_back(count: int, size: int) -> Iterator[Call]:
    """All values, unchanged, forward and backward."""
    for number in [*range(count), *reversed(range(count))]:
        yield Call("need", f"v{number}", size, False)
        yield Call("release", f"v{number}", size, False)


def zero3(count: int, size: int) -> Iterator[Call]:
    """Of every 7 values 4 are parameters, 1 their gradients and 2 their states; forward, backward
    and update.
    """
    groups = max(count // 7, 1)
    parameters = [[f"p{group}.{number}" for number in range(4)] for group in range(groups)]
    for group in [*parameters, *(group[::-1] for group in parameters[::-1])]:
        for name in group:
            yield Call("need", name, size, False)
            yield Call("release", name, size, False)
        if group[0].endswith(".3"):
            index = int(group[0][1:].split(".")[0])
            yield Call("create", f"g{index}", 4 * size, True)
            yield Call("release", f"g{index}", 4 * size, True)
    for index, group in enumerate(parameters):
        yield Call("need", f"g{index}", 4 * size, False)
        yield Call("discard", f"g{index}", 4 * size, False)
        states = [f"s{index}.{number}" for number in range(2)]
        for name in states:
            yield Call("need", name, 6 * size, True)
        for name in group:
            yield Call("create", name, size, True)
            yield Call("release", name, size, True)
        for name in states:
            yield Call("release", name, 6 * size, True)


ORDERS: dict[str, Callable[[int, int], Iterator[Call]]] = {
    "cyclic": cyclic,
    "there and back": there_and_back,
    "ZeRO-3": zero3,
}


class Drive:
    """A drive that is done at once, under a `Schedule`."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.bytes_moved = 0
        self.under_way: list[Transfer] = []

    def pump(self) -> None:
        """End what is under way, as a swapper notes it at its next call, and start what
        comes next.
        """
        ended, self.under_way = self.under_way, []
        for transfer in ended:
            self.bytes_moved += transfer.nbytes
            self.schedule.finished(transfer, True)
        self.under_way += self.schedule.plan()

    def do(self, call: Call) -> None:
        """One call of the user."""
        schedule = self.schedule
        if call.action == "release":
            schedule.release(call.name, call.changed, None)
        elif call.action == "discard":
            while schedule.blocking_transfer(call.name) is not None:
                self.pump()
            schedule.discard(call.name)
        else:
            if call.action == "create" or call.name not in schedule:
                while schedule.blocks_create(call.name, call.nbytes) is not None:
                    self.pump()
                schedule.create(call.name, call.nbytes)
            else:
                schedule.need(call.name)
            self.pump()
            while not schedule.ready(call.name):
                self.pump()
            schedule.take(call.name)
            return
        self.pump()


class Planned(NamedTuple):
    """A period, learned: microseconds and operations a use, bytes moved."""

    microseconds: float
    operations: float
    bytes_moved: int
    uses: int


def plan(
    order: Callable[[int, int], Iterator[Call]],
    count: int,
    size: int,
    share: float,
    periods: int = 4,
) -> Planned:
    """Walk *order* with memory for *share* of its bytes; the last period of *periods*."""
    calls = list(order(count, size))
    total = sum({call.name: call.nbytes for call in calls}.values())
    schedule = Schedule(int(share * total) // 4096 * 4096)
    drive = Drive(schedule)
    uses = sum(call.action in ("create", "need") for call in calls)
    for _ in range(periods):
        moved, operations = drive.bytes_moved, schedule.operations
        began = time.thread_time()
        for call in calls:
            drive.do(call)
        seconds = time.thread_time() - began
        schedule.step()
    return Planned(
        seconds / uses * 1e6,
        (schedule.operations - operations) / uses,
        drive.bytes_moved - moved,
        uses,
    )


@click.command()
@click.option("--counts", default="256,2048,16384", show_default=True, help="Numbers of values.")
@click.option("--rounds", default=3, show_default=True, help="The median of so many runs is shown.")
def main(counts: str, rounds: int) -> None:
    """Print a Markdown table of planning costs."""
    click.echo(
        "| order | memory | values | uses | CPU us a use | operations a use | bytes moved, of all |"
    )
    click.echo("|---|---|---|---|---|---|---|")
    for (name, order), share, count in itertools.product(
        ORDERS.items(), (0.5, 0.2), map(int, counts.split(","))
    ):
        size = 256 * KIB
        runs = [plan(order, count, size, share) for _ in range(rounds)]
        middle = statistics.median(run.microseconds for run in runs)
        total = sum({call.name: call.nbytes for call in order(count, size)}.values())
        last = runs[-1]
        click.echo(
            f"| {name} | {share:.0%} | {count} | {last.uses} | {middle:.1f} | {last.operations:.1f} | {last.bytes_moved / total:.2f} |"
        )


if __name__ == "__main__":
    main()
