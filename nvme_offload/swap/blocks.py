"""`Blocks`: the memory of values, and the transfers that fill and empty it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..errors import check, known
from ..store.transfer import Transfer
from .arena import Arena
from .value_states import Event, State
from .values import EVICTABLE, Value


class Prefetched:
    """The values that were read, or that got a reserved block, for a later use. In order of use."""

    def __init__(self) -> None:
        self.values: deque[Value] = deque()
        self.nbytes = 0

    def add(self, value: Value, position: int) -> None:
        """Add *value*, which is ready for its use at *position*."""
        if value.prefetched_for is None:
            self.nbytes += value.size
            self.values.append(value)
        value.prefetched_for = position

    def remove(self, value: Value) -> None:
        """Remove *value*, which is in use or was evicted."""
        if value.prefetched_for is not None:
            value.prefetched_for = None
            self.nbytes -= value.size


class Blocks:
    """The blocks of values in an arena of *nbytes*, in whole granules, and the transfers to start."""

    def __init__(self, nbytes: int, granule: int) -> None:
        self.arena = Arena(nbytes)
        self.prefetched = Prefetched()
        self.in_use: dict[str, Value] = {}
        self.reservations: dict[str, Value] = {}  # blocks for values that are created later
        # Values in memory of which the drive may have a copy, current or stale, oldest first.
        self.copies: dict[str, Value] = {}
        self.to_start: list[Transfer] = []  # decided
        self.placed = 0  # values with a block
        self.used_bytes = 0  # of all blocks of values
        self.peak_bytes = 0
        self.unused_prefetches = 0  # values that were read and evicted before use
        self.operations = 0  # values, positions and blocks examined: tests bound the cost of a call
        self._granule = granule

    def rounded(self, nbytes: int) -> int:
        """The size of a block for *nbytes*. A value of 0 bytes has a block too."""
        return max(-(-nbytes // self._granule), 1) * self._granule

    def gaps(self) -> list[tuple[int, int]]:
        """Start and end of each gap between values in use."""
        found = []
        position = 0
        blocks = [value.block for value in self.in_use.values() if value.block is not None]
        for block in sorted(blocks, key=lambda block: block.start):
            if block.start > position:
                found.append((position, block.start))
            position = block.end
        if position < self.arena.nbytes:
            found.append((position, self.arena.nbytes))
        return found

    def has_room(self, nbytes: int) -> bool:
        """Whether a value of *nbytes* fits into reclaimable memory."""
        size = self.rounded(nbytes)
        return any(self.arena.best_fit(size, above) is not None for above in (False, True))

    def place(self, value: Value, start: int) -> None:
        """Allocate the block of *value* at *start*, which is reclaimable."""
        block, lost = self.arena.take(start, value.size, value)
        self.operations += 1 + len(lost)
        for other in lost:
            self._detach(other)
            other.to(Event.DROP)
        value.block = block
        if value.exists:
            self.count_placed(value)
        value.to(Event.ALLOCATE)

    def count_placed(self, value: Value) -> None:
        """Count the block of *value*, which exists."""
        self.placed += 1
        self.used_bytes += value.size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def drop(self, value: Value) -> None:
        """Free the block of *value*, which is clean or without contents."""
        if value.read is not None:
            value.read.cancelled = True
            value.read = None
            value.prefetched_unused = False
        value.to(Event.DROP)
        self.free(value)

    def free(self, value: Value) -> None:
        """Free the block of *value*, if it has one."""
        block = value.block
        if block is not None:
            self._detach(value)
            self.arena.free(block)
        elif not value.exists:
            self.reservations.pop(value.name, None)

    def _detach(self, value: Value) -> None:
        value.block = None
        self.copies.pop(value.name, None)
        value.stamp = 0
        if value.exists:
            self.placed -= 1
            self.used_bytes -= value.size
        else:
            self.reservations.pop(value.name, None)
        self.unused_prefetches += value.prefetched_unused
        value.prefetched_unused = False
        self.prefetched.remove(value)

    def start_read(self, value: Value) -> None:
        """Read *value* into its block, after the writes from this block and the writes of *value*."""
        block = known(value.block)
        after = [write for write in block.writes if not write.ended]
        if value.write is not None and value.write not in after:
            after.append(value.write)
        value.read = self._start(value, False, block.start, after)
        value.prefetched_unused = True
        value.to(Event.START_READ)

    def start_write(self, value: Value) -> None:
        """Write *value* from its block."""
        block = known(value.block)
        value.write = self._start(value, True, block.start)
        block.writes = (value.write,)
        value.to(Event.START_WRITE)

    def _start(
        self, value: Value, writes: bool, offset: int, after: Sequence[Transfer] = ()
    ) -> Transfer:
        transfer = Transfer(
            value.name, writes, value.value_bytes, after, offset=offset, block_bytes=value.size
        )
        self.to_start.append(transfer)
        return transfer

    def evict(self, value: Value) -> None:
        """Make the block of *value*, which is idle, reclaimable. A dirty value is written back."""
        block = known(value.block)
        if value.state == State.DIRTY:
            self.start_write(value)
        if value.state in EVICTABLE:
            value.stamp = 0
            if not block.reclaimable:
                self.arena.offer(block)

    def reattach(self, value: Value) -> bool:
        """Reassign to *value* the block from which it is being written, unless the block is reused."""
        write = value.write
        if write is None or not self.arena.is_reclaimable(
            write.offset, write.offset + write.block_bytes
        ):
            return False
        self._take_back(value, write)
        known(value.block).writes = (write,)
        value.to(Event.REATTACH)
        return True

    def restore_failed_write(self, value: Value, write: Transfer) -> None:
        """Return the block of a failed *write* to *value*; its new owner has no contents yet."""
        if value.block is not None:
            self.drop(value)
        for block in self.arena.overlapping(write.offset, write.offset + write.block_bytes):
            other = block.owner
            if other is None:
                continue
            check(other.state in (State.RESERVED, State.READING), "a block has two owners")
            self.drop(other)
        self._take_back(value, write)

    def _take_back(self, value: Value, write: Transfer) -> None:
        value.block, lost = self.arena.take(write.offset, write.block_bytes, value)
        check(not lost, "a block has two owners")
        self.count_placed(value)
