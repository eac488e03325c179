"""`BucketUpdates`: the queued updates of an `NVMeOptimizer`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..optimizer_states import compiling
from ..update.queue import Job, Pending, UpdateQueue, wait_for_all
from .awaited import Awaited, has_waiting_class, use_module, watch_entrances
from .buckets import Bucket, Weight, is_distributed, local
from .modes import Modes, fixed_modes, sure_stack


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


class BucketUpdates(UpdateQueue):
    """The queue of *owner*, an NVMeOptimizer: a job calls its `run_job`, and then `job_ended`.

    While the owner is broken, no job is made, and a wait ends by dropping the jobs.

    Attributes: *uses*, weights in the order of their first use.
    """

    def __init__(self, owner: weakref.ref[Any]) -> None:
        super().__init__()
        self.uses: list[Weight] = []
        self._owner = owner
        self._streams: dict[torch.device, Any] = {}
        self._module_hooks: list[Any] = []  # one hook while a parameter is awaited
        weakref.finalize(self, _remove, self._module_hooks)

    def add(self, step: Step, bucket: Bucket, options: Mapping[int, Mapping[str, Any]]) -> None:
        """Queue the update of *bucket*, with its present gradients and *options* by group."""
        watch_entrances()
        with self.lock:
            awaited = []
            for weight in dict.fromkeys(fragment.weight for fragment in bucket.fragments):
                one = weight.awaited
                if one is None or one.step is not step:
                    weight.look()
                    one = Awaited(self, step, weight)
                    weight.taken_up()
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
            make = functools.partial(self._make, step, bucket, options, ready)
            self.put(Job(make, awaited, _note(step), bucket))
            if not self._module_hooks:
                self._module_hooks.append(
                    torch.nn.modules.module.register_module_forward_pre_hook(use_module)
                )

    def end(self, step: Step, order: Callable[[Bucket], tuple[int, int]]) -> None:
        """All updates of *step* are queued: make the remaining ones in the *order* of buckets."""
        with self.lock:
            jobs = self.arrange(lambda job: order(job.subject))
            step.hints = [job.subject.name for job in jobs]
            make = functools.partial(self._make, step, None, {}, None)
            self.put(Job(make, note=_note(step)))

    def wait(self) -> None:
        """As in the base class. On GPUs, later work of the current streams is ordered after the
        updates.
        """
        super().wait()
        if not self.is_worker():
            for device, stream in self._streams.items():
                torch.cuda.current_stream(device).wait_stream(stream)

    def _is_void(self) -> bool:
        owner = self._owner()
        return self.is_dead or (owner is not None and owner.is_broken)

    def _used(self, pending: Pending) -> None:
        if isinstance(pending, Awaited):
            self.uses.append(pending.weight)

    def _restored_all(self) -> None:
        if self._module_hooks:
            self._module_hooks.pop().remove()

    def _ended(self, job: Job, error: BaseException | None) -> None:
        for pending in job.pending if error is None else ():
            if isinstance(pending, Awaited) and pending.left == 0:
                pending.drop_gradient()
        owner = self._owner()
        if owner is not None:
            owner.job_ended(error)

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            make: Any = torch.cuda.Stream
            self._streams[device] = make(device)
        return self._streams[device]

    # In the thread.

    def _make(
        self,
        step: Step,
        bucket: Bucket | None,
        options: Mapping[int, Mapping[str, Any]],
        ready: Any,
    ) -> Any:
        """Update *bucket* after the CUDA event *ready*; without a bucket, end *step*."""
        with self._like_the_caller(step, bucket, ready):
            step.owner.run_job(step, bucket, options)
            if ready is not None and bucket is not None and bucket.home == bucket.device:
                return torch.cuda.current_stream().record_event()
        return None

    @contextlib.contextmanager
    def _like_the_caller(self, step: Step, bucket: Bucket | None, ready: Any) -> Iterator[None]:
        """Set the thread-local state of the step's caller, and a stream of this thread. Uses of
        parameters do not wait in the context.
        """
        if torch.get_num_threads() != step.threads:
            torch.set_num_threads(step.threads)
        with sure_stack() as stack:
            stack.enter_context(fixed_modes(step.modes))
            stack.enter_context(torch._C.DisableTorchFunctionSubclass())
            if ready is not None and bucket is not None:
                stream = self._stream(bucket.device)
                stream.wait_event(ready)
                stack.enter_context(torch.cuda.stream(stream))
            yield


def _note(step: Step) -> str:
    return f"in the updates of step {step.number} of NVMeOptimizer"


def can_be_awaited(tensor: torch.Tensor) -> bool:
    """Whether uses of *tensor* can be made to wait."""
    if is_distributed(tensor):
        from . import awaited_dtensor  # noqa: F401  # slow to import, and often not needed
    return has_waiting_class(tensor)


def anything_is_compiled() -> bool:
    """Whether torch.compile was used: compiled code checks the classes of parameters, and does not
    call their `__torch_function__`. A later compilation first waits for pending updates.
    """
    return compiling.was_used(wait_for_all)


def _remove(module_hooks: Sequence[Any]) -> None:
    """Remove the hooks of a queue that no longer exists. It takes no lock, since the garbage
    collector may call it in any thread.
    """
    for hook in module_hooks:
        hook.remove()
