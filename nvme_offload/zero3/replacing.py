"""`Replacements`: names of DeepSpeed that stand for this package's objects until `restore`.

`replaces` marks a function that takes the place of DeepSpeed's while the package is enabled.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_Function = TypeVar("_Function", bound=Callable[..., Any])
_functions: dict[tuple[str, str], Callable[..., Any]] = {}
_absent = object()


def replaces(owner: str, name: str = "") -> Callable[[_Function], _Function]:
    """Register a function in place of the one named *name*, by default as itself, of *owner*, a
    module or "module:class". It is called with DeepSpeed's function and then the arguments.
    """

    def register(function: _Function) -> _Function:
        _functions[owner, name or function.__name__] = function
        return function

    return register


class Replacements(list[Callable[[], Any]]):
    """What undoes the replacements, in their order."""

    def put(self, owner: Any, name: str, value: object) -> None:
        """Set the item *name* of a dictionary, or the attribute of another *owner*."""
        is_dict = isinstance(owner, dict)
        put: Any = dict.__setitem__ if is_dict else setattr
        drop: Any = dict.pop if is_dict else delattr
        present = owner if is_dict else vars(owner)
        before = present.get(name, _absent)
        # A property, such as an optimizer's state, is set and not replaced.
        if before is _absent and inspect.isdatadescriptor(getattr(type(owner), name, None)):
            before = getattr(owner, name)

        def undo() -> None:
            if before is not _absent:
                put(owner, name, before)
            elif name in present:
                drop(owner, name)

        self.append(undo)  # first: an exception may come before the next line
        put(owner, name, value)

    def put_functions(self) -> None:
        """Set all functions that `replaces` has registered."""
        for (place, name), function in _functions.items():
            owner = owner_at(place)
            self.put(owner, name, _bound(function, getattr(owner, name)))

    def restore(self) -> None:
        """Undo the replacements."""
        while self:
            self[-1]()  # it may be called again, after an exception before the next line
            self.pop()


@contextlib.contextmanager
def replaced(owner: Any, **values: object) -> Iterator[None]:
    """Context in which attributes of *owner* have other *values*."""
    made = Replacements()
    try:
        try:
            for name, value in values.items():
                made.put(owner, name, value)
            yield
        finally:
            made.restore()
    finally:  # an exception, such as Ctrl-C, may have come in the lines before
        made.restore()


def owner_at(place: str) -> Any:
    """The module or class at *place*, "module" or "module:class"."""
    module, _, name = place.partition(":")
    owner: Any = importlib.import_module(module)
    return functools.reduce(getattr, name.split("."), owner) if name else owner


def _bound(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def bound(*args: Any, **named: Any) -> Any:
        return function(original, *args, **named)

    # A factory in place of a class is no member of the class's module.
    return bound if isinstance(original, type) else functools.wraps(original)(bound)
