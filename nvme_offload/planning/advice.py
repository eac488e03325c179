"""The cheapest change of the options with which training fits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import known
from .model import Model
from .passes import Work
from .placement import INFERENCE, STRATEGIES, Strategy, World
from .plan import UNLIMITED_BYTES, Drive, Machine, Plan, drive_described, fastest, plans


@dataclasses.dataclass(frozen=True)
class Question:
    """The options of `plan`.

    model, machine, world, work, budget: as for `plans`. state_format, way: the required format of states
    on the drive, and the required door; None for any. inference: forward passes only.
    """

    model: Model
    machine: Machine
    world: World
    work: Work
    budget: int | None = None
    state_format: str | None = None
    way: str | None = None
    inference: bool = False

    @property
    def strategies(self) -> Sequence[Strategy]:
        """The strategies that the options allow."""
        return [
            each
            for each in (INFERENCE if self.inference else STRATEGIES)
            if self.way in (None, each.door)
            and (self.state_format in (None, each.state_format) or not each.ours)
        ]

    def answers(self) -> list[Plan]:
        """A plan for each allowed strategy."""
        found = self.model, self.machine, self.world, self.work, self.budget, self.strategies
        return plans(*found)


class Change(NamedTuple):
    """A change that helps. words: the change in words; plan: the plan that then fits."""

    words: str
    plan: Plan


class _Lever(NamedTuple):
    """*cost*: a power of two, so that a lever costs more than all cheaper ones together."""

    cost: int
    words: str
    pull: Callable[[Question], Question]


def cheapest_change(question: Question) -> Change | None:
    """The cheapest change of *question* with which training fits; None if all changes together do not
    suffice.

    Changes are tried alone and together, in the order of their cost: another state format, another way
    to train, activation checkpointing, activations on the drive, no "--budget", a smaller micro-batch, up
    to twice the host memory, more space on the drive, any amount of host memory. Of memory and drive
    space the least amount that suffices is named.
    """
    levers = list(_levers(question))
    tries = [
        each
        for count in range(1, len(levers) + 1)
        for each in itertools.combinations(levers, count)
        if count <= 4
    ]
    for each in sorted(tries, key=lambda each: sum(lever.cost for lever in each)):
        changed = question
        for lever in each:
            changed = lever.pull(changed)
        if fastest(changed.answers()) is None:
            continue
        amounts = []
        if changed.machine.host_bytes > question.machine.host_bytes:
            changed, said = _least_host(question, changed)
            amounts.append(said)
        if changed.machine.free_bytes > question.machine.free_bytes:
            changed, said = _least_drive(question, changed)
            amounts.append(said)
        chosen = known(fastest(changed.answers()))
        words = [lever.words for lever in each if lever.words]
        return Change(" and ".join([*words, *amounts]), chosen)
    return None


def _levers(question: Question) -> list[_Lever]:
    work = question.work
    found = []
    if question.state_format is not None:
        found.append(
            _Lever(1, "another state format", lambda q: dataclasses.replace(q, state_format=None))
        )
    if question.way is not None:
        found.append(_Lever(2, "another way to train", lambda q: dataclasses.replace(q, way=None)))
    if work.tokens and not question.inference:
        if not work.recomputes:
            found.append(
                _Lever(
                    4,
                    "activation checkpointing (--activations checkpoint)",
                    lambda q: _working(q, activations="checkpoint"),
                )
            )
        if work.activations != "checkpoint-drive":
            found.append(
                _Lever(
                    8,
                    "checkpointed activations on the drive (--activations checkpoint-drive)",
                    lambda q: _working(q, activations="checkpoint-drive"),
                )
            )
    if question.budget is not None:
        found.append(_Lever(16, "no --budget", lambda q: dataclasses.replace(q, budget=None)))
    if work.tokens and work.micro_batch > 1:
        found.append(
            _Lever(
                32,
                f"--micro-batch 1 --accumulate {work.accumulation * work.micro_batch}",
                lambda q: _working(
                    q, micro_batch=1, accumulation=work.accumulation * work.micro_batch
                ),
            )
        )
    twice = 2 * question.machine.host_bytes
    found.append(_Lever(64, "", lambda q: _machine(q, host_bytes=twice)))
    found.append(_Lever(128, "", lambda q: _machine(q, drives=_roomy(q.machine))))
    found.append(_Lever(256, "", lambda q: _machine(q, host_bytes=UNLIMITED_BYTES)))
    return found


def _working(question: Question, **changes: object) -> Question:
    return dataclasses.replace(question, work=question.work._replace(**changes))  # type: ignore[arg-type]


def _machine(question: Question, **changes: object) -> Question:
    return dataclasses.replace(
        question,
        machine=dataclasses.replace(question.machine, **changes),  # type: ignore[arg-type]
    )


def _roomy(machine: Machine) -> tuple[Drive, ...]:
    """Its drives with unlimited space; without drives, one of unknown speed."""
    roomy = [dataclasses.replace(drive, free_bytes=UNLIMITED_BYTES) for drive in machine.drives]
    return tuple(roomy) or (dataclasses.replace(drive_described(1, 1), speeds={}),)


def _least_host(before: Question, question: Question) -> tuple[Question, str]:
    """*question* with the least host memory that suffices, in whole GB."""
    low, high = before.machine.host_bytes // 10**9, -(-question.machine.host_bytes // 10**9)
    while high - low > 1:
        middle = (low + high) // 2
        fits = fastest(_machine(question, host_bytes=middle * 10**9).answers()) is not None
        low, high = (low, middle) if fits else (middle, high)
    return _machine(question, host_bytes=high * 10**9), f"{high} GB of host memory"


def _least_drive(before: Question, question: Question) -> tuple[Question, str]:
    """*question* with the least drive space that suffices, in whole GB."""
    fitting = [plan for plan in question.answers() if plan.fits]
    least = min(plan.drive_bytes for plan in fitting) * question.world.ranks
    size = max(-(-least // 10**9), 1)
    count = len({drive.identity or drive.path for drive in question.machine.drives})
    drives = tuple(
        dataclasses.replace(drive, free_bytes=-(-size * 10**9 // count))
        for drive in question.machine.drives
    )
    said = f"{size} GB free on the drive"
    if not before.machine.drives:
        said = f"a drive with {size} GB free (--path DIR)"
    return _machine(question, drives=drives), said
