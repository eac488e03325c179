"""The tensors in an optimizer's state of one parameter, at any depth of containers and objects."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)})
# These stay in memory, regardless of shape: step is a counter, master is not the optimizer's.
_IN_MEMORY = ("step", "master")

Key = Any  # a tensor's key in the state, or the tuple of keys that leads to it


def tensors(state: Mapping[Any, Any]) -> dict[Key, torch.Tensor]:
    """All tensors, by key. Tensors inside tensor subclasses are not found."""
    return {
        path[0] if len(path) == 1 else path: value
        for path, value in content(state)
        if isinstance(value, torch.Tensor)
    }


def content(state: Mapping[Any, Any]) -> list[tuple[tuple[Any, ...], Any]]:
    """The leaves, which are not containers, each with the path of keys that leads to it."""
    found: list[tuple[tuple[Any, ...], Any]] = []
    _gather(state.items(), (), (id(state),), found)
    return found


def travelling(
    state: Mapping[Any, Any], shape: torch.Size, parameter: torch.Tensor
) -> dict[Key, torch.Tensor]:
    """The tensors that are offloaded with *parameter*, whose shape in memory is *shape*."""
    return {
        key: value
        for key, value in tensors(state).items()
        if value is not parameter
        and value.device == parameter.device
        and travels(key, value, shape)
    }


def travels(key: Key, value: torch.Tensor, shape: torch.Size) -> bool:
    """Whether *value*, with the key *key*, is offloaded with a parameter of *shape*: a plain tensor
    of more than a single number.
    """
    plain = (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_quantized
    )
    return plain and top(key) not in _IN_MEMORY and (value.numel() > 1 or is_for_each(value, shape))


def is_for_each(value: Any, shape: torch.Size) -> bool:
    """Whether *value* is an elementwise tensor: it has the *shape* of its parameter."""
    return torch.is_tensor(value) and value.dim() > 0 and value.shape == shape


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that `torch.empty_like` gives: the tensor's own if its elements have no gaps."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def in_a_row(values: torch.Tensor, strides: tuple[int, ...] | None = None) -> torch.Tensor:
    """*values*, which have no gaps, as a flat view in memory order; of a copy with these *strides* if
    theirs are others.
    """
    if strides not in (None, values.stride()):
        values = torch.empty_strided(
            values.shape, strides, dtype=values.dtype, device=values.device
        ).copy_(values)
    return values.as_strided((values.numel(),), (1,))


def drop_memory(held: Iterable[torch.Tensor]) -> None:
    """Empty the tensors *held*, so that other tensors can use the memory of which they were views."""
    empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
    for tensor in held:
        kind = tensor.dtype, tensor.device
        if kind not in empty:
            empty[kind] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = empty[kind]


def top(key: Key) -> Any:
    """The key in the state itself that leads to the tensor with the key *key*."""
    return key[0] if isinstance(key, tuple) and len(key) > 1 else key


def replaced(state: Mapping[Any, Any], others: Mapping[int, Any]) -> dict[Any, Any]:
    """A deep copy of *state* in which *others*, by id, replace tensors; all other tensors stay the
    same objects.
    """
    memo: dict[int, Any] = {}
    made = {}
    for key, value in state.items():
        if type(value) in _PLAIN:
            made[key] = others.get(id(value), value)
            continue
        if not memo:
            memo = {**{id(one): one for one in tensors(state).values()}, **others}
        made[key] = copy.deepcopy(value, memo)
    return made


def _gather(
    inner: Iterable[tuple[Any, Any]],
    path: tuple[Any, ...],
    above: tuple[int, ...],
    found: list[tuple[tuple[Any, ...], Any]],
) -> None:
    for key, value in inner:
        # Most leaves are plain, and every step examines all leaves.
        below = None if type(value) in _PLAIN or id(value) in above else _inside(value)
        if below is None:
            found.append(((*path, key), value))
        else:
            _gather(below, (*path, key), (*above, id(value)), found)


def _inside(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """The contents of a container, by key; None for a leaf."""
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple | deque):
        return enumerate(value)
    if (
        hasattr(value, "__dict__")
        and not isinstance(value, type | torch.nn.Module | torch.optim.Optimizer)
        and not callable(value)
    ):
        own: dict[str, Any] = vars(value)
        return own.items()
    return None
