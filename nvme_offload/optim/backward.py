"""`BackwardUpdates`: updates buckets in backward(), when their gradients are complete."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..device.modes import check_no_capture
from ..errors import UnsupportedError, UsageError, known
from .buckets import Bucket, Weight, is_distributed, like, local, local_as_it_is
from .host_gradient import HostGradient
from .modes import fixed_modes
from .options import refuse_second_backward
from .placeholders import SpentGradient
from .provisional import Before

if TYPE_CHECKING:
    from .steps import Steps

_log = logging.getLogger(__name__)


class BackwardUpdates:
    """Updates the buckets of *owner* whose gradients are complete, and drops the gradients.

    *owner* is not kept alive. Attributes: *accumulating*, true while backward() must not update
    parameters or drop gradients.
    """

    def __init__(self, owner: Steps) -> None:
        self._source = weakref.ref(owner)
        self._when = owner.when
        self._updated = owner.updated
        self._norms: dict[Weight, torch.Tensor] = {}  # norms of the gradients that updates consume
        # weights whose gradients were consumed since `zero_grad`, and the number of the last such step
        self._spent: dict[Weight, int] = {}
        # per bucket, the weights whose gradients are not complete
        self._waiting: dict[Bucket, set[Weight]] = {}
        # Backward passes that have updated parameters, by their number
        self._passes: dict[int, _Pass] = {}
        self._bound_in_pass = -1  # the pass in which the binding was last checked
        self._draining_pass = -1  # the pass that waits at its end for parameters in host memory
        self._has_begun = False  # an update of the present step has begun
        self._failed_step = -2  # the last step in which an update failed
        self.accumulating = False
        if self._when.step_in_backward:
            _watch_nested_passes()
        backward = weakref.ref(self)
        compiler: Any = torch.compiler

        def came(parameter: torch.Tensor) -> None:
            updates = backward()
            if updates is not None:
                updates.gradient_came(parameter)

        # compiled autograd would compile the update, which would change its rounding
        self._hook: Any = compiler.disable(came)
        self._hook.updates = backward
        self._handles: dict[int, Any] = {}  # of the hooks, by their key in the parameter's hooks

    @property
    def _owner(self) -> Steps:
        return known(self._source())

    def check(self, parameter: torch.Tensor) -> None:
        """Check that a gradient of *parameter* is final when its hooks run. Raises:
        UnsupportedError.

        With several processes, only a DTensor shows that. FSDP2 runs the hooks after it has reduced
        a gradient. Where autograd runs them, the placements say whether a reduction is still
        pending. If the mesh has all ranks, no other ranks remain to reduce over. Source:
        foreach_reduce of torch.distributed.fsdp.
        """
        if self._when.step_in_backward in (False, "local") or not parameter.requires_grad:
            return
        dist = torch.distributed
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if ranks > 1 and (
            not is_distributed(parameter) or parameter.device_mesh.size() < ranks  # type: ignore[attr-defined]
        ):
            local = 'say step_in_backward="local" where nothing but autograd and FSDP2 works on gradients; '
            raise UnsupportedError(
                f"step_in_backward={self._when.step_in_backward!r} with several processes takes DTensors over all ranks, such as fully_shard makes: any other "
                "gradient that is complete on this rank may be reduced afterwards, as DistributedDataParallel does. Use fully_shard in its place, which over a "
                "mesh of (ranks, 1) only replicates; "
                f"{'' if self._when.is_provisional else local}or leave it out"
            )

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add hooks to *parameters*, except frozen ones. A parameter that has left the groups keeps
        its hook, since FSDP2 may be calling it.
        """
        self._handles = {
            key: handle
            for key, handle in self._handles.items()
            if handle.hooks_dict_ref() is not None
        }
        for parameter in parameters:
            one: Any = parameter
            # torch.utils.swap_tensors removes the hooks of a parameter
            if one.requires_grad and self._handles.keys().isdisjoint(
                one._post_accumulate_grad_hooks or ()
            ):
                handle = one.register_post_accumulate_grad_hook(self._hook)
                self._handles[handle.id] = handle

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    # Called by hooks.

    @fixed_modes()
    def gradient_came(self, parameter: torch.Tensor) -> None:
        """Autograd or FSDP2 has computed the gradient of *parameter*. Parameters that cannot be
        updated now are left to `step`, since an error here would leave other ranks waiting for this
        one. Raises: OffloadError, with *accumulate*; UnsupportedError.
        """
        owner = self._source()
        if (
            owner is None
            or owner.is_orphan
            or (self._when.step_in_backward and (self.accumulating or owner.health.broken))
        ):
            return
        check_no_capture(
            "update or add up gradients in backward: leave step_in_backward and accumulate out, and call step() after each replay"
        )
        self.check(parameter)  # there may be more processes than at first
        weight = self._bound(parameter)
        if weight is None or not weight.fragments:
            return
        if self._when.accumulate:
            owner.sums.move(weight)
            return
        self._check_alone(parameter)
        owner.begin_backward()
        weight.settle_gradient()
        if self._when.is_provisional or not weight.fragments[0].bucket.visits_device:
            _await_copy(weight.parameter)  # the CPU reads the gradient
        try:
            with owner.lock:
                self._update_complete(weight)
        except BaseException as error:
            owner.note(error)
            raise

    def _check_alone(self, parameter: Any) -> None:
        """Check that no other optimizer updates *parameter* in this pass. Raises: UsageError."""
        hooks = parameter._post_accumulate_grad_hooks
        for hook in hooks.values() if len(hooks) > 1 else ():
            other = hook.updates() if hasattr(hook, "updates") else None
            if other not in (None, self) and other.is_updating(parameter):
                raise UsageError(
                    "two optimizers with step_in_backward would update the same parameter in this backward(): close() the unused optimizer, "
                    "or call no_sync() of the optimizer whose step() does not follow"
                )

    def is_updating(self, parameter: torch.Tensor) -> bool:
        """Whether this updates *parameter* in the present pass."""
        owner = self._source()
        if owner is None or owner.is_orphan or self.accumulating or self._when.accumulate:
            return False
        weight = owner.binding.of(parameter)
        return weight is not None and bool(weight.fragments)

    def _bound(self, parameter: torch.Tensor) -> Weight | None:
        """The weight of *parameter*; None if it cannot be updated now."""
        owner = self._owner
        weight = owner.binding.of(parameter)
        number = torch._C._current_graph_task_id()
        if number != self._bound_in_pass or (weight is not None and not weight.is_as_bound):
            self._bound_in_pass = number
            try:
                owner.bind()
            except Exception as error:
                owner.note(error)
                _log.warning("parameters are not bound in backward(): %s", str(error))
            weight = owner.binding.of(parameter)
        return weight if weight is not None and weight.is_as_bound else None

    def _update_complete(self, weight: Weight) -> None:
        """Update the buckets that waited only for the gradient of *weight*."""
        owner = self._owner
        owner.recover()
        owner.ended.clear()
        owner.health.calls.running = True
        if self._when.is_provisional:
            owner.provisional.complete(weight)
        for bucket in self._complete(weight):
            if not owner.health.broken:
                try:
                    self._update(bucket)
                except Exception as error:
                    if self._failed_step < owner.count - 1:
                        _log.warning(
                            "an update during backward() failed, and is left to step(); so is any other that fails: %s",
                            error,
                        )
                    self._failed_step = owner.count
                    owner.note(error)
                    owner.recover()
                    owner.health.calls.running = True
        owner.health.calls.running = False

    def _update(self, bucket: Bucket) -> None:
        """Update *bucket*, whose gradients are complete, if it can be updated now."""
        owner = self._owner
        if not self._has_begun:
            owner.states.take_up()
            self._has_begun = True
        if not all(fragment.weight.is_as_bound for fragment in bucket.fragments):
            return
        for fragment in bucket.fragments:
            check_gradient(fragment.weight)
        if self._when.is_provisional:
            owner.provisional.came_by(bucket)
        else:
            self._begin_updates()
            if owner.overlap.can_queue([bucket]):
                self._note_norms(bucket)
                owner.overlap.add(owner, [bucket])
                self._spend(bucket)
                return
        if not owner.overlap.quiesce():
            return  # an earlier update has failed; `step` raises its error
        if bucket.visits_device:
            self._drain_at_end()
        elif not self._when.is_provisional:
            self._note_norms(bucket)
        with owner.clock.running():
            if self._when.is_provisional:
                self._update_provisionally(bucket)  # which `zero_grad` undoes
            else:
                owner.update_now(bucket)
        if not self._when.is_provisional:
            self._spend(bucket)

    def _update_provisionally(self, bucket: Bucket) -> None:
        """Update *bucket* so that it can be undone; if that is impossible, leave it to `step`."""
        owner = self._owner
        provisional, calls = owner.provisional, owner.health.calls
        if not (provisional.may_begin(bucket) and owner.updater.keeps_layout(bucket, owner.count)):
            return
        if not owner.tier.swapper.stays(bucket.name):
            owner.tier.swapper.write_back(bucket.name)  # an undo returns to this version
        owner.updater.open(bucket)
        owner.updater.retain(bucket)
        before = provisional.before(bucket)
        try:
            options = owner.options_of(bucket)
            left = owner.updater.step(bucket, options, owner.count, calls)
            provisional.made(before, left)
            self._updated.add(bucket)
            owner.states.show(bucket)
            calls.changing = False
        except BaseException as error:
            self._undo_after(error, before)
            raise

    def _undo_after(self, error: BaseException, before: Before) -> None:
        """Undo now: the program may write to the parameters before its next call. Log an error."""
        owner = self._owner
        try:
            with owner.health.out_of_sync(
                f"updates were being undone ({type(error).__name__}: {error})"
            ):
                owner.tier.end_uses()
                owner.updater.recover(owner.binding.buckets)
                owner.show_undone(owner.provisional.roll_back(before))
                owner.health.calls.changing = False
        except Exception as failure:
            _log.warning(
                "an update was not undone, so that a checkpoint must be loaded: %s", failure
            )

    def _drain_at_end(self) -> None:
        """Make this pass wait at its end until parameters in host memory have their new values."""
        number = torch._C._current_graph_task_id()
        if number == self._draining_pass:
            return
        self._draining_pass = number

        def drain(owner: Steps) -> None:
            self._draining_pass = -1  # FSDP2 may reduce the gradients of another root after this
            with owner.lock:
                if owner.overlap.quiesce():
                    owner.updater.drain()

        _at_end_of_pass(self._owner.weakly(drain))

    def _begin_updates(self) -> None:
        """Record that this backward pass is about to update parameters."""
        number = torch._C._current_graph_task_id()
        if number != -1 and number not in self._passes and not _is_compiled():
            for one in (_Pass(number), *_outer_passes):
                if one.is_running:
                    self._passes[one.number] = one

    def was_cut_short(self) -> bool:
        """Whether an exception has ended a backward pass after an update, since the last call."""
        # Another thread may still be in its pass.
        ended = [one for one in list(self._passes.values()) if not one.is_running]
        for one in ended:
            self._passes.pop(one.number, None)
        return not all(one.is_complete for one in ended)

    def end_step(self) -> None:
        """The step has ended, or is dropped. Remove consumed gradients."""
        self._has_begun = False
        self._waiting.clear()
        self._norms.clear()
        for weight in self._spent:
            if _is_spent(weight):
                weight.parameter.grad = None

    def forget_replaced(self) -> bool:
        """A step that failed has updated buckets, and now the program makes a step. Have it update
        those again whose gradients are other tensors now, as after `model.zero_grad()`. Changes in
        place, as by clipping, make no other gradient. Returns: whether there are any.
        """
        owner = self._owner
        if not self._updated or owner.overlap.step is not None or self._when.step_in_backward:
            return False
        replaced = {
            bucket
            for bucket in self._updated
            if any(fragment.weight.has_other_gradient for fragment in bucket.fragments)
        }
        self._updated -= replaced
        return bool(replaced)

    def check_unchanged(self) -> None:
        """Check that nothing has changed the options and gradients that the updates of this step have
        used, or the parameters since. Raises: UsageError.
        """
        owner = self._owner
        if not self._updated:
            return
        changed = [f"the option {name}" for name in owner.options.changed(owner.groups)]
        if not all(
            _is_spent(weight) or not weight.is_as_bound
            for weight, step in self._spent.items()
            if step == owner.count
        ):
            changed.append("a gradient")
        weights = {fragment.weight for bucket in self._updated for fragment in bucket.fragments}
        # of an awaited one, another thread records the update
        if any(one.awaited is None and one.was_changed for one in weights):
            changed.append("a parameter")
        if changed:
            raise UsageError(
                f"{changed[0]} was changed between backward() and step(), where step_in_backward={self._when.step_in_backward!r} "
                "has updated parameters already: change it before backward() or after step(), or leave step_in_backward out"
            )

    def forget(self) -> None:
        """Buckets were replaced: forget which gradients they wait for."""
        self._waiting.clear()

    def _complete(self, weight: Weight) -> list[Bucket]:
        """The gradient of *weight* is complete; return the buckets that waited only for it. Raises:
        UsageError if one is updated already.
        """
        ready = []
        for bucket in dict.fromkeys(fragment.bucket for fragment in weight.fragments):
            waiting = self._waiting.get(bucket, set())
            # the first gradient of a backward pass; an earlier pass may not have ended
            if weight not in waiting:
                waiting = {fragment.weight for fragment in bucket.fragments}
                self._waiting[bucket] = waiting
            waiting.discard(weight)
            if bucket in self._updated:
                refuse_second_backward(self._when.step_in_backward)
            if waiting:
                continue
            # a gradient that was complete in an aborted backward() may have been dropped since
            waiting |= {
                fragment.weight
                for fragment in bucket.fragments
                if fragment.weight.parameter.grad is None
            }
            if not waiting:
                ready.append(bucket)
        return ready

    def _note_norms(self, bucket: Bucket) -> None:
        """Keep the norms of gradients that `_spend` drops, and that no update brings to a GPU."""
        for weight in {fragment.weight for fragment in bucket.fragments} - self._norms.keys():
            gradient = weight.parameter.grad
            if gradient is not None:
                _await_copy(weight.parameter)
                self._norms[weight] = torch.linalg.vector_norm(local(gradient))

    def _spend(self, bucket: Bucket) -> None:
        """*bucket* was updated: drop the gradients that no other bucket still needs."""
        for fragment in bucket.fragments:
            parameter = fragment.weight.parameter
            if (
                all(other.bucket in self._updated for other in fragment.weight.fragments)
                and parameter.grad is not None
            ):
                norm = self._norms.pop(fragment.weight, None)
                if norm is None:
                    parts = [known(part.norm) for part in fragment.weight.fragments]
                    norm = torch.linalg.vector_norm(torch.stack(parts)).to(parameter.grad.dtype)
                parameter.grad = like(parameter, SpentGradient(local_as_it_is(parameter), norm))
                self._spent[fragment.weight] = self._owner.count

    def zero(self, *, set_to_none: bool) -> None:
        """Do what `zero_grad` does for the consumed gradients: unless *set_to_none*, replace them
        by zeros. With zeros, `step` updates parameters that the next backward() does not reach.
        """
        spent, self._spent = self._spent, {}
        for weight in () if set_to_none else spent:
            parameter = weight.parameter
            if parameter.grad is None:
                part = local_as_it_is(parameter)
                zeros = torch.zeros(part.shape, dtype=part.dtype, device=part.device)
                parameter.grad = like(parameter, zeros)


def _is_spent(weight: Weight) -> bool:
    """Whether an update has consumed the gradient that the parameter has."""
    gradient = weight.parameter.grad
    return gradient is not None and isinstance(local_as_it_is(gradient), SpentGradient)


def _await_copy(parameter: torch.Tensor) -> None:
    """Wait until the gradient of *parameter* is in host memory. With CPUOffloadPolicy, older FSDP2
    runs hooks while the current stream still copies the gradient.

    Source: foreach_reduce of torch.distributed.fsdp, which waits in torch 2.13 and does not in
    2.11.
    """
    if parameter.grad is not None and local(parameter.grad).is_pinned():
        torch.accelerator.current_stream().synchronize()


class _Pass:
    """The backward pass *number*, which runs now in this thread: the engine drops the callback of its
    end if an exception ends it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_complete = False
        end = functools.partial(setattr, self, "is_complete", True)  # no traceback refers to it
        _at_end_of_pass(end)
        self._end = weakref.ref(end)

    @property
    def is_running(self) -> bool:
        """Whether the pass is neither complete nor ended by an exception."""
        return not self.is_complete and self._end() is not None


_outer_passes: list[_Pass] = []  # in which another pass runs now


@functools.cache
def _watch_nested_passes() -> None:
    """Keep `_outer_passes`: reentrant checkpoints run a backward pass in a function's backward. Only
    the outer pass can say whether an exception ended it after updates in the inner one.
    """
    backward: Any = torch.autograd.backward

    @functools.wraps(backward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        number = torch._C._current_graph_task_id()
        if number == -1 or _is_compiled():
            return backward(*args, **kwargs)
        outer = _Pass(number)
        try:
            _outer_passes.append(outer)
            return backward(*args, **kwargs)
        finally:
            _outer_passes[:] = [one for one in _outer_passes if one is not outer]

    untyped: Any = torch
    untyped.autograd.backward = untyped.compiler.disable(watched)


def _is_compiled() -> bool:
    """Whether compiled autograd runs, which does not call the engine's callbacks."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "in_compiled_autograd_region", False))


def _at_end_of_pass(act: Callable[[], Any]) -> None:
    """Make autograd call *act* at the end of this backward pass, unless an exception ends it."""
    engine: Any = torch.autograd.Variable
    engine._execution_engine.queue_callback(act)


def check_gradient(weight: Weight) -> None:
    """Check the gradient of *weight*, and copy it if it is another parameter's in host memory."""
    gradient = weight.parameter.grad
    if isinstance(gradient, HostGradient):
        gradient.held.check()
        if gradient.held.weight() is not weight:
            weight.parameter.grad = gradient = gradient.clone()
    if gradient is not None and gradient.layout is not torch.strided:
        raise UnsupportedError(
            "a gradient is sparse, which NVMeOptimizer does not take: make the embedding with sparse=False"
        )
