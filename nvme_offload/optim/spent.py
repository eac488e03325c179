"""`SpentGradient`: what stands in `.grad` once `step_in_backward` has used the gradient up."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UsageError


class SpentGradient(torch.Tensor):
    """A tensor without memory, like a gradient in all but that every use of it says what contradicts `step_in_backward`."""

    @staticmethod
    def __new__(cls: Any, parameter: torch.Tensor) -> Any:
        """Stand for the gradient of *parameter*."""
        return torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<gradient of shape {list(self.shape)}, used up by step_in_backward>"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse. Raises: UsageError."""
        raise UsageError(
            f"{function} wants a gradient that step_in_backward has used up: the parameter was updated during backward(). To accumulate gradients, "
            "run all but the last backward() under optimizer.no_sync(), and call optimizer.step() or zero_grad() before the next. Clipping by a norm, "
            "GradScaler, DistributedDataParallel and whatever else looks at gradients before step() needs step_in_backward=False; where it has come to "
            "this, the parameters have moved by gradients without it, so begin again from a checkpoint"
        )
