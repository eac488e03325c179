"""`bound`: what a forward pass of DeepSpeed gathers ahead of its use, with `"overlap_step"`.

What is gathered waits for its update. By itself DeepSpeed gathers `stage3_prefetch_bucket_size`
elements ahead before every module, up to `stage3_max_live_parameters`, so that a model of a billion
parameters would wait for all of its updates before its first layer. Here as many are ahead in all.

Nothing here depends on what is updated: all ranks, which gather together, do the same.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params, z3_leaf_module

_COUNTED = 1000  # parameters that are ahead; more are enough, whatever their size


def bound(coordinator: Any) -> None:
    """Have the forward passes of *coordinator*, of one engine, gather less ahead."""
    compiler: Any = torch.compiler
    coordinator.fetch_sub_module = compiler.disable(_Ahead(coordinator).fetch)


class _Ahead:
    """Each use of a module is a step of a pass. DeepSpeed records the steps of one pass, and in those
    that follow it gathers ahead by a queue of the uses that are to come.

    _turn: the step of the recorded pass at which its backward part begins, None without one.
    _backward: the uses in that part, while they are not in the queue.
    """

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self._fetch = coordinator.fetch_sub_module
        self._turn: int | None = None
        self._backward: list[Any] = []

    def fetch(self, current_submodule: Any, forward: bool) -> None:
        """DeepSpeed's, with less ahead in the forward part of a pass that was recorded."""
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
        if step == 0 and turn is not None:
            self._take_out(turn)
        bucket = self._get("prefetch_bucket_sz")
        self._set("prefetch_bucket_sz", bucket - self._elements_ahead(current_submodule, bucket))
        try:
            self._fetch(current_submodule, forward)
        finally:
            self._set("prefetch_bucket_sz", bucket)
        if turn is not None and step == turn - 1:
            self._get("param_queue").extend(self._backward)

    def _take_out(self, turn: int) -> None:
        """Have the forward part of a pass gather nothing for the part from *turn* on. In an evaluation
        none follows: it would be in flight for good, and `GatheredParameters` refuses that.
        """
        queue = self._get("param_queue")
        self._backward = [use for use in queue if use.step_id_last_used_at >= turn]
        self._set("param_queue", deque(use for use in queue if use.step_id_last_used_at < turn))

    def _elements_ahead(self, module: Any, bucket: int) -> int:
        """Of what is gathered and not used yet, *module* aside; at most *bucket*."""
        ahead = self._get("inflight_param_registry")
        if len(ahead) > _COUNTED:
            return bucket
        own = set(iter_params(module, recurse=z3_leaf_module(module)))
        elements: int = sum(param.ds_numel for param in ahead if param not in own)
        return min(bucket, elements)

    # DeepSpeed's own attributes.

    def _get(self, name: str) -> Any:
        return getattr(self._coordinator, f"_PartitionedParameterCoordinator__{name}")

    def _set(self, name: str, value: Any) -> None:
        setattr(self._coordinator, f"_PartitionedParameterCoordinator__{name}", value)
