"""The tensors in the state that an optimizer keeps for one parameter, also in lists, dictionaries
and objects, to whatever depth.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)})
# whatever their shapes: the one is a count, and the other is not the optimizer's
_IN_MEMORY = ("step", "master")

Key = Any  # of a tensor: its key in the state, or the tuple of the keys that lead to it


def tensors(state: Mapping[Any, Any]) -> dict[Key, torch.Tensor]:
    """All of them, by key. Those within tensors of other classes are not looked for."""
    return {
        way[0] if len(way) == 1 else way: value
        for way, value in content(state)
        if isinstance(value, torch.Tensor)
    }


def content(state: Mapping[Any, Any]) -> list[tuple[tuple[Any, ...], Any]]:
    """All that is in no container, and the ways there."""
    found: list[tuple[tuple[Any, ...], Any]] = []
    _gather(state.items(), (), (id(state),), found)
    return found


def travelling(
    state: Mapping[Any, Any], shape: torch.Size, parameter: torch.Tensor
) -> dict[Key, torch.Tensor]:
    """Those that go to the drive with *parameter*, which has this *shape*: all but what is no more
    than a number.
    """
    return {
        key: value
        for key, value in tensors(state).items()
        if value is not parameter
        and value.device == parameter.device
        and travels(key, value, shape)
    }


def travels(key: Key, value: torch.Tensor, shape: torch.Size) -> bool:
    """Whether the plain tensor *value*, called *key*, goes to the drive with a parameter of
    *shape*.
    """
    plain = (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_quantized
    )
    return plain and top(key) not in _IN_MEMORY and (value.numel() > 1 or is_for_each(value, shape))


def is_for_each(value: torch.Tensor, shape: torch.Size) -> bool:
    """Whether *value* has an element for each of a parameter of *shape*."""
    return value.dim() > 0 and value.shape == shape


def top(key: Key) -> Any:
    """The key in the state itself that leads to the tensor called *key*."""
    return key[0] if isinstance(key, tuple) and len(key) > 1 else key


def replaced(state: Mapping[Any, Any], others: Mapping[int, Any]) -> dict[Any, Any]:
    """A deep copy of *state* with *others* in the place of tensors, by id; those without another
    are the same objects.
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
    way: tuple[Any, ...],
    above: tuple[int, ...],
    found: list[tuple[tuple[Any, ...], Any]],
) -> None:
    for key, value in inner:
        # Most of a state is one of these, and every step looks at all of it.
        below = None if type(value) in _PLAIN or id(value) in above else _inside(value)
        if below is None:
            found.append(((*way, key), value))
        else:
            _gather(below, (*way, key), (*above, id(value)), found)


def _inside(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """What *value* contains, by key; None where it is no container."""
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
