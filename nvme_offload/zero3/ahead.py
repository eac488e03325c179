"""`bound` limits how much a forward pass of DeepSpeed gathers ahead of use, with `"overlap_step"`.

Gathering a parameter waits for the parameter's update. DeepSpeed gathers another
`stage3_prefetch_bucket_size` elements ahead before every module, up to
`stage3_max_live_parameters`. A model of a billion parameters would therefore wait for all of its
updates before its first layer. Here `stage3_prefetch_bucket_size` limits the elements gathered
ahead in total.

The limit does not depend on which parameters were updated, so all ranks gather the same ones.
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
    """Each use of a module is a step of a pass. DeepSpeed records the steps of one pass. In later
    passes it gathers ahead from a queue of the uses of parameters that follow; a use leaves the
    queue when its parameter is gathered or used.

    Attributes: *fetches*, the number of uses of modules so far. DeepSpeed requests the parameters
    that one use gathers in the order of a set.

    _turn: the step of the recorded pass at which its backward part begins, None without one.
    _steps: the step of each use in the forward part, in the order of the queue.
    _elements: for each use in the forward part, the elements of the uses before it; last, the
    total.
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
        """Add up the uses of the forward part of a pass. Keep the pass from gathering ahead for its
        backward part, which begins at *turn*. An evaluation has no backward part: the gathers would
        stay in flight, and `GatheredParameters` refuses parameters in flight.
        """
        uses = list(self._get("param_queue"))
        steps = [use.step_id_last_used_at for use in uses]
        end = len(uses) if turn is None else bisect(steps, turn - 1)
        self._steps = steps[:end]
        self._elements = list(accumulate((use.param.ds_numel for use in uses[:end]), initial=0))
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
