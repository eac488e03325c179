"""`BackwardOrder`: which saved tensors backward wants next."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable

_MOST_OF_A_NODE = 1 << 20


class BackwardOrder:
    """Numbers saved tensors, and predicts which of them backward will ask for next.

    Backward visits the nodes in the reverse of the order in which they saved; within a node,
    tensors come in the order in which they were saved. A node is an operation, or a compiled block,
    which may save many tensors. The prediction starts from the tensor that was asked for last, so
    it also holds where there are several graphs, and in a graph that a checkpoint has just
    recomputed. A wrong prediction costs time, never bits. Moves nothing itself.
    """

    def __init__(self) -> None:
        self._node: Hashable = None
        self._next = 0  # of the node; it counts down
        self._alive: list[int] = []  # ascending: what is asked for last comes first
        self._waiting: list[int] = []  # of these

    def save(self, node: Hashable) -> int:
        """A tensor is saved by *node*; its number."""
        if node != self._node or self._next % _MOST_OF_A_NODE == 0:
            self._node = node
            self._next = (self._next // _MOST_OF_A_NODE + 2) * _MOST_OF_A_NODE
        self._next -= 1
        insort(self._alive, self._next)
        insort(self._waiting, self._next)
        return self._next

    def forget(self, number: int) -> None:
        """No graph has it any more."""
        _remove(self._alive, number)
        _remove(self._waiting, number)

    def ask(self, number: int) -> None:
        """Backward asks for it; for the second time where it goes through a graph that was retained
        once more, and all of it waits again.
        """
        if not _remove(self._waiting, number):
            self._waiting = self._alive.copy()
            _remove(self._waiting, number)

    def after(self, number: int, count: int) -> list[int]:
        """The *count* tensors that are likely asked for after *number*, the next one first."""
        place = bisect_left(self._waiting, number)
        return self._waiting[max(place - count, 0) : place][::-1]

    def next_node(self, number: int, count: int) -> list[int]:
        """The tensors, of `after`, that the node of *number* still asks for, and those of the next
        node; or the first *count*, where that is more.
        """
        found: list[int] = []
        nodes = {number // _MOST_OF_A_NODE}
        for place in range(bisect_left(self._waiting, number) - 1, -1, -1):
            one = self._waiting[place]
            nodes.add(one // _MOST_OF_A_NODE)
            if len(nodes) > 2 and len(found) >= count:
                break
            found.append(one)
        return found


def _remove(numbers: list[int], number: int) -> bool:
    place = bisect_left(numbers, number)
    found = place < len(numbers) and numbers[place] == number
    if found:
        del numbers[place]
    return found
