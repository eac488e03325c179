"""`HostGradient`: the placeholder in `.grad` of a gradient in host memory."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from ..errors import UsageError, known
from .without_memory import WithoutMemory, changes_form, with_values

if TYPE_CHECKING:
    from .accumulation import GradientSums
    from .buckets import Weight

_ATEN = torch.ops.aten
_ADD = _ATEN.add_.Tensor
_UNSCALE = _ATEN._amp_foreach_non_finite_check_and_unscale_.default
_NORM = _ATEN.linalg_vector_norm.default
_NORMS = _ATEN._foreach_norm.Scalar
_MOVE = _ATEN._to_copy.default
_ZERO = _ATEN.zero_.default
_ZEROS = _ATEN._foreach_zero_.default
# operators that scale each element by a number or a tensor of one element
_SCALE = {_ATEN.mul_.Tensor, _ATEN.div_.Tensor}
_SCALES = {
    _ATEN._foreach_mul_.Scalar,
    _ATEN._foreach_mul_.Tensor,
    _ATEN._foreach_div_.Scalar,
    _ATEN._foreach_div_.Tensor,
}


@dataclasses.dataclass(eq=False)
class Sum:
    """The accumulated gradient of *weight*, whose bytes *owner* stores. The garbage collector does
    not see objects in `.grad`, so both references are weak.

    *pending*: elementwise changes that still have to be applied to the bytes, in order. *is_zero*:
    it has no bytes yet. *lost*: why the bytes are gone; "" if they are not.
    """

    weight: weakref.ref[Weight]
    owner: weakref.ref[GradientSums]
    strides: tuple[int, ...]
    pending: list[Callable[[torch.Tensor], Any]] = dataclasses.field(default_factory=list)
    is_zero: bool = False
    lost: str = ""

    def check(self) -> GradientSums:
        """Return the owner of the bytes. Raises: UsageError if the bytes are gone."""
        owner = self.owner()
        if owner is None:
            self.lost = "went with its NVMeOptimizer"
        if owner is None or self.lost:
            raise UsageError(
                f'the gradient that accumulate="host" had of a parameter {self.lost}: call zero_grad() before the next backward(), or, of a parameter that has '
                "left the optimizer, set .grad to None"
            )
        return owner

    def changes(self) -> Callable[[torch.Tensor], None]:
        """A function that applies the pending changes to flat values of all or a part of the
        gradient.
        """
        pending, is_scalar = list(self.pending), not self.strides

        def change(values: torch.Tensor) -> None:
            # type promotion differs for a tensor without dimensions: torch computes in the common
            # dtype of both operands
            for one in pending:
                one(values.view(()) if is_scalar else values)

        return change

    def make_zero(self) -> None:
        """Reset to zero. A plain tensor replaces the gradient of a weight that is not bound any longer,
        or not as it is now. Raises: UsageError if the weight is gone.
        """
        self.pending.clear()
        weight = self.weight()
        if weight is None:
            self.check()
        elif weight.fragments and weight.is_as_bound:
            self.is_zero, self.lost = True, ""
        else:
            weight.parameter.grad = torch.zeros_like(weight.parameter.detach())


class HostGradient(WithoutMemory):
    """Stands for a gradient: in-place operators, such as autograd's additions, change its bytes in
    host memory, and any other use gets a copy. So clipping, GradScaler and DistributedDataParallel
    see the same values.
    """

    held: Sum

    @staticmethod
    def __new__(cls: Any, of: Sum) -> Any:
        """Stand for the gradient *of*."""
        parameter = known(of.weight()).parameter
        return cls._of_form(of, parameter.shape, of.strides, parameter.dtype, parameter.device)

    @classmethod
    def _of_form(cls, of: Sum, *form: Any) -> Any:
        made = cls.make(*form)
        made.held = of
        return made

    def _moved(self, args: Any, kwargs: Any) -> Any:
        """The placeholder that `Tensor.to` makes of this one, whose values are gone."""
        form = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        device = kwargs.get("device") or self.device
        moved = _MOVE(form, *args, **{**kwargs, "device": form.device})
        return self._of_form(self.held, moved.shape, moved.stride(), moved.dtype, device)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<gradient of shape {list(self.shape)}, in host memory>"

    def refuse(self, use: str) -> NoReturn:
        """See `WithoutMemory`."""
        _refuse(use)

    def replace_data(self, values: torch.Tensor) -> None:
        """See `WithoutMemory`. *values* become the parameter's gradient, as the program may change
        them later.
        """
        weight = self.held.weight()
        if weight is None:
            self.held.check()
        if weight is None or weight.parameter.grad is not self:
            _refuse("an assignment to .data of a tensor that is no longer in .grad")
        if isinstance(values, HostGradient) and values.held is self.held:
            weight.parameter.grad = values
        else:
            weight.parameter.grad = values.detach()
            self.held.lost = "was replaced by an assignment to its .data"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the operator with the values, loading one gradient at a time. Raises: UsageError."""
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if function is _ATEN.detach.default:
            return cls(first.held)
        if function is _MOVE and first.held.lost:
            return first._moved(args[1:], kwargs)
        if function is _ADD and isinstance(first, cls) and _is_gradient(args[1], first, kwargs):
            first.held.check().add(first.held, args[1])
            return first
        if function is _ZERO:
            first.held.make_zero()
            return first
        if function is _ZEROS:
            for one in first:
                one.zero_()
            return None
        if function in _SCALE and isinstance(first, cls) and _is_number(args[1]):
            _later(first, function, args[1])
            return first
        if function in _SCALES:
            for one in first:
                _later(one, lambda values, number: function([values], number), args[1])
            return None
        if function is _NORMS:
            return [function([_values(one)], *args[1:], **kwargs)[0] for one in first]
        if function is _NORM and first.device.type == "cuda" and len(args) < 3 and not kwargs:
            # For plain gradients on a GPU torch computes the norms of a list, whose last bits
            # differ. Source: get_total_norm of torch.nn.utils.
            return torch._foreach_norm([_values(first)], *args[1:])[0]
        if function is _UNSCALE:
            for one in first:
                _unscale(one, args[1], args[2])
            return None
        if function.is_view or changes_form(function):
            _refuse(function)
        return _with_values(function, args, kwargs)


def _later(tensor: torch.Tensor, change: Callable[[torch.Tensor, Any], Any], number: Any) -> None:
    """Defer a *change* by a *number* until the bytes of the gradient are moved; change a plain
    gradient now.
    """
    if not isinstance(tensor, HostGradient):
        change(tensor, number)
        return
    tensor.held.check()
    kept = number.clone() if torch.is_tensor(number) else number
    tensor.held.pending.append(lambda values: change(values, kept))


def _is_gradient(other: Any, to: HostGradient, kwargs: Any) -> bool:
    return (
        type(other) is torch.Tensor
        and not kwargs
        and other.layout is torch.strided
        and (other.shape, other.dtype, other.device) == (to.shape, to.dtype, to.device)
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or (type(value) is torch.Tensor and value.dim() == 0)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.held.check().load(tensor.held) if isinstance(tensor, HostGradient) else tensor


def _unscale(tensor: torch.Tensor, found: torch.Tensor, scale: torch.Tensor) -> None:
    """GradScaler's operator: check the gradient for infinities now, and unscale it later."""
    _UNSCALE([_values(tensor)], found, scale)
    if isinstance(tensor, HostGradient):
        tensor.held.pending.append(
            lambda values: _UNSCALE([values], torch.zeros_like(found), scale)
        )


def _with_values(function: Any, args: Any, kwargs: Any) -> Any:
    if any(
        isinstance(argument, list | tuple)
        and any(isinstance(one, HostGradient) for one in tree_leaves(argument))
        for argument in (*args, *kwargs.values())
    ):
        _refuse(function)  # it would load the whole list into the memory of the device

    def store(one: HostGradient, values: torch.Tensor) -> None:
        one.held.check().store(one.held, values)

    return with_values(function, args, kwargs, HostGradient, _values, store)


def _refuse(function: Any) -> NoReturn:
    raise UsageError(
        f'{function} cannot be done to gradients that accumulate="host" has in host memory: clone() them one by one, and assign the results to .grad'
    )
