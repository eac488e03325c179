"""Tensors without memory, for what is not where it is looked for: `SpentGradient` in `.grad`, and `StateOnDrive` in an optimizer's `state`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import UsageError
from .bundles import local

if TYPE_CHECKING:
    from .bundles import Weight

_COPIES = (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)


class SpentGradient(torch.Tensor):
    """What `step_in_backward` leaves of a gradient: every use of it says what contradicts that."""

    @staticmethod
    def __new__(cls: Any, parameter: torch.Tensor) -> Any:
        """Stand for the gradient of *parameter*, or of a part of one."""
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


class StateOnDrive(torch.Tensor):
    """The state *key* of *weight*: copies stand for the same, and so do those on another device; every other use says where the values are."""

    weight: Weight
    key: str

    @staticmethod
    def __new__(cls: Any, weight: Weight, key: str, dtype: torch.dtype) -> Any:
        """Stand for it as it is on this rank."""
        part = local(weight.parameter)
        made = torch.Tensor._make_wrapper_subclass(cls, part.shape, dtype=dtype, device=part.device)
        made.weight, made.key = weight, key
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<state {self.key!r} of shape {list(self.shape)}, on a drive>"

    def __deepcopy__(self, memo: Any) -> StateOnDrive:
        return self  # torch's copies *weight*, too

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Copy the stand-in, or refuse. Raises: UsageError."""
        if function in _COPIES:
            return cls(args[0].weight, args[0].key, args[0].dtype)
        raise UsageError(f"{function} wants a state that NVMeOptimizer has on a drive: take it from state_dict(), and give it back by load_state_dict()")


def is_on_drive(value: Any) -> bool:
    """Whether *value* is a `StateOnDrive`, or the whole of which one is this rank's part."""
    return torch.is_tensor(value) and isinstance(local(value), StateOnDrive)
