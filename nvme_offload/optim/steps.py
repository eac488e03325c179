"""`Steps`: the updates of an `NVMeOptimizer`, and how they continue after an exception."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..device.modes import check_no_capture
from ..errors import known
from ..optimizer_states.formats import StateFormat
from ..parameters.idle import streamer_of
from ..swap.cores import use_share_of_cores
from ..swap.tier import Tier
from .accumulation import GradientSums
from .backward import BackwardUpdates, check_gradient
from .binding import Binding, Plan, check_resized, may_be_replaced, parameters_of
from .bucketing import Bucketing
from .buckets import Bucket, Weight
from .budget import Budget, DividedOtherwiseError
from .modes import fixed_modes
from .options import Maker, StepOptions, When, differences, samples_of
from .overlap import Overlap, Step
from .progress import Health, Progress
from .provisional import ProvisionalUpdates
from .states import States
from .stats import UpdateClock, UpdateStats
from .update import Options, Updater

_log = logging.getLogger(__name__)


class Steps:
    """The steps of *optimizer*, which is not kept alive. Every bucket is updated once a step: in
    `make`, in `gradient_came` during backward(), or in `run_job` by the thread of *overlap*. A call
    that an exception ends leaves its traces in *health*, and `recover` continues. *updated*: the
    buckets that the present step has updated.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        when: When,
        tier: Tier,
        state_format: StateFormat,
        maker: Maker,
        name: str,
        prefix: str,
        *,
        declared: bool,
        place_updates: Callable[[torch.Tensor], torch.device],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.when = when
        self.tier = tier
        self.lock = threading.RLock()  # backward() has a thread for every GPU
        self.health = Health()
        self.count = 0
        self._last: UpdateStats | None = None
        self.updated: set[Bucket] = set()
        self.updater = Updater(tier, state_format, maker, name)
        self.updater.notes_norms = bool(when.step_in_backward)
        budget = Budget(tier.cap_bytes)
        self.bucketing = Bucketing(
            name,
            maker,
            state_format,
            budget,
            prefix,
            declared=declared,
            gradients=when.accumulate is not None,
            place_updates=place_updates,
        )
        self.provisional = ProvisionalUpdates(tier, self, when.overlap_step)
        self.binding = Binding(
            self.bucketing, budget, tier, self.updater, when, self.provisional.share_room
        )
        self.options = StepOptions()
        self.states = States(self)
        self.backward = BackwardUpdates(self)
        self.sums = GradientSums(tier, self.lock, self.updater.drain, self.weakly(Steps.recover))
        self.overlap = Overlap(self, name, self.health.calls, enabled=when.overlap_step)
        self.clock: UpdateClock  # from the first binding on
        # The number of a step whose updates have all been made, until `step` returns or the next
        # one begins.
        self.ended: Any = []

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's `param_groups`."""
        return known(self._optimizer()).param_groups

    @property
    def is_orphan(self) -> bool:
        """Whether the optimizer no longer exists."""
        return self._optimizer() is None

    def weakly(self, method: Callable[[Steps], Any]) -> Callable[..., None]:
        """A function that calls *method*, and does not keep this object alive."""
        source = weakref.ref(self)

        def call(*_: Any) -> None:
            steps = source()
            if steps is not None:
                method(steps)

        return call

    # Binding parameters.

    def bind_or_wait(self) -> None:
        """Bind the parameters; only check that they can be offloaded if they will probably be
        replaced first.
        """
        if self.binding.weights or not may_be_replaced(self.groups):
            self.bind()
            return
        for index, group in enumerate(self.groups):
            self.bucketing.try_out(group["params"], self.options.of(index, group))
        self.options.forget()
        self._watch_gradients()

    def bind(self, *, lazily: bool = False) -> None:
        """Follow changes of the parameters since the last call: new ones get buckets; moved, cast
        or unfrozen ones get other buckets, with their states. *lazily*: ignore moves, casts and
        unfreezing. Raises: UsageError, UnsupportedError and NoSpaceError; states of unbound
        parameters stay in `state`.
        """
        groups, binding = self.groups, self.binding
        if not binding.differs(groups, forms=not lazily):
            return
        with self.between_steps():
            plan = binding.plan(groups)
            check_resized(plan.bound_again, self.states.shown, groups)
            updated = plan.updated_weights(self.updated)
            for _, parameter in parameters_of(groups):
                self.backward.check(parameter)
                self.overlap.require_awaitable(parameter)
                if self.when.accumulate:
                    self.sums.check(parameter)
            try:
                made, buckets = self._replace(plan, updated)
            except DividedOtherwiseError:
                plan = Plan(plan.places, [*plan.weights, *binding.weights], list(binding.buckets))
                updated |= plan.updated_weights(self.updated)
                made, buckets = self._replace(plan, updated)
            given = self.states.of_unbound(made)
            binding.commit(groups, made, buckets)
            self.updated.update(
                bucket
                for bucket in buckets
                if updated.issuperset(fragment.weight for fragment in bucket.fragments)
            )
            if len(buckets) == len(binding.buckets):  # the tier was reset
                self.clock = UpdateClock(self.tier)
            # With streamed parameters, or updates under the forward pass, copies run in that pass already.
            self.updater.looks_ahead = not self.when.overlap_step and not any(
                streamer_of(parameter) for _, parameter in parameters_of(groups)
            )
            if any(bucket.device.type == "cpu" for bucket in binding.buckets):
                use_share_of_cores()
            for bucket in buckets:
                if bucket.trained and bucket.traits.eager:
                    self.updater.open(bucket)
                    self.updater.start(bucket, self.options_of(bucket))
                    self.states.show(bucket)
            if not self.updated:
                # a step may have begun with other groups, or begin with other options
                self.options.forget()
            self.drain()
            self._watch_gradients()
            self.sums.limit(binding.buckets)
            if given:
                self.states.restore(given, bound_again=True)

    def _replace(
        self, plan: Plan, updated: Collection[Weight]
    ) -> tuple[list[Weight], list[Bucket]]:
        """Discard the buckets of *plan*; return the weights and buckets to bind instead."""
        self.states.bring(plan)
        self.sums.release(plan.weights)
        with self.health.out_of_sync("parameters were being bound anew"):
            self.states.detach(plan.weights)
            self.overlap.release(plan.weights)
            self.backward.forget()
            self.provisional.forget_order(plan.buckets)
            self.updated.difference_update(plan.buckets)
            self.binding.release(plan)
        return self.binding.admit(self.groups, self.options.of, plan, updated)

    def _watch_gradients(self) -> None:
        if self.when.step_in_backward or self.when.accumulate:
            self.backward.watch(one for _, one in parameters_of(self.groups))

    def options_of(self, bucket: Bucket) -> dict[int, dict[str, Any]]:
        """The options of the groups of *bucket* in this step, by index of the group."""
        return {index: self.options.of(index, self.groups[index]) for index in bucket.groups}

    # Between steps.

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """Context without pending updates; no value is in use when it begins. `recover` ends it
        after an exception.
        """
        self.settle()
        self.recover()
        with self.lock, fixed_modes():
            self.health.check()
            self.health.calls.running = True
            self.drain()
            yield
            self.health.calls.running = False

    def drain(self) -> None:
        """Return when no value of the tier is in use."""
        self.updater.drain()
        self.sums.settle()

    def _ease(self) -> None:
        """As `drain`, but values that stay in memory may still be on their way there."""
        self.updater.ease()
        self.sums.settle()

    @fixed_modes()
    def settle(self) -> None:
        """Before states are read: undo provisional updates, and complete the last step."""
        self.undo_provisional()
        self.synchronize()

    def settle_for_use(self) -> None:
        """As `settle`, before the program uses `state`."""
        self.settle()
        self.states.were_used = True

    def synchronize(self) -> None:
        """See `NVMeOptimizer.synchronize`."""
        self.overlap.wait()
        if not self.is_orphan:
            self.overlap.apply_options(self.groups)

    # A step.

    @property
    def last_stats(self) -> UpdateStats | None:
        """See `NVMeOptimizer.last_stats`."""
        queue = self.overlap
        if self._last is None or not self.when.overlap_step or queue.has_jobs:
            return self._last
        return dataclasses.replace(self._last, update_wait_seconds=queue.waited_seconds)

    def make(self, closure: Callable[[], Any] | None) -> Any:
        """Make a step after *closure*, which computes gradients, and return its result."""
        check_no_capture(
            "contain step(): capture the forward and the backward pass, and call step() after each replay"
        )
        tried_again = self.overlap.told
        self.overlap.check()
        self.recover()
        self.health.check()
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        try:
            with self.lock, fixed_modes():
                self._make(tried_again=tried_again)
            # In one line: an exception comes either before it, so that a repeated step() changes
            # nothing, or after step() has returned.
            return self.ended.clear() or result
        except BaseException as error:
            self.note(error)
            raise

    def _make(self, *, tried_again: bool) -> None:
        """*tried_again*: a queued update has failed, and the caller tries it again."""
        self.bind()
        self.binding.check_trains()
        if self.overlap.step is None:
            self.synchronize()
            tried_again = tried_again or bool(self.ended)
            if tried_again and not any(one.has_new_gradient for one in self.binding.weights):
                return  # the step was made already
        self.ended.clear()
        if self.backward.forget_replaced():
            self.options.forget()
        self.health.calls.running = True
        if self.when.is_provisional:
            self._end_provisional()
        elif self.when.step_in_backward:
            self.backward.check_unchanged()
        due = self._due()
        idle = self._left_by_idle_groups(due)
        if not idle and self.overlap.can_queue(due):
            with self.overlap.lock:  # no update begins before all are in order
                self.overlap.add(self, due)
                self._end_step()
        else:
            self.synchronize()
            if self.overlap.step is not None:  # this call makes its other updates
                self.options.left(self.overlap.step.left)
                self.overlap.step = None
            with self.clock.running():
                self._ease()
                self.tier.swapper.prefetch(self.sums.names(due))
                for bucket in due:
                    self.update_now(bucket)
                self.options.left(idle)
                self._ease()
                counts = self._counts
                self._end_step()
            self._last = self.clock.end_step(self.count, **counts)
        self.health.calls.running = False

    def _due(self) -> list[Bucket]:
        """The buckets that have gradients and are not updated in this step yet."""
        if self.overlap.step is None or self.states.were_used:
            self.synchronize()
            self.states.take_up()
        for weight in self.binding.weights:
            weight.settle_gradient()
        due = self.provisional.in_order(
            bucket
            for bucket in self.binding.buckets
            if bucket not in self.updated and bucket.has_gradient
        )
        self.bucketing.check(due)
        for weight in {fragment.weight for bucket in due for fragment in bucket.fragments}:
            check_gradient(weight)
        return due

    def _left_by_idle_groups(self, due: Iterable[Bucket]) -> Options:
        """The options that the optimizer changes in groups without updates, such as a step count."""
        if all(weight.traits.why == "known" for weight in self.binding.weights):
            return {}
        busy = {index for bucket in {*due, *self.updated} for index in bucket.groups}
        given = {
            index: self.options.of(index, group)
            for index, group in enumerate(self.groups)
            if index not in busy
        }
        left = {
            index: self.updater.step_alone(samples_of([self.groups[index]]), options)
            for index, options in given.items()
        }
        return {index: left[index] for index, _, _ in differences(given, left)}

    def update_now(self, bucket: Bucket) -> None:
        """Update the parameters of *bucket* in this call."""
        calls = self.health.calls
        self.sums.take(bucket)  # not in the queue's thread: the program may set `.grad` meanwhile
        left = self._update(bucket, self.options_of(bucket), self.count, calls)
        self.sums.done(bucket)
        self.options.left(left)
        for fragment in bucket.fragments:
            fragment.weight.mark_gradient()
        self.updated.add(bucket)
        calls.changing = False

    def _update(self, bucket: Bucket, options: Options, seed: int, progress: Progress) -> Options:
        """Update *bucket*. The caller records the options, and ends the change in *progress*."""
        self.updater.open(bucket)  # if it raises, nothing is changed
        left = self.updater.step(bucket, options, seed, progress)
        self.states.show(bucket)
        return left

    @property
    def _counts(self) -> dict[str, int]:
        return {
            "buckets": len(self.updated),
            "updated_in_backward": self.provisional.made_count,
            "rolled_back": self.provisional.rolled_back_count,
        }

    def _end_step(self) -> None:
        """All updates are made or queued. After an exception it can be repeated."""
        if not self.ended:
            self.ended.append(self.count + 1)
        self.overlap.note_changes(self.options.end(self.groups))
        if self.overlap.step is None:
            self.tier.swapper.step()
        else:
            provisional = self.provisional
            self.overlap.end(self._counts, None if provisional.rests else provisional.place)
        self.count = self.ended[0]
        self.forget_step()

    def forget_step(self) -> None:
        """No step has begun."""
        self.sums.spend(list(self.updated))
        self.updated.clear()
        self.options.forget()
        self.overlap.step = None
        self.backward.end_step()
        self.provisional.end_step()

    def give_up(self) -> None:
        """Drop the rest of a step that has begun."""
        self.recover()
        self.ended.clear()
        self.undo_provisional()
        self.provisional.end_step()
        self.backward.end_step()
        if self.updated and not self.health.broken:
            left = [one for one in self.binding.buckets if one not in self.updated]
            if self.when.step_in_backward or any(one.has_gradient for one in left):
                _log.warning(
                    "a step is given up after %d of %d buckets: their parameters are one step ahead",
                    len(self.updated),
                    len(self.binding.buckets),
                )
            self._end_step()
            self.ended.clear()

    def zero(self, *, set_to_none: bool) -> None:
        """Drop the gradients that are not in `.grad`."""
        self.backward.zero(set_to_none=set_to_none)
        if self.health.broken:
            self.sums.reset()
        else:
            self.sums.clear()

    # Updates in the thread of the queue. No other thread uses the swapper meanwhile.

    def begin_backward(self) -> None:
        """backward() is about to write the first gradient, or a later one."""
        if self.overlap.backward_begins:
            self.synchronize()
            self.overlap.backward_begins = False

    def run_job(self, step: Step, bucket: Bucket | None, options: Options) -> None:
        """Update *bucket* in *step*, or end *step*. After an exception it can be repeated."""
        jobs = self.health.jobs
        if jobs.running:  # it has failed
            self.tier.end_uses()
            if self.tier.interrupted:
                self.health.mark_broken("a call was interrupted")
            self.health.check()
            self.updater.recover(self.binding.buckets)
        jobs.running = True
        if step.hints:
            self.tier.swapper.prefetch(step.hints)
            step.hints = []
        with self.clock.running():
            if bucket is not None:
                step.left.update(self._update(bucket, options, step.number - 1, jobs))
                if bucket.visits_device:
                    self.updater.drain()  # the CPU uses the parameters next
                return
            self.updater.drain()
            self.tier.swapper.step()
            self.overlap.ended.append((step.given, step.left))
        self._last = self.clock.end_step(step.number, **step.counts)

    def job_ended(self, error: BaseException | None) -> None:
        """The queue has recorded the end of the last job, or the *error* that ended it."""
        if error is None:
            self.health.jobs.changing = self.health.jobs.running = False
        else:
            self.health.note(error, self.health.jobs)

    # Updates that can be undone.

    def _end_provisional(self) -> None:
        """Gradients and options are final: undo the updates that used other ones."""
        provisional = self.provisional
        provisional.check()
        # otherwise an earlier attempt of this step has made final updates, with the options of that
        # time
        all_provisional = len(self.updated) == len(provisional)
        if all_provisional and self.options.changed(self.groups):
            self.undo_provisional()
            self.options.forget()
        self.undo(lambda: provisional.roll_back_changed(self.options))

    @fixed_modes()
    def undo_provisional(self) -> None:
        """Undo the provisional updates of this step."""
        if self.provisional:
            self.recover()
            with self.lock:
                self.undo(self.provisional.roll_back_all)

    def undo(self, roll_back: Callable[[], Sequence[Bucket]]) -> None:
        """Undo updates by *roll_back*, which returns their buckets."""
        if not self.health.broken:
            self.drain()
            with self.health.out_of_sync("updates were being undone"):
                self.show_undone(roll_back())

    def show_undone(self, buckets: Sequence[Bucket]) -> None:
        """Updates of *buckets* were undone."""
        for bucket in buckets:
            self.updated.discard(bucket)
            self.states.show(bucket)

    # After an exception.

    def note(self, error: BaseException) -> None:
        """Record the consequences of *error*, which ends this call, for the next call."""
        self.health.note(error)
        if self.ended:
            for weight in self.binding.weights:
                weight.mark_gradient()

    def recover(self) -> None:
        """Continue after a call that an exception has ended at any line."""
        health, queue = self.health, self.overlap
        if queue.is_dead:
            health.mark_broken("the thread of the updates has ended")
        if self.backward.was_cut_short():
            health.mark_broken("backward() failed after a part of its updates")
        with self.lock:
            jobs_run = queue.is_running
            if not (
                health.calls.running or (health.jobs.running and not jobs_run) or self.sums.running
            ):
                return
            if jobs_run:
                queue.quiesce()
            self.tier.end_uses()
            if health.calls.changing or health.jobs.changing:
                health.mark_broken("a step failed in the midst of an update")
            if self.tier.interrupted:
                health.mark_broken(f"a call was interrupted{health.cause}")
            health.cause = ""
            if not health.broken:
                buckets = self.binding.buckets
                self.updater.recover(buckets)
                self.sums.recover(buckets)
                self.provisional.keep_but_made(buckets)
                if self.ended:
                    self._end_step()
            health.calls.running = health.jobs.running = self.sums.running = False

    def give_up_what_fails(self) -> None:
        """Before states are loaded: wait for pending updates, and drop the ones that fail."""
        self.recover()
        try:
            self.settle()
        except Exception as error:
            _log.warning("updates are given up, since states are loaded: %s", error)
            self.overlap.abandon()

    def close(self) -> None:
        """See `NVMeOptimizer.close`."""
        with self.lock:
            if self.health.closed:
                return
            try:
                self.recover()
                self.settle()
            finally:
                self.health.closed = True
                self.overlap.close()
                self.backward.close()
                if not self.health.broken:
                    self.drain()
                self.sums.close(self.binding.weights)
                self.tier.close()

    def load(self, given: Mapping[Weight, dict[str, Any]], count: int, *, wide: bool) -> None:
        """Replace all states, of step *count*, by the states *given*."""
        if self.health.broken or self.tier.interrupted:
            self._reset()
        self.forget_step()
        self.provisional.forget(self.binding.buckets)
        self.updater.wide = wide
        self.states.restore(given, loaded=True)
        self.count = count

    def _reset(self) -> None:
        """Forget all states, and gradients in host memory, even if they are damaged."""
        self.overlap.abandon()
        for weight in self.binding.weights:
            weight.awaited = None  # it has the gradient of a step that was not made
        self.updater.reset(self.binding.buckets)
        self.sums.reset()
        self.tier.reset()
        for bucket in self.binding.buckets:
            bucket.forget()
        for progress in (self.health.calls, self.health.jobs):
            progress.running = progress.changing = False
        self.ended.clear()
