"""`Overlap`: updates that a step queues, and that a thread makes concurrently with later work."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedError
from ..optimizer_states import compiling
from ..parameters.idle import streamer_of
from ..update.queue import Job, Pending, UpdateQueue, wait_for_all
from .awaited import Awaited, has_waiting_class, use_module, watch_entrances
from .buckets import Bucket, Weight, is_distributed, local
from .modes import Modes, callers, fixed_modes, sure_stack
from .options import differences, same
from .progress import Progress
from .update import Options

if TYPE_CHECKING:
    from .steps import Steps

_log = logging.getLogger(__name__)


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


class Overlap(UpdateQueue):
    """The queued updates of *owner*, the steps of an optimizer of the class *name*. If not *enabled*,
    no update is queued. *progress*: of the program's calls. A job calls `run_job` of *owner*, and then
    `job_ended`. While *owner* is broken, no job is made, and a wait ends by dropping the jobs.

    Attributes: *step*, the present step, if some of its updates are queued; *ended*, the options of
    steps before and after their updates, until `apply_options`; *backward_begins*, whether the next
    gradient is the first since the last step.
    """

    def __init__(self, owner: Steps, name: str, progress: Progress, *, enabled: bool) -> None:
        super().__init__()
        self.step: Step | None = None
        self.ended: list[tuple[Options, Options]] = []
        self.backward_begins = True
        self._owner = weakref.ref(owner)
        self._name = name
        self._progress = progress
        self._enabled = enabled
        self._warned = False
        self._places: dict[Weight, int] = {}  # in the order of the parameters' uses
        first = owner.weakly(lambda steps: steps.begin_backward())
        hooks: Any = torch.utils.hooks
        hooks.unserializable_hook(first)
        compiler: Any = torch.compiler
        self._first_gradient = compiler.disable(first)
        self._hooks: dict[Weight, Any] = {}
        self._uses: list[Weight] = []  # weights in the order of their first use
        self._streams: dict[torch.device, Any] = {}
        self._module_hooks: list[Any] = []  # one hook while a parameter is awaited
        weakref.finalize(self, _remove, self._module_hooks)

    def require_awaitable(self, parameter: torch.Tensor) -> None:
        """Check that uses of *parameter* can be made to wait. Raises: UnsupportedError."""
        if self._enabled and streamer_of(parameter) is not None:
            raise UnsupportedError(
                "overlap_step=True does not take streamed parameters, which are updated where they are used: leave it out, or use step_in_backward"
            )
        if self._enabled and not can_be_awaited(parameter):
            raise UnsupportedError(
                f"overlap_step=True takes Parameters, plain tensors and DTensors, whose use can be made to wait, not {type(parameter).__name__}: "
                "leave it out, or use step_in_backward"
            )

    def can_queue(self, due: Sequence[Bucket]) -> bool:
        """Whether the updates of *due* can be made after the step has returned. The first updates
        cannot: they make the inner optimizers, and show which options these change.
        """
        if not self._enabled:
            return False
        if compiling.was_used(wait_for_all):  # compiled code checks the class of parameters
            self._warn("torch.compile is used in this process")
            return False
        if torch.get_default_dtype() != torch.float32:  # it applies to the whole process
            self._warn("torch.set_default_dtype has changed the default")
            return False
        gradients = [
            weight.parameter.grad
            for weight in {fragment.weight for bucket in due for fragment in bucket.fragments}
            if weight.parameter.grad is not None
        ]
        return (
            all(bucket.inner is not None for bucket in due)
            and all(map(can_be_awaited, gradients))
            and len(set(map(id, gradients))) == len(gradients)
        )

    def add(self, owner: Steps, due: Iterable[Bucket]) -> None:
        """Queue the updates of *due*, with their present gradients, in the present step of *owner*."""
        watch_entrances()
        with self.lock:
            self._progress.changing = True
            if self.step is None:
                self.step = Step(owner, owner.count + 1, torch.get_num_threads(), callers())
            for bucket in due:
                for fragment in bucket.fragments:
                    self._watch(fragment.weight)
                options = owner.options_of(bucket)
                self.step.given.update(options)
                self._queue(self.step, bucket, options)
                owner.updated.add(bucket)
            self._progress.changing = False

    def _queue(self, step: Step, bucket: Bucket, options: Options) -> None:
        awaited = []
        for weight in dict.fromkeys(fragment.weight for fragment in bucket.fragments):
            one = weight.awaited
            if one is None or one.step is not step:
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

    def end(self, counts: Mapping[str, int], first: Callable[[Bucket], int] | None) -> None:
        """All updates of the step are queued: order them by the last order in which parameters were
        used, after the order *first*, if there is one. *counts*: for the step's `UpdateStats`.
        """
        uses, self._uses = self._uses, []
        if uses:
            self._places = {
                weight: place for place, weight in enumerate(dict.fromkeys([*uses, *self._places]))
            }
        never = len(self._places)

        def place(bucket: Bucket) -> tuple[int, int]:
            used = min(self._places.get(fragment.weight, never) for fragment in bucket.fragments)
            return 0 if first is None else first(bucket), used

        self.waited_seconds = 0.0
        if self.step is not None:
            self.step.counts = dict(counts)
            with self.lock:
                self._progress.changing = True
                jobs = self.arrange(lambda job: place(job.subject))
                self.step.hints = [job.subject.name for job in jobs]
                make = functools.partial(self._make, self.step, None, {}, None)
                self.put(Job(make, note=_note(self.step)))
                self.step, self.backward_begins = None, True
                self._progress.changing = False

    def apply_options(self, groups: Sequence[dict[str, Any]]) -> None:
        """Write options that queued updates have changed, unless the program has set them since."""
        while self.ended:
            given, left = self.ended[0]
            changed = differences(given, left)
            for index, key, value in changed:
                if same(groups[index].get(key), given[index].get(key)):
                    groups[index][key] = value
            self.note_changes(sorted({key for _, key, _ in changed}))
            del self.ended[0]

    def note_changes(self, keys: Sequence[str]) -> None:
        """A step has changed options that programs read after it: queue no further update."""
        if keys and self._enabled:
            self._enabled = False
            self._warn(
                f"{self._name} changes {', '.join(keys)} of its groups in a step, which schedulers and programs read"
            )

    def release(self, weights: Iterable[Weight]) -> None:
        """Forget *weights*, whose buckets are discarded."""
        for weight in weights:
            hook = self._hooks.pop(weight, None)
            if hook is not None:
                hook.remove()
            self._places.pop(weight, None)
        self._uses.clear()

    def close(self) -> None:
        """Drop the updates that are not made yet."""
        self.stop(finish=False)
        self.release(list(self._hooks))

    def _watch(self, weight: Weight) -> None:
        """Complete pending updates when backward begins, in which DDP may write to gradients."""
        if weight not in self._hooks and weight.parameter.requires_grad:
            parameter: Any = weight.parameter
            self._hooks[weight] = parameter.register_hook(self._first_gradient)

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("overlap_step is left out: %s", reason)

    def wait(self) -> None:
        """As in the base class. On GPUs, later work of current streams follows the updates."""
        super().wait()
        if not self.is_worker():
            for device, stream in self._streams.items():
                torch.cuda.current_stream(device).wait_stream(stream)

    def _is_void(self) -> bool:
        owner = self._owner()
        return self.is_dead or (owner is not None and bool(owner.health.broken))

    def _used(self, pending: Pending) -> None:
        if isinstance(pending, Awaited):
            self._uses.append(pending.weight)

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

    def _make(self, step: Step, bucket: Bucket | None, options: Options, ready: Any) -> Any:
        """Update *bucket* after the CUDA event *ready*; without a bucket, end *step*."""
        with self._like_the_caller(step, bucket, ready):
            step.owner.run_job(step, bucket, options)
            if ready is not None and bucket is not None and bucket.home == bucket.device:
                return torch.cuda.current_stream().record_event()
        return None

    @contextlib.contextmanager
    def _like_the_caller(self, step: Step, bucket: Bucket | None, ready: Any) -> Iterator[None]:
        """Set the thread-local state of the step's caller, and a stream of this thread."""
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


def _remove(module_hooks: Sequence[Any]) -> None:
    """Remove hooks, without a lock: the garbage collector may call it in any thread."""
    for hook in module_hooks:
        hook.remove()
