"""`UpdateQueue`: updates that are made after the call that asks for them has returned, and the
thread that makes them. The first use of an updated tensor waits for its update.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..errors import UsageError
from ..io.closing import fail_at_exit
from ..io.section import give_back
from ..io.weak_list import WeakList

# A signal that comes just before a thread blocks does not wake it. Source: acquire_timed of
# CPython's Modules/_threadmodule.c, which looks at signals once the lock is taken or a signal has
# cut the wait short.
_SIGNAL_SECONDS = 0.5
# The thread of a queue without jobs looks this often whether the queue still exists.
_LOOK_SECONDS = 5.0
_queues: WeakList[UpdateQueue] = WeakList()


class Pending:
    """Tensors whose first use waits for their updates: a parameter, or the parameters of a ZeRO-3
    sub-group.

    Attributes: *left*, the number of updates that are not made yet; *event*, the CUDA event at the
    end of the last one, None if it ran on the CPU. Both change under the queue's lock.
    """

    def __init__(self) -> None:
        self.left = 0
        self.event: Any = None

    def hold(self) -> None:
        """Make every use of the tensors call `UpdateQueue.use` first. It may be called again."""

    def order(self) -> None:
        """Order later work of this thread on a GPU after the updates, which were made."""

    def restore(self) -> None:
        """End `hold`."""


class Job(NamedTuple):
    """An update of *pending*. *make* makes it, and returns the CUDA event at its end if it runs on a
    GPU, otherwise None. *note* is added to an exception. *subject* is the bucket or sub-group, None for
    the end of a step.
    """

    make: Callable[[], Any]
    pending: Sequence[Pending] = ()
    note: str = ""
    subject: Any = None


class UpdateQueue:
    """Jobs that a separate thread makes one after another.

    A job that fails stops the queue. The next caller that waits receives the error; a later wait
    tries the job again. While the queue is *void*, no job is made: once an exception has ended the
    thread outside of a job, or by the rule of a subclass.

    Attributes: *lock*, held while several jobs are queued together; *waited_seconds*, the time that
    callers have waited since it was last set to 0.
    Lifetime: the thread ends with `stop`, when the queue is garbage-collected, or with the process,
    after the jobs.
    """

    def __init__(self) -> None:
        self._make_locks()
        self.waited_seconds = 0.0
        self._jobs: deque[Job] = deque()
        self._current: Job | None = None
        self._failed = False  # the first job has failed
        self._error: BaseException | None = None  # the error, until a caller has received it
        self._held: dict[Pending, None] = {}  # those that have not been used yet
        self._paused = 0
        self._afterwards: Callable[[], None] | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        _queues.add(self)
        weakref.finalize(self, _end, weakref.ref(self), self._changed)

    def begin_in_child(self) -> None:
        """In a forked child, which lacks the other threads: no thread holds locks, or makes jobs."""
        self._make_locks()
        if self._is_done():
            self._thread = None  # it has not died in the midst of a job

    def _make_locks(self) -> None:
        # `with` of a Condition runs Python code, in which Ctrl-C would leave the lock held
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)

    # For subclasses.

    def _is_void(self) -> bool:
        """Whether no job will be made."""
        return self.is_dead

    def _give_up(self) -> BaseException | None:
        """The queue is void: the error for callers that wait; None if they may continue."""
        self._drop()
        return None

    def _ended(self, job: Job, error: BaseException | None) -> None:
        """*job* has ended, with *error* if it failed. The caller holds the lock."""

    def _used(self, pending: Pending) -> None:
        """*pending*, which was updated, is used for the first time. The caller holds the lock."""

    def _restored_all(self) -> None:
        """No use of any tensor waits any longer. The caller holds the lock."""

    def _before_wait(self) -> None:
        """This thread is about to wait for a job."""

    # The state.

    @property
    def told(self) -> bool:
        """Whether a caller has received an error, and no caller has waited since."""
        return self._failed and self._error is None

    @property
    def is_dead(self) -> bool:
        """Whether an exception has ended the thread."""
        return self._thread is not None and not self._thread.is_alive() and not self._stopping

    @property
    def is_running(self) -> bool:
        """Whether a job is in progress, or will begin without a further call."""
        with self.lock:
            return not self._is_idle()

    @property
    def has_jobs(self) -> bool:
        """Whether a job is in progress or queued."""
        with self.lock:
            return not self._is_done()

    @property
    def holds(self) -> bool:
        """Whether any tensor was not used since its update was queued."""
        return bool(self._held)

    def is_worker(self) -> bool:
        """Whether this is the thread that makes the jobs."""
        return threading.current_thread() is self._thread

    # Queueing updates.

    def put(self, job: Job) -> None:
        """Queue *job*. Uses of its tensors wait from now on."""
        with self.lock:
            for pending in job.pending:
                self._held[pending] = None  # first: `_drop` undoes the rest after an exception
                pending.left += 1
                pending.hold()
            self._jobs.append(job)
            if self._thread is None:
                self._stopping = False
                self._thread = threading.Thread(
                    target=_work,
                    args=(weakref.ref(self), self._changed),
                    name="nvme_offload updates",
                    daemon=True,
                )
                self._thread.start()
            self._changed.notify_all()

    def arrange(self, order: Callable[[Job], Any]) -> list[Job]:
        """Make the queued jobs in the *order* of its results. Returns: the jobs."""
        with self.lock:
            self._jobs = deque(sorted(self._jobs, key=order))
            return list(self._jobs)

    # Waiting for updates.

    def wait(self) -> None:
        """Return when all jobs are made. Raises: the error of a job."""
        if self.is_worker():
            return
        self._wait(self._is_done)
        for pending in list(self._held):
            self._restore(pending)

    def use(self, pending: Pending) -> bool:
        """Wait for the updates of *pending*, before its first use. False if an update itself uses
        it. Raises: the error of a job.
        """
        if self.is_worker():
            return False
        self._wait(lambda: pending.left == 0)
        self._restore(pending, used=True)
        return True

    def check(self) -> None:
        """Raise the error, if no caller has received it; otherwise try the job again."""
        with self.lock:
            self._tell()
            self._try_again()

    def quiesce(self) -> bool:
        """Return when no job is in progress or will begin; True if all are made."""
        if self.is_worker():
            return False
        with self.lock:
            self._block(self._is_idle)
            return not self._jobs and not self._is_void()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which no job is made."""
        with self.lock:
            self._paused += 1
        try:
            self._block(lambda: self._current is None or self.is_dead)
            yield
        finally:
            with self.lock:
                self._paused -= 1
                self._changed.notify_all()

    def afterwards(self, act: Callable[[], None]) -> bool:
        """Make the thread call *act* when no job is left to make. Returns: whether there are any."""
        with self.lock:
            if self._is_idle():
                return False
            self._afterwards = act
            return True

    def abandon(self) -> BaseException | None:
        """Make the jobs that can be made, and drop the others, whose waits end. The queue can be used
        again. Returns: the error, if no caller has received it.
        """
        self.quiesce()
        with self.lock:
            error = self._error
            self._drop()
            if self.is_dead:
                self._thread = self._current = None
            return error

    def stop(self, *, finish: bool) -> None:
        """End the thread, after all jobs with *finish*; drop the remaining jobs and their waits."""
        if finish:
            self.quiesce()
        with self.lock:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
            if thread is not None and not self.is_worker():
                # Wait before joining: a `__del__` may call this in the midst of `use`, where this
                # thread holds the lock, and waiting releases it.
                self._block(lambda: self._thread is None or not thread.is_alive())
                thread.join()
            self._thread = None
        self._drop()

    # Internals.

    def _wait(self, is_done: Callable[[], bool]) -> None:
        with self.lock:
            if is_done():
                return
            if os.getpid() != self._process:
                raise UsageError(
                    "this process was forked while an update was pending, which only the parent process can make: wait for it before the fork, as "
                    "optimizer.synchronize() of an NVMeOptimizer does"
                )
            while not is_done():
                if self._is_void():
                    self._block(self._is_idle)
                    self._tell()
                    refusal = self._give_up()
                    if refusal is not None:
                        raise refusal
                    return
                self._try_again()
                self._block(lambda: is_done() or self._failed or self._is_void())
                if not is_done():
                    self._tell()

    def _block(self, is_true: Callable[[], bool]) -> None:
        began = time.perf_counter()
        self._before_wait()
        with self.lock:
            try:
                wait_for(self._changed, is_true)
            finally:
                self.waited_seconds += time.perf_counter() - began

    def _tell(self) -> None:
        """Raise the error, if no caller has received it. The queue does not keep it: its traceback
        keeps the caller's frames alive, and these keep the graph of a forward pass.
        """
        error, self._error = self._error, None
        if error is not None:
            if self._is_void():
                self._give_up()
            try:
                raise error
            finally:
                del error

    def _try_again(self) -> None:
        if self.told and not self._is_void():
            self._failed = False
            self._changed.notify_all()

    def _restore(self, pending: Pending, *, used: bool = False) -> None:
        if pending in self._held:
            pending.order()  # without the lock, since it may wait for a GPU
            with self.lock:
                if pending in self._held:
                    if used:
                        self._used(pending)
                    self._end_hold(pending)

    def _end_hold(self, pending: Pending) -> None:
        pending.restore()
        self._held.pop(pending, None)
        if not self._held:
            self._restored_all()

    def _drop(self) -> None:
        """Drop the queued jobs; waits for them end. No job may be in progress."""
        with self.lock:
            self._jobs.clear()
            self._failed, self._error = False, None
            for pending in list(self._held):
                pending.left = 0
                self._end_hold(pending)
            self._changed.notify_all()

    def _is_done(self) -> bool:
        return not self._jobs and self._current is None

    def _is_idle(self) -> bool:
        """Whether no job is in progress, and none will begin without a further call."""
        return self.is_dead or (
            self._current is None and (not self._jobs or self._failed or self._is_void())
        )

    # Called by the thread.

    def take(self) -> Job | None:
        """The next job, if one can be made now. The caller holds the lock."""
        if not self._jobs or self._paused or self._failed or self._is_void():
            return None
        self._current = self._jobs.popleft()
        return self._current

    def make(self, job: Job) -> None:
        """Make *job*, which `take` has returned."""
        error: BaseException | None = None
        event = None
        try:
            event = job.make()
        except BaseException as failure:
            error = failure
            if hasattr(error, "add_note"):
                error.add_note(job.note)
        with self.lock:
            for pending in job.pending if error is None else ():
                pending.left -= 1
                pending.event = event
            self._ended(job, error)
            if error is not None:
                self._jobs.appendleft(job)
                self._failed, self._error = True, error
            # last: an exception before this line ends the thread, and `is_dead` detects it
            self._current = None
            self._changed.notify_all()

    def act_afterwards(self) -> None:
        """Call the function that `afterwards` was given, if no job is left to make."""
        with self.lock:
            if not self._is_idle():
                return
            act, self._afterwards = self._afterwards, None
        if act is not None:
            act()


def wait_for(condition: threading.Condition, is_true: Callable[[], bool]) -> None:
    """As `threading.Condition.wait_for`, looking up now and then for signals."""
    while not condition.wait_for(is_true, _SIGNAL_SECONDS):
        pass


def quiesce_all() -> None:
    """Return when no queue of this process makes jobs, or will without a further call."""
    for queue in _queues:
        queue.quiesce()


def wait_for_all() -> None:
    """Return when all jobs of this process are made. Raises: the error of a job."""
    for queue in _queues:
        queue.wait()


def queues() -> list[UpdateQueue]:
    """The queues of this process."""
    return list(_queues)


def _work(reference: weakref.ref[UpdateQueue], changed: threading.Condition) -> None:
    """Make jobs. An exception outside of a job ends the thread, and the next wait raises it."""
    try:
        _make_jobs(reference, changed)
    except BaseException as error:
        queue = reference()
        if queue is not None:
            queue._error = error
            give_back(queue.lock)
            queue.act_afterwards()


def _make_jobs(reference: weakref.ref[UpdateQueue], changed: threading.Condition) -> None:
    """Take and make jobs. Holds a reference to the queue only while it makes one."""
    while True:
        with changed:
            while True:
                queue = reference()
                if queue is None:
                    return
                if queue._stopping:
                    queue._thread = None
                    changed.notify_all()
                    return
                job = queue.take()
                if job is not None:
                    break
                del queue, job
                changed.wait(_LOOK_SECONDS)
        queue.make(job)
        queue.act_afterwards()
        del queue, job


def _end(reference: weakref.ref[UpdateQueue], changed: threading.Condition) -> None:
    queue = reference()
    if queue is not None:  # the process is exiting: no thread may be running torch code by then
        error = queue.abandon()
        queue.stop(finish=False)
        if error is not None:
            fail_at_exit("unawaited update", error)
    # The garbage collector may call this in any thread, which must not wait for a lock.
    elif changed.acquire(blocking=False):
        changed.notify_all()
        changed.release()


def _begin_in_child() -> None:
    """A queue's thread, for one, may have held a lock as it waited for further jobs."""
    for queue in _queues:
        queue.begin_in_child()


os.register_at_fork(before=quiesce_all, after_in_child=_begin_in_child)
