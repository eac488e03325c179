"""`Schedule`: the planner of a memory budget: which values are where, and what to read and write
next.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TypeAlias

from ..errors import InvariantError, OutOfHostMemoryError, UsageError, known
from ..store.transfer import Stage, Transfer
from ..units import format_bytes
from .access_order import AccessOrder
from .arena import Arena, Block
from .residents import Chooser
from .value_states import TABLE, Event, State

# The next use of a value as a number, for Belady eviction: the victim is the value whose next use
# is farthest. Positions of the learned order lie between these two.
_HINTED = -(1 << 62)  # plus the number of the hint
# plus the time of the last use: without a known order, the most recently used value is the victim
_UNKNOWN = 1 << 62
_POSITIONS_PER_CALL = 256  # positions that one call of `plan` looks ahead
_MAX_VICTIMS = 16  # victims to try for one allocation
_TRIES_TO_KEEP = 4  # without some residents, the others may need more memory
# a hint is redundant if the learned order has its use within this plus twice the number of hints
_HINT_SLACK = 8

_IDLE = frozenset({State.CLEAN, State.DIRTY, State.DIRTY_FAILED, State.WRITING, State.REDIRTY})
_EVICTABLE = frozenset({State.CLEAN, State.DIRTY, State.WRITING})
_STALE = frozenset({State.DIRTY, State.DIRTY_FAILED, State.USED_DIRTY})  # the drive's copy is void
_SPARABLE = _STALE | {State.CLEAN, State.USED}


@dataclasses.dataclass(eq=False, slots=True)
class _Entry:
    """A value, or a block that is reserved for one."""

    name: str
    nbytes: int  # of the tensor that its user gets
    value_bytes: int  # of these, the leading bytes with contents
    size: int  # of its block, in whole granules
    exists: bool = True  # False: a reservation
    lowest: bool = False  # placed as low as possible
    state: State = State.NEW
    block: Block[_Entry] | None = None
    read: Transfer | None = None
    write: Transfer | None = None  # in flight, from its block or from one that it has lost
    home: int | None = None  # the offset reserved for it as a resident
    # read or reserved for the use at this position, or for a hint (-1)
    prefetched_for: int | None = None
    prefetched_unused: bool = False  # read and not used since
    transient: bool = False  # in use, and not a resident
    evict_after_write: bool = False  # when the write of its older version has ended
    read_failed: bool = False
    retained_bytes: int | None = None  # of the version on the drive that `roll_back` returns to
    keeps_copy: bool = False  # on the drive, until its next use ends
    last_use: int = 0
    stamp: int = 0  # of its valid entry in a heap


_Block: TypeAlias = Block[_Entry]


class Schedule:
    """The planner of *nbytes* of memory. Pure bookkeeping: it is told what users do and which
    transfers end, and says what to start.

    The uses of the last period are expected in the next. Two cursors walk them: `order.now` at the
    next use, and a prefetch cursor ahead of it, by the size of the next two values or by
    *lookahead_bytes*. Residents are chosen for a whole period, by transfers saved per byte of
    memory, next to the memory that the other values need (`residents.Chooser`). They are packed at
    the low end. The other values, the transient ones, share the rest: each is prefetched, used, and
    reclaimable at once unless it is used again before the prefetch cursor. If it changed it is
    written back then. Its block can be given away before that write ends: the next owner's transfer
    waits for the write (`Transfer.after`). So the plan does not depend on when transfers end.

    While no order is known, or it is not followed, values stay until their memory is needed. The
    victim is the value whose next use is farthest (Belady eviction); where nothing is known, the
    most recently used one, which is the same in a cyclic order. As much memory as would be prefetched is kept
    reclaimable.

    A reclaimable block keeps its contents until it is reused. Where a write fails whose block was
    given away, the value gets the block back: the new owner has no contents yet.

    Where the drive is full, `spare` gives up the drive's copies of values that are in memory, so that
    memory and drive together hold little more than one copy of each value.

    Blocks are whole granules. A use costs O(log n).

    Attributes
    ----------
    order : AccessOrder
        The learned order.
    lookahead_bytes : int
        How much is prefetched, in bytes of memory.
    used_bytes, peak_bytes : int
        Bytes of all blocks of values, now and at most.
    unused_prefetches : int
        Values that were read and evicted before use.
    operations : int
        Values, positions and blocks examined; tests bound the cost of a call with it.
    """

    def __init__(
        self, nbytes: int, lookahead_bytes: int | None = None, granule: int = 4096
    ) -> None:
        self.nbytes = nbytes
        self.order = AccessOrder()
        self.used_bytes = 0
        self.peak_bytes = 0
        self.unused_prefetches = 0
        self.operations = 0
        self._granule = granule
        self._asked_lookahead = lookahead_bytes
        self._largest = 0
        self._set_lookahead()
        self._entries: dict[str, _Entry] = {}
        self._reservations: dict[str, _Entry] = {}  # blocks for values that are created later
        self._arena: Arena[_Entry] = Arena(nbytes)
        self._placed = 0  # values with a block
        self._in_use: dict[str, _Entry] = {}
        self._in_use_bytes = 0  # without those placed lowest
        self._transient_in_use_bytes = 0  # of these, not of residents
        self._to_start: list[Transfer] = []
        self._needed: _Entry | None = None
        self._creates = False  # the needed value is created
        self._awaited: list[Transfer] = []  # by the needed value
        self._failed_write: str | None = None
        self._retried: _Entry | None = None  # its failed write is tried again for the needed value
        self._uses = 0
        # The residents, and the prefetch cursor.
        self._homes: dict[str, tuple[int, int]] = {}  # resident -> (offset, size)
        self._all_resident = False
        self._may_add = True  # to the residents, which had not to be fewer yet
        self._transient_bytes = 0  # budget of values that are not resident, used or prefetched
        self._forced = False  # a resident had to be evicted
        self._stay = False  # residents, whatever would save more: a full drive has no room to move
        self._cursor = 0
        self._prefetched: deque[_Entry] = deque()  # read or reserved, in order of use
        self._prefetched_bytes = 0
        self._hints: deque[str] = deque()  # not acted on yet
        # Eviction candidates, the last to be used first: transient values, and residents.
        self._heaps: tuple[list[tuple[int, int, _Entry]], list[tuple[int, int, _Entry]]] = ([], [])
        self._stamps = 0
        # Values in memory of which the drive may have a copy, or a void one, the first of them first.
        self._copies: dict[str, _Entry] = {}

    def _set_lookahead(self) -> None:
        self.lookahead_bytes = (
            min(2 * self._largest, self.nbytes // 2)
            if self._asked_lookahead is None
            else self._asked_lookahead
        )

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """Every value, oldest first."""
        return list(self._entries)

    def size(self, name: str) -> int:
        """Bytes of *name*, as created. Raises: UsageError when there is none."""
        return self._entry(name).nbytes

    # Calls of users.

    def blocking_transfer(self, name: str) -> Transfer | None:
        """A transfer of *name* that must end before it can be discarded, or None."""
        entry = self._entries.get(name)
        return None if entry is None else entry.read or entry.write

    def blocks_create(self, name: str, nbytes: int) -> Transfer | None:
        """A transfer of *name* that must end before it can be created with *nbytes*, or None. A
        write from a block that it keeps does not block.
        """
        entry = self._entries.get(name)
        if entry is None:
            return None
        if entry.write is not None and (
            entry.state <= State.READING or entry.size != self._rounded(nbytes)
        ):
            return entry.write
        return entry.read

    def create(self, name: str, nbytes: int, lowest: bool = False) -> None:
        """Request a block for a new value *name*, *lowest* in the memory if so: `plan` provides it,
        `take` hands it out once it is `ready`.

        No transfer that `blocks_create` reports may be in flight. Raises: UsageError when *name* is
        in use, OutOfHostMemoryError when it cannot fit; nothing is changed then.
        """
        if nbytes < 0:
            raise UsageError(f"{name!r} cannot have {nbytes} bytes")
        size = self._rounded(nbytes)
        entry = self._entries.get(name)
        if entry is not None:
            self._check_free(entry)
            _check(self.blocks_create(name, nbytes) is None, "a transfer is in flight")
        if entry is not None and entry.size == size:
            if entry.block is None:
                self._check_fits(name, nbytes, size)
            entry.nbytes = nbytes
        else:
            self._check_fits(name, nbytes, size)
            if entry is not None:
                self.discard(name)
            reserved = self._reservations.pop(name, None)
            if reserved is not None and reserved.size != size:
                self._drop_block(reserved)
                reserved = None
            entry = reserved or self._new_entry(name, nbytes, size)
            entry.exists = True
            entry.nbytes = entry.value_bytes = nbytes
            entry.lowest = lowest
            self._entries[name] = entry
            if entry.block is not None:
                self._count_placed(entry)
        self._need(entry, created=True)

    def need(self, name: str, in_order: bool = True) -> None:
        """Request the contents of *name*: `plan` provides them, `take` hands them out once it is
        `ready`. The use is not learned unless *in_order*.

        Raises: UsageError when there is no such value or it is in use, OutOfHostMemoryError when it
        cannot fit.
        """
        entry = self._entry(name)
        self._check_free(entry)
        if entry.block is None:
            self._check_fits(name, entry.nbytes, entry.size)
        entry.read_failed = False
        self._need(entry, created=False, in_order=in_order)

    def ready(self, name: str) -> bool:
        """Whether the needed value *name* can be taken; for other values, whether memory has their
        contents.
        """
        entry = self._entries[name]
        if entry is self._needed and self._creates and entry.state == State.RESERVED:
            return all(write.ended for write in known(entry.block).writes)
        return entry.state >= State.CLEAN

    def take(self, name: str) -> tuple[int, bool]:
        """Start the use of *name*, which is ready. Returns its offset, and whether it was read for
        this use.
        """
        entry = self._entries[name]
        block = known(entry.block)
        _check(entry is self._needed, "a value is taken that was not needed")
        if block.reclaimable:
            self._arena.claim(block)
        self._to(entry, Event.CREATE if self._creates else Event.USE)
        if self._creates:
            entry.value_bytes = entry.nbytes
            self._copies.setdefault(name, entry)  # of what it replaces
        was_read = entry.prefetched_unused and not self._creates
        entry.prefetched_unused = entry.evict_after_write = False
        entry.stamp = 0
        self._unmark_prefetched(entry)
        self._needed = None
        self._in_use[name] = entry
        if not self._is_resident(entry) and not entry.lowest:
            entry.transient = True
            self._transient_in_use_bytes += entry.size
        if not entry.lowest:
            self._in_use_bytes += entry.size
        return block.start, was_read

    def cancel_need(self, name: str) -> None:
        """Withdraw the request for *name*, which was not taken. A value to be created is forgotten."""
        entry = self._entries[name]
        creates, self._needed, self._failed_write = self._creates, None, None
        if creates and entry.state <= State.RESERVED and entry.write is None:
            self.discard(name)
        elif entry.state == State.RESERVED:
            self._drop_block(entry)
        elif entry.state in _IDLE:
            self._on_idle(entry)

    def release(self, name: str, changed: bool, nbytes: int | None) -> None:
        """End the use of *name*. If it was *changed*, its first *nbytes* are its contents. Raises:
        UsageError.
        """
        entry = self._entry(name)
        self._check_used(entry)
        if nbytes is not None and not 0 <= nbytes <= entry.nbytes:
            raise UsageError(f"{name!r} has room for {entry.nbytes} bytes, not for {nbytes}")
        if changed:
            entry.value_bytes = entry.nbytes if nbytes is None else nbytes
            self.order.changed(name)
        self._end_use(entry)
        entry.keeps_copy = False
        self._to(entry, Event.RELEASE_DIRTY if changed else Event.RELEASE_CLEAN)
        entry.last_use = self._uses
        if entry.size > self._largest:
            self._largest = entry.size
            self._set_lookahead()
        self._on_idle(entry)

    def discard(self, name: str) -> None:
        """Forget *name*, in use or not. No transfer of it may be in flight. Raises: UsageError when
        there is none.
        """
        entry = self._entry(name)
        _check(entry.read is None and entry.write is None, "a transfer is in flight")
        if entry.state >= State.USED:
            self._end_use(entry)
        self._free_block(entry)
        del self._entries[name]
        self.order.dropped(name)

    def retain(self, name: str) -> None:
        """Have `roll_back` return to the version of *name*, which is in use, that the drive has.
        Raises: UsageError where that is not the newest.
        """
        entry = self._entry(name)
        self._check_used(entry)
        if entry.state != State.USED or entry.value_bytes == 0:
            raise UsageError(
                f"memory alone has the newest version of {name!r}: write it back before its use"
            )
        entry.retained_bytes = entry.value_bytes

    def roll_back(self, name: str) -> None:
        """The version of *name* that was retained is the newest again. No transfer of it may be in
        flight. Raises: UsageError when it is in use.
        """
        entry = self._entry(name)
        self._check_free(entry)
        _check(entry.read is None and entry.write is None, "a transfer is in flight")
        retained_bytes = known(entry.retained_bytes)
        if entry.state == State.RESERVED:
            self._drop_block(entry)
        else:
            self._to(entry, Event.ROLL_BACK)
            self._free_block(entry)
        entry.read_failed = False
        entry.value_bytes, entry.retained_bytes = retained_bytes, None
        self.order.repeat(name)

    def stays(self, name: str) -> bool:
        """Whether *name* is chosen to be resident."""
        return self._all_resident or name in self._homes

    def foretell(self, sizes: Mapping[str, int], at_once: int, stay: bool) -> None:
        """Plan for the order of use that is expected, before any is learned: see
        `AccessOrder.foretell`. The residents *stay*, if so, where another order would have others.
        """
        if self.order.foretell(sizes, at_once):
            self._choose_residents(packed=False)
            self._stay |= stay

    def hint(self, names: Iterable[str]) -> None:
        """*names* are used next, in this order. Unknown names are ignored, and hints that the
        followed order already has.
        """
        known = [name for name in names if name in self._entries]
        self.operations += len(known)
        if self.order.followed and not any(map(self.order.repeats, known)):
            near = self.order.now + 2 * len(known) + _HINT_SLACK
            positions = [self.order.next_use(name) for name in known]
            places = [
                position for position in positions if position is not None and position < near
            ]
            if len(places) == len(known) and places == sorted(places):
                return
        waiting = set(self._hints) if len(self._hints) < 2 * len(known) else None
        self.order.hint(known)
        self._hints.extend(
            known if waiting is None else (name for name in known if name not in waiting)
        )
        if len(self._hints) > 2 * len(self._entries) + 64:  # hinted repeatedly, and never used
            self._hints = deque(dict.fromkeys(self._hints))

    def step(self) -> None:
        """End a period of the order of use, and choose the residents of the next ones."""
        forced, self._forced = self._forced, False
        adopted = self.order.step()
        if adopted:
            self._prefetch_anew()
        packed = forced and self._all_resident
        if adopted or packed:
            self._choose_residents(packed)
        self._cursor = max(self._cursor, self.order.now)

    # Transfers.

    def plan(self) -> list[Transfer]:
        """The transfers to start now. They count as in flight from here on."""
        needed = self._needed
        if needed is not None and self._failed_write is None:
            self._provide_needed(needed)
        if needed is None or needed.block is not None:
            self._prefetch()
        return self.take_pending()

    def take_pending(self) -> list[Transfer]:
        """The transfers to start that are already decided, without planning more."""
        transfers, self._to_start = self._to_start, []
        return transfers

    def waits_for(self, name: str) -> list[Transfer]:
        """The in-flight transfers that keep the needed value *name* from being ready."""
        entry = self._entries[name]
        if entry.read is not None:
            return [*(write for write in entry.read.after if not write.ended), entry.read]
        if entry.block is not None:
            return [write for write in entry.block.writes if not write.ended]
        return [transfer for transfer in self._awaited if not transfer.ended]

    def failed_write(self) -> str | None:
        """The value whose failed write keeps the needed one from fitting, or None. After this call
        it may be tried again.
        """
        name, self._failed_write = self._failed_write, None
        return name

    def write_all(self, but: set[str]) -> list[Transfer]:
        """Start a write of every dirty value that is not in use, not being written, and not among
        *but*.
        """
        for entry in self._entries.values():
            if entry.name not in but:
                self._write_back(entry)
        return self.take_pending()

    def write(self, name: str) -> list[Transfer]:
        """Start a write of *name*, which is not in use, if it is dirty and not being written. The
        drive keeps its copy until the next use of *name* ends. Raises: UsageError.
        """
        entry = self._entry(name)
        self._check_free(entry)
        entry.keeps_copy = True
        self._write_back(entry)
        return self.take_pending()

    def spare(self, nbytes: int, *, but: Container[str], stale: bool) -> list[str]:
        """Values in memory whose copies on the drive are void from here on: *nbytes* together, or all
        that there are. Not those of values among *but*; only what was void before if *stale*.
        """
        self._stay = True
        states = _STALE if stale else _SPARABLE
        spared: list[_Entry] = []
        for entry in self._copies.values():
            if nbytes <= 0:
                break
            self.operations += 1
            # what is reclaimable is about to be lost from memory
            lost = entry.block is None or entry.block.reclaimable
            if entry.state in states and not (lost or entry.keeps_copy or entry.name in but):
                spared.append(entry)
                nbytes -= entry.value_bytes
        for entry in spared:
            del self._copies[entry.name]
            self._to(entry, Event.SPARE)
        return [entry.name for entry in spared]

    def _write_back(self, entry: _Entry) -> None:
        if entry.state in (State.DIRTY, State.DIRTY_FAILED):
            self._start_write(entry)
            self._add_candidate(entry)  # evictable again if its last write had failed

    def grow(self, nbytes: int) -> None:
        """Extend the memory to *nbytes* in all. Blocks stay where they are."""
        _check(nbytes >= self.nbytes, "memory cannot shrink")
        self._arena.grow(nbytes)
        self.nbytes = nbytes
        self._set_lookahead()
        if self.order.learned:
            self._choose_residents(packed=False)

    def in_use(self) -> bool:
        """Whether any value is in use."""
        return bool(self._in_use)

    def names_in_use(self) -> list[str]:
        """Every value in use that is not placed lowest."""
        return [name for name, entry in self._in_use.items() if not entry.lowest]

    def finished(self, transfer: Transfer, succeeded: bool) -> None:
        """*transfer* has ended. A failed one is not retried before it is needed: see `need`,
        `failed_write` and `write_all`.
        """
        transfer.stage = Stage.ENDED
        transfer.after = ()
        if transfer.cancelled:
            return
        entry = self._entries[transfer.name]
        if not transfer.writes:
            entry.read = None
            self._to(entry, Event.READ_DONE if succeeded else Event.DROP)
            if succeeded:
                self._copies[entry.name] = entry
                self._on_read(entry)
            else:
                entry.prefetched_unused = False
                entry.read_failed = True
                self._free_block(entry)
            return
        entry.write = None
        if entry.state >= State.CLEAN:
            self._copies[entry.name] = entry
        if succeeded:
            self._to(entry, Event.WRITE_DONE)
            if entry.state == State.DIRTY:
                if entry.evict_after_write:
                    self._evict(entry)
                else:
                    self._add_candidate(entry)
            return
        if entry.state <= State.READING:
            self._restore_failed_write(entry, transfer)
        elif entry.block is not None and entry.block.reclaimable:
            self._arena.claim(entry.block)
        self._to(entry, Event.WRITE_FAILED)
        entry.evict_after_write = False
        if entry.state == State.DIRTY:
            self._add_candidate(entry)

    # The states of a value.

    def _end_use(self, entry: _Entry) -> None:
        del self._in_use[entry.name]
        self.order.ended(entry.name)
        if not entry.lowest:
            self._in_use_bytes -= entry.size
        if entry.transient:
            entry.transient = False
            self._transient_in_use_bytes -= entry.size

    def _to(self, entry: _Entry, event: Event) -> None:
        state = TABLE[entry.state][event]
        if state is None:
            raise InvariantError(f"{event.name} in {entry.state.name}, of {entry.name!r}")
        entry.state = state

    def _new_entry(self, name: str, nbytes: int, size: int) -> _Entry:
        home = self._homes.get(name)
        return _Entry(
            name, nbytes, nbytes, size, home=None if home is None or home[1] != size else home[0]
        )

    def _place(self, entry: _Entry, start: int) -> None:
        """Allocate the block of *entry* at *start*, which is reclaimable."""
        block, lost = self._arena.take(start, entry.size, entry)
        self.operations += 1 + len(lost)
        for other in lost:
            self._detach_block(other)
            self._to(other, Event.DROP)
        entry.block = block
        if entry.exists:
            self._count_placed(entry)
        self._to(entry, Event.ALLOCATE)

    def _count_placed(self, entry: _Entry) -> None:
        self._placed += 1
        self.used_bytes += entry.size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _drop_block(self, entry: _Entry) -> None:
        """Free the block of *entry*, which is clean or without contents."""
        if entry.read is not None:
            entry.read.cancelled = True
            entry.read = None
            entry.prefetched_unused = False
        self._to(entry, Event.DROP)
        self._free_block(entry)

    def _free_block(self, entry: _Entry) -> None:
        block = entry.block
        if block is not None:
            self._detach_block(entry)
            self._arena.free(block)
        elif not entry.exists:
            self._reservations.pop(entry.name, None)

    def _detach_block(self, entry: _Entry) -> None:
        entry.block = None
        self._copies.pop(entry.name, None)
        entry.stamp = 0
        entry.evict_after_write = False
        if entry.exists:
            self._placed -= 1
            self.used_bytes -= entry.size
        self.unused_prefetches += entry.prefetched_unused
        entry.prefetched_unused = False
        self._unmark_prefetched(entry)
        if not entry.exists:
            self._reservations.pop(entry.name, None)

    def _transfer(
        self, entry: _Entry, writes: bool, offset: int, after: Sequence[Transfer] = ()
    ) -> Transfer:
        return Transfer(
            entry.name, writes, entry.value_bytes, after, offset=offset, block_bytes=entry.size
        )

    def _start_read(self, entry: _Entry) -> None:
        block = known(entry.block)
        after = [write for write in block.writes if not write.ended]
        if entry.write is not None and entry.write not in after:
            after.append(entry.write)
        entry.read = self._transfer(entry, False, block.start, after)
        entry.prefetched_unused = True
        self._to(entry, Event.START_READ)
        self._to_start.append(entry.read)

    def _start_write(self, entry: _Entry) -> None:
        block = known(entry.block)
        entry.write = self._transfer(entry, True, block.start)
        block.writes = (entry.write,)
        self._to(entry, Event.START_WRITE)
        self._to_start.append(entry.write)

    def _evict(self, entry: _Entry) -> None:
        """Make the block of *entry*, which is idle, reclaimable; a dirty value is written back."""
        block = known(entry.block)
        if entry.state == State.DIRTY:
            self._start_write(entry)
        if entry.state in _EVICTABLE:
            entry.stamp = 0
            entry.evict_after_write = False
            if not block.reclaimable:
                self._arena.offer(block)
        elif entry.state == State.REDIRTY:
            entry.evict_after_write = True

    def _restore_failed_write(self, entry: _Entry, write: Transfer) -> None:
        """The write of *entry* failed after its block was given away: give the block back. The new
        owner has no contents yet.
        """
        if entry.block is not None:
            self._drop_block(entry)
        start, end = write.offset, write.offset + write.block_bytes
        for block in self._arena.overlapping(start, end):
            other = block.owner
            if other is None:
                continue
            _check(other.state in (State.RESERVED, State.READING), "a block has two owners")
            self._drop_block(other)
        entry.block, lost = self._arena.take(start, write.block_bytes, entry)
        _check(not lost, "a block has two owners")
        self._count_placed(entry)

    # Residency and eviction.

    def _priority(self, entry: _Entry) -> int:
        """The next use of *entry*: the larger, the later."""
        hint = self.order.hinted(entry.name)
        if hint is not None:
            return _HINTED + hint
        position = self.order.next_use(entry.name)
        return _UNKNOWN + entry.last_use if position is None else position

    def _is_resident(self, entry: _Entry) -> bool:
        return self._all_resident or (
            entry.home is not None and entry.block is not None and entry.block.start == entry.home
        )

    def _on_idle(self, entry: _Entry) -> None:
        """*entry* became idle: keep it, or evict it."""
        if self.order.followed:
            if not self._is_resident(entry):
                position = self.order.next_use(entry.name)
                if (
                    position is not None
                    and position >= self._cursor
                    and self.order.hinted(entry.name) is None
                ):
                    self._evict(entry)
                    return
            self._add_candidate(entry)
            return
        self._add_candidate(entry)
        if self._placed < len(self._entries):
            self._evict_for_lookahead()

    def _on_read(self, entry: _Entry) -> None:
        """*entry* was read: for its user, as a prefetch, or in vain."""
        if entry is self._needed or entry.prefetched_for is not None:
            self._add_candidate(entry)
        else:
            self._on_idle(entry)

    def _add_candidate(self, entry: _Entry) -> None:
        """Keep *entry* in memory as an eviction candidate."""
        if entry is self._needed:
            return
        self._stamps += 1
        entry.stamp = self._stamps
        heap = self._heaps[self._is_resident(entry)]
        heapq.heappush(heap, (-self._priority(entry), self._stamps, entry))
        if len(heap) > 2 * len(self._entries) + 64:
            heap[:] = [item for item in heap if item[2].stamp == item[1]]
            heapq.heapify(heap)

    def _evict_for_lookahead(self) -> None:
        heap = self._heaps[False]
        while self._arena.reclaimable_bytes < self.lookahead_bytes:
            victim = self._pop_victim(heap, -1)
            if victim is None:
                return
            self._evict(victim)

    def _pop_victim(self, heap: list[tuple[int, int, _Entry]], beyond: int) -> _Entry | None:
        """Remove and return the candidate of *heap* whose next use is farthest, if that is later
        than *beyond*.
        """
        renewed = 0
        while heap:
            key, stamp, entry = heap[0]
            if (
                entry.stamp != stamp
                or entry.state not in _EVICTABLE
                or (entry.block is not None and entry.block.reclaimable)
            ):
                heapq.heappop(heap)
                self.operations += 1
                continue
            priority = self._priority(entry)
            self.operations += 1
            if priority != -key and renewed < 8:
                renewed += 1
                self._stamps += 1
                entry.stamp = self._stamps
                heapq.heapreplace(heap, (-priority, self._stamps, entry))
                continue
            if priority <= beyond:
                return None
            heapq.heappop(heap)
            return entry
        return None

    def _choose_residents(self, packed: bool) -> None:
        """Choose the residents of the expected order, and their offsets.

        Where all values fit they stay where they are, unless they must be *packed* because of
        fragmentation.
        """
        period = self.order.period
        sizes = {use.name: self._rounded(use.nbytes) for use in period.uses}
        lowest = max(
            (
                entry.block.end
                for entry in self._in_use.values()
                if entry.lowest and entry.block is not None
            ),
            default=0,
        )
        available = self.nbytes - lowest
        fits = sum(sizes.values()) <= available
        if fits and not packed:
            self._all_resident = True
            if self._homes:
                self._set_homes({}, 0)
            return
        chooser = Chooser(period, sizes, self._in_use_bytes, self._asked_lookahead)
        if fits:
            names, transient, saved = [*sizes], 0, 0
        else:
            names, transient, saved = chooser.choose(available)
        self._all_resident = False
        if self._homes and self._stay:
            packed, saved = False, 0
        if not packed and self._keep_residents(chooser, sizes, saved):
            return
        self._transient_bytes, self._may_add = transient, True
        self._set_homes(*_laid_out(names, sizes, lowest))

    def _keep_residents(self, chooser: Chooser, sizes: Mapping[str, int], saved: int) -> bool:
        """Keep the residents where they are, with more of them where these have room now, or without
        the last of them where the others need that memory, if that saves about as much as the best
        choice, of *saved* bytes.
        """
        homes, boundary = self._homes, self._arena.boundary
        if any(sizes.get(name, size) != size for name, (_, size) in homes.items()):
            return False
        if self._may_add and homes:
            left = self.nbytes - chooser.transient(homes).nbytes - boundary
            added, boundary = _laid_out(chooser.more(homes, max(left, 0)), sizes, boundary)
            homes = {**homes, **added}
        for _ in range(_TRIES_TO_KEEP):
            transient = chooser.transient(homes).nbytes
            if not chooser.is_near(homes, saved):
                return False
            if boundary <= self.nbytes - transient:
                self._transient_bytes = transient
                if len(homes) != len(self._homes):
                    # what comes and goes with the timing of uses would change the order of use
                    self._may_add &= len(homes) > len(self._homes)
                    self._set_homes(homes, boundary)
                return True
            homes = {
                name: (start, size)
                for name, (start, size) in homes.items()
                if start + size <= self.nbytes - transient
            }
            boundary = max((start + size for start, size in homes.values()), default=0)
        return False

    def _set_homes(self, homes: dict[str, tuple[int, int]], boundary: int) -> None:
        self._homes = homes
        self._arena.set_boundary(boundary if homes else 0)
        idle = []
        for entry in self._entries.values():
            self.operations += 1
            home = homes.get(entry.name)
            entry.home = None if home is None or home[1] != entry.size else home[0]
            if entry.state in _IDLE and entry.block is not None and not entry.block.reclaimable:
                idle.append(entry)
        self._heaps = ([], [])
        for entry in idle:
            if not homes or self._is_resident(entry) or entry.state not in _EVICTABLE:
                self._add_candidate(entry)
            else:
                # it is in the residents' part, or in the part of the transient values
                self._evict(entry)

    # Allocation.

    def _provide_needed(self, entry: _Entry) -> None:
        """Allocate the block of the needed *entry*, and start its read."""
        self._claim(entry)
        block = entry.block
        if entry.read_failed and not self._creates:
            return
        if block is None:
            if not self._homes and self._reattach(entry):
                return
            start = self._find_space(entry, None)
            if start is None:
                return
            self._place(entry, start)
        if entry.state == State.RESERVED and not self._creates:
            self._start_read(entry)

    def _claim(self, entry: _Entry) -> None:
        """Make *entry* not reclaimable. In the residents' part it is dropped instead, to be read to
        its own part.
        """
        block = entry.block
        if block is None:
            return
        if block.reclaimable:
            # A create does not wait for the write of the old contents if the block stays.
            movable = entry.write is None or entry is not self._needed or not self._creates
            if (
                self._homes
                and movable
                and not self._is_resident(entry)
                and self._may_move(entry, block)
            ):
                self._drop_block(entry)
                return
            self._arena.claim(block)
            self._add_candidate(entry)
        if entry.evict_after_write:
            entry.evict_after_write = False
            self._add_candidate(entry)

    def _may_move(self, entry: _Entry, block: _Block) -> bool:
        """Whether *entry* is in the wrong part, and there is space in the right one."""
        if entry.home is not None:
            return self._arena.is_reclaimable(entry.home, entry.home + entry.size)
        return (
            block.start < self._arena.boundary
            and self._arena.best_fit(entry.size, above=True) is not None
        )

    def _reattach(self, entry: _Entry) -> bool:
        """Give *entry* back the block from which it is being written, if that is not reused."""
        write = entry.write
        if write is None or not self._arena.is_reclaimable(
            write.offset, write.offset + write.block_bytes
        ):
            return False
        entry.block, lost = self._arena.take(write.offset, write.block_bytes, entry)
        _check(not lost, "a block has two owners")
        entry.block.writes = (write,)
        self._count_placed(entry)
        self._to(entry, Event.REATTACH)
        self._add_candidate(entry)
        return True

    def _find_space(self, entry: _Entry, position: int | None) -> int | None:
        """Where *entry* can be placed at once, or None. Evicts values used later than *position*;
        any, where *position* is None (needed now).
        """
        if entry.lowest:
            return self._lowest(entry.size)
        if entry.home is not None and self._arena.is_reclaimable(
            entry.home, entry.home + entry.size
        ):
            return entry.home
        start = self._arena.best_fit(entry.size, above=True)
        if start is None and not self._homes and position is None:
            start = self._arena.best_fit(entry.size, above=False)
        if start is None:
            start = self._evict_for(entry.size, self._heaps[False], position)
        if start is None and position is None:
            start = self._arena.best_fit(entry.size, above=False)
            if start is None:
                self._forced = True
                start = self._evict_for(entry.size, self._heaps[True], None)
            if start is None:
                start = self._evict_range(entry.size, self._largest_gap(entry.size))
        return start

    def _evict_for(
        self, size: int, heap: list[tuple[int, int, _Entry]], position: int | None
    ) -> int | None:
        """Evict the candidates whose next use is farthest, with their neighbours, until *size*
        contiguous bytes are reclaimable; their start, or None.
        """
        beyond = (_HINTED << 1) if position is None else position
        tried: list[_Entry] = []
        found = None
        while found is None and len(tried) < (_MAX_VICTIMS if position is None else 2):
            victim = self._pop_victim(heap, beyond)
            if victim is None:
                break
            blocks = self._extend_victim(victim, size, beyond, position is not None)
            if blocks is None:
                tried.append(victim)
                continue
            found = blocks[0].start
            for block in blocks:
                if block.owner is not None and not block.reclaimable:
                    self._evict(block.owner)
        for entry in tried:
            self._add_candidate(entry)
        return found

    def _extend_victim(
        self, victim: _Entry, size: int, beyond: int, above: bool
    ) -> list[_Block] | None:
        """The block of *victim* with neighbours, those with the farthest next use first, that have
        *size* bytes together; None where there are none.
        """
        low = high = known(victim.block)
        if above and low.start < self._arena.boundary:
            return None
        blocks = deque([low])
        left, right = (
            self._eviction_priority(low.previous, beyond, above),
            self._eviction_priority(high.following, beyond, above),
        )
        while high.end - low.start < size:
            self.operations += 1
            if left is None and right is None:
                return None
            if right is None or (left is not None and left > right):
                low = known(low.previous)
                blocks.appendleft(low)
                left = self._eviction_priority(low.previous, beyond, above)
            else:
                high = known(high.following)
                blocks.append(high)
                right = self._eviction_priority(high.following, beyond, above)
        return list(blocks)

    def _eviction_priority(self, block: _Block | None, beyond: int, above: bool) -> int | None:
        """The next use of the owner of *block*: the later, the better a victim. None where it must
        stay.
        """
        if block is None or (above and block.start < self._arena.boundary):
            return None
        if block.reclaimable:
            return _UNKNOWN << 1
        owner = known(block.owner)
        if (
            owner.state not in _EVICTABLE
            or owner is self._needed
            or (above and self._is_resident(owner))
        ):
            return None
        priority = self._priority(owner)
        return priority if priority > beyond else None

    def _gaps(self) -> list[tuple[int, int]]:
        """Start and end of each gap between values in use."""
        found = []
        position = 0
        for block in sorted(
            (entry.block for entry in self._in_use.values() if entry.block is not None),
            key=lambda block: block.start,
        ):
            if block.start > position:
                found.append((position, block.start))
            position = block.end
        if position < self.nbytes:
            found.append((position, self.nbytes))
        return found

    def _largest_gap(self, size: int) -> int:
        return max(self._gaps(), key=lambda gap: (gap[1] - gap[0], -gap[0]))[0]

    def _lowest(self, size: int) -> int | None:
        return self._evict_range(
            size, next(start for start, end in self._gaps() if end - start >= size)
        )

    def _evict_range(self, size: int, start: int) -> int | None:
        """Evict everything in *size* bytes from *start*, where nothing is in use. Returns *start*,
        or None while that waits for transfers.
        """
        end = start + size
        self._awaited = []
        failed = None
        for block in self._arena.overlapping(start, end):
            owner = block.owner
            self.operations += 1
            if owner is None or block.reclaimable:
                continue
            if owner.state == State.DIRTY_FAILED:
                failed = owner
            elif owner.state == State.RESERVED:
                self._drop_block(owner)
            elif owner.state == State.READING:
                read = known(owner.read)
                self._awaited += [*(write for write in read.after if not write.ended), read]
            elif owner.state == State.REDIRTY:
                self._awaited.append(known(owner.write))
            else:
                self._evict(owner)
        if failed is not None and not self._awaited:
            if failed is not self._retried:
                self._failed_write = failed.name
                self._retried = failed
                return None
            self._retried = None
            self._start_write(failed)
            self._evict(failed)
            return self._evict_range(size, start)
        return None if self._awaited else start

    # Prefetch.

    def _need(self, entry: _Entry, created: bool, in_order: bool = True) -> None:
        self._needed = entry
        entry.stamp = 0  # not a candidate
        self._creates = created
        self._failed_write = None
        self._retried = None
        self._awaited = []
        self._uses += 1
        order = self.order
        expected = order.now + 1
        order.use(entry.name, entry.nbytes, created, in_order)
        if order.full:
            self.step()
        if self._cursor < order.now:
            self._cursor = order.now
        elif (
            self._cursor > order.now == expected and entry.state == State.OFFLOADED and not created
        ):
            self._prefetch_anew()  # it was lost since, and those after it may be, too
        self._drop_missed()

    def _prefetch_anew(self) -> None:
        """Begin at the next use, and let what was prefetched count no longer."""
        self.operations += len(self._prefetched)
        for entry in self._prefetched:
            self._unmark_prefetched(entry)
            if entry.state == State.RESERVED and entry is not self._needed:
                self._drop_block(entry)
        self._prefetched.clear()
        self._cursor = self.order.now

    def _drop_missed(self) -> None:
        """Drop prefetches that were not used at their turn."""
        ahead = self._prefetched
        while ahead:
            entry = ahead[0]
            if entry.prefetched_for is not None and entry is not self._needed:
                if entry.prefetched_for >= self.order.now or (
                    entry.prefetched_for < 0 and self.order.hinted(entry.name) is not None
                ):
                    return
                self.operations += 1
                self._unmark_prefetched(entry)
                if entry.state == State.RESERVED:
                    self._drop_block(entry)
                elif (
                    entry.state in _IDLE and entry.block is not None and not entry.block.reclaimable
                ):
                    self._on_idle(entry)
            ahead.popleft()

    def _unmark_prefetched(self, entry: _Entry) -> None:
        if entry.prefetched_for is not None:
            entry.prefetched_for = None
            self._prefetched_bytes -= entry.size

    def _mark_prefetched(self, entry: _Entry, position: int) -> None:
        if entry.prefetched_for is None:
            self._prefetched_bytes += entry.size
            self._prefetched.append(entry)
        entry.prefetched_for = position

    def _prefetch(self) -> None:
        """Advance the prefetch cursor as far as memory allows."""
        hints = self._hints
        while hints:
            self.operations += 1
            name = hints[0]
            entry = self._entries.get(name)
            hint = self.order.hinted(name)
            if (
                entry is not None
                and hint is not None
                and not self._prefetch_value(entry, -1, _HINTED + hint)
            ):
                return
            hints.popleft()
        order = self.order
        if not order.followed:
            return
        length = len(order.period)
        last = min(order.now + length, self._cursor + _POSITIONS_PER_CALL)
        while self._cursor < last:
            position = self._cursor
            use = order.at(position)
            self.operations += 1
            entry = self._entries.get(use.name)
            if entry is None:
                if order.foretold:
                    return  # it will be created: what comes after it is far
                if (
                    use.created
                    and use.name not in self._reservations
                    and not self._reserve(use.name, use.nbytes, position)
                ):
                    return
            elif (
                use.created
                and entry is not self._needed
                and (entry.block is None or entry.block.reclaimable)
            ):
                if entry.block is not None and entry.write is not None:
                    return  # it will be reclaimable and written then, or needed in place
                self._claim(entry)
                if entry.block is not None:
                    self._cursor = position + 1
                    continue
                # it keeps its size until it is discarded
                if entry.size != self._rounded(use.nbytes):
                    self._cursor = position + 1
                    continue
                if not self._fits_prefetch(entry.size):
                    return
                start = self._find_space(entry, position)
                if start is None:
                    return
                self._place(entry, start)
                self._mark_prefetched(entry, position)
            elif not self._prefetch_value(entry, position, position):
                return
            self._cursor = position + 1

    def _fits_prefetch(self, size: int) -> bool:
        """Whether *size* more bytes may be prefetched: with residents, into all of the transient
        memory that is not in use.
        """
        taken = self._prefetched_bytes + size
        return (
            taken + self._transient_in_use_bytes <= self._transient_bytes
            if self._homes
            else taken <= self.lookahead_bytes
        )

    def _reserve(self, name: str, nbytes: int, position: int) -> bool:
        """Reserve a block for *name*, created at *position*; whether the cursor may advance."""
        size = self._rounded(nbytes)
        if not self._fits_prefetch(size):
            return False
        entry = self._new_entry(name, nbytes, size)
        entry.exists = False
        start = self._find_space(entry, position)
        if start is None:
            return False
        self._place(entry, start)
        self._reservations[name] = entry
        self._mark_prefetched(entry, position)
        return True

    def _prefetch_value(self, entry: _Entry, position: int, priority: int) -> bool:
        """Get *entry* into memory for its use at *position*; whether the cursor may advance."""
        if entry is self._needed or entry.read_failed:
            return True
        block = entry.block
        below = block is not None and block.reclaimable and block.start < self._arena.boundary
        if (
            block is not None
            and below
            and self._homes
            and entry.home is None
            and not self._may_move(entry, block)
        ):
            # it would stay in the residents' part; it is reclaimable there, and not lost yet
            return False
        self._claim(entry)
        if entry.block is not None:
            return True
        if entry.state != State.OFFLOADED:  # it has no contents
            return True
        if not self._fits_prefetch(entry.size):
            return False
        if self._homes or not self._reattach(entry):
            start = self._find_space(entry, priority)
            if start is None:
                return False
            self._place(entry, start)
            self._start_read(entry)
        self._mark_prefetched(entry, position)
        return True

    # Checks.

    def _rounded(self, nbytes: int) -> int:
        # a value of 0 bytes has a block too
        return max(-(-nbytes // self._granule), 1) * self._granule

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise UsageError(f"there is no value {name!r}")
        return entry

    def _check_used(self, entry: _Entry) -> None:
        if entry.state < State.USED:
            raise UsageError(f"{entry.name!r} is not in use")

    def _check_free(self, entry: _Entry) -> None:
        if entry.state >= State.USED:
            raise UsageError(f"{entry.name!r} is in use already: release it first")

    def _check_fits(self, name: str, nbytes: int, size: int) -> None:
        """Check that *size* bytes fit next to the values in use. Raises: OutOfHostMemoryError, with
        the cure.
        """
        if self._arena.best_fit(size, above=True) is not None or any(
            end - start >= size for start, end in self._gaps()
        ):
            return
        in_use = sorted(
            (entry for entry in self._in_use.values()),
            key=lambda entry: entry.block.start if entry.block is not None else 0,
        )
        used = sum(entry.size for entry in in_use)
        enough = size + max(
            (entry.block.end for entry in in_use if entry.block is not None), default=0
        )
        listed = ", ".join(f"{entry.name!r} ({format_bytes(entry.nbytes)})" for entry in in_use[:8])
        more = f" and {len(in_use) - 8} more" if len(in_use) > 8 else ""
        raise OutOfHostMemoryError(
            f"no space for {name!r}, {format_bytes(nbytes)}, in a budget of {format_bytes(self.nbytes)}: {format_bytes(used)} are in use"
            f"{f' by {listed}{more}' if in_use else ''}; release some first, or make the budget at least {enough} bytes"
        )


def _check(holds: bool, fault: str) -> None:
    """Raises: InvariantError, with the *fault*, unless what must hold *holds*."""
    if not holds:
        raise InvariantError(f"{fault}: please report it as a fault of nvme_offload")


def _laid_out(
    names: Iterable[str], sizes: Mapping[str, int], start: int
) -> tuple[dict[str, tuple[int, int]], int]:
    """Residents one behind the other from *start* on: the offset and size of each, and their end."""
    homes = {}
    for name in names:
        homes[name] = start, sizes[name]
        start += sizes[name]
    return homes, start
