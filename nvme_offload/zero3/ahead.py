"""`bound`: what a forward pass of DeepSpeed gathers ahead of its use, with `"overlap_step"`.

What is gathered waits for its update. By itself DeepSpeed gathers `stage3_prefetch_bucket_size`
elements ahead before every module, up to `stage3_max_live_parameters`, so that a model of a billion
parameters would wait for all of its updates before its first layer. Here as many are ahead in all.

Nothing here depends on what is updated: all ranks, which gather together, do the same.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from itertools import accumulate
from typing import Any

import torch


def bound(coordinator: Any) -> Ahead:
    """Have the forward passes of *coordinator*, of one engine, gather less ahead."""
    compiler: Any = torch.compiler
    ahead = Ahead(coordinator)
    coordinator.fetch_sub_module = compiler.disable(ahead.fetch)
    return ahead


class Ahead:
    """Each use of a module is a step of a pass. DeepSpeed records the steps of one pass, and in those
    that follow it gathers ahead by a queue of the uses of parameters that are to come: those that
    left it are gathered, or were used.

    Attributes: *fetches*, the uses of modules so far. What one of them gathers, DeepSpeed asks for in
    the order of a set.

    _turn: the step of the recorded pass at which its backward part begins, None without one.
    _steps: of each use in the forward part, in the order of the queue.
    _elements: of the uses in the forward part before each, and of all of them.
    _backward: the uses in the backward part, while they are not in the queue.
    """

    def __init__(self, coordinator: Any) -> None:
        self.fetches = 0
        self._coordinator = coordinator
        self._fetch = coordinator.fetch_sub_module
        self._turn: int | None = None
        self._steps: list[int] = []
        self._elements: list[int] = [0]
        self._backward: list[Any] = []

    def fetch(self, current_submodule: Any, forward: bool) -> None:
        """DeepSpeed's, with less ahead in the forward part of a pass that was recorded."""
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
        """Add up the uses of the forward part of a pass, and have it gather nothing for the part from
        *turn* on. In an evaluation none follows: it would be in flight for good, and
        `GatheredParameters` refuses that.
        """
        uses = list(self._get("param_queue"))
        steps = [use.step_id_last_used_at for use in uses]
        end = len(uses) if turn is None else bisect(steps, turn - 1)
        self._steps = steps[:end]
        self._elements = list(accumulate((use.param.ds_numel for use in uses[:end]), initial=0))
        self._backward = uses[end:]
        self._set("param_queue", deque(uses[:end]))

    def _elements_ahead(self, step: int) -> int:
        """Of the uses after *step* that left the queue."""
        left = len(self._steps) - len(self._get("param_queue"))
        return self._elements[left] - self._elements[min(left, bisect(self._steps, step))]

    # DeepSpeed's own attributes.

    def _get(self, name: str) -> Any:
        return getattr(self._coordinator, f"_PartitionedParameterCoordinator__{name}")

    def _set(self, name: str, value: Any) -> None:
        setattr(self._coordinator, f"_PartitionedParameterCoordinator__{name}", value)
