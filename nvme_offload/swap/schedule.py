"""`Schedule`: which named values lie where in a budget of memory, and what to read and
write next.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

from ..errors import OutOfHostMemoryError, UsageError
from ..units import format_bytes
from .access_order import AccessOrder
from .arena import Arena, Block
from .residents import Chooser
from .value_states import TABLE, Event, State

# How late a value is used again, as a number: who is used last leaves first. Positions of the
# learned order lie between.
_HINTED = -(1 << 62)  # plus the number of the hint
# plus the time of the last use: where no order is known, what was used last leaves first
_UNKNOWN = 1 << 62
_PLACES_A_CALL = 256  # that are looked ahead in one call of `plan`
_VICTIMS_A_ROOM = 16  # that are tried for one room
# of what could be saved: then those that stay are not chosen anew, since all would move
_GOOD_ENOUGH = 0.95
# a hint that is no farther away in the learned order than this and twice the hints is no news
_NEWS = 8

_IDLE = frozenset({State.CLEAN, State.DIRTY, State.STUCK, State.WRITING, State.REDIRTY})
_IN_USE = frozenset({State.USED, State.USED_NEW, State.USED_WRITING, State.USED_OVER})
_EVICTABLE = frozenset({State.CLEAN, State.DIRTY, State.WRITING})


@dataclasses.dataclass(eq=False, slots=True)
class Transfer:
    """What to move between memory and drive: the first *nbytes* of *name*, from *offset* bytes into
    the memory.

    room: bytes from *offset* on that are the value's. after: the writes that have to end well
    before this may start. ended: it has. void: it must not start any more, since one of *after* has
    failed.
    """

    writes: bool
    name: str
    offset: int
    nbytes: int
    room: int
    after: tuple[Transfer, ...] = ()
    ended: bool = False
    void: bool = False


@dataclasses.dataclass(eq=False, slots=True)
class _Entry:
    """A value, or room that is kept for one."""

    name: str
    nbytes: int  # of the room that its user is given
    kept: int  # of these, from the first, are its value
    size: int  # that it takes of the memory
    known: bool = True  # not only room that is kept for one
    lowest: bool = False  # where it is to be placed
    state: State = State.NOWHERE
    block: Block[_Entry] | None = None
    read: Transfer | None = None
    write: Transfer | None = None  # under way, from its room or from one that it has given away
    home: int | None = None  # the offset at which it stays
    # read or reserved for the use at this position, or for a hint (-1), and not used since
    ahead: int | None = None
    unused: bool = False  # read, and not used since
    passes: bool = False  # it is in use, and does not stay
    leaves: bool = False  # as soon as the write of its older version has ended
    read_failed: bool = False
    last_use: int = 0
    stamp: int = 0  # of its place in a heap


_Block: TypeAlias = Block[_Entry]


class Schedule:
    """The plan of a budget of *nbytes* of memory: pure bookkeeping, told what users do and which
    transfers end, and asked what to start.

    What was used in the last period is expected in the next: two cursors walk it, `order.now`
    before the next use, and another one ahead of it, by what is read: as much as the next two
    values take, or *lookahead_bytes*. Which values stay in memory is chosen for the whole period,
    by transfers saved for each byte of room, beside the room that the others want to pass through
    (`residents.Chooser`); they lie packed at the low end. All others pass through the rest: read
    ahead, used, and on offer at once when nobody uses them before the second cursor. A changed
    value is written then. Its room can be given on before that write ends: who gets it waits for
    the write (`Transfer.after`). So what is planned does not depend on when transfers end.

    Where no order is known, or it is not followed, values stay until their room is needed, and what
    is used again last leaves first; where nothing is known that is what was used last, since it is
    used again last where the order is cyclic. As much room as would be read ahead is kept on offer.

    What is on offer keeps its bytes until its room is taken. Where a write fails whose room was
    given on already, the value gets it back: what waits there has no bytes yet.

    Values lie in whole granules. A use costs O(log n).

    Attributes: *order*, told of every use here. *lookahead_bytes*, how much is read ahead, in bytes
    of memory. *peak_bytes*, the most that was taken. *dropped_unused*, how many were read and left
    unused. *operations*, how many values, places and blocks were looked at, by which tests bound
    what a call costs.
    """

    def __init__(
        self, nbytes: int, lookahead_bytes: int | None = None, granule: int = 4096
    ) -> None:
        self.nbytes = nbytes
        self.order = AccessOrder()
        self.used_bytes = 0
        self.peak_bytes = 0
        self.dropped_unused = 0
        self.operations = 0
        self._granule = granule
        self._asked_lookahead = lookahead_bytes
        self._largest = 0
        self._set_lookahead()
        self._entries: dict[str, _Entry] = {}
        self._kept_for: dict[str, _Entry] = {}  # rooms for values that there are not yet
        self._arena: Arena[_Entry] = Arena(nbytes)
        self._placed = 0  # values of `_entries` with room
        self._in_use: dict[str, _Entry] = {}
        self._in_use_bytes = 0  # but for those placed lowest
        self._in_passing = 0  # of these, of values that do not stay
        self._out: list[Transfer] = []  # to start
        self._needed: _Entry | None = None
        self._creates = False  # the needed one
        self._awaited: list[Transfer] = []  # by the needed one
        self._obstacle: str | None = None
        self._tried_again: _Entry | None = None  # for the needed one, since its write had failed
        self._uses = 0
        # The residents and the cursor that looks ahead.
        self._homes: dict[str, tuple[int, int]] = {}  # name -> (offset, size) of who stays
        self._stay_all = False
        self._passing_bytes = 0  # of room for who does not stay, which is in use or read ahead
        self._forced = False  # values had to leave that were to stay
        self._cursor = 0
        self._ahead: deque[_Entry] = deque()  # read or reserved ahead, in order of use
        self._ahead_bytes = 0
        self._hints: deque[str] = deque()  # that nothing was done about
        # Who may leave, the last to be used first: those that pass, and those that stay.
        self._heaps: tuple[list[tuple[int, int, _Entry]], list[tuple[int, int, _Entry]]] = ([], [])
        self._stamps = 0

    def _set_lookahead(self) -> None:
        self.lookahead_bytes = (
            min(2 * self._largest, self.nbytes // 2)
            if self._asked_lookahead is None
            else self._asked_lookahead
        )

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """Every value, the oldest first."""
        return list(self._entries)

    def size(self, name: str) -> int:
        """Bytes of the room of *name*, as asked for. Raises: UsageError when there is none."""
        return self._entry(name).nbytes

    # What a user does.

    def hindrance(self, name: str) -> Transfer | None:
        """A transfer of *name* that has to end before it can be created anew or discarded: None
        where there is none.
        """
        entry = self._entries.get(name)
        return None if entry is None else entry.read or entry.write

    def hinders_create(self, name: str, nbytes: int) -> Transfer | None:
        """A transfer of *name* that has to end before it can be created with *nbytes*; a write from
        its own room need not.
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
        """Room for a new value *name* is needed: `plan` makes it, *lowest* in the memory if so,
        `take` hands it out once it is `ready`.

        No transfer that `hinders_create` may be under way. Raises: UsageError when *name* is in
        use, OutOfHostMemoryError when there cannot be room, and nothing is changed.
        """
        if nbytes < 0:
            raise UsageError(f"{name!r} cannot have {nbytes} bytes")
        size = self._rounded(nbytes)
        entry = self._entries.get(name)
        if entry is not None:
            self._check_free(entry)
            assert self.hinders_create(name, nbytes) is None
        if entry is not None and entry.size == size:
            if entry.block is None:
                self._check_fits(name, nbytes, size)
            entry.nbytes = nbytes
        else:
            self._check_fits(name, nbytes, size)
            if entry is not None:
                self.discard(name)
            kept = self._kept_for.pop(name, None)
            if kept is not None and kept.size != size:
                self._lose(kept)
                kept = None
            entry = kept or self._new_entry(name, nbytes, size)
            entry.known = True
            entry.nbytes = entry.kept = nbytes
            entry.lowest = lowest
            self._entries[name] = entry
            if entry.block is not None:
                self._count_placed(entry)
        self._need(entry, created=True)

    def need(self, name: str) -> None:
        """The bytes of *name* are needed: `plan` brings them, `take` hands them out once it is
        `ready`.

        Raises: UsageError when there is no such value or it is in use, OutOfHostMemoryError when
        there cannot be room for it.
        """
        entry = self._entry(name)
        self._check_free(entry)
        if entry.block is None:
            self._check_fits(name, entry.nbytes, entry.size)
        entry.read_failed = False
        self._need(entry, created=False)

    def ready(self, name: str) -> bool:
        """Whether the needed value *name* can be taken; any value that is not needed: whether its
        bytes are in memory.
        """
        entry = self._entries[name]
        if entry is self._needed and self._creates and entry.state == State.RESERVED:
            assert entry.block is not None
            return all(write.ended for write in entry.block.writes)
        return entry.state >= State.CLEAN

    def take(self, name: str) -> tuple[int, bool]:
        """*name*, which is ready, is in use from now on; its offset, and whether its bytes had to
        be read for this use.
        """
        entry = self._entries[name]
        block = entry.block
        assert block is not None
        assert entry is self._needed
        if block.open:
            self._arena.close(block)
        self._to(entry, Event.CREATE if self._creates else Event.TAKE)
        if self._creates:
            entry.kept = entry.nbytes
        was_read = entry.unused and not self._creates
        entry.unused = entry.leaves = False
        entry.stamp = 0
        self._not_ahead(entry)
        self._needed = None
        self._in_use[name] = entry
        if not self._stays(entry) and not entry.lowest:
            entry.passes = True
            self._in_passing += entry.size
        if not entry.lowest:
            self._in_use_bytes += entry.size
        return block.start, was_read

    def give_up(self, name: str) -> None:
        """*name*, which is not taken, is no longer needed; where it was to be created it is
        forgotten.
        """
        entry = self._entries[name]
        creates, self._needed, self._obstacle = self._creates, None, None
        if creates and entry.state <= State.RESERVED and entry.write is None:
            self.discard(name)
        elif entry.state == State.RESERVED:
            self._lose(entry)
        elif entry.state in _IDLE:
            self._idle(entry)

    def release(self, name: str, changed: bool, nbytes: int | None) -> None:
        """The user of *name* is done; where it was *changed*, its first *nbytes* are its value now.
        Raises: UsageError.
        """
        entry = self._entry(name)
        if entry.state < State.USED:
            raise UsageError(f"{name!r} is not in use")
        if nbytes is not None and not 0 <= nbytes <= entry.nbytes:
            raise UsageError(f"{name!r} has room for {entry.nbytes} bytes, not for {nbytes}")
        if changed:
            entry.kept = entry.nbytes if nbytes is None else nbytes
            self.order.changed(name)
        self._let_go(entry)
        self._to(entry, Event.CHANGED if changed else Event.SAME)
        entry.last_use = self._uses
        if entry.size > self._largest:
            self._largest = entry.size
            self._set_lookahead()
        self._idle(entry)

    def discard(self, name: str) -> None:
        """Forget *name*, in use or not. No transfer of it may be under way. Raises: UsageError when
        there is none.
        """
        entry = self._entry(name)
        assert entry.read is None
        assert entry.write is None
        if entry.state >= State.USED:
            self._let_go(entry)
        self._vacate(entry)
        del self._entries[name]
        self.order.dropped(name)

    def hint(self, names: Iterable[str]) -> None:
        """*names* are used next, in this order; unknown ones are passed over, and so is what the
        order that is followed knows already.
        """
        known = [name for name in names if name in self._entries]
        self.operations += len(known)
        if self.order.followed:
            near = self.order.now + 2 * len(known) + _NEWS
            positions = [self.order.next_use(name) for name in known]
            if all(position is not None and position < near for position in positions):
                return
        waiting = set(self._hints) if len(self._hints) < 2 * len(known) else None
        self.order.hint(known)
        self._hints.extend(
            known if waiting is None else (name for name in known if name not in waiting)
        )
        if len(self._hints) > 2 * len(self._entries) + 64:  # hinted again and again, and never used
            self._hints = deque(dict.fromkeys(self._hints))

    def step(self) -> None:
        """A period of the order of use ends here; from what it was follows which values stay in
        memory in the next ones.
        """
        forced, self._forced = self._forced, False
        adopted = self.order.step()
        if adopted:  # what was read for the order before is no more ahead than all else
            for entry in self._ahead:
                self._not_ahead(entry)
                if entry.state == State.RESERVED and entry is not self._needed:
                    self._lose(entry)
            self._ahead.clear()
            self._cursor = self.order.now
        if adopted or (forced and self._stay_all):
            self._choose_residents(packed=forced)
        self._cursor = max(self._cursor, self.order.now)

    # What to transfer.

    def plan(self) -> list[Transfer]:
        """The transfers to start now: they count as under way from here on."""
        needed = self._needed
        if needed is not None and self._obstacle is None:
            self._bring_needed(needed)
        if needed is None or needed.block is not None:
            self._look_ahead()
        return self.decided()

    def decided(self) -> list[Transfer]:
        """The transfers to start that follow from what was told, without looking for more."""
        out, self._out = self._out, []
        return out

    def waits_for(self, name: str) -> list[Transfer]:
        """The transfers, under way, that keep the needed value *name* from being ready."""
        entry = self._entries[name]
        if entry.read is not None:
            return [*(write for write in entry.read.after if not write.ended), entry.read]
        if entry.block is not None:
            return [write for write in entry.block.writes if not write.ended]
        return [transfer for transfer in self._awaited if not transfer.ended]

    def obstacle(self) -> str | None:
        """A value that keeps the needed one from having room, because its write failed; asked for
        once, it may be tried again.
        """
        name, self._obstacle = self._obstacle, None
        return name

    def write_all(self, but: set[str]) -> list[Transfer]:
        """Writes, to start now, of every changed value that is neither in use nor under way nor
        among *but*.
        """
        for entry in self._entries.values():
            if entry.state in (State.DIRTY, State.STUCK) and entry.name not in but:
                self._start_write(entry)
                self._keep(entry)  # it may leave again where the last write had failed
        return self.decided()

    def grow(self, nbytes: int) -> None:
        """The memory has *nbytes* from now on, no fewer than before: what is there stays there."""
        assert nbytes >= self.nbytes
        self._arena.grow(nbytes)
        self.nbytes = nbytes
        self._set_lookahead()
        if self.order.learned:
            self._choose_residents(packed=False)

    def in_use(self) -> bool:
        """Whether any value is."""
        return bool(self._in_use)

    def finished(self, transfer: Transfer, well: bool) -> None:
        """*transfer* has ended. One that failed is not tried again before somebody needs it: see
        `need`, `obstacle` and `write_all`.
        """
        transfer.ended = True
        if transfer.void:
            return
        entry = self._entries[transfer.name]
        if not transfer.writes:
            entry.read = None
            self._to(entry, Event.READ_WELL if well else Event.LOST)
            if well:
                self._idle_or_keep(entry)
            else:
                entry.unused = False
                entry.read_failed = True
                self._vacate(entry)
            return
        entry.write = None
        if well:
            self._to(entry, Event.WRITTEN)
            if entry.state == State.DIRTY:
                if entry.leaves:
                    self._evict(entry)
                else:
                    self._keep(entry)
            return
        if entry.state <= State.READING:
            self._take_back(entry, transfer)
        elif entry.block is not None and entry.block.open:
            self._arena.close(entry.block)
        self._to(entry, Event.WRITE_FAILED)
        entry.leaves = False
        if entry.state == State.DIRTY:
            self._keep(entry)

    # The states of a value.

    def _let_go(self, entry: _Entry) -> None:
        del self._in_use[entry.name]
        self.order.ended(entry.name)
        if not entry.lowest:
            self._in_use_bytes -= entry.size
        if entry.passes:
            entry.passes = False
            self._in_passing -= entry.size

    def _to(self, entry: _Entry, event: Event) -> None:
        state = TABLE[entry.state][event]
        assert state is not None, f"{event.name} in {entry.state.name}"
        entry.state = state

    def _new_entry(self, name: str, nbytes: int, size: int) -> _Entry:
        home = self._homes.get(name)
        return _Entry(
            name, nbytes, nbytes, size, home=None if home is None or home[1] != size else home[0]
        )

    def _place(self, entry: _Entry, start: int) -> None:
        """Give *entry* its room at *start*, which is on offer."""
        block, lost = self._arena.take(start, entry.size, entry)
        self.operations += 1 + len(lost)
        for other in lost:
            self._forget_room(other)
            self._to(other, Event.LOST)
        entry.block = block
        if entry.known:
            self._count_placed(entry)
        self._to(entry, Event.ROOM)

    def _count_placed(self, entry: _Entry) -> None:
        self._placed += 1
        self.used_bytes += entry.size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _lose(self, entry: _Entry) -> None:
        """*entry*, whose bytes are on the drive or are none, gives its room away."""
        if entry.read is not None:
            entry.read.void = True
            entry.read = None
            entry.unused = False
        self._to(entry, Event.LOST)
        self._vacate(entry)

    def _vacate(self, entry: _Entry) -> None:
        block = entry.block
        if block is not None:
            self._forget_room(entry)
            self._arena.free(block)
        elif not entry.known:
            self._kept_for.pop(entry.name, None)

    def _forget_room(self, entry: _Entry) -> None:
        entry.block = None
        entry.stamp = 0
        entry.leaves = False
        if entry.known:
            self._placed -= 1
            self.used_bytes -= entry.size
        self.dropped_unused += entry.unused
        entry.unused = False
        self._not_ahead(entry)
        if not entry.known:
            self._kept_for.pop(entry.name, None)

    def _start_read(self, entry: _Entry) -> None:
        block = entry.block
        assert block is not None
        after = [write for write in block.writes if not write.ended]
        if entry.write is not None and entry.write not in after:
            after.append(entry.write)
        entry.read = Transfer(False, entry.name, block.start, entry.kept, entry.size, tuple(after))
        entry.unused = True
        self._to(entry, Event.READ)
        self._out.append(entry.read)

    def _start_write(self, entry: _Entry) -> None:
        block = entry.block
        assert block is not None
        entry.write = Transfer(True, entry.name, block.start, entry.kept, entry.size)
        block.writes = (entry.write,)
        self._to(entry, Event.WRITE)
        self._out.append(entry.write)

    def _evict(self, entry: _Entry) -> None:
        """Offer the room of *entry*, which is idle; where only memory has its bytes, they are
        written.
        """
        block = entry.block
        assert block is not None
        if entry.state == State.DIRTY:
            self._start_write(entry)
        if entry.state in _EVICTABLE:
            entry.stamp = 0
            entry.leaves = False
            if not block.open:
                self._arena.open(block)
        elif entry.state == State.REDIRTY:
            entry.leaves = True

    def _take_back(self, entry: _Entry, write: Transfer) -> None:
        """The *write* of *entry* has failed, whose room was given away: who is there has no bytes
        yet, and goes.
        """
        if entry.block is not None:
            self._lose(entry)
        start, end = write.offset, write.offset + write.room
        for block in self._arena.overlapping(start, end):
            other = block.owner
            if other is None:
                continue
            assert other.state in (State.RESERVED, State.READING)
            self._lose(other)
        entry.block, lost = self._arena.take(start, write.room, entry)
        assert not lost
        self._count_placed(entry)

    # Who stays, and who leaves.

    def _priority(self, entry: _Entry) -> int:
        """How late *entry* is used again."""
        hint = self.order.hinted(entry.name)
        if hint is not None:
            return _HINTED + hint
        position = self.order.next_use(entry.name)
        return _UNKNOWN + entry.last_use if position is None else position

    def _stays(self, entry: _Entry) -> bool:
        return self._stay_all or (
            entry.home is not None and entry.block is not None and entry.block.start == entry.home
        )

    def _idle(self, entry: _Entry) -> None:
        """*entry* is idle from now on: it stays, or it leaves."""
        if self.order.followed:
            if not self._stays(entry):
                position = self.order.next_use(entry.name)
                if (
                    position is not None
                    and position >= self._cursor
                    and self.order.hinted(entry.name) is None
                ):
                    self._evict(entry)
                    return
            self._keep(entry)
            return
        self._keep(entry)
        if self._placed < len(self._entries):
            self._evict_for_lookahead()

    def _idle_or_keep(self, entry: _Entry) -> None:
        """*entry* was read: for its user, for a use ahead, or in vain."""
        if entry is self._needed or entry.ahead is not None:
            self._keep(entry)
        else:
            self._idle(entry)

    def _keep(self, entry: _Entry) -> None:
        """*entry* stays in memory until somebody needs its room more."""
        if entry is self._needed:
            return
        self._stamps += 1
        entry.stamp = self._stamps
        heap = self._heaps[self._stays(entry)]
        heapq.heappush(heap, (-self._priority(entry), self._stamps, entry))
        if len(heap) > 2 * len(self._entries) + 64:
            heap[:] = [item for item in heap if item[2].stamp == item[1]]
            heapq.heapify(heap)

    def _evict_for_lookahead(self) -> None:
        heap = self._heaps[False]
        while self._arena.open_bytes < self.lookahead_bytes:
            victim = self._pop_victim(heap, -1)
            if victim is None:
                return
            self._evict(victim)

    def _pop_victim(self, heap: list[tuple[int, int, _Entry]], beyond: int) -> _Entry | None:
        """The idle value of *heap* that is used last, if that is later than *beyond*; it is in no
        heap then.
        """
        renewed = 0
        while heap:
            key, stamp, entry = heap[0]
            if (
                entry.stamp != stamp
                or entry.state not in _EVICTABLE
                or (entry.block is not None and entry.block.open)
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
        """Choose who stays in memory, for the order that is expected from now on, and where.

        Where all values fit, each stays where it is, unless they have to be *packed* to find room.
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
        room = self.nbytes - lowest
        fits = sum(sizes.values()) <= room
        if fits and not packed:
            self._stay_all = True
            if self._homes:
                self._set_homes({}, 0)
            return
        chooser = Chooser(period, sizes, self._in_use_bytes, self._asked_lookahead)
        if fits:
            names, passing, saved = [*sizes], 0, 0
        else:
            names, passing, saved = chooser.choose(room)
        self._stay_all = False
        kept = chooser.passing(self._homes).nbytes
        fit = self._arena.boundary <= self.nbytes - kept and all(
            sizes.get(name, size) == size for name, (_, size) in self._homes.items()
        )
        if fit and not packed and chooser.saved(self._homes) >= _GOOD_ENOUGH * saved:
            self._passing_bytes = kept
            return
        self._passing_bytes = passing
        homes: dict[str, tuple[int, int]] = {}
        for name in names:
            homes[name] = (lowest, sizes[name])
            lowest += sizes[name]
        self._set_homes(homes, lowest)

    def _set_homes(self, homes: dict[str, tuple[int, int]], boundary: int) -> None:
        self._homes = homes
        self._arena.set_boundary(boundary if homes else 0)
        idle = []
        for entry in self._entries.values():
            self.operations += 1
            home = homes.get(entry.name)
            entry.home = None if home is None or home[1] != entry.size else home[0]
            if entry.state in _IDLE and entry.block is not None and not entry.block.open:
                idle.append(entry)
        self._heaps = ([], [])
        for entry in idle:
            if not homes or self._stays(entry) or entry.state not in _EVICTABLE:
                self._keep(entry)
            else:
                # it is in the way of those that stay, or where others are to pass
                self._evict(entry)

    # Making room.

    def _bring_needed(self, entry: _Entry) -> None:
        """See that the needed *entry* has its room, and that its bytes are on their way."""
        self._claim(entry)
        block = entry.block
        if entry.read_failed and not self._creates:
            return
        if block is None:
            if not self._homes and self._back(entry):
                return
            start = self._room(entry, None)
            if start is None:
                return
            self._place(entry, start)
        if entry.state == State.RESERVED and not self._creates:
            self._start_read(entry)

    def _claim(self, entry: _Entry) -> None:
        """*entry* is not on offer any more; but where it is in the way of those that stay, it
        moves, through the drive.
        """
        block = entry.block
        if block is None:
            return
        if block.open:
            # Who creates it anew does not wait for its write, so that it stays where that is.
            movable = entry.write is None or entry is not self._needed or not self._creates
            if self._homes and movable and not self._stays(entry) and self._may_move(entry, block):
                self._lose(entry)
                return
            self._arena.close(block)
            self._keep(entry)
        if entry.leaves:
            entry.leaves = False
            self._keep(entry)

    def _may_move(self, entry: _Entry, block: _Block) -> bool:
        """Whether there is room where *entry* belongs, and it is elsewhere."""
        if entry.home is not None:
            return self._arena.is_open(entry.home, entry.home + entry.size)
        return (
            block.start < self._arena.boundary
            and self._arena.best_fit(entry.size, above=True) is not None
        )

    def _back(self, entry: _Entry) -> bool:
        """Take back the room from which *entry* is still being written, if nobody else has it."""
        write = entry.write
        if write is None or not self._arena.is_open(write.offset, write.offset + write.room):
            return False
        entry.block, lost = self._arena.take(write.offset, write.room, entry)
        assert not lost
        entry.block.writes = (write,)
        self._count_placed(entry)
        self._to(entry, Event.BACK)
        self._keep(entry)
        return True

    def _room(self, entry: _Entry, position: int | None) -> int | None:
        """Where *entry* can be placed at once; values that are used later than *position* leave for
        it, or any where it is needed now.
        """
        if entry.lowest:
            return self._lowest(entry.size)
        if entry.home is not None and self._arena.is_open(entry.home, entry.home + entry.size):
            return entry.home
        start = self._arena.best_fit(entry.size, above=True)
        if start is None and not self._homes and position is None:
            start = self._arena.best_fit(entry.size, above=False)
        if start is None:
            start = self._make_room(entry.size, self._heaps[False], position)
        if start is None and position is None:
            start = self._arena.best_fit(entry.size, above=False)
            if start is None:
                self._forced = True
                start = self._make_room(entry.size, self._heaps[True], None)
            if start is None:
                start = self._clear(entry.size, self._longest(entry.size))
        return start

    def _make_room(
        self, size: int, heap: list[tuple[int, int, _Entry]], position: int | None
    ) -> int | None:
        """Make those leave who are used last, with their neighbours, until *size* bytes in one
        piece are on offer; where that is.
        """
        beyond = (_HINTED << 1) if position is None else position
        tried: list[_Entry] = []
        found = None
        while found is None and len(tried) < (_VICTIMS_A_ROOM if position is None else 2):
            victim = self._pop_victim(heap, beyond)
            if victim is None:
                break
            stretch = self._grow(victim, size, beyond, position is not None)
            if stretch is None:
                tried.append(victim)
                continue
            found = stretch[0].start
            for block in stretch:
                if block.owner is not None and not block.open:
                    self._evict(block.owner)
        for entry in tried:
            self._keep(entry)
        return found

    def _grow(self, victim: _Entry, size: int, beyond: int, above: bool) -> list[_Block] | None:
        """The block of *victim* and as many neighbours, those first that are used later, as have
        *size* bytes; None where that is not to be had.
        """
        low = high = victim.block
        assert low is not None
        assert high is not None
        if above and low.start < self._arena.boundary:
            return None
        blocks = deque([low])
        left, right = (
            self._cost(low.previous, beyond, above),
            self._cost(high.following, beyond, above),
        )
        while high.end - low.start < size:
            self.operations += 1
            if left is None and right is None:
                return None
            if right is None or (left is not None and left > right):
                assert low.previous is not None
                low = low.previous
                blocks.appendleft(low)
                left = self._cost(low.previous, beyond, above)
            else:
                assert high.following is not None
                high = high.following
                blocks.append(high)
                right = self._cost(high.following, beyond, above)
        return list(blocks)

    def _cost(self, block: _Block | None, beyond: int, above: bool) -> int | None:
        """How late the owner of *block* is used, the later the better it leaves; None where it
        cannot or must not.
        """
        if block is None or (above and block.start < self._arena.boundary):
            return None
        if block.open:
            return _UNKNOWN << 1
        owner = block.owner
        assert owner is not None
        if owner.state not in _EVICTABLE or owner is self._needed or (above and self._stays(owner)):
            return None
        priority = self._priority(owner)
        return priority if priority > beyond else None

    def _stretches(self) -> list[tuple[int, int]]:
        """Start and end of every stretch of memory between values in use."""
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

    def _longest(self, size: int) -> int:
        return max(self._stretches(), key=lambda stretch: (stretch[1] - stretch[0], -stretch[0]))[0]

    def _lowest(self, size: int) -> int | None:
        return self._clear(
            size, next(start for start, end in self._stretches() if end - start >= size)
        )

    def _clear(self, size: int, start: int) -> int | None:
        """Make everybody leave the *size* bytes from *start*, where nobody is in use; *start* once
        that is done, None while it takes a wait.
        """
        end = start + size
        self._awaited = []
        stuck = None
        for block in self._arena.overlapping(start, end):
            owner = block.owner
            self.operations += 1
            if owner is None or block.open:
                continue
            if owner.state == State.STUCK:
                stuck = owner
            elif owner.state == State.RESERVED:
                self._lose(owner)
            elif owner.state == State.READING:
                assert owner.read is not None
                self._awaited += [
                    *(write for write in owner.read.after if not write.ended),
                    owner.read,
                ]
            elif owner.state == State.REDIRTY:
                assert owner.write is not None
                self._awaited.append(owner.write)
            else:
                self._evict(owner)
        if stuck is not None and not self._awaited:
            if stuck is not self._tried_again:
                self._obstacle = stuck.name
                self._tried_again = stuck
                return None
            self._tried_again = None
            self._start_write(stuck)
            self._evict(stuck)
            return self._clear(size, start)
        return None if self._awaited else start

    # Looking ahead.

    def _need(self, entry: _Entry, created: bool) -> None:
        self._needed = entry
        entry.stamp = 0  # it does not leave
        self._creates = created
        self._obstacle = None
        self._tried_again = None
        self._awaited = []
        self._uses += 1
        order = self.order
        order.use(entry.name, entry.nbytes, created)
        if order.full:
            self.step()
        if self._cursor < order.now:
            self._cursor = order.now
        self._pass_over()

    def _pass_over(self) -> None:
        """What was read or reserved ahead, and not used when it was its turn, waits no longer."""
        ahead = self._ahead
        while ahead:
            entry = ahead[0]
            if entry.ahead is not None and entry is not self._needed:
                if entry.ahead >= self.order.now or (
                    entry.ahead < 0 and self.order.hinted(entry.name) is not None
                ):
                    return
                self.operations += 1
                self._not_ahead(entry)
                if entry.state == State.RESERVED:
                    self._lose(entry)
                elif entry.state in _IDLE and entry.block is not None and not entry.block.open:
                    self._idle(entry)
            ahead.popleft()

    def _not_ahead(self, entry: _Entry) -> None:
        if entry.ahead is not None:
            entry.ahead = None
            self._ahead_bytes -= entry.size

    def _is_ahead(self, entry: _Entry, position: int) -> None:
        if entry.ahead is None:
            self._ahead_bytes += entry.size
            self._ahead.append(entry)
        entry.ahead = position

    def _look_ahead(self) -> None:
        """Move the second cursor on, as far as there is room."""
        hints = self._hints
        while hints:
            self.operations += 1
            name = hints[0]
            entry = self._entries.get(name)
            hint = self.order.hinted(name)
            if (
                entry is not None
                and hint is not None
                and not self._prepare(entry, -1, _HINTED + hint)
            ):
                return
            hints.popleft()
        order = self.order
        if not order.followed:
            return
        length = len(order.period)
        last = min(order.now + length, self._cursor + _PLACES_A_CALL)
        while self._cursor < last:
            position = self._cursor
            use = order.at(position)
            self.operations += 1
            entry = self._entries.get(use.name)
            if entry is None:
                if (
                    use.created
                    and use.name not in self._kept_for
                    and not self._reserve(use.name, use.nbytes, position)
                ):
                    return
            elif (
                use.created
                and entry is not self._needed
                and (entry.block is None or entry.block.open)
            ):
                if entry.block is not None and entry.write is not None:
                    return  # by then it is on offer and written, or needed where it is
                self._claim(entry)
                if entry.block is not None:
                    self._cursor = position + 1
                    continue
                # it has no other room before it is dropped
                if entry.size != self._rounded(use.nbytes):
                    self._cursor = position + 1
                    continue
                if not self._fits_ahead(entry.size):
                    return
                start = self._room(entry, position)
                if start is None:
                    return
                self._place(entry, start)
                self._is_ahead(entry, position)
            elif not self._prepare(entry, position, position):
                return
            self._cursor = position + 1

    def _fits_ahead(self, size: int) -> bool:
        """Whether *size* bytes more may be read ahead: where values pass beside those that stay,
        what is not in use there may all be.
        """
        taken = self._ahead_bytes + size
        return (
            taken + self._in_passing <= self._passing_bytes
            if self._homes
            else taken <= self.lookahead_bytes
        )

    def _reserve(self, name: str, nbytes: int, position: int) -> bool:
        """Keep room for *name*, which is created at *position*; whether the cursor may pass."""
        size = self._rounded(nbytes)
        if not self._fits_ahead(size):
            return False
        entry = self._new_entry(name, nbytes, size)
        entry.known = False
        start = self._room(entry, position)
        if start is None:
            return False
        self._place(entry, start)
        self._kept_for[name] = entry
        self._is_ahead(entry, position)
        return True

    def _prepare(self, entry: _Entry, position: int, priority: int) -> bool:
        """See that *entry*, which is used at *position*, is in memory then; whether the cursor may
        pass.
        """
        if entry is self._needed or entry.read_failed:
            return True
        block = entry.block
        below = block is not None and block.open and block.start < self._arena.boundary
        if (
            block is not None
            and below
            and self._homes
            and entry.home is None
            and not self._may_move(entry, block)
        ):
            # where it is it would be in the way of those that stay; it is on offer, but not lost
            # yet
            return False
        self._claim(entry)
        if entry.block is not None:
            return True
        if entry.state != State.OFFLOADED:  # nobody has given it bytes
            return True
        if not self._fits_ahead(entry.size):
            return False
        if self._homes or not self._back(entry):
            start = self._room(entry, priority)
            if start is None:
                return False
            self._place(entry, start)
            self._start_read(entry)
        self._is_ahead(entry, position)
        return True

    # What is asked for.

    def _rounded(self, nbytes: int) -> int:
        # who has no bytes has a place all the same
        return max(-(-nbytes // self._granule), 1) * self._granule

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise UsageError(f"there is no value {name!r}")
        return entry

    def _check_free(self, entry: _Entry) -> None:
        if entry.state >= State.USED:
            raise UsageError(f"{entry.name!r} is in use already: release it first")

    def _check_fits(self, name: str, nbytes: int, size: int) -> None:
        """Raises: OutOfHostMemoryError, with what would do, when what is in use leaves no room for
        *size* bytes.
        """
        if self._arena.best_fit(size, above=True) is not None or any(
            end - start >= size for start, end in self._stretches()
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
            f"no room for {name!r}, {format_bytes(nbytes)}, in a budget of {format_bytes(self.nbytes)}: {format_bytes(used)} are in use"
            f"{f' by {listed}{more}' if in_use else ''}; release some first, or make the budget at least {enough} bytes"
        )
