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
from .modes import Modes, fixed_modes

_queues: weakref.WeakSet[UpdateQueue] = weakref.WeakSet()
_compiled = False  # whether anything was compiled in this process


@dataclasses.dataclass(eq=False)
class Step:
    """One step, of *owner*, which its jobs keep alive: it is the *number*th, counted from 1.

    *given* and *left*: the options of groups, as they were when the step was called and as the last
    bucket left them. *threads*: that torch's operators may use. *modes*: of the step's caller. *hints*: names of values in the
    order of need, which the swapper has not been told of yet. *counts*: for its `UpdateStats`.
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
    """The update of *bucket* with *options* by group; of no bucket, the end of the step. *ready*:
    the event of a CUDA device after which it may begin.
    """

    step: Step
    bucket: Bucket | None
    options: Mapping[int, Mapping[str, Any]]
    awaited: Sequence[Awaited]
    ready: Any


class UpdateQueue:
    """Jobs, which a thread of the queue's own makes one after the other by its *owner*'s `run_job`,
    and records by its `job_ended`.

    A job that fails stops the queue. Who waits next is told what went wrong, and who waits after
    that has it tried again. While the owner is broken, or once an exception has ended the thread
    outside of a job, no job is made, and waits end by forgetting them.

    Attributes: *lock*, under which jobs are put together; *waited_seconds*, that callers waited
    since it was last set to 0; *uses*, weights in the order in which they were first used. Lifetime:
    the thread ends by `stop`, when the queue is garbage, or with the process, after the jobs.
    """

    def __init__(self, owner: weakref.ref[Any]) -> None:
        self._owner = owner
        self.lock = threading.Condition()
        self.waited_seconds = 0.0
        self.uses: list[Weight] = []
        self._jobs: deque[Job] = deque()
        self._current: Job | None = None
        self._failed = False  # and the first job is to be tried again
        self._error: BaseException | None = None  # why, until somebody is told
        self._held: dict[Awaited, None] = {}  # whose parameters nobody has used yet
        self._streams: dict[torch.device, Any] = {}
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._module_hooks: list[Any] = []  # one while a parameter waits
        self._process = os.getpid()
        _queues.add(self)
        weakref.finalize(self, _end, weakref.ref(self), self.lock, self._module_hooks)

    @property
    def told(self) -> bool:
        """Whether a caller was told of an error, and nobody has waited since."""
        return self._failed and self._error is None

    @property
    def is_dead(self) -> bool:
        """Whether an exception has ended the thread."""
        return self._thread is not None and not self._thread.is_alive() and not self._stopping

    @property
    def is_running(self) -> bool:
        """Whether the thread makes a job, or will without a further call."""
        with self.lock:
            return not self._is_idle()

    @property
    def has_jobs(self) -> bool:
        """Whether a job is being made or will be."""
        with self.lock:
            return not self._is_done()

    # For who has updates to make.

    def add(self, step: Step, bucket: Bucket, options: Mapping[int, Mapping[str, Any]]) -> None:
        """Queue the update of *bucket*, whose gradients are those of now."""
        watch_entrances()
        with self.lock:
            awaited = []
            for weight in dict.fromkeys(fragment.weight for fragment in bucket.fragments):
                one = weight.awaited
                if one is None or one.step is not step:
                    weight.look()
                    one = Awaited(self, step, weight)
                    weight.taken_up()
                    weight.awaited = one
                one.left += 1
                one.hold()
                self._held[one] = None
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
        """No more is to come of *step*: make what is left in the *order* of buckets."""
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

    # For who needs them made.

    def wait(self) -> None:
        """Return when all jobs are done. Raises: what went wrong."""
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
        """Wait for one update: the parameter is used for the first time. False where it is the
        update that uses it. Raises: what went wrong.
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
        """Raises: what went wrong, if nobody was told; otherwise have it tried again."""
        with self.lock:
            self._tell()
            self._try_again()

    def quiesce(self) -> bool:
        """Return when no job is being made or will be; whether all are done."""
        if self._is_worker():
            return False
        with self.lock:
            wait_for(self.lock, self._is_idle)
            return not self._jobs and not self._is_void()

    def stop(self, *, finish: bool) -> None:
        """End the thread, after all jobs or after the one that is being made; nothing waits for
        those that are not made.
        """
        if finish:
            self.quiesce()
        with self.lock:
            self._stopping = True
            self.lock.notify_all()
            thread = self._thread
            if thread is not None and not self._is_worker(thread):
                # Before it is joined: this thread may have the lock already, where a `__del__`
                # calls this in the midst of `use`, and waiting gives that up.
                wait_for(self.lock, lambda: self._thread is None or not thread.is_alive())
                thread.join()
            self._thread = None
        self.abandon()

    def abandon(self) -> None:
        """Forget the jobs that are not made; those that wait go on. None may be being made."""
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
                    "an update of NVMeOptimizer is to come in the process that this one was forked from, and never comes here: call optimizer.synchronize() "
                    "before the fork"
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
        """Raises: what went wrong, if nobody was told. It is not kept: its traceback has the
        caller's frames, and these the graph of a forward pass.
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
        """Whether no job will be made, since parameters and states are not whole."""
        owner = self._owner()
        return self.is_dead or (owner is not None and owner.is_broken)

    def _is_idle(self) -> bool:
        """Whether the thread makes no job, and will make none without a further call."""
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

    # In the thread.

    def take(self) -> Job | None:
        """The next job, if there is one to be made now. Under the lock."""
        if not self._jobs or self._failed or self._is_void():
            return None
        self._current = self._jobs.popleft()
        return self._current

    def make(self, job: Job) -> None:
        """Make a *job* that was taken."""
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
            self._current = None  # last: an exception before it ends the thread, which is noticed
            self.lock.notify_all()

    @contextlib.contextmanager
    def _like_the_caller(self, job: Job) -> Iterator[None]:
        """What is a thread's own, as the step's caller had it, on a stream of this thread's; no
        use of a parameter waits.
        """
        if torch.get_num_threads() != job.step.threads:
            torch.set_num_threads(job.step.threads)
        with contextlib.ExitStack() as stack:
            stack.enter_context(fixed_modes(job.step.modes))
            stack.enter_context(torch._C.DisableTorchFunctionSubclass())
            if job.ready is not None and job.bucket is not None:
                stream = self._stream(job.bucket.device)
                stream.wait_event(job.ready)
                stack.enter_context(torch.cuda.stream(stream))
            yield


def _be_reached(awaited: Awaited) -> None:
    """Let what uses the parameter from now on come after its update on a GPU."""
    if awaited.event is None:
        return
    if is_distributed(awaited.weight.parameter):
        awaited.event.synchronize()  # FSDP2 gathers on streams of its own
        return
    now = torch.cuda.current_stream(awaited.weight.parameter.device)
    for stream in {now, awaited.home}:
        stream.wait_event(awaited.event)


def wait_for_all() -> None:
    """Return when no optimizer has an update to come. Raises: what went wrong."""
    for queue in list(_queues):
        queue.wait()


def anything_is_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process: what it compiled looks at the
    classes of parameters, and not by their own functions. What is compiled later waits first.
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
    """Run the thread. An exception outside of a job ends it, and the next wait raises it."""
    try:
        _make_jobs(reference, lock)
    except BaseException as error:
        queue = reference()
        if queue is not None:
            queue._error = error


def _make_jobs(reference: weakref.ref[UpdateQueue], lock: threading.Condition) -> None:
    """Holds the queue only while it makes a job."""
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
    if queue is not None:  # the process ends: a thread in the midst of torch may not be there then
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
