"""`Ahead` limits how much a forward pass of DeepSpeed gathers ahead of use, with `"overlap_step"`.

Gathering a parameter waits for its update. DeepSpeed gathers another `stage3_prefetch_bucket_size`
elements before every module, up to `stage3_max_live_parameters`: a model of a billion parameters
would wait for all updates before its first layer. Here the bucket limits the elements gathered
ahead in total, whichever parameters were updated, so all ranks gather the same ones.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from itertools import accumulate
from typing import Any

import torch


class Ahead:
    """Each use of a module is a step of a pass. DeepSpeed records the steps of one pass of
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
