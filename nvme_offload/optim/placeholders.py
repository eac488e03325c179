"""Tensors without memory: `SpentGradient` in `.grad`, and `StateOnDrive` in `state`."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from ..errors import UsageError, known
from ..optimizer_states.tree import replaced, tensors
from .buckets import local
from .without_memory import WithoutMemory, changes_form, with_values, written

if TYPE_CHECKING:
    from .buckets import Weight
    from .steps import Steps

_ATEN = torch.ops.aten
_MOVE = _ATEN._to_copy.default
_SAME_PLACES = _MOVE, _ATEN.detach.default
_NORM = _ATEN.linalg_vector_norm.default
_NORMS = _ATEN._foreach_norm.Scalar
_PRODUCTS = _ATEN.mul_.Tensor, _ATEN._foreach_mul_.Tensor, _ATEN._foreach_mul_.Scalar

_log = logging.getLogger(__name__)


@functools.cache
def _warn_of_clipping() -> None:
    _log.warning(
        "step_in_backward has used up the gradients, and only their norm is left: clipping that would change them raises an error. Nothing is to be done "
        'without clipping (max_grad_norm=0 in the Trainer); to clip, use step_in_backward="provisional" or accumulate="host"'
    )


class SpentGradient(WithoutMemory):
    """The placeholder of a gradient that `step_in_backward` has consumed. It has the gradient's
    norm, and refuses every other use, except a product with 1, as by clipping that changes nothing.
    """

    kept_norm: torch.Tensor

    @staticmethod
    def __new__(cls: Any, parameter: torch.Tensor, norm: torch.Tensor) -> Any:
        """Stand for the gradient of *parameter*, or of a part of one, which had this *norm*."""
        # not from the parameter, whose use would wait for its pending update
        strides = torch.empty(parameter.shape, device="meta").stride()
        made = cls.make(parameter.shape, strides, parameter.dtype, parameter.device)
        made.kept_norm = norm
        return made

    def refuse(self, use: str) -> NoReturn:
        """See `WithoutMemory`."""
        raise UsageError(
            f"{use} wants a gradient that step_in_backward has used up: the parameter was updated during backward(). To accumulate gradients, "
            'run all but the last backward() under optimizer.no_sync(), or use accumulate="host" in its place. Clipping by a norm, '
            "GradScaler, DistributedDataParallel and all other code that reads gradients before step() needs step_in_backward=False; for clipping there is "
            '"provisional", and in the Trainer of transformers max_grad_norm=0. The parameters were already updated by unchanged gradients, so begin again '
            "from a checkpoint"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<gradient of shape {list(self.shape)}, used up by step_in_backward>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return norms; refuse everything else. Raises: UsageError."""
        found = None
        if function is _NORM and set(args[1:]) <= {2.0} and not kwargs:
            _warn_of_clipping()
            found = args[0].kept_norm.to(args[0].device, copy=True)
        elif function is _NORMS and set(args[1:]) <= {2.0} and not kwargs:
            found = [torch.linalg.vector_norm(one) for one in args[0]]
        elif function in _PRODUCTS and _is_one(args[1]):
            found = args[0] if function is _PRODUCTS[0] else None
        else:
            spent = [one for one in tree_leaves((args, kwargs)) if isinstance(one, cls)]
            spent[0].refuse(str(function))
        return found


def _is_one(factor: Any) -> bool:
    if torch.is_tensor(factor):
        return type(factor) is torch.Tensor and factor.numel() == 1 and factor.item() == 1
    return bool(factor == 1)


class StateOnDrive(WithoutMemory):
    """The state *key* of *weight*. Every use gets a copy; an in-place operator changes the values
    on the drive, also through views. A tensor moved to another device or dtype stays on the drive
    until it is used, and cannot be used after the next update.
    """

    weight: Weight
    key: str
    source: weakref.ref[Steps]
    # operators that lead from the state to this tensor
    ways: tuple[Callable[[torch.Tensor], Any], ...]
    # `updates` of the weight when this was moved; None for the state itself, which is always
    # current
    updates: int | None
    # the dtype of the state, if this has all its values, each in its place; otherwise None
    whole: torch.dtype | None

    @staticmethod
    def __new__(
        cls: Any,
        source: weakref.ref[Steps],
        weight: Weight,
        key: str,
        form: torch.Tensor,
        device: torch.device,
        ways: tuple[Callable[[torch.Tensor], Any], ...] = (),
        updates: int | None = None,
        whole: torch.dtype | None = None,
    ) -> Any:
        """Stand for the local shard of the state, with the shape, strides and dtype of *form*."""
        made = cls.make(form.shape, form.stride(), form.dtype, device)
        made.source, made.weight, made.key = source, weight, key
        made.ways, made.updates = ways, updates
        made.whole = whole if ways else form.dtype
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<state {self.key!r} of shape {list(self.shape)}, on a drive>"

    def __deepcopy__(self, memo: Any) -> StateOnDrive:
        moved: StateOnDrive = self._by(_MOVE, (self,), {})
        return moved  # torch's own method would copy *weight*, too

    def refuse(self, use: str) -> NoReturn:
        """See `WithoutMemory`."""
        raise UsageError(
            f"{use} cannot be done to the state {self.key!r}, whose values are on a drive: clone() it, and put its replacement "
            "into optimizer.state"
        )

    def replace_data(self, values: torch.Tensor) -> None:
        """See `WithoutMemory`."""
        if (values.shape, values.dtype, values.device) != (self.shape, self.dtype, self.device):
            self.refuse("an assignment to .data that changes shape, dtype or device")
        self.copy_(values)

    @property
    def is_current(self) -> bool:
        """Whether no update has changed the state since this tensor was moved."""
        return self.updates in (None, self.weight.updates)

    def load(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the whole state, and this tensor as a view of it. Raises: UsageError."""
        source = self.source()
        if source is None:
            raise UsageError(f"the NVMeOptimizer that the state {self.key!r} was of is gone")
        source.synchronize()
        if not self.is_current:
            raise UsageError(
                f"the state {self.key!r} was moved before an update, and its values have changed since: clone() keeps them"
            )
        whole = source.states.read(self.weight, self.key)
        return whole, self.of(whole)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The result of this tensor's operators on the *whole* state."""
        for way in self.ways:
            whole = way(whole)
        return whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the operator with the values. Raises: UsageError."""
        kwargs = kwargs or {}
        if changes_form(function) and isinstance(args[0], cls):
            args[0].refuse(str(function))
        if (function.is_view or function is _MOVE) and isinstance(args[0], cls):
            return args[0]._by(function, args, kwargs)
        if any(one.updates is not None for one in written(StateOnDrive, function, args, kwargs)):
            raise UsageError(
                f"{function} would change a copy of a state that is still on the drive: clone() it, and put that into state"
            )
        wholes: dict[int, torch.Tensor] = {}  # of which the values are views

        def load(one: StateOnDrive) -> torch.Tensor:
            wholes[id(one)], part = one.load()
            return part

        def store(one: StateOnDrive, _: torch.Tensor) -> None:
            known(one.source()).states.write(one.weight, one.key, wholes[id(one)])

        return with_values(function, args, kwargs, StateOnDrive, load, store)

    def _by(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The result of *function*, a view or a move, for this tensor."""
        rest = args[1:]
        source, updates = self.source(), self.updates
        if function is _MOVE:
            if source is not None:
                source.synchronize()  # a pending update precedes the move
            updates = self.weight.updates if updates is None else updates
        device = torch.device(kwargs.get("device") or self.device)
        form = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        on_meta = {"device": form.device} if "device" in kwargs else {}
        forms = function(form, *rest, **{**kwargs, **on_meta})
        several = not torch.is_tensor(forms)
        made = []
        for index, one in enumerate(forms if several else [forms]):

            def way(tensor: torch.Tensor, index: int = index) -> torch.Tensor:
                result = function(tensor, *rest, **kwargs)
                return result[index] if several else result  # type: ignore[no-any-return]

            ways = (*self.ways, way)
            rounds = self.whole is None or torch.promote_types(self.whole, one.dtype) != one.dtype
            whole = None if rounds or function not in _SAME_PLACES else self.whole
            made.append(
                StateOnDrive(self.source, self.weight, self.key, one, device, ways, updates, whole)
            )
        return made if several else made[0]


def is_on_drive(value: Any) -> bool:
    """Whether *value* is a `StateOnDrive`, or a DTensor whose local shard is one."""
    return torch.is_tensor(value) and isinstance(local(value), StateOnDrive)


def whole_or_copied(state: Any) -> Any:
    """*state* with copies in place of views and roundings of states on the drive."""
    copies = {}
    for leaf in tensors(state).values():
        placeholder = local(leaf)
        if isinstance(placeholder, StateOnDrive) and placeholder.whole is None:
            copies[id(leaf)] = leaf.clone()
    return replaced(state, copies) if copies else state
