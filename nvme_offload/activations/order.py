"""`BackwardOrder`: predicts which saved tensors backward needs next."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator

_NODE_TENSORS = 1 << 20  # numbers reserved for each node


class BackwardOrder:
    """Numbers saved tensors, and predicts which of them backward unpacks next.

    Backward visits nodes in the reverse of the order in which they saved. Within a node, tensors
    are unpacked in the order in which they were saved. A node is one operation or one compiled
    block, which may save many tensors. The prediction starts from the tensor that was unpacked
    last, so it also holds for several graphs, and for a graph that checkpointing has just
    recomputed. A wrong prediction costs time, never correctness.

    Numbers descend within a node and ascend from node to node, so backward's order is descending.
    """

    def __init__(self) -> None:
        self._node: Hashable = None
        self._next = 0  # the last number given; descends within a node
        self._alive: list[int] = []  # ascending, the reverse of backward's order
        self._pending: list[int] = []  # those that backward has not unpacked yet

    def save(self, node: Hashable) -> int:
        """*node* saves a tensor. Returns its number."""
        if node != self._node or self._next % _NODE_TENSORS == 0:
            self._node = node
            self._next = (self._next // _NODE_TENSORS + 2) * _NODE_TENSORS
        self._next -= 1
        insort(self._alive, self._next)
        insort(self._pending, self._next)
        return self._next

    def forget(self, number: int) -> None:
        """No graph holds tensor *number* any more."""
        _remove(self._alive, number)
        _remove(self._pending, number)

    def ask(self, number: int) -> None:
        """Backward unpacks tensor *number*. A second time means another pass through a retained
        graph: all tensors are pending again.
        """
        if not _remove(self._pending, number):
            self._pending = self._alive.copy()
            _remove(self._pending, number)

    def after(self, number: int, count: int | None = None) -> Iterator[int]:
        """The *count* tensors, or all, that are likely to be unpacked after *number*, the next one
        first.
        """
        places = range(bisect_left(self._pending, number) - 1, -1, -1)
        return itertools.islice(map(self._pending.__getitem__, places), count)

    def next_node(self, number: int, count: int) -> list[int]:
        """The tensors that remain to be unpacked of *number*'s node and of the next node, in order;
        at least *count* if there are as many.
        """
        found: list[int] = []
        nodes = {number // _NODE_TENSORS}
        for one in self.after(number):
            nodes.add(one // _NODE_TENSORS)
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
