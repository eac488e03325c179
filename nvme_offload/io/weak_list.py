"""`WeakList`: objects that other references keep alive, listed in any thread."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class WeakList(Generic[_Item]):
    """The objects that were added and still exist. Every method is one operation of a list, so one
    thread can list the objects while another adds one; a `weakref.WeakSet` then raises RuntimeError.
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[_Item]] = []

    def add(self, item: _Item) -> None:
        """Add *item*."""
        self._references.append(weakref.ref(item, self._references.remove))

    def items(self) -> list[_Item]:
        """The objects, in the order in which they were added."""
        found = [reference() for reference in list(self._references)]
        return [item for item in found if item is not None]
