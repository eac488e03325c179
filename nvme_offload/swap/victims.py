"""`Victims` finds space for a value by evicting the values whose next use is farthest."""

from __future__ import annotations

import heapq
from collections import deque

from ..errors import known
from .access_order import AccessOrder
from .blocks import Blocks
from .residency import Residency
from .value_states import State
from .values import EVICTABLE, Block, Need, Value

# The next use of a value as a number, for Belady eviction: the victim is the value whose next use
# is farthest. Positions of the learned order lie between these two.
HINTED = -(1 << 62)  # plus the number of the hint
# Plus the time of the last use: without a known order, the most recently used value is the victim.
_UNKNOWN = 1 << 62
_MAX_VICTIMS = 16  # victims to try for one allocation

_Heap = list[tuple[int, int, Value]]


class Victims:
    """The candidates for eviction, farthest next use first, residents apart."""

    def __init__(
        self, blocks: Blocks, order: AccessOrder, residency: Residency, need: Need
    ) -> None:
        self._blocks = blocks
        self._arena = blocks.arena
        self._order = order
        self._residency = residency
        self._need = need
        self._heaps: tuple[_Heap, _Heap] = ([], [])
        self._stamps = 0

    def add(self, value: Value) -> None:
        """Keep *value* in memory as an eviction candidate."""
        if value is self._need.value:
            return
        self._stamps += 1
        value.stamp = self._stamps
        heap = self._heaps[self._residency.has(value)]
        heapq.heappush(heap, (-self._priority(value), self._stamps, value))
        if len(heap) > 2 * self._blocks.placed + 64:
            heap[:] = [item for item in heap if item[2].stamp == item[1]]
            heapq.heapify(heap)

    def clear(self) -> None:
        """Remove all candidates."""
        self._heaps = ([], [])

    def keep_reclaimable(self, nbytes: int) -> None:
        """Evict until *nbytes* are reclaimable, if there are victims."""
        while self._arena.reclaimable_bytes < nbytes:
            victim = self._pop(self._heaps[False], -1)
            if victim is None:
                return
            self._blocks.evict(victim)

    def find_space(self, value: Value, position: int | None) -> int | None:
        """An offset that *value* can get now, or None. Evicts values used later than *position*."""
        if value.lowest:
            gaps = self._blocks.gaps()
            lowest = next(start for start, end in gaps if end - start >= value.size)
            return self._evict_range(value.size, lowest)
        home = self._residency.home(value)
        if home is not None and self._arena.is_reclaimable(home, home + value.size):
            return home
        size = value.size
        start = self._arena.best_fit(size, above=True)
        if start is None and not self._residency.homes and position is None:
            start = self._arena.best_fit(size, above=False)
        if start is None:
            start = self._evict_for(size, self._heaps[False], position)
        if start is None and position is None:
            start = self._arena.best_fit(size, above=False)
            if start is None:
                start = self._evict_for(size, self._heaps[True], None)
            if start is None:
                gaps = self._blocks.gaps()
                largest = max(gaps, key=lambda gap: (gap[1] - gap[0], -gap[0]))[0]
                start = self._evict_range(size, largest)
        return start

    def _priority(self, value: Value) -> int:
        """The next use of *value* as a number: a larger number is later."""
        hint = self._order.hinted(value.name)
        if hint is not None:
            return HINTED + hint
        position = self._order.next_use(value.name)
        return _UNKNOWN + value.last_use if position is None else position

    def _pop(self, heap: _Heap, beyond: int) -> Value | None:
        """Take the candidate of *heap* whose next use is farthest, if it is later than *beyond*."""
        renewed = 0
        while heap:
            key, stamp, value = heap[0]
            if (
                value.stamp != stamp
                or value.state not in EVICTABLE
                or (value.block is not None and value.block.reclaimable)
            ):
                heapq.heappop(heap)
                self._blocks.operations += 1
                continue
            priority = self._priority(value)
            self._blocks.operations += 1
            if priority != -key and renewed < 8:
                renewed += 1
                self._stamps += 1
                value.stamp = self._stamps
                heapq.heapreplace(heap, (-priority, self._stamps, value))
                continue
            if priority <= beyond:
                return None
            heapq.heappop(heap)
            return value
        return None

    def _evict_for(self, size: int, heap: _Heap, position: int | None) -> int | None:
        """Evict the farthest uses until *size* contiguous bytes are reclaimable, from the result on."""
        beyond = (HINTED << 1) if position is None else position
        tried: list[Value] = []
        found = None
        while found is None and len(tried) < (_MAX_VICTIMS if position is None else 2):
            victim = self._pop(heap, beyond)
            if victim is None:
                break
            blocks = self._extended(victim, size, beyond, position is not None)
            if blocks is None:
                tried.append(victim)
                continue
            found = blocks[0].start
            for block in blocks:
                if block.owner is not None and not block.reclaimable:
                    self._blocks.evict(block.owner)
        for value in tried:
            self.add(value)
        return found

    def _extended(self, victim: Value, size: int, beyond: int, above: bool) -> deque[Block] | None:
        """The blocks around *victim*, farthest next use first, of *size* bytes; None if too few."""
        low = high = known(victim.block)
        if above and low.start < self._arena.boundary:
            return None
        blocks = deque([low])
        left = self._block_priority(self._arena.previous(low), beyond, above)
        right = self._block_priority(self._arena.following(high), beyond, above)
        while high.end - low.start < size:
            self._blocks.operations += 1
            if left is None and right is None:
                return None
            if right is None or (left is not None and left > right):
                low = known(self._arena.previous(low))
                blocks.appendleft(low)
                left = self._block_priority(self._arena.previous(low), beyond, above)
            else:
                high = known(self._arena.following(high))
                blocks.append(high)
                right = self._block_priority(self._arena.following(high), beyond, above)
        return blocks

    def _block_priority(self, block: Block | None, beyond: int, above: bool) -> int | None:
        """The next use of the owner of *block*, later for a better victim; None if it must stay."""
        if block is None or (above and block.start < self._arena.boundary):
            return None
        if block.reclaimable:
            return _UNKNOWN << 1
        owner = known(block.owner)
        if (
            owner.state not in EVICTABLE
            or owner is self._need.value
            or (above and self._residency.has(owner))
        ):
            return None
        priority = self._priority(owner)
        return priority if priority > beyond else None

    def _evict_range(self, size: int, start: int) -> int | None:
        """Evict the values in *size* bytes from *start*; None while transfers must end first."""
        need = self._need
        need.awaited = []
        failed = None
        for block in self._arena.overlapping(start, start + size):
            owner = block.owner
            self._blocks.operations += 1
            if owner is None or block.reclaimable:
                continue
            if owner.state == State.DIRTY_FAILED:
                failed = owner
            elif owner.state == State.RESERVED:
                self._blocks.drop(owner)
            elif owner.state == State.READING:
                read = known(owner.read)
                need.awaited += [*(write for write in read.after if not write.ended), read]
            elif owner.state == State.REDIRTY:
                need.awaited.append(known(owner.write))
            else:
                self._blocks.evict(owner)
        if failed is not None and not need.awaited:
            if failed is not need.retried:
                need.failed_write = failed.name
                need.retried = failed
                return None
            need.retried = None
            self._blocks.start_write(failed)
            self._blocks.evict(failed)
            return self._evict_range(size, start)
        return None if need.awaited else start
