"""`Schedule`: which named values lie where in a budget of memory, and what to read and write next."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from typing import NamedTuple

from .access_order import AccessOrder, Use
from .errors import UsageError
from .units import format_bytes

# How soon an entry is used again, as a number: the higher, the better it leaves. Known distances are from 0 up.
_STAYS = -3.0
_LAST_RESORT = -2.0  # below every entry that can leave at all
_WRITE_FAILED = -1.0
_UNKNOWN = float(1 << 50)  # plus the time of the last use: see `Schedule._rank`


class Transfer(NamedTuple):
    """What to move between memory and drive: the first *nbytes* of *name*, from *offset* bytes into the memory."""

    writes: bool
    name: str
    offset: int
    nbytes: int


@dataclasses.dataclass(eq=False, slots=True)
class _Entry:
    """A value. Where it has an offset it is in memory, or on its way there when *reading*; where it has none it is on the drive."""

    name: str
    nbytes: int  # of the room that its user is given
    kept: int  # of these, from the first, are its value
    size: int  # that it takes of the memory
    offset: int | None = None
    in_use: bool = False
    created: bool = True  # there are no bytes to read yet
    dirty: bool = True  # the drive does not have its bytes, or will not once its user is done
    reading: bool = False
    writing: bool = False
    leaving: bool = False  # chosen to make room
    unused: bool = False  # read, and not used since
    claimed: int = 0  # so many bytes of its place, from the first, are meant for something else
    write_failed: bool = False
    read_failed: bool = False
    last_use: int = 0
    lowest: bool = False  # where it is to be placed

    @property
    def holds_up(self) -> bool:
        """Whether its memory cannot be taken at once."""
        return self.dirty or self.writing or self.reading


class Schedule:
    """The plan of a budget of *nbytes* of memory: pure bookkeeping, told what users do and which transfers end, and asked what to start.

    What is used again last leaves first (Belady), but never for something that is used later than itself. *lookahead_bytes* of what is used next
    are read ahead, beside what is there anyway: by default twice the largest value, at most half of the memory, since what is read ahead takes
    the place of what could stay. A changed value is written back as soon as reading ahead wants its room. While no order is known, what was
    used last leaves first, since it is used again last where the order is cyclic, and as much room as would be read ahead is kept clean.

    Where every value is used once in a period, it does not matter for the bytes which ones leave, but for the time: by the rule above those that do
    not fit come one after the other, and the drive stands idle while the others are used. So as many as do not fit are chosen at even distances,
    and leave as soon as their users are done.

    Values lie in whole granules. There is no allocator underneath: room for a value is the stretch of holes and of entries that can leave which
    costs least, so that what leaves is always neighbours, and no choice of victims can fail to make a hole.

    Attributes: *order*, told of every use here. *peak_bytes*, the most that was taken. *dropped_unused*, how many were read and left unused.
    """

    def __init__(self, nbytes: int, lookahead_bytes: int | None = None, granule: int = 4096) -> None:
        self.nbytes = nbytes
        self.order = AccessOrder()
        self.used_bytes = 0
        self.peak_bytes = 0
        self.dropped_unused = 0
        self._granule = granule
        self._lookahead_bytes = lookahead_bytes
        self._largest = 0
        self._entries: dict[str, _Entry] = {}
        self._placed: list[_Entry] = []  # by offset
        self._needed: _Entry | None = None
        self._in_the_way: list[_Entry] = []  # of the needed one
        self._claims: list[_Entry] = []  # by something nearer, within one call of plan()
        self._claimed_holes: list[_Entry] = []
        self._uses = 0
        self._streamed: frozenset[str] = frozenset()  # which leave as soon as they were used
        self._used_up: list[str] = []  # of these, since the last plan

    @property
    def lookahead_bytes(self) -> int:
        """How much is read ahead, in bytes of memory."""
        return min(2 * self._largest, self.nbytes // 2) if self._lookahead_bytes is None else self._lookahead_bytes

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """Every value, the oldest first."""
        return list(self._entries)

    def size(self, name: str) -> int:
        """Bytes of the room of *name*, as asked for. Raises: UsageError when there is none."""
        return self._entry(name).nbytes

    # What a user does.

    def create(self, name: str, nbytes: int, lowest: bool = False) -> None:
        """Room for a new value *name* is needed: `plan` makes it, *lowest* in the memory if so, `take` hands it out once it is `ready`.

        Raises: UsageError when *name* is in use, or when there cannot be room, and nothing is changed.
        """
        if nbytes < 0:
            raise UsageError(f"{name!r} cannot have {nbytes} bytes")
        size = self._rounded(nbytes)
        old = self._entries.get(name)
        if old is not None:
            self._check_free(old)
        if old is not None and old.offset is not None and old.size == size and not old.reading:
            old.nbytes = old.kept = nbytes  # a write that is under way may go on: the new bytes are written after it
            old.created = old.dirty = True
            old.unused = old.write_failed = False
        else:
            self._check_fits(name, nbytes, size)
            if old is not None:
                self.discard(name)
            self._entries[name] = _Entry(name, nbytes, nbytes, size, lowest=lowest)
        self._need(self._entries[name], created=True)

    def need(self, name: str) -> None:
        """The bytes of *name* are needed: `plan` brings them, `take` hands them out once it is `ready`.

        Raises: UsageError when there is no such value, it is in use, or there cannot be room for it.
        """
        entry = self._entry(name)
        self._check_free(entry)
        if entry.offset is None:
            self._check_fits(name, entry.nbytes, entry.size)
        entry.read_failed = False
        self._need(entry, created=False)

    def ready(self, name: str) -> bool:
        """Whether the needed value *name* is in memory."""
        entry = self._entries[name]
        return entry.offset is not None and not entry.reading

    def take(self, name: str) -> tuple[int, bool]:
        """*name*, which is ready, is in use from now on; its offset, and whether its bytes had to be read for this use."""
        entry = self._entries[name]
        assert entry.offset is not None
        was_read = entry.unused
        entry.in_use, entry.unused, entry.leaving = True, False, False
        self._needed = None
        return entry.offset, was_read

    def give_up(self, name: str) -> None:
        """*name*, which is not taken, is no longer needed; where it was to be created it is forgotten."""
        self._needed = None
        entry = self._entries[name]
        if entry.created and not entry.writing:
            self.discard(name)

    def release(self, name: str, changed: bool, nbytes: int | None) -> None:
        """The user of *name* is done; where it was *changed*, its first *nbytes* are its value now. Raises: UsageError."""
        entry = self._entry(name)
        if not entry.in_use:
            raise UsageError(f"{name!r} is not in use")
        if nbytes is not None and not 0 <= nbytes <= entry.nbytes:
            raise UsageError(f"{name!r} has room for {entry.nbytes} bytes, not for {nbytes}")
        if changed:
            entry.kept = entry.nbytes if nbytes is None else nbytes
            entry.dirty = True
            entry.write_failed = False
        entry.in_use = entry.created = False
        entry.last_use = self._uses
        self._largest = max(self._largest, entry.size)
        if name in self._streamed:
            entry.leaving = True
            self._used_up.append(name)

    def discard(self, name: str) -> None:
        """Forget *name*, in use or not. No transfer of it may be under way. Raises: UsageError when there is none."""
        entry = self._entry(name)
        assert not entry.reading
        assert not entry.writing
        if entry.offset is not None:
            self._drop(entry)
        del self._entries[name]
        self.order.forget_hint(name)

    def step(self) -> None:
        """A period of the order of use ends here; from what it was follows which values leave as soon as they are used in the next ones."""
        self.order.step()
        sizes = [self._rounded(use.nbytes) for use in self.order.round]
        total = sum(sizes)
        streamed = set()
        if total > self.nbytes:
            share = min((total - self.nbytes + self.lookahead_bytes) / total, 1)
            owed = 0.0
            for use, size in zip(self.order.round, sizes, strict=True):
                owed += share * size
                if owed >= size / 2:
                    owed -= size
                    streamed.add(use.name)
        self._streamed = frozenset(streamed)

    # What to transfer.

    def plan(self) -> list[Transfer]:
        """The transfers to start now: they count as under way from here on. Those for the needed value come first, then by the time of need."""
        transfers: list[Transfer] = []
        self._in_the_way = []
        needed = self._needed
        if needed is not None and needed.offset is None and not needed.read_failed:
            run = self._room(needed.size, _LAST_RESORT, needed.lowest)
            if run is not None and not self._settle(needed, run, transfers):
                self._in_the_way = [member for member in run[1] if member.holds_up]
        if self._overflowed or (self.order.creates and self.nbytes - self.used_bytes < self.lookahead_bytes):
            self._look_ahead(transfers)
        self._let_out(transfers)
        for entry in self._claims:
            entry.claimed = 0
        for hole in self._claimed_holes:
            self._placed.remove(hole)
        self._claims, self._claimed_holes = [], []
        return transfers

    def waits_for(self, name: str) -> list[str]:
        """The values whose transfers, under way, keep the needed value *name* from being ready."""
        return [name] if self._entries[name].reading else [entry.name for entry in self._in_the_way if entry.reading or entry.writing]

    def obstacle(self) -> str | None:
        """A value that keeps the needed one from having room, because its write failed; asked for once, it may be tried again."""
        for entry in self._in_the_way:
            if entry.write_failed and not entry.writing:
                entry.write_failed = False
                return entry.name
        return None

    def write_all(self, but: set[str]) -> list[Transfer]:
        """Writes, to start now, of every changed value that is neither in use nor under way nor among *but*."""
        transfers: list[Transfer] = []
        for entry in self._placed:
            if entry.dirty and not entry.in_use and not entry.writing and entry.name not in but:
                self._write(entry, transfers)
        return transfers

    def resize(self, nbytes: int) -> None:
        """Every value leaves the memory, which has *nbytes* from now on. No transfer may be under way, and nothing in use or changed since its write.

        Raises: UsageError when the largest value would not fit.
        """
        assert not any(entry.in_use or entry.holds_up for entry in self._placed)
        largest = max((entry.size for entry in self._entries.values()), default=0)
        if nbytes < largest:
            raise UsageError(f"a budget of {format_bytes(nbytes)} cannot hold the largest value, which takes {format_bytes(largest)}")
        for entry in list(self._placed):
            self._drop(entry)
        self.nbytes = nbytes

    def in_use(self) -> bool:
        """Whether any value is."""
        return any(entry.in_use for entry in self._placed)

    def under_way(self, name: str) -> bool:
        """Whether a transfer of *name* is."""
        entry = self._entry(name)
        return entry.reading or entry.writing

    def finished(self, transfer: Transfer, well: bool) -> None:
        """*transfer* has ended. One that failed is not tried again before somebody needs it: see `need`, `obstacle` and `write_all`."""
        entry = self._entries[transfer.name]
        if transfer.writes:
            entry.writing = False
            if not well:
                entry.dirty = entry.write_failed = True
        else:
            entry.reading = False
            if not well:
                entry.unused = False
                entry.read_failed = True
                self._drop(entry)

    # How.

    @property
    def _overflowed(self) -> bool:
        """Whether some value is not in memory."""
        return len(self._placed) - len(self._claimed_holes) < len(self._entries)

    def _need(self, entry: _Entry, created: bool) -> None:
        self._needed = entry
        self._uses += 1
        self.order.use(Use(entry.name, entry.nbytes, created))

    def _look_ahead(self, transfers: list[Transfer]) -> None:
        left = self.lookahead_bytes
        # What is needed later than this is not read yet, however little is read ahead: it would only change places with what has just been used.
        horizon = max(left, self.nbytes // 2)
        for distance, use in self.order.upcoming():
            entry = self._entries.get(use.name)
            if entry is None and not use.created:
                continue
            if entry is not None and (entry.in_use or entry is self._needed or (entry.read_failed and not use.created)):
                continue
            size = self._rounded(use.nbytes) if use.created or entry is None else entry.size
            horizon -= size
            if horizon < 0:
                break
            if entry is not None and entry.offset is not None:
                if not entry.claimed:
                    entry.leaving = False
                if entry.unused:
                    left -= entry.size
                continue
            if size > left:
                break
            left -= size
            run = self._room(size, float(distance))
            if run is None:
                break
            if use.created or entry is None:
                self._claim(run, size, transfers)
            else:
                self._settle(entry, run, transfers)
        if not self.order.learned and self._overflowed:
            self._keep_clean(left, transfers)

    def _let_out(self, transfers: list[Transfer]) -> None:
        """Write those of `_used_up` that are still to leave, and are not on their way."""
        for name in self._used_up:
            entry = self._entries.get(name)
            if entry is not None and entry.leaving and entry.dirty and not entry.in_use and not entry.writing:
                self._write(entry, transfers)
        self._used_up = []

    def _keep_clean(self, nbytes: int, transfers: list[Transfer]) -> None:
        room = self.nbytes - self.used_bytes
        for entry in sorted((entry for entry in self._placed if not entry.claimed and self._rank(entry) >= 0), key=self._rank, reverse=True):
            if room >= nbytes:
                return
            room += entry.size
            if entry.dirty and not entry.writing and not entry.reading:
                entry.leaving = True
                self._write(entry, transfers)

    def _settle(self, entry: _Entry, run: tuple[int, list[_Entry]], transfers: list[Transfer]) -> bool:
        """Give *entry* its place in *run*, and start its read, or make those leave who are there; whether it has its place."""
        if any(member.holds_up for member in run[1]):
            self._claim(run, entry.size, transfers)
            return False
        for member in run[1]:
            offset, claimed, member.claimed = member.offset or 0, member.claimed, 0
            self._drop(member)
            self._claim_hole(offset, offset + claimed)
        entry.offset = run[0]
        self._placed.insert(bisect_left(self._placed, run[0], key=_offset), entry)
        self.used_bytes += entry.size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        if not entry.created:
            entry.reading = entry.unused = True
            transfers.append(Transfer(False, entry.name, run[0], entry.kept))
        return True

    def _claim(self, run: tuple[int, list[_Entry]], size: int, transfers: list[Transfer]) -> None:
        """Keep *run* from those whose turn comes later in this plan, and start the writes that make it room."""
        start, members = run
        position = start
        for member in members:
            offset = member.offset or 0
            self._claim_hole(position, offset)
            position = offset + member.size
            member.claimed = min(start + size, position) - offset  # what comes next may have the rest
            member.leaving = True
            self._claims.append(member)
            if member.dirty and not member.writing and not member.reading and not member.write_failed:
                self._write(member, transfers)
        self._claim_hole(position, start + size)

    def _claim_hole(self, start: int, end: int) -> None:
        if start < end:
            hole = _Entry("", 0, 0, end - start, offset=start, claimed=end - start)
            self._placed.insert(bisect_left(self._placed, start, key=_offset), hole)
            self._claimed_holes.append(hole)

    def _write(self, entry: _Entry, transfers: list[Transfer]) -> None:
        entry.dirty, entry.writing, entry.write_failed = False, True, False
        transfers.append(Transfer(True, entry.name, entry.offset or 0, entry.kept))

    def _drop(self, entry: _Entry) -> None:
        self._placed.remove(entry)
        self.used_bytes -= entry.size
        self.dropped_unused += entry.unused
        entry.offset = None
        entry.leaving = entry.unused = False

    def _room(self, size: int, beyond: float, lowest: bool = False) -> tuple[int, list[_Entry]] | None:
        """The offset of the cheapest or *lowest* stretch of *size* bytes, and who has to leave it: only entries with a rank above *beyond*.

        Cheapest is where the soonest to be used again is farthest away, then where nobody need be waited for, then where the fewest bytes leave;
        then the tightest.
        """
        pieces: list[tuple[int, int, float, _Entry | None]] = []
        position = 0
        for entry in self._placed:
            offset = entry.offset or 0
            if offset > position:
                pieces.append((position, offset, math.inf, None))
            position = offset + entry.size
            if entry.claimed:
                pieces.append((offset, offset + entry.claimed, _STAYS, entry))
            if entry.claimed < entry.size:
                pieces.append((offset + entry.claimed, position, self._rank(entry), entry))
        if position < self.nbytes:
            pieces.append((position, self.nbytes, math.inf, None))
        best: tuple[float, int, int, int] = (math.inf, 0, 0, 0)
        found = None
        for first, (start, _, _, _) in enumerate(pieces):
            soonest, held_up, leaving = math.inf, 0, 0
            for index in range(first, len(pieces)):
                _, end, rank, piece = pieces[index]
                if rank <= beyond or (piece is not None and piece.reading and beyond >= 0):
                    break
                soonest = min(soonest, rank)
                if piece is not None:
                    held_up += piece.holds_up
                    leaving += piece.size
                cost = (-soonest, held_up, leaving, end - start)
                if found is not None and cost[:3] > best[:3]:
                    break
                if end - start >= size:
                    if found is None or cost < best:
                        best, found = cost, (start, first, index)
                    break
            if lowest and found is not None:
                break
        if found is None:
            return None
        start, first, last = found
        return start, [piece[3] for piece in pieces[first : last + 1] if piece[3] is not None]

    def _rank(self, entry: _Entry) -> float:
        if entry.in_use or entry is self._needed:
            return _STAYS
        if entry.write_failed:
            return _WRITE_FAILED
        if entry.leaving:
            return math.inf
        distance = self.order.next_use(entry.name)
        return _UNKNOWN + entry.last_use if distance is None else float(distance)

    def _rounded(self, nbytes: int) -> int:
        return max(-(-nbytes // self._granule), 1) * self._granule  # who has no bytes has a place all the same

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise UsageError(f"there is no value {name!r}")
        return entry

    def _check_free(self, entry: _Entry) -> None:
        if entry.in_use:
            raise UsageError(f"{entry.name!r} is in use already: release it first")

    def _check_fits(self, name: str, nbytes: int, size: int) -> None:
        """Raises: UsageError, with what would do, when what is in use leaves no room for *size* bytes."""
        if self._room(size, _LAST_RESORT) is not None:
            return
        in_use = [entry for entry in self._placed if entry.in_use]
        used = sum(entry.size for entry in in_use)
        enough = size + max(((entry.offset or 0) + entry.size for entry in in_use), default=0)
        listed = ", ".join(f"{entry.name!r} ({format_bytes(entry.nbytes)})" for entry in in_use[:8])
        more = f" and {len(in_use) - 8} more" if len(in_use) > 8 else ""
        raise UsageError(
            f"no room for {name!r}, {format_bytes(nbytes)}, in a budget of {format_bytes(self.nbytes)}: {format_bytes(used)} are in use"
            f"{f' by {listed}{more}' if in_use else ''}; release some first, or make the budget at least {enough} bytes"
        )


def _offset(entry: _Entry) -> int:
    return entry.offset or 0
