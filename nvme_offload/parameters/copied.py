"""Copies of a model whose parameters stream: of its values in state dicts, and of the model itself."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Container
from typing import Any, NoReturn

import torch

from ..errors import UsageError
from . import idle


class StateCopies:
    """Puts copies in host memory, by *copy_of*, of the parameters that *streamed* has into state dicts.
    As in torch, entries of one parameter share memory.
    """

    def __init__(
        self, streamed: Container[torch.Tensor], copy_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._streamed = streamed
        self._copy_of = copy_of
        # Of the present call of state_dict().
        self._state: weakref.ref[Any] | None = None
        self._keys: set[str] = set()
        self._copies: dict[torch.Tensor, weakref.ref[torch.Tensor]] = {}

    def put(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Replace the entries of *module* in *state*, which are views of the device's memory."""
        for name, parameter in module._parameters.items():
            key = prefix + name
            if parameter in self._streamed and state.get(key, parameter) is not parameter:
                state[key] = None  # so that it keeps no slot
                state[key] = self._copy(state, key, parameter)

    def _copy(self, state: dict[str, Any], key: str, parameter: Any) -> torch.Tensor:
        if self._state is None or self._state() is not state or key in self._keys:
            try:
                self._state = weakref.ref(state)
            except TypeError:  # a plain dict
                self._state = None
            self._keys, self._copies = set(), {}
        self._keys.add(key)
        made = self._copies.get(parameter, lambda: None)()
        if made is not None:
            return made.detach()
        copied = self._copy_of(parameter)
        self._copies[parameter] = weakref.ref(copied)
        return copied


class Hook:
    """A hook of a module. A copy of the module has none, as its parameters do not stream."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __call__(self, *args: Any) -> Any:
        """Call the method."""
        return self._method(*args)

    @property
    def __name__(self) -> str:
        idle.refuse_tracing()

    def __deepcopy__(self, memo: Any) -> Any:
        return _no_hook

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_pickling()


def _no_hook(*_: Any) -> None:
    """In place of a `Hook`."""


class ModuleParameters(dict[str, Any]):
    """The parameters of a module. *read* is called with each parameter that the program reads."""

    def __init__(self, read: Callable[[Any], None], parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._read(parameter)
        return parameter

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return {name: copy.deepcopy(parameter, memo) for name, parameter in self.items()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_pickling()


def _refuse_pickling() -> NoReturn:
    raise UsageError(
        "a model with streamed parameters cannot be pickled: save its state_dict(), or pickle a copy.deepcopy() of it"
    )
