"""`WithoutMemory`: tensors whose values are stored elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from .awaited import Waits

Kind = TypeVar("Kind")


class WithoutMemory(torch.Tensor):
    """A placeholder for a tensor. Operators reach `__torch_dispatch__` of the subclass, which finds
    the values. `refuse` gets methods that bypass it and use the memory: they would read and write
    address 0.
    """

    @classmethod
    @torch.inference_mode(False)
    def make(
        cls,
        shape: torch.Size,
        strides: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Any:
        """A tensor of this class. C++ that asks for its address gets an error."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    def replace_data(self, values: torch.Tensor) -> None:
        """Carry out ``self.data = values``."""
        self.refuse("an assignment to .data")

    def refuse(self, use: str) -> NoReturn:
        """Raises: UsageError for this *use* of memory."""
        raise NotImplementedError

    def __copy__(self) -> torch.Tensor:
        return self.detach()

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        values: Any = self.clone()
        return values.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the *function*, or refuse it. Raises: UsageError."""
        if any(issubclass(kind, Waits) for kind in types):
            return NotImplemented  # their own method waits, and calls the function again
        caller = sys._getframe(1).f_globals.get("__name__", "")
        # in C++, so that no exception comes before functions of subclasses are enabled again
        return torch._C._disabled_torch_function_impl(
            _call_or_refuse, types, (caller, function, args, kwargs or {}), {}
        )


def _call_or_refuse(caller: str, function: Any, args: Any, kwargs: Any) -> Any:
    if function == _SET_DATA and isinstance(args[0], WithoutMemory):
        args[0].replace_data(args[1])
        return None
    use = _OF_MEMORY.get(function)
    # torch.compile and others compare storages to find aliases. C++ refuses to use this one.
    if use and not (use == "untyped_storage" and caller.startswith("torch.")):
        for one in args:
            if isinstance(one, WithoutMemory):
                one.refuse(use)
    return function(*args, **kwargs)


def changes_form(function: Any) -> bool:
    """Whether the operator gives its argument another shape or other memory in place."""
    return (
        torch.Tag.inplace_view in function.tags and function is not torch.ops.aten.detach_.default
    )


def with_values(
    function: Any,
    args: Any,
    kwargs: Any,
    kind: type[Kind],
    load: Callable[[Kind], torch.Tensor],
    store: Callable[[Kind, torch.Tensor], None],
) -> Any:
    """Call *function* with the values that *load* returns of each placeholder of this *kind*, and *store*
    the values that it changes.
    """
    loaded: dict[int, tuple[Kind, torch.Tensor]] = {}

    def values(one: Kind) -> torch.Tensor:
        if id(one) not in loaded:
            loaded[id(one)] = one, load(one)
        return loaded[id(one)][1]

    given, named = tree_map_only(kind, values, (args, kwargs))
    result = function(*given, **named)
    for one in written(kind, function, args, kwargs):
        store(one, loaded[id(one)][1])
    originals = {id(own): one for one, own in loaded.values()}
    return tree_map_only(torch.Tensor, lambda tensor: originals.get(id(tensor), tensor), result)


def written(kind: type[Kind], function: Any, args: Any, kwargs: Any) -> list[Kind]:
    """The arguments of this *kind* that *function* changes."""
    found: list[Kind] = []
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [
                one
                for one in (value if isinstance(value, list | tuple) else [value])
                if isinstance(one, kind)
            ]
    return found


def _of_memory() -> dict[Any, str]:
    names = (
        *("data_ptr", "const_data_ptr", "mutable_data_ptr", "untyped_storage", "storage"),
        *("_typed_storage", "share_memory_", "is_shared", "__dlpack__", "__dlpack_device__"),
        *("__array__", "numpy", "apply_", "map_", "map2_"),
    )
    found = {getattr(torch.Tensor, name): name for name in names if hasattr(torch.Tensor, name)}
    interface: Any = torch.Tensor.__cuda_array_interface__
    return {**found, interface.__get__: "__cuda_array_interface__"}


# Methods of torch.Tensor, in C++ or Python, that use memory without an operator.
_OF_MEMORY = _of_memory()
_data: Any = torch.Tensor.data
_SET_DATA = _data.__set__
