"""`UpdateQueue`: the updates of steps that have returned, and the thread that makes them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import UsageError
from ..io.waits import wait_for
from ..optimizer_states import compiling
from .awaited import Awaited, use_module, watch_entrances
from .buckets import Bucket, Weight, is_distributed, local
from .modes import Modes, fixed_modes, sure_stack

_queues: weakref.WeakSet[UpdateQueue] = weakref.WeakSet()
_compiled = False  # whether torch.compile was used in this process


@dataclasses.dataclass(eq=False)
class Step:
    """One step of *owner*, the *number*th, counted from 1. Its jobs keep *owner* alive.

    *given* and *left*: the options of groups when the step was called, and after the update of the
    last bucket. *threads*: the number of threads for torch's operators. *modes*: of the step's
    caller. *hints*: names of values in the order of need, not yet passed to the swapper. *counts*:
    for its `UpdateStats`.
    """

    owner: Any
    number: int
    threads: int
    modes: Modes
    given: dict[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    left: dict[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    hints: list[str] = dataclasses.field(default_factory=list)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)


class Job(NamedTuple):
    """The update of *bucket* with *options* by group; without a bucket, the end of the step.
    *ready*: the event of a CUDA device after which the update may begin.
    """

    step: Step
    bucket: Bucket | None
    options: Mapping[int, Mapping[str, Any]]
    awaited: Sequence[Awaited]
    ready: Any


class UpdateQueue:
    """Jobs that a separate thread makes one after another: it calls `run_job` of *owner*, and then
    its `job_ended`.

    A job that fails stops the queue. The next caller that waits receives the error; a later wait
    tries the job again. While the owner is broken, or once an exception has ended the thread
    outside of a job, no job is made, and a wait ends by dropping the jobs.

    Attributes: *lock*, held while several jobs are queued together; *waited_seconds*, the time that
    callers have waited since it was last set to 0; *uses*, weights in the order of their first use.
    Lifetime: the thread ends with `stop`, when the queue is garbage-collected, or with the process,
    after the jobs.
    """

    def __init__(self, owner: weakref.ref[Any]) -> None:
        self._owner = owner
        self.lock = threading.Condition()
        self.waited_seconds = 0.0
        self.uses: list[Weight] = []
        self._jobs: deque[Job] = deque()
        self._current: Job | None = None
        self._failed = False  # the first job has failed, and can be tried again
        self._error: BaseException | None = None  # the error, until a caller has received it
        self._held: dict[Awaited, None] = {}  # updates whose parameters have not been used yet
        self._streams: dict[torch.device, Any] = {}
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._module_hooks: list[Any] = []  # one hook while a parameter is awaited
        self._process = os.getpid()
        _queues.add(self)
        weakref.finalize(self, _end, weakref.ref(self), self.lock, self._module_hooks)

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

    # Queueing updates.

    def add(self, step: Step, bucket: Bucket, options: Mapping[int, Mapping[str, Any]]) -> None:
        """Queue the update of *bucket*, with its present gradients."""
        watch_entrances()
        with self.lock:
            awaited = []
            for weight in dict.fromkeys(fragment.weight for fragment in bucket.fragments):
                one = weight.awaited
                if one is None or one.step is not step:
                    weight.look()
                    one = Awaited(self, step, weight)
                    weight.taken_up()
                self._held[one] = None  # first: `abandon` undoes the rest after an exception
                weight.awaited = one
                one.left += 1
                one.hold()
                awaited.append(one)
            ready = None
            if bucket.device.type == "cuda":
                home = torch.cuda.current_stream(bucket.device)
                ready = home.record_event()
                stream = self._stream(bucket.device)
                for one in awaited:
                    one.home = home
                    if one.values is not None and local(one.values).is_cuda:
                        local(one.values).record_stream(stream)
            self._put(Job(step, bucket, options, awaited, ready))
            if not self._module_hooks:
                self._module_hooks.append(
                    torch.nn.modules.module.register_module_forward_pre_hook(use_module)
                )

    def end(self, step: Step, order: Callable[[Bucket], tuple[int, int]]) -> None:
        """All updates of *step* are queued: make the remaining ones in the *order* of buckets."""
        with self.lock:
            jobs = sorted(
                (job for job in self._jobs if job.bucket is not None),
                key=lambda job: order(job.bucket) if job.bucket is not None else (0, 0),
            )
            self._jobs = deque(jobs)
            step.hints = [job.bucket.name for job in jobs if job.bucket is not None]
            self._put(Job(step, None, {}, (), None))

    def _put(self, job: Job) -> None:
        self._jobs.append(job)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work,
                args=(weakref.ref(self), self.lock),
                name="nvme_offload updates",
                daemon=True,
            )
            self._thread.start()
        self.lock.notify_all()

    # Waiting for updates.

    def wait(self) -> None:
        """Return when all jobs are done. Raises: the error of a job."""
        if self._is_worker():
            return
        self._wait(self._is_done)
        with self.lock:
            for device, stream in self._streams.items():
                torch.cuda.current_stream(device).wait_stream(stream)
            for awaited in list(self._held):
                _be_reached(awaited)
                self._restore(awaited)

    def use(self, awaited: Awaited) -> bool:
        """Wait for one update, before the first use of its parameter or gradient. False if the
        update itself uses them. Raises: the error of a job.
        """
        if self._is_worker():
            return False
        self._wait(lambda: awaited.left == 0)
        with self.lock:
            if awaited in self._held:
                _be_reached(awaited)
                self.uses.append(awaited.weight)
                self._restore(awaited)
        return True

    def check(self) -> None:
        """Raise the error, if no caller has received it; otherwise try the job again."""
        with self.lock:
            self._tell()
            self._try_again()

    def quiesce(self) -> bool:
        """Return when no job is in progress or will begin; True if all are done."""
        if self._is_worker():
            return False
        with self.lock:
            wait_for(self.lock, self._is_idle)
            return not self._jobs and not self._is_void()

    def stop(self, *, finish: bool) -> None:
        """End the thread: after all jobs with *finish*, otherwise after the job in progress. Drop
        the remaining jobs; waits for them end.
        """
        if finish:
            self.quiesce()
        with self.lock:
            self._stopping = True
            self.lock.notify_all()
            thread = self._thread
            if thread is not None and not self._is_worker(thread):
                # Wait before joining: a `__del__` may call this in the midst of `use`, where this
                # thread holds the lock, and waiting releases it.
                wait_for(self.lock, lambda: self._thread is None or not thread.is_alive())
                thread.join()
            self._thread = None
        self.abandon()

    def abandon(self) -> None:
        """Drop the queued jobs; waits for them end. No job may be in progress."""
        with self.lock:
            self._jobs.clear()
            self._failed, self._error = False, None
            for awaited in list(self._held):
                awaited.left = 0
                awaited.weight.awaited = None
                self._restore(awaited)
            self.lock.notify_all()

    def _wait(self, is_done: Callable[[], bool]) -> None:
        with self.lock:
            if is_done():
                return
            if os.getpid() != self._process:
                raise UsageError(
                    "this process was forked while an update of NVMeOptimizer was pending, which only the parent process can make: call "
                    "optimizer.synchronize() before the fork"
                )
            began = time.perf_counter()
            try:
                while not is_done():
                    if self._is_void():
                        wait_for(self.lock, self._is_idle)
                        self._tell()
                        self.abandon()
                        return
                    self._try_again()
                    wait_for(self.lock, lambda: is_done() or self._failed or self._is_void())
                    if not is_done():
                        self._tell()
            finally:
                self.waited_seconds += time.perf_counter() - began

    def _tell(self) -> None:
        """Raise the error, if no caller has received it. The queue does not keep it: its traceback
        keeps the caller's frames alive, and these keep the graph of a forward pass.
        """
        error, self._error = self._error, None
        if error is not None:
            if self._is_void():
                self.abandon()
            try:
                raise error
            finally:
                del error

    def _try_again(self) -> None:
        if self.told:
            self._failed = False
            self.lock.notify_all()

    def _restore(self, awaited: Awaited) -> None:
        awaited.restore()
        self._held.pop(awaited, None)
        if not self._held and self._module_hooks:
            self._module_hooks.pop().remove()

    def _is_done(self) -> bool:
        return not self._jobs and self._current is None

    def _is_void(self) -> bool:
        """Whether no job will be made: the thread is dead, or parameters and states are out of
        sync.
        """
        owner = self._owner()
        return self.is_dead or (owner is not None and owner.is_broken)

    def _is_idle(self) -> bool:
        """Whether no job is in progress, and none will begin without a further call."""
        return self.is_dead or (
            self._current is None and (not self._jobs or self._failed or self._is_void())
        )

    def _is_worker(self, thread: threading.Thread | None = None) -> bool:
        return threading.current_thread() is (thread or self._thread)

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            make: Any = torch.cuda.Stream
            self._streams[device] = make(device)
        return self._streams[device]

    # Called by the thread.

    def take(self) -> Job | None:
        """The next job, if one can be made now. The caller holds the lock."""
        if not self._jobs or self._failed or self._is_void():
            return None
        self._current = self._jobs.popleft()
        return self._current

    def make(self, job: Job) -> None:
        """Make *job*, which `take` has returned."""
        error: BaseException | None = None
        event = None
        try:
            with self._like_the_caller(job):
                job.step.owner.run_job(job)
                if (
                    job.ready is not None
                    and job.bucket is not None
                    and job.bucket.home == job.bucket.device
                ):
                    event = torch.cuda.current_stream().record_event()
        except BaseException as failure:
            error = failure
            if hasattr(error, "add_note"):
                error.add_note(f"in the updates of step {job.step.number} of NVMeOptimizer")
        with self.lock:
            if error is not None:
                job.step.owner.job_ended(error)
                self._jobs.appendleft(job)
                self._failed, self._error = True, error
            else:
                for awaited in job.awaited:
                    awaited.left -= 1
                    awaited.event = event
                    if awaited.left == 0:
                        awaited.values = None
                        awaited.weight.awaited = None
                job.step.owner.job_ended(None)
            # last: an exception before this line ends the thread, and `is_dead` detects it
            self._current = None
            self.lock.notify_all()

    @contextlib.contextmanager
    def _like_the_caller(self, job: Job) -> Iterator[None]:
        """Set the thread-local state of the step's caller, and a stream of this thread. Uses of
        parameters do not wait in the context.
        """
        if torch.get_num_threads() != job.step.threads:
            torch.set_num_threads(job.step.threads)
        with sure_stack() as stack:
            stack.enter_context(fixed_modes(job.step.modes))
            stack.enter_context(torch._C.DisableTorchFunctionSubclass())
            if job.ready is not None and job.bucket is not None:
                stream = self._stream(job.bucket.device)
                stream.wait_event(job.ready)
                stack.enter_context(torch.cuda.stream(stream))
            yield


def _be_reached(awaited: Awaited) -> None:
    """On a GPU, order later uses of the parameter after its update."""
    if awaited.event is None:
        return
    if is_distributed(awaited.weight.parameter):
        awaited.event.synchronize()  # FSDP2 gathers on separate streams
        return
    now = torch.cuda.current_stream(awaited.weight.parameter.device)
    for stream in {now, awaited.home}:
        stream.wait_event(awaited.event)


def wait_for_all() -> None:
    """Return when no optimizer has a pending update. Raises: the error of an update."""
    for queue in list(_queues):
        queue.wait()


def anything_is_compiled() -> bool:
    """Whether torch.compile was used in this process: compiled code checks the classes of
    parameters, and does not call their `__torch_function__`. A later compilation first waits for
    pending updates.
    """
    global _compiled
    compiling.wait_first(_before_compiling)
    _compiled = _compiled or compiling.was_used()
    return _compiled


def _before_compiling() -> None:
    global _compiled
    _compiled = True
    wait_for_all()


def _work(reference: weakref.ref[UpdateQueue], lock: threading.Condition) -> None:
    """The function of the thread. An exception outside of a job ends it, and the next wait raises
    it.
    """
    try:
        _make_jobs(reference, lock)
    except BaseException as error:
        queue = reference()
        if queue is not None:
            queue._error = error


def _make_jobs(reference: weakref.ref[UpdateQueue], lock: threading.Condition) -> None:
    """Take and make jobs. Holds a reference to the queue only while it makes one."""
    while True:
        with lock:
            while True:
                queue = reference()
                if queue is None:
                    return
                if queue._stopping:
                    queue._thread = None
                    lock.notify_all()
                    return
                job = queue.take()
                if job is not None:
                    break
                del queue, job
                lock.wait()
        queue.make(job)
        del queue, job


def _end(
    reference: weakref.ref[UpdateQueue], lock: threading.Condition, module_hooks: list[Any]
) -> None:
    queue = reference()
    if queue is not None:  # the process is exiting: no thread may be running torch code by then
        queue.stop(finish=True)
    else:
        with lock:
            for hook in module_hooks:
                hook.remove()
            lock.notify_all()


def _before_fork() -> None:
    for queue in list(_queues):
        queue.quiesce()


os.register_at_fork(before=_before_fork)
