"""`BackwardUpdates`: finds the buckets that can be updated during backward(), because all of their
gradients are complete.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..errors import UnsupportedError, known
from .buckets import Bucket, Weight, is_distributed, like, local, local_as_it_is
from .placeholders import SpentGradient


class BackwardUpdates:
    """Finds the buckets whose gradients are complete, and drops gradients after their update.

    *updated*: the buckets that this step has updated; the owner's own set. *assume_final*: a
    complete gradient is final, even if there are other ranks. Attributes: *accumulating*, true
    while backward() must not update parameters or drop gradients.
    """

    def __init__(self, updated: set[Bucket], *, assume_final: bool) -> None:
        self._assume_final = assume_final
        self._updated = updated
        self._norms: dict[Weight, torch.Tensor] = {}  # norms of the gradients that updates consume
        # weights whose gradients were consumed since `zero_grad`
        self._spent: dict[Weight, None] = {}
        # per bucket, the weights whose gradients are not complete
        self._waiting: dict[Bucket, set[Weight]] = {}
        # backward passes that have updated parameters and have not ended
        self._passes: set[int] = set()
        self.accumulating = False

    def check(self, parameter: torch.Tensor) -> None:
        """Check that a gradient of *parameter* is final when its hooks run. Raises:
        UnsupportedError.

        With several processes, only a DTensor shows that. FSDP2 runs the hooks after it has reduced
        a gradient. Where autograd runs them, the placements say whether a reduction is still
        pending. If the mesh has all ranks, no other ranks remain to reduce over. Source:
        foreach_reduce of torch.distributed.fsdp.
        """
        several = (
            torch.distributed.is_available()
            and torch.distributed.is_initialized()
            and torch.distributed.get_world_size() > 1
        )
        if self._assume_final or not several or not parameter.requires_grad:
            return
        if (
            not is_distributed(parameter)
            or parameter.device_mesh.size()  # type: ignore[attr-defined]
            < torch.distributed.get_world_size()
        ):
            raise UnsupportedError(
                "step_in_backward=True with several processes takes DTensors over all ranks, such as fully_shard makes: any other gradient that is complete on "
                "this rank may be reduced afterwards, as DistributedDataParallel does. Use fully_shard in its place, which over a mesh of (ranks, 1) only "
                'replicates; say step_in_backward="local" where nothing but autograd and FSDP2 works on gradients; or leave it out'
            )

    def begin_updates(self) -> None:
        """Record that this backward pass is about to update parameters."""
        number = torch._C._current_graph_task_id()
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if getattr(compiled, "in_compiled_autograd_region", False):
            return  # compiled autograd does not call the engine's callbacks
        if number != -1 and number not in self._passes:
            # The engine calls the callback unless an exception ends the pass. Source:
            # final_callbacks_ in torch/csrc/autograd/engine.cpp.
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._passes.discard(number))
            self._passes.add(number)

    def was_cut_short(self) -> bool:
        """Whether an exception has ended a backward pass after an update, since the last call of
        this.
        """
        if not self._passes or torch._C._current_graph_task_id() != -1:
            return False
        self._passes.clear()
        return True

    def end_step(self) -> None:
        """`step` has updated the remaining buckets, or they were dropped. Remove consumed
        gradients, so that the next backward() begins without any.
        """
        self._waiting.clear()
        self._norms.clear()
        for weight in self._spent:
            gradient = weight.parameter.grad
            if gradient is not None and isinstance(local_as_it_is(gradient), SpentGradient):
                weight.parameter.grad = None

    def forget(self) -> None:
        """Buckets were replaced: forget which gradients they wait for."""
        self._waiting.clear()

    def complete(self, weight: Weight) -> list[Bucket]:
        """Record that the gradient of *weight* is complete; return the buckets that waited for
        nothing else.
        """
        ready = []
        for bucket in dict.fromkeys(fragment.bucket for fragment in weight.fragments):
            waiting = self._waiting.get(bucket, set())
            # the first gradient of a backward pass; an earlier pass may not have ended
            if weight not in waiting:
                waiting = {fragment.weight for fragment in bucket.fragments}
                self._waiting[bucket] = waiting
            waiting.discard(weight)
            if waiting or bucket in self._updated:
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

    def note_norms(self, bucket: Bucket) -> None:
        """Compute the norms of the gradients of *bucket*, which an update is about to consume. Without
        this, `spend` takes the norms from `Fragment.norm`.
        """
        for weight in {fragment.weight for fragment in bucket.fragments} - self._norms.keys():
            gradient = weight.parameter.grad
            if gradient is not None:
                await_copy(weight.parameter)
                self._norms[weight] = torch.linalg.vector_norm(local(gradient))

    def spend(self, bucket: Bucket) -> None:
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
                self._spent[fragment.weight] = None

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


def await_copy(parameter: torch.Tensor) -> None:
    """Wait until the gradient of *parameter* is in host memory. With CPUOffloadPolicy, older FSDP2
    runs hooks while the current stream still copies the gradient.

    Source: foreach_reduce of torch.distributed.fsdp, which waits in torch 2.13 and does not in
    2.11.
    """
    if parameter.grad is not None and local(parameter.grad).is_pinned():
        torch.accelerator.current_stream().synchronize()
