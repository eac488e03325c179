"""`Updates`: the updates of a step that has returned, and the thread that makes them."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import InvariantError, OffloadError
from ..io.waits import wait_for
from ..swap.tier import Tier
from . import awaited

_all: weakref.WeakSet[Updates] = weakref.WeakSet()


class Update(NamedTuple):
    """The update of *sub_group*, which has *params*. *make* makes it, and returns the event at its end
    if it runs on a GPU, otherwise None.
    """

    sub_group: int
    params: Sequence[torch.nn.Parameter]
    make: Callable[[], Any]


class Updates:
    """Makes updates, one step at a time, in a thread that ends with the step. Updates read and
    write in *tier*. *now* returns an increasing number; uses with equal numbers count as
    simultaneous.

    If an update fails, the remaining updates are not made: the step was only partly applied. The
    next caller that waits receives the error. Until `abandon`, later callers receive
    `partly_applied`.

    Attributes: *uses*, the value of *now* at the first use of each sub-group of the step;
    *waited_seconds*, which callers have waited, and *drive_seconds*, which the thread has waited
    for the drive, both since the last call of `take_waits`.
    """

    def __init__(self, tier: Tier, now: Callable[[], int]) -> None:
        self.tier = tier
        self.uses: dict[int, int] = {}
        self._now = now
        self.waited_seconds = 0.0
        self.drive_seconds = 0.0
        self._lock = threading.Condition()  # guards all attributes
        self._left: dict[int, Update] = {}  # updates that are not made yet
        self._held: dict[int, Update] = {}  # updates whose parameters are not used yet
        self._ends: dict[int, Any] = {}  # the events at the end of updates
        self._thread: threading.Thread | None = None  # while there are updates to make
        self._busy = False
        self._paused = 0
        self._beside = False  # no caller has waited for all updates since they were started
        self._stopping = False
        self._failed = False
        self._error: BaseException | None = None  # the error, until a caller has received it
        self._afterwards: Callable[[], None] | None = None
        _all.add(self)
        weakref.finalize(self, _end, weakref.ref(self))

    @property
    def pending(self) -> bool:
        """Whether updates are being made, or have failed."""
        with self._lock:
            return self._thread is not None or self._failed

    def start(self, step: int, updates: Sequence[Update], last: Callable[[], None]) -> None:
        """Make *updates*, of the *step*th step, in this order, then call *last*. The updates of the
        step before must be complete.
        """
        with self._lock:
            if self._thread is not None or self._failed:
                raise InvariantError("updates of a step begin before the last ones have ended")
            try:
                self.uses = {}
                self._ends = {}
                self._beside = True
                self._left = {update.sub_group: update for update in updates}
                self._held = dict(self._left)
                for update in updates:
                    for param in update.params:
                        awaited.hold(param, functools.partial(self.use, update.sub_group))
                self._thread = threading.Thread(
                    target=self._run,
                    args=(step, [*updates, Update(-1, (), last)]),
                    name="nvme_offload updates",
                    daemon=True,
                )
                self._thread.start()
            except BaseException:
                self._thread, self._failed = None, True
                raise

    # Called by threads that need the updates.

    def use(self, index: int) -> None:
        """Wait until sub-group *index* is updated. Raises: the error, if updates failed."""
        if self.is_worker():
            return
        with self._lock:
            self._wait_for(lambda: index not in self._left or self._failed)
            if index in self._left:
                self._tell()
            if index in self._held:
                self.uses[index] = self._now()
                self._let_go(index)
            end = self._ends.get(index)
        if end is not None:
            end.synchronize()

    def wait(self) -> None:
        """Wait until all updates are made. Raises: the error, if updates failed."""
        if self.is_worker():
            return
        with self._lock:
            self._wait_for(lambda: self._thread is None)
            if self._failed:
                self._tell()
            self._beside = False
            for index in list(self._held):
                self._let_go(index)

    def quiesce(self) -> None:
        """Wait until no update is being made or pending."""
        if not self.is_worker():
            with self._lock:
                self._wait_for(lambda: self._thread is None)
                self._beside = False

    def abandon(self) -> BaseException | None:
        """Forget a failure, after all updates that can be made. Returns: the error, if no caller
        has received it.
        """
        self.quiesce()
        with self._lock:
            error, self._error = self._error, None
            self._failed = False
            self._left.clear()
            for index in list(self._held):
                self._let_go(index)
            return error

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which no update is being made."""
        with self._lock:
            self._paused += 1
        try:
            with self._lock:
                self._wait_for(lambda: not self._busy)
            yield
        finally:
            with self._lock:
                self._paused -= 1
                self._lock.notify_all()

    def afterwards(self, act: Callable[[], None]) -> bool:
        """Make the thread call *act* when it ends. Returns immediately: whether there is a thread."""
        with self._lock:
            if self._thread is not None:
                self._afterwards = act
            return self._thread is not None

    def is_worker(self) -> bool:
        """Whether this is the thread that makes the updates."""
        return threading.current_thread() is self._thread

    def take_waits(self) -> tuple[float, float]:
        """Return *waited_seconds* and *drive_seconds*, and reset both to 0."""
        with self._lock:
            waits = self.waited_seconds, self.drive_seconds
            self.waited_seconds = self.drive_seconds = 0.0
            return waits

    def stop(self) -> None:
        """Make no update after the current one."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
            thread = self._thread
        if thread is not None and not self.is_worker():
            thread.join()

    def _wait_for(self, is_true: Callable[[], bool]) -> None:
        def ended() -> bool:
            self._notice_death()
            return is_true()

        began = time.perf_counter()
        self.tier.release_locks()
        try:
            wait_for(self._lock, ended)
        finally:
            self.waited_seconds += time.perf_counter() - began

    def _notice_death(self) -> None:
        """Mark the updates as failed if an exception ended the thread between two of them."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread, self._busy = None, False
            self._failed |= bool(self._left)

    def _tell(self) -> None:
        """Raises: the error, if no caller has received it; otherwise `partly_applied`."""
        error, self._error = self._error, None
        try:
            raise error or partly_applied()
        finally:
            del error

    def _let_go(self, index: int) -> None:
        for param in self._held.pop(index).params:
            awaited.let_go(param)

    # In the thread.

    def _run(self, step: int, updates: Sequence[Update]) -> None:
        try:
            for update in updates:
                with self._lock:
                    self._lock.wait_for(lambda: not self._paused or self._stopping)
                    if self._stopping or self._failed:
                        self._failed = True
                        return
                    self._busy = True
                before = self.tier.swapper.stats().waited_seconds
                end = update.make()
                waited = self.tier.swapper.stats().waited_seconds - before
                with self._lock:
                    self._busy = False
                    self.drive_seconds += waited
                    self._left.pop(update.sub_group, None)
                    if end is not None:
                        self._ends[update.sub_group] = end
                    self._lock.notify_all()
                del update
        except BaseException as error:
            if hasattr(error, "add_note"):
                error.add_note(f"in the updates of step {step}")
            with self._lock:
                self._failed, self._error = True, error
        finally:
            with self._lock:
                self._busy, self._thread = False, None
                afterwards, self._afterwards = self._afterwards, None
                self._lock.notify_all()
            if afterwards is not None:
                afterwards()


def partly_applied() -> OffloadError:
    """The error for states that belong to no completed step."""
    return OffloadError(
        "the last step was only partly applied, because an exception ended it: load_checkpoint() brings back the states of the last checkpoint"
    )


def quiesce(tier: Tier) -> None:
    """Wait until no engine makes updates that read and write in *tier*. A failure is raised to the
    callers that wait for the updates.
    """
    for updates in _of(tier):
        updates.quiesce()


@contextlib.contextmanager
def paused(tier: Tier) -> Iterator[None]:
    """Context in which no update that reads and writes in *tier* is being made, so that no update
    uses memory of *tier*.
    """
    with contextlib.ExitStack() as stack:
        for updates in _of(tier):
            stack.enter_context(updates.paused())
        yield


def beside(tier: Tier) -> bool:
    """Whether this thread's uses of *tier*'s values may be concurrent with uses by updates. Their
    interleaving then differs from step to step.
    """
    return not is_worker() and any(updates._beside for updates in _of(tier))


def quiesce_all() -> None:
    """Wait until no engine makes updates."""
    for updates in list(_all):
        updates.quiesce()


def is_worker() -> bool:
    """Whether this is a thread that makes updates."""
    return any(updates.is_worker() for updates in list(_all))


def _of(tier: Tier) -> list[Updates]:
    return [updates for updates in list(_all) if updates.tier is tier]


def _end(reference: weakref.ref[Updates]) -> None:
    updates = reference()
    if updates is not None:  # the process ends, and no thread may be in a call of torch then
        updates.stop()


os.register_at_fork(before=quiesce_all)
