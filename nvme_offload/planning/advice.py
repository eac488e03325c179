"""The plans that matter to a user, and the cheapest change of the options with which training fits."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..errors import known
from .model import Model
from .passes import Work
from .placement import INFERENCE, STRATEGIES, Strategy, World
from .plan import AS_FAST, DESCRIBED_PATH, UNLIMITED_BYTES, Drive, Machine, Plan, fastest, plans


@dataclasses.dataclass(frozen=True)
class Question:
    """The options of `plan`, and as for `plans`. *state_format*, *way*: the required format of
    states on the drive, and the required door or title. *inference*: forward passes only.
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
            if self.way in (None, each.door, each.title)
            and (self.state_format in (None, each.state_format) or not each.ours)
        ]

    def answers(self) -> list[Plan]:
        """A plan for each allowed strategy."""
        found = self.model, self.machine, self.world, self.work, self.budget, self.strategies
        return plans(*found)


def faster(found: Sequence[Plan], chosen: Plan) -> list[Plan]:
    """The plans that are faster than *chosen*, and than every plan with fewer concessions, the
    fastest first.
    """
    better = [chosen]
    timed = [(plan.seconds, plan) for plan in found if plan.fits and plan.seconds is not None]
    for seconds, plan in sorted(timed, key=lambda each: (each[1].concession, each[0])):
        compared = [
            other
            for other in better[1:]
            if plan.rounding >= other.rounding and plan.clipping >= other.clipping
        ]
        if all(seconds * AS_FAST < (other.seconds or 0.0) for other in (chosen, *compared)):
            better.append(plan)
    return sorted(better[1:], key=lambda plan: plan.seconds or math.inf)


def shown(found: Sequence[Plan], chosen: Plan | None, count: int) -> list[Plan]:
    """At most *count* of the plans, in their order: the way of *chosen*, the best of each other
    `door`, which fits or lacks the least, and the fastest plans that are faster.
    """
    ranked = sorted(found, key=_rank)
    doors = {plan.strategy.door: plan.strategy.name for plan in reversed(ranked)}
    others = ranked
    if chosen is not None:
        doors[chosen.strategy.door] = chosen.strategy.name
        others = faster(found, chosen)
    names = [*doors.values(), *(plan.strategy.name for plan in others)]
    wanted = list(dict.fromkeys(names))[:count]
    return [plan for plan in found if plan.strategy.name in wanted]


def _rank(plan: Plan) -> tuple[object, ...]:
    lacking = plan.shortage, len(plan.problems)
    return (*lacking, plan.concession, plan.seconds or math.inf)


def hiding(question: Question, found: Sequence[Plan]) -> tuple[Plan, int] | None:
    """The plan with the least rounding whose drive a larger fitting micro-batch hides, and the smallest
    such batch; None if the batch hides the drive already.
    """
    tries = [plan for plan in found if plan.fits and plan.free_tokens]
    for plan in sorted(tries, key=lambda plan: (plan.rounding, plan.free_tokens)):
        micro_batch = math.ceil((plan.free_tokens or 0.0) / question.work.sequence)
        if micro_batch <= question.work.micro_batch:
            return None
        changed = _working(question, micro_batch=micro_batch)
        again = {each.strategy.name: each for each in changed.answers()}
        if again[plan.strategy.name].fits:
            return plan, micro_batch
    return None


class Change(NamedTuple):
    """A change that helps. *found*: all plans with it. *finer*: a plan that concedes less and fits with more
    space on the drive.
    """

    words: str
    plan: Plan
    found: list[Plan]
    finer: Plan | None


_Lever = tuple[str, Callable[[Question], Question]]  # in words, and the changed question


def cheapest_change(question: Question) -> Change | None:
    """The cheapest of at most four changes with which training fits, in the order of docs/planning.md,
    with the least amount of memory or drive space that suffices.
    """
    levers = _levers(question)
    numbers = range(len(levers))
    tries = [each for count in range(1, 5) for each in itertools.combinations(numbers, count)]
    # a lever costs more than all before it together
    for each in sorted(tries, key=lambda each: sum(1 << number for number in each)):
        changed, words = question, []
        for said, pull in (levers[number] for number in each):
            changed = pull(changed)
            words += [said] * bool(said)
        if fastest(changed.answers()) is None:
            continue
        if changed.machine.host_bytes > question.machine.host_bytes:
            changed, said = _least_host(question, changed)
            words.append(said)
        roomy = known(fastest(changed.answers()))
        if changed.machine.free_bytes > question.machine.free_bytes:
            changed, said = _least_drive(question, changed)
            words.append(said)
        found = changed.answers()
        plan = known(fastest(found))
        finer = roomy if roomy.concession < plan.concession else None
        return Change(" and ".join(words), plan, found, finer)
    return None


def _levers(question: Question) -> list[_Lever]:
    """The changes that apply, the cheapest first."""
    work = question.work
    count = work.accumulation * work.micro_batch
    saves = work.tokens and not question.inference
    levers: list[tuple[object, str, Callable[[Question], Question]]] = [
        (question.state_format, "another state format", partial(_with, state_format=None)),
        (question.way, "another way to train", partial(_with, way=None)),
        (
            saves and not work.recomputes,
            "activation checkpointing (--activations checkpoint)",
            partial(_working, activations="checkpoint"),
        ),
        (
            saves and work.activations != "checkpoint-drive",
            "checkpointed activations on the drive (--activations checkpoint-drive)",
            partial(_working, activations="checkpoint-drive"),
        ),
        (question.budget is not None, "no --budget", partial(_with, budget=None)),
        (
            work.tokens and work.micro_batch > 1,
            f"--micro-batch 1 --accumulate {count}",
            partial(_working, micro_batch=1, accumulation=count),
        ),
        (True, "", partial(_machine, host_bytes=2 * question.machine.host_bytes)),
        (True, "", lambda asked: _machine(asked, drives=_roomy(asked.machine))),
        (True, "", partial(_machine, host_bytes=UNLIMITED_BYTES)),
    ]
    return [(words, pull) for applies, words, pull in levers if applies]


def _with(question: Question, **changes: Any) -> Question:
    return dataclasses.replace(question, **changes)


def _working(question: Question, **changes: Any) -> Question:
    return _with(question, work=question.work._replace(**changes))


def _machine(question: Question, **changes: Any) -> Question:
    return _with(question, machine=dataclasses.replace(question.machine, **changes))


def _roomy(machine: Machine) -> tuple[Drive, ...]:
    """Its drives with unlimited space; without drives, one of unknown speed."""
    roomy = [dataclasses.replace(drive, free_bytes=UNLIMITED_BYTES) for drive in machine.drives]
    return tuple(roomy) or (Drive(DESCRIBED_PATH, UNLIMITED_BYTES),)


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
    least = min(plan.drive_bytes for plan in question.answers() if plan.fits) * question.world.ranks
    size = max(-(-least // 10**9), 1)
    count = len({drive.identity or drive.path for drive in question.machine.drives})
    each = -(-size * 10**9 // count)
    drives = tuple(dataclasses.replace(drive, free_bytes=each) for drive in question.machine.drives)
    said = f"{size} GB free on the drive"
    if not before.machine.drives:
        said = f"a drive with {size} GB free (--path DIR)"
    return _machine(question, drives=drives), said
