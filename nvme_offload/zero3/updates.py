"""`Updates`: the queued updates of an engine's sub-groups."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import InvariantError, OffloadError
from ..swap.tier import Tier
from ..update.queue import Job, Pending, UpdateQueue, queues
from . import awaited


class _SubGroup(Pending):
    """The partitions of *params*, the parameters of sub-group *index*, whose update is in *queue*."""

    def __init__(
        self, queue: UpdateQueue, index: int, params: Sequence[torch.nn.Parameter]
    ) -> None:
        super().__init__()
        self.index = index
        self._params = params
        self._use = functools.partial(queue.use, self)

    def hold(self) -> None:
        for param in self._params:
            awaited.hold(param, self._use)

    def order(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def restore(self) -> None:
        for param in self._params:
            awaited.let_go(param)


class Updates(UpdateQueue):
    """Makes the updates of one step at a time, which read and write in *tier*. If an update fails,
    the remaining updates are not made: until `abandon`, callers that wait for them receive the
    error, once, or `partly_applied`.

    Attributes: *uses*, the value of *now*, an increasing number, at the first use of each sub-group
    of the step.
    """

    def __init__(self, tier: Tier, now: Callable[[], int]) -> None:
        super().__init__()
        self.tier = tier
        self.uses: dict[int, int] = {}
        self._now = now

    def start(
        self,
        step: int,
        sub_groups: Mapping[int, Sequence[torch.nn.Parameter]],
        make: Callable[[int], Any],
        last: Callable[[], None],
    ) -> None:
        """Call *make* for each of *sub_groups* of the *step*th step, given with their parameters, in
        their order, then *last*. *make*: see `Job`. The updates of the step before must be complete.
        """
        with self.lock:
            if self.has_jobs:
                raise InvariantError("updates of a step begin before the last ones have ended")
            self.uses = {}
            self._failed = True  # until all are queued
            note = f"in the updates of step {step}"
            for index, params in sub_groups.items():
                pending = _SubGroup(self, index, params)
                self.put(Job(functools.partial(make, index), [pending], note, index))
            self.put(Job(last, note=note))
            self._failed = False

    def _is_void(self) -> bool:
        return self.is_dead or self._failed

    def _give_up(self) -> BaseException | None:
        return partly_applied()

    def _used(self, pending: Pending) -> None:
        if isinstance(pending, _SubGroup):
            self.uses[pending.index] = self._now()

    def _before_wait(self) -> None:
        self.tier.release_locks()


def partly_applied() -> OffloadError:
    """The error for states that belong to no completed step."""
    return OffloadError(
        "the last step was only partly applied, because an exception ended it: load_checkpoint() brings back the states of the last checkpoint"
    )


def quiesce(tier: Tier) -> None:
    """Wait until no engine makes updates in *tier*. Failures are left to the callers that wait."""
    for updates in _of(tier):
        updates.quiesce()


@contextlib.contextmanager
def paused(tier: Tier) -> Iterator[None]:
    """Context in which no update uses memory of *tier*."""
    with contextlib.ExitStack() as stack:
        for updates in _of(tier):
            stack.enter_context(updates.paused())
        yield


def beside(tier: Tier) -> bool:
    """Whether this thread's uses of *tier*'s values may interleave with uses by updates."""
    return not is_worker() and any(updates.holds for updates in _of(tier))


def is_worker() -> bool:
    """Whether this is a thread that makes updates."""
    return any(queue.is_worker() for queue in queues())


def _of(tier: Tier) -> list[Updates]:
    return [queue for queue in queues() if isinstance(queue, Updates) and queue.tier is tier]
