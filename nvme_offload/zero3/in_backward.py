"""`InBackward` implements `"step_in_backward"` for one engine. In the last backward pass of a step,
it updates a sub-group as soon as the gradients of all its parameters are reduced. DeepSpeed's
`step` then skips the sub-group.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedError, UsageError
from .overlap import left_out_since, needs_order, tell_left_out

if TYPE_CHECKING:
    from .stage3 import Stage3


class InBackward:
    """The updates of *stage3*. *updated*: by this pass. *updating*: whether it is in one."""

    def __init__(self, stage3: Stage3) -> None:
        self.updated: set[int] = set()
        self.updating = False
        self._stage3 = stage3
        self._reduced: dict[int, set[int]] = {}  # sub-group -> ids of parameters
        self._reason: str | None = None  # why this pass updates nothing, "" if it does, once known
        self._told: set[str] = set()

    def reduced(self, index: int, params: Iterable[Any]) -> None:
        """Record that backward has reduced the gradients of *params* in sub-group *index*, and update
        the sub-group if it is complete. Raises: UsageError; any error of an update.
        """
        stage3 = self._stage3
        if index in self.updated:
            raise UsageError(
                '"step_in_backward" has updated parameters in the backward pass before, and a second one follows without a step: '
                "call engine.step() after each backward pass, and set gradient_accumulation_steps to accumulate"
            )
        reduced = self._reduced.setdefault(index, set())
        reduced.update(map(id, params))
        if any(
            param.requires_grad and id(param) not in reduced for param in stage3.fp16_groups[index]
        ):
            return
        if self._reason is None:  # once in a pass: it looks at all sub-groups
            self._reason = left_out_since(stage3) or (
                "updates depend on the order of sub-groups"
                if needs_order(stage3)
                else "gradients are clipped or scaled"
                if stage3.clip_grad > 0 or stage3.loss_scale != 1
                else ""
            )
        if self._reason:
            tell_left_out(self._told, self._reason, "step_in_backward")
            return
        self._update(index)

    @torch.no_grad()
    def _update(self, index: int) -> None:
        stage3, whole = self._stage3, self._stage3.partly_changed
        self.updating = True
        try:
            stage3.update(
                index, 1.0, functools.partial(stage3.step_sub_group, index, stage3.optimizer)
            )
        finally:
            self.updating = False
        stage3.gradient_store.use_up(index)
        self.updated.add(index)
        stage3.partly_changed = whole  # after an exception it stays true

    def end(self) -> None:
        """Reset after the end of a step, or after its backward pass was abandoned."""
        self._reduced.clear()
        self._reason = None
        self.updated.clear()
        self.updating = False


def require_possible(stage3: Stage3, ds_config: Mapping[str, Any]) -> None:
    """Check that the settings allow updates in backward. Raises: UsageError, UnsupportedError."""
    refused = {
        '"gradient_clipping" above 0 (the default is 1.0), which needs the norm of all gradients': (
            stage3.clip_grad > 0
        ),
        "fp16, whose overflows are known after the backward pass": stage3.dtype == torch.float16,
        '"missing_gradients": "last", which needs gradients of earlier steps': stage3.keeps_last,
        '"overlap_step"': stage3.overlap is not None,
        '"managed_gradient_accumulation": false, with which no backward pass is known to be the last': (
            ds_config.get("managed_gradient_accumulation") is False
        ),
    }
    for what, is_on in refused.items():
        if is_on:
            raise UsageError(f'"step_in_backward" excludes {what}: change one of the two')
    zero = ds_config.get("zero_optimization") or {}
    if (zero.get("offload_param") or {}).get("device") == "nvme":
        raise UnsupportedError(
            '"step_in_backward" does not work with parameters on a drive: leave it out, or keep parameters on the GPU or with "device": "cpu"'
        )
