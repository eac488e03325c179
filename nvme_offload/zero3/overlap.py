"""`Overlap` implements `"overlap_step"` for one engine: it records the updates that DeepSpeed's `step`
would make, and its thread makes them later.

`step` itself makes the updates of a step that creates states, and all updates if deferring them
could change results.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import math
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator

from ..device.staging import CPU
from ..errors import InvariantError
from ..optimizer_states import compiling
from ..optimizer_states.traits import known, raw_step
from ..update.queue import Job, Pending, UpdateQueue, quiesce_all
from . import compat
from .once_per_step import has_hooks, replaces_step
from .replacing import replaced, replaces
from .updates import Awaited, partly_applied

if TYPE_CHECKING:
    from .stage3 import Stage3

_log = logging.getLogger(__name__)


class Overlap(UpdateQueue):
    """The updates of *stage3*, which read and write in *tier*. If one fails, the remaining ones are
    not made: until `abandon`, callers that wait get the error, once, or `partly_applied`.
    """

    def __init__(self, stage3: Stage3) -> None:
        super().__init__()
        self.tier = stage3.tier
        self._stage3 = stage3
        self._gathered = Ahead(stage3.parameter_offload.get_param_coordinator())
        # The number of uses of modules before the first use of each sub-group in this step.
        self._uses: dict[int, int] = {}
        self._drive_seconds = 0.0  # that updates have waited for the drive
        # The factors of the gradients in this step, by sub-group; None if its updates are not deferred.
        self._noted: dict[int, Any] | None = None
        # The factors of the last updates, since the GPU may still read them.
        self._queued: Mapping[int, Any] = {}
        self._has_noted = False  # whether the last step that has begun deferred updates
        self._has_states = False  # whether a step has made states since the last load, if any
        self._told: set[str] = set()
        self._optimizer: Any = None  # the optimizer with its options at the time of the step
        self._order: list[int] = []  # the order in which the last step's sub-groups are updated
        self._wanted: list[int] = []  # the order of the last forward pass

    @property
    def holds_gradients(self) -> bool:
        """Whether updates that need the gradients of a step are pending, or have failed."""
        return bool(self._noted) or self.has_jobs

    @property
    def notes(self) -> bool:
        """Whether a step has begun that defers its updates."""
        return self._noted is not None

    # In a step.

    def begin(self) -> None:
        """Begin a step. The updates of the step before must be complete."""
        self._noted = None
        self._has_noted = False
        if not self._has_states:
            return
        reason = left_out_since(self._stage3)
        if reason:
            tell_left_out(self._told, reason)
            return
        self._optimizer = with_own_options(self._stage3.optimizer)
        self._noted = {}

    def gathers_nothing(self) -> contextlib.AbstractContextManager[None]:
        """Context in which DeepSpeed's `step` does not gather the small parameters that it keeps on
        the accelerator: the forward pass gathers each one at its first use, after its update. Steps
        that defer no update use it, too, because all ranks gather together.
        """
        return replaced(self._stage3, persistent_parameters=[])

    def note(self, index: int, factor: Any) -> None:
        """Defer the update of sub-group *index*, whose gradient is multiplied by *factor*."""
        self._has_noted = True
        if self._noted is not None:
            self._noted[index] = factor

    def end(self, step: int) -> bool:
        """End DeepSpeed's `step`, the *step*th one. Returns: whether its updates are pending."""
        noted, self._noted = self._noted, None
        stage3 = self._stage3
        if not stage3.overflow:
            self._has_states = True
        if not noted:  # an overflow
            return False
        self._order = self._in_order()
        self.start(step, noted)
        return True

    def start(self, step: int, noted: Mapping[int, Any]) -> None:
        """Queue the updates *noted* in the *step*th step."""
        groups, like = self._stage3.fp16_groups, _like_this_thread()
        with self.lock:
            if self.has_jobs:
                raise InvariantError("updates of a step begin before the last ones have ended")
            self._uses, self._queued = {}, noted
            self._failed = True  # until all are queued
            note = f"in the updates of step {step}"
            for index in self._order:
                make = functools.partial(self._make, index, noted[index], like)
                self.put(Job(make, [Awaited(self, index, groups[index])], note))
            self.put(Job(functools.partial(self._finish, like), note=note))
            self._failed = False

    def _is_void(self) -> bool:
        return self.is_dead or self._failed

    def _give_up(self) -> BaseException | None:
        return partly_applied()

    def _before_wait(self) -> None:
        self.tier.release_locks()

    def _used(self, pending: Pending) -> None:
        if isinstance(pending, Awaited):
            self._uses[pending.index] = self._gathered.fetches

    def cancel(self) -> bool:
        """Cancel a step that an exception has ended. Returns: whether it had deferred updates."""
        self._noted = None
        return self._has_noted

    def begin_load(self) -> None:
        """Prepare for a load of states: make the updates that can be made, and forget all other updates."""
        error = self.abandon()
        if error is not None:
            _log.warning("updates are given up, since a checkpoint is loaded: %s", error)
        self._noted, self._has_states = None, False

    def take_waits(self) -> tuple[float, float]:
        """Seconds since the last call that the program, and that updates waited."""
        with self.lock:
            waits = self.waited_seconds, self._drive_seconds
            self.waited_seconds = self._drive_seconds = 0.0
            return waits

    def following(self, index: int, count: int) -> Sequence[int]:
        """At most *count* sub-groups in the last step's order of updates, from *index* on, if any."""
        rest = itertools.dropwhile(index.__ne__, self._order)
        return list(itertools.islice(rest, count))

    def _in_order(self) -> list[int]:
        """The sub-groups in the model's order at first, then in the order of the step before, for
        which the swapper has planned; in the order of the last two forward passes if they agree.
        """
        groups = self._stage3.fp16_groups
        if needs_order(self._stage3):
            return list(range(len(groups)))
        order = self._order
        if not order:
            place = {
                id(param): place for place, param in enumerate(self._stage3.module.parameters())
            }
            places = [min(place.get(id(param), 0) for param in group) for group in groups]
            order = sorted(range(len(groups)), key=places.__getitem__)
        uses = [self._uses[index] for index in order if index in self._uses]
        last, self._wanted = self._wanted, order
        if uses != sorted(uses):
            self._wanted = sorted(order, key=lambda index: self._uses.get(index, math.inf))
        return self._wanted if self._wanted == last else order

    # In the thread.

    def _make(self, index: int, factor: Any, like: Any) -> Any:
        stage3, optimizer = self._stage3, self._optimizer
        swapper = stage3.tier.swapper
        before = swapper.stats().waited_seconds
        # Hooks that the program has added since the step are for its next steps.
        step = functools.partial(raw_step(optimizer), optimizer)
        try:
            with like():
                stage3.update(
                    index, factor, functools.partial(stage3.step_sub_group, index, optimizer, step)
                )
                with self.lock:
                    self._drive_seconds += swapper.stats().waited_seconds - before
                if stage3.update_device != CPU:
                    return torch.cuda.current_stream().record_event()
                return None
        except BaseException:
            stage3.release_all()
            raise

    def _finish(self, like: Any) -> None:
        stage3 = self._stage3
        with like():
            stage3.optimizer_swapper.drain()
            stage3.spend_gradients()
        stage3.end_period()
        stage3.partly_changed = False
        self._optimizer = None


class Ahead:
    """Limits how much a forward pass of DeepSpeed gathers ahead of use. Gathering a parameter waits for
    its update. DeepSpeed gathers another `stage3_prefetch_bucket_size` elements before every module, up
    to `stage3_max_live_parameters`: a model of a billion parameters would wait for all updates before
    its first layer. Here the bucket limits the elements gathered ahead in total, whichever parameters
    were updated, so all ranks gather the same ones.

    Each use of a module is a step of a pass. DeepSpeed records the steps of one pass of
    *coordinator*. In later passes it gathers ahead from a queue of the uses of parameters that
    follow; a use leaves the queue when its parameter is gathered or used.

    Attributes: *fetches*, the number of uses of modules so far. DeepSpeed requests the parameters
    that one use gathers in the order of a set.
    """

    def __init__(self, coordinator: Any) -> None:
        self.fetches = 0
        self._coordinator = coordinator
        self._fetch = coordinator.fetch_sub_module
        # The step of the recorded pass at which its backward part begins, None without one.
        self._turn: int | None = None
        # Of the uses in the forward part, in the order of the queue: the step of each, and the
        # elements of the uses before it; last, the total.
        self._steps: list[int] = []
        self._elements: list[int] = [0]
        self._backward: list[Any] = []  # the uses in the backward part, while not in the queue
        compiler: Any = torch.compiler
        coordinator.fetch_sub_module = compiler.disable(self.fetch)

    def fetch(self, current_submodule: Any, forward: bool) -> None:
        """DeepSpeed's method, which gathers less ahead in the forward part of a recorded pass."""
        self.fetches += 1
        step = self._get("step_id")
        if self._coordinator.is_record_trace():
            if step == 0:
                self._turn = None
            if self._turn is None and not forward:
                self._turn = step
        turn = self._turn
        if not self._coordinator.is_complete_trace() or (turn is not None and step >= turn):
            self._fetch(current_submodule, forward)
            return
        if step == 0:
            self._begin(turn)
        bucket = self._get("prefetch_bucket_sz")
        self._set("prefetch_bucket_sz", max(bucket - self._elements_ahead(step), 0))
        try:
            self._fetch(current_submodule, forward)
        finally:
            self._set("prefetch_bucket_sz", bucket)
        if turn is not None and step == turn - 1:
            self._get("param_queue").extend(self._backward)

    def _begin(self, turn: int | None) -> None:
        """Keep the pass from gathering ahead for its backward part, which begins at *turn*: in an
        evaluation, which has none, these gathers would stay in flight.
        """
        uses = list(self._get("param_queue"))
        steps = [use.step_id_last_used_at for use in uses]
        end = len(uses) if turn is None else bisect(steps, turn - 1)
        self._steps = steps[:end]
        self._elements = list(
            itertools.accumulate((use.param.ds_numel for use in uses[:end]), initial=0)
        )
        self._backward = uses[end:]
        self._set("param_queue", deque(uses[:end]))

    def _elements_ahead(self, step: int) -> int:
        """The number of elements of the uses after *step* that left the queue."""
        left = len(self._steps) - len(self._get("param_queue"))
        return self._elements[left] - self._elements[min(left, bisect(self._steps, step))]

    # DeepSpeed's own attributes.

    def _get(self, name: str) -> Any:
        return getattr(self._coordinator, f"_PartitionedParameterCoordinator__{name}")

    def _set(self, name: str, value: Any) -> None:
        setattr(self._coordinator, f"_PartitionedParameterCoordinator__{name}", value)


def with_own_options(optimizer: torch.optim.Optimizer) -> Any:
    """An optimizer without parameters, with the state and the present options of *optimizer*."""
    kind: Any = type(optimizer)
    if hasattr(kind, "__del__"):  # DeepSpeed's would free native state that both optimizers use
        kind = _without_del(kind)
    other = object.__new__(kind)
    other.__dict__.update(optimizer.__dict__)
    other.__dict__.pop("step", None)  # a scheduler's wrapper, which calls *optimizer*'s step
    other.param_groups = [
        {key: [] if key == "params" else copy.deepcopy(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    return other


@functools.cache
def _without_del(kind: type) -> type:
    return type(kind.__name__, (kind,), {"__del__": lambda self: None})


def tell_left_out(told: set[str], reason: str, setting: str = "overlap_step") -> None:
    """Log, once, that updates are made in `step`, and why. *told*: the reasons logged before."""
    if reason not in told:
        told.add(reason)
        _log.warning("%s is left out: %s", setting, reason)


def left_out_since(stage3: Stage3) -> str:
    """Why sub-groups must be updated in `step` and in their order; "" if they need not be."""
    optimizer: Any = stage3.optimizer
    name, device = type(optimizer).__name__, get_accelerator().device_name()
    reasons = {
        '"ratio" keeps some states on the accelerator': not all(
            map(stage3._swappable_optimizer_subgroup, range(len(stage3.fp16_groups)))
        ),
        f"{name} is not among the optimizers that are known to update sub-groups in any order": (
            not known(optimizer)
        ),
        f"the method step of this {name} was replaced": replaces_step(optimizer),
        f"hooks are called before or after the steps of {name}": has_hooks(optimizer),
        "torch_autocast in float16 scales in the optimizer's step": (
            getattr(stage3, "torch_autocast_gradscaler", None) is not None
        ),
        '"wall_clock_breakdown" times the updates': type(stage3.timers).__name__ != "NoopTimer",
        f"it was never tried with {device} devices": device not in ("cpu", "cuda"),
        "torch.compile is used in this process": compiling.was_used(quiesce_all),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def needs_order(stage3: Stage3) -> bool:
    """Whether bits depend on the order of sub-groups: DeepSpeed's optimizers for the CPU keep powers
    of the betas from one call to the next.

    Source: csrc/includes/cpu_adam.h, `IncrementStep`.
    """
    optimizer = stage3.optimizer
    if not type(optimizer).__module__.startswith("deepspeed."):
        return False
    betas = {repr(group.get("betas")) for group in optimizer.param_groups}
    return len(betas) > 1 or not compat.keeps_powers_for_a_step()


def _like_this_thread() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context for updates in another thread: its number of threads, device and stream."""
    threads, accelerator = torch.get_num_threads(), get_accelerator()
    device = stream = None
    if accelerator.device_name() == "cuda":
        device, stream = accelerator.current_device(), accelerator.Stream()
        # Work queued on this thread's stream must read the parameters before updates change them.
        stream.wait_stream(accelerator.current_stream())

    @contextlib.contextmanager
    def like() -> Iterator[None]:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if device is not None:
                accelerator.set_device(device)
                # The first use of a parameter waits for the event at the end of its update.
                stack.enter_context(accelerator.stream(stream))
            yield

    return like


@replaces("deepspeed.utils.init_on_device:OnDevice", "__enter__")
@replaces(
    "deepspeed.runtime.zero.partition_parameters:InsertPostInitMethodToModuleSubClasses",
    "__enter__",
)
def enter(original: Callable[..., Any], context: Any) -> Any:
    """Enter `zero.Init` or `OnDevice` after all updates: it replaces torch's functions in all threads."""
    quiesce_all()
    return original(context)
