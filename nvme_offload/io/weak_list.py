"""`WeakList`: objects that other references keep alive, listed in any thread."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class WeakList(Generic[_Item]):
    """The objects that were added and still exist, in the order in which they were added. One thread may
    iterate while another adds an object, where a `weakref.WeakSet` raises RuntimeError.
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[_Item]] = []

    def add(self, item: _Item) -> None:
        """Add *item*."""
        self._references.append(weakref.ref(item, self._references.remove))

    def __iter__(self) -> Iterator[_Item]:
        found = [reference() for reference in list(self._references)]
        return (item for item in found if item is not None)
