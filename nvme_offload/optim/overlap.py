"""`Overlap`: updates that a step queues, and that a thread makes concurrently with later work."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedError
from .buckets import Bucket, Weight
from .modes import callers
from .options import differences, same
from .progress import Progress
from .update import Options
from .update_queue import BucketUpdates, Step, anything_is_compiled, can_be_awaited

if TYPE_CHECKING:
    from .steps import Steps

_log = logging.getLogger(__name__)


class Overlap:
    """The queued updates of *owner*, an optimizer of the class *name*. If not *enabled*, no update
    is queued. *progress*: of the program's calls.

    Attributes: *queue*; *step*, the present step, if some of its updates are queued; *ended*, the
    options of steps before and after their updates, until `apply_options`; *backward_begins*,
    whether the next gradient is the first since the last step.
    """

    def __init__(self, owner: Steps, name: str, progress: Progress, *, enabled: bool) -> None:
        self.queue = BucketUpdates(weakref.ref(owner))
        self.step: Step | None = None
        self.ended: list[tuple[Options, Options]] = []
        self.backward_begins = True
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

    def check(self, parameter: torch.Tensor) -> None:
        """Check that uses of *parameter* can be made to wait. Raises: UnsupportedError."""
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
        if anything_is_compiled():
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
        """Queue the updates of *due* in the present step of *owner*."""
        with self.queue.lock:
            self._progress.changing = True
            if self.step is None:
                self.step = Step(owner, owner.count + 1, torch.get_num_threads(), callers())
            for bucket in due:
                for fragment in bucket.fragments:
                    self._watch(fragment.weight)
                options = owner.options_of(bucket)
                self.step.given.update(options)
                self.queue.add(self.step, bucket, options)
                owner.updated.add(bucket)
            self._progress.changing = False

    def end(self, counts: Mapping[str, int], first: Callable[[Bucket], int] | None) -> None:
        """All updates of the step are queued: order them by the last order in which parameters were
        used, after the order *first*, if there is one. *counts*: for the step's `UpdateStats`.
        """
        uses, self.queue.uses = self.queue.uses, []
        if uses:
            self._places = {
                weight: place for place, weight in enumerate(dict.fromkeys([*uses, *self._places]))
            }
        never = len(self._places)

        def place(bucket: Bucket) -> tuple[int, int]:
            used = min(self._places.get(fragment.weight, never) for fragment in bucket.fragments)
            return 0 if first is None else first(bucket), used

        self.queue.waited_seconds = 0.0
        if self.step is not None:
            self.step.counts = dict(counts)
            with self.queue.lock:
                self._progress.changing = True
                self.queue.end(self.step, place)
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
        self.queue.uses.clear()

    def close(self) -> None:
        """Drop the updates that are not made yet."""
        self.queue.stop(finish=False)
        self.release(list(self._hooks))

    def _watch(self, weight: Weight) -> None:
        """Complete pending updates when a backward pass begins: it may write to gradients, as DDP
        does through its buckets, which share their memory.
        """
        if weight not in self._hooks and weight.parameter.requires_grad:
            parameter: Any = weight.parameter
            self._hooks[weight] = parameter.register_hook(self._first_gradient)

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("overlap_step is left out: %s", reason)
