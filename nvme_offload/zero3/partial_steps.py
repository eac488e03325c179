"""`PartialSteps` refuses steps of an optimizer after an exception has interrupted one."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import OffloadError
from . import compat
from .updates import partly_applied


class PartialSteps:
    """The part of ZeRO's optimizers that knows whether a step may begin.

    Attributes: *partly_changed*, whether a step or a load has changed only some of the states.
    """

    partly_changed = False
    _partly_reduced = False  # a backward pass has reduced gradients and has not ended
    _awaits_backward = False  # no backward pass has ended since the last applied step

    def require_whole(self) -> None:
        """Raises: OffloadError if a step or a load has changed only some of the states."""
        if self.partly_changed:
            raise partly_applied()

    def _require_backward(self) -> None:
        """Raises: OffloadError unless a backward pass has ended since the last step."""
        if self._awaits_backward:
            raise OffloadError(
                "no backward pass has ended since the last step, which is only partly applied if an exception ended engine.step(): "
                "run a backward pass, or, after an exception, call load_checkpoint()"
            )
        self._require_no_backward()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _require_no_backward(self, *_: Any) -> None:
        """Raises: OffloadError if an exception ended a backward pass after it had reduced some
        gradients.
        """
        if torch.is_grad_enabled() and (self._partly_reduced or compat.lacks_reductions(self)):
            raise partly_applied()
