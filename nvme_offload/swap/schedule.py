"""`Schedule`: the planner of a memory budget. It knows where each value is, and decides the next
reads and writes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

from ..errors import OutOfHostMemoryError, UsageError, check, known
from ..sizes import AHEAD_PARTS
from ..store.transfer import Stage, Transfer
from ..units import format_bytes
from .access_order import AccessOrder
from .blocks import Blocks
from .prefetch import Prefetcher
from .residency import Residency
from .residents import Chooser
from .value_states import Event, State
from .values import EVICTABLE, IDLE, Glimpse, Need, Value
from .victims import Victims

_STALE = frozenset({State.DIRTY, State.DIRTY_FAILED, State.USED_DIRTY})  # the drive's copy is stale
_SPARABLE = _STALE | {State.CLEAN, State.USED}


class Schedule:
    """The planner of *nbytes* of memory. It only does bookkeeping: callers report uses and ended
    transfers, and it returns the transfers to start.

    It expects the uses of the last period in the next one. Two cursors walk them: `order.now` is at
    the next use, and a prefetch cursor is ahead of it by the size of the next two values or by
    *lookahead_bytes*. Residents are chosen for a whole period, by transfers saved per byte of
    memory, after the memory that the other values need is set aside (`residents.Chooser`). They are
    packed at the low end. The other values, the transient ones, share the rest. Each is prefetched
    and used. It then becomes reclaimable immediately, unless it is used again before the prefetch
    cursor; if it changed, it is written back at that time. Its block can be reassigned before that
    write ends: the next owner's transfer waits for the write (`Transfer.after`). The plan therefore
    does not depend on the times at which transfers end.

    While no order is known, or it is not followed, values stay until their memory is needed. The
    victim is the value whose next use is farthest (Belady eviction). If no next use is known, the
    victim is the most recently used value; in a cyclic order, both rules choose the same value. As
    much memory as would be prefetched is kept reclaimable.

    A reclaimable block keeps its contents until it is reused. If a write fails after its block was
    reassigned, the value gets the block back: the new owner has no contents yet.

    If the drive is full, `spare` drops the drive's copies of values that are in memory, so that
    memory and drive together hold little more than one copy of each value.

    Blocks are whole granules. A use costs O(log n).

    Attributes: *order*; *blocks*, which counts bytes and the cost of calls.
    """

    def __init__(
        self, nbytes: int, lookahead_bytes: int | None = None, granule: int = 4096
    ) -> None:
        self.order = AccessOrder()
        self._values: dict[str, Value] = {}
        self._need = Need()
        self.blocks = Blocks(nbytes, granule)
        self._residency = Residency()
        self._victims = Victims(self.blocks, self.order, self._residency, self._need)
        self._prefetcher = Prefetcher(
            self._values,
            self.order,
            self.blocks,
            self._victims,
            self._residency,
            self._need,
        )
        self._count = 0  # number of uses so far
        self._largest = 0
        self._asked_lookahead = lookahead_bytes
        self._set_lookahead()

    def _set_lookahead(self) -> None:
        self._prefetcher.lookahead_bytes = (
            min(2 * self._largest, self.nbytes // 2)
            if self._asked_lookahead is None
            else self._asked_lookahead
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return self.blocks.arena.nbytes

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def names(self) -> list[str]:
        """Every value, oldest first."""
        return list(self._values)

    def size(self, name: str) -> int:
        """Bytes of *name*, as created. Raises: UsageError if there is no such value."""
        return self._value(name).nbytes

    # Called for users of values.

    def blocking_transfer(self, name: str) -> Transfer | None:
        """A transfer of *name* that must end before it can be discarded, or None."""
        value = self._values.get(name)
        return None if value is None else value.read or value.write

    def blocks_create(self, name: str, nbytes: int) -> Transfer | None:
        """The transfer that must end before *name* can be created with *nbytes*, or None."""
        value = self._values.get(name)
        if value is None:
            return None
        if value.write is not None and (
            value.state <= State.READING or value.size != self.blocks.rounded(nbytes)
        ):
            return value.write
        return value.read

    def create(self, name: str, nbytes: int, lowest: bool = False, once: bool = False) -> None:
        """Request a block for a new value *name*, with *lowest* at the lowest free address. `plan`
        provides the block, and `take` returns it once it is `ready`. With *once*, later periods are
        expected to use its contents.

        No transfer that `blocks_create` reports may be in flight. Raises, without changing
        anything: UsageError if *name* is in use, OutOfHostMemoryError if it cannot fit.
        """
        if nbytes < 0:
            raise UsageError(f"{name!r} cannot have {nbytes} bytes")
        size = self.blocks.rounded(nbytes)
        value = self._values.get(name)
        if value is not None:
            self._check_free(value)
            check(self.blocks_create(name, nbytes) is None, "a transfer is in flight")
        if value is not None and value.size == size:
            if value.block is None:
                self._check_fits(name, nbytes, size)
            value.nbytes = nbytes
        else:
            self._check_fits(name, nbytes, size)
            if value is not None:
                self.discard(name)
            value = self.blocks.reservations.pop(name, None)
            if value is not None and value.size != size:
                self.blocks.drop(value)
                value = None
            if value is None:
                value = Value(name, nbytes, nbytes, size)
            value.exists = True
            value.nbytes = value.value_bytes = nbytes
            value.lowest = lowest
            self._values[name] = value
            if value.block is not None:
                self.blocks.count_placed(value)
        self._begin(value, created=True, recreated=not once)

    def need(self, name: str, in_order: bool = True) -> None:
        """Request the contents of *name*. `plan` provides them, and `take` returns them once they
        are `ready`. The use is learned only if *in_order*.

        Raises: UsageError if there is no such value or it is in use, OutOfHostMemoryError if it
        cannot fit.
        """
        value = self._value(name)
        self._check_free(value)
        if value.block is None:
            self._check_fits(name, value.nbytes, value.size)
        value.read_failed = False
        self._begin(value, created=False, in_order=in_order)

    def ready(self, name: str) -> bool:
        """Whether the needed value *name* can be taken; of others, whether they are in memory."""
        value = self._values[name]
        if value is self._need.value and self._need.creates and value.state == State.RESERVED:
            return all(write.ended for write in known(value.block).writes)
        return value.state >= State.CLEAN

    def take(self, name: str) -> tuple[int, bool]:
        """Start the use of *name*. Returns its offset, and whether it was read for this use."""
        value, need = self._values[name], self._need
        block = known(value.block)
        check(value is need.value, "a value is taken that was not needed")
        if block.reclaimable:
            self.blocks.arena.claim(block)
        value.to(Event.CREATE if need.creates else Event.USE)
        if need.creates:
            value.value_bytes = value.nbytes
            self.blocks.copies.setdefault(name, value)  # the drive may have the replaced value
        was_read = value.prefetched_unused and not need.creates
        value.prefetched_unused = False
        value.stamp = 0
        self.blocks.prefetched.remove(value)
        need.value = None
        self.blocks.in_use[name] = value
        return block.start, was_read

    def cancel_need(self, name: str) -> None:
        """Withdraw the request for *name*, which was not taken. A requested new value is dropped."""
        value, creates = self._values[name], self._need.creates
        self._need.begin(None)
        if creates and value.state <= State.RESERVED and value.write is None:
            self.discard(name)
        elif value.state == State.RESERVED:
            self.blocks.drop(value)
        elif value.state in IDLE:
            self._prefetcher.on_idle(value)

    def release(self, name: str, changed: bool, nbytes: int | None) -> None:
        """End the use of *name*. If it was *changed*, its first *nbytes* are its contents."""
        value = self._value(name)
        self._check_used(value)
        if nbytes is not None and not 0 <= nbytes <= value.nbytes:
            raise UsageError(f"{name!r} holds {value.nbytes} bytes, not {nbytes}")
        if changed:
            value.value_bytes = value.nbytes if nbytes is None else nbytes
            self.order.changed(name)
        self._end_use(value)
        value.keeps_copy = False
        value.to(Event.RELEASE_DIRTY if changed else Event.RELEASE_CLEAN)
        value.last_use = self._count
        if value.size > self._largest:
            self._largest = value.size
            self._set_lookahead()
        self._prefetcher.on_idle(value)

    def discard(self, name: str) -> None:
        """Drop *name*, in use or not, with no transfer in flight. Raises: UsageError."""
        value = self._value(name)
        check(value.read is None and value.write is None, "a transfer is in flight")
        if value.state >= State.USED:
            self._end_use(value)
        self.blocks.free(value)
        del self._values[name]
        self.order.dropped(name)
        self._prefetcher.on_discard(value)

    def replace(self, name: str, by: str) -> bool:
        """Make the value *by* the value *name*, whose contents are dropped, with no transfer of either
        in flight. Returns: False, and changes nothing, if *by* is not in memory. Raises: UsageError.
        """
        value = self._value(by)
        self._check_free(self._value(name))
        self._check_free(value)
        if not value.is_kept:
            return False
        if value.state is State.CLEAN:
            value.to(Event.SPARE)  # the drive has no copy by the other name
        self.blocks.copies.pop(by, None)
        self.order.dropped(by)
        self.blocks.free(self._values[name])
        del self._values[by]
        value.name = name
        self._values[name] = value
        return True

    def retain(self, name: str) -> None:
        """Keep the on-drive version of *name*, in use, for `roll_back`. Raises: UsageError."""
        value = self._value(name)
        self._check_used(value)
        if value.state != State.USED or value.value_bytes == 0:
            raise UsageError(
                f"memory alone has the newest version of {name!r}: write it back before its use"
            )
        value.retained_bytes = value.value_bytes

    def roll_back(self, name: str) -> None:
        """Make the retained version of *name* the newest, with no transfer in flight."""
        value = self._value(name)
        self._check_free(value)
        check(value.read is None and value.write is None, "a transfer is in flight")
        retained_bytes = known(value.retained_bytes)
        if value.state == State.RESERVED:
            self.blocks.drop(value)
        else:
            value.to(Event.ROLL_BACK)
            self.blocks.free(value)
        value.read_failed = False
        value.uses += 1
        value.value_bytes, value.retained_bytes = retained_bytes, None
        self.order.repeat(name)

    def stays(self, name: str) -> bool:
        """Whether *name* is chosen to be resident."""
        return self._residency.everything or name in self._residency.homes

    @property
    def everything_stays(self) -> bool:
        """Whether the plan is to keep all values in memory."""
        return self._residency.everything

    def upcoming(self, count: int) -> Iterator[Glimpse]:
        """The next *count* values that are expected, before the first that may not be read before its
        use; at most a part of a period, and none unless all values stay in memory.
        """
        order = self.order
        if not (self.everything_stays and order.followed):
            return
        for position in range(order.now, order.now + min(count, len(order.period) // AHEAD_PARTS)):
            use = order.at(position)
            value = self._values.get(use.name)
            if use.created:
                continue
            if value is None or not value.is_kept:
                return
            yield Glimpse(value, value.uses, known(value.block))

    def is_as_glimpsed(self, glimpse: Glimpse) -> bool:
        """Whether the present use of a value found what *glimpse* shows, in the same memory."""
        value, uses, block = glimpse
        return (
            self._values.get(value.name) is value
            and value.uses == uses + 1
            and value.block is block
        )

    def foretell(self, sizes: Mapping[str, int], at_once: int, stay: bool) -> None:
        """Plan for an order before any is learned; with *stay*, its residents stay."""
        if self.order.foretell(sizes, at_once):
            self._choose_residents()
            self._residency.stays |= stay

    def hint(self, names: Iterable[str]) -> None:
        """Expect *names* to be used next, in this order: see `Prefetcher.hint`."""
        self._prefetcher.hint(names)

    def step(self) -> None:
        """End a period of the order of use, and choose the residents of the next ones."""
        if self.order.step():
            self._prefetcher.restart()
            self._choose_residents()
        self._prefetcher.cursor = max(self._prefetcher.cursor, self.order.now)

    # Transfers.

    def plan(self) -> list[Transfer]:
        """The transfers to start now. From now on they count as in flight."""
        need = self._need
        needed = need.value
        if needed is not None and need.failed_write is None:
            self._provide(needed)
        if needed is None or needed.block is not None:
            self._prefetcher.advance()
        return self.take_pending()

    def take_pending(self) -> list[Transfer]:
        """The transfers that are already decided, without planning more."""
        transfers, self.blocks.to_start = self.blocks.to_start, []
        return transfers

    def waits_for(self, name: str) -> list[Transfer]:
        """The in-flight transfers that keep the needed value *name* from being ready."""
        value = self._values[name]
        if value.read is not None:
            return [*(write for write in value.read.after if not write.ended), value.read]
        if value.block is not None:
            return [write for write in value.block.writes if not write.ended]
        return [transfer for transfer in self._need.awaited if not transfer.ended]

    def failed_write(self) -> str | None:
        """The value whose failed write keeps the needed one from fitting; may be retried now."""
        name, self._need.failed_write = self._need.failed_write, None
        return name

    def write_all(self, but: set[str]) -> list[Transfer]:
        """Start a write of every dirty value, unless it is in use, being written or in *but*."""
        for value in self._values.values():
            if value.name not in but:
                self._write_back(value)
        return self.take_pending()

    def write(self, name: str) -> list[Transfer]:
        """Start a write of *name* if it is dirty; its copy stays until its next use ends."""
        value = self._value(name)
        self._check_free(value)
        value.keeps_copy = True
        self._write_back(value)
        return self.take_pending()

    def spare(self, nbytes: int, *, but: Container[str], stale: bool) -> list[str]:
        """Invalidate on-drive copies of values in memory, *nbytes* in total or as many as there
        are. Returns: the values. Values in *but* are skipped. With *stale*, only copies that were
        stale before are included.
        """
        self._residency.stays = True
        states = _STALE if stale else _SPARABLE
        spared: list[Value] = []
        for value in self.blocks.copies.values():
            if nbytes <= 0:
                break
            self.blocks.operations += 1
            # The contents of a reclaimable block may be overwritten at any time.
            lost = value.block is None or value.block.reclaimable
            if value.state in states and not (lost or value.keeps_copy or value.name in but):
                spared.append(value)
                nbytes -= value.value_bytes
        for value in spared:
            del self.blocks.copies[value.name]
            value.to(Event.SPARE)
        return [value.name for value in spared]

    def _write_back(self, value: Value) -> None:
        if value.state in (State.DIRTY, State.DIRTY_FAILED):
            self.blocks.start_write(value)
            self._victims.add(value)  # if its last write failed, it is evictable again

    def grow(self, nbytes: int) -> None:
        """Extend the memory to *nbytes* in total. Blocks stay where they are."""
        check(nbytes >= self.nbytes, "memory cannot shrink")
        self.blocks.arena.grow(nbytes)
        self._set_lookahead()
        if self.order.learned:
            self._choose_residents()

    def in_use(self) -> bool:
        """Whether any value is in use."""
        return bool(self.blocks.in_use)

    def names_in_use(self) -> list[str]:
        """Every value in use that is not placed lowest."""
        return [name for name, value in self.blocks.in_use.items() if not value.lowest]

    def finished(self, transfer: Transfer, succeeded: bool) -> None:
        """Record that *transfer* has ended; a failed one is retried when it is needed."""
        transfer.stage = Stage.ENDED
        # Blocks reference the transfer until they are used again, and transfers reference each
        # other.
        transfer.after, transfer.store = (), None
        if succeeded:
            transfer.requests = []
        if transfer.cancelled:
            return
        value = self._values[transfer.name]
        if not transfer.writes:
            value.read = None
            value.to(Event.READ_DONE if succeeded else Event.DROP)
            if succeeded:
                self.blocks.copies[value.name] = value
                if value is self._need.value or value.prefetched_for is not None:
                    self._victims.add(value)
                else:
                    self._prefetcher.on_idle(value)
            else:
                value.prefetched_unused = False
                value.read_failed = True
                self.blocks.free(value)
            return
        value.write = None
        if value.state >= State.CLEAN:
            self.blocks.copies[value.name] = value
        if succeeded:
            value.to(Event.WRITE_DONE)
            if value.state == State.DIRTY:
                self._victims.add(value)
            return
        if value.state <= State.READING:
            self.blocks.restore_failed_write(value, transfer)
        elif value.block is not None and value.block.reclaimable:
            self.blocks.arena.claim(value.block)
        value.to(Event.WRITE_FAILED)
        if value.state == State.DIRTY:
            self._victims.add(value)

    # Decisions.

    def _begin(
        self, value: Value, created: bool, in_order: bool = True, recreated: bool = False
    ) -> None:
        self._need.begin(value, created)
        value.stamp = 0  # not a candidate
        value.uses += 1
        self._count += 1
        expected = self.order.now + 1
        self.order.use(value.name, value.nbytes, recreated, in_order)
        if self.order.full:
            self.step()
        self._prefetcher.on_use(value, expected)

    def _end_use(self, value: Value) -> None:
        del self.blocks.in_use[value.name]
        self.order.ended(value.name)

    def _provide(self, value: Value) -> None:
        """Allocate the block of the needed *value*, and start its read."""
        self._prefetcher.claim(value)
        creates = self._need.creates
        if value.read_failed and not creates:
            return
        if value.block is None:
            if not self._residency.homes and self._prefetcher.reattach(value):
                return
            start = self._victims.find_space(value, None)
            if start is None:
                return
            self.blocks.place(value, start)
        if value.state == State.RESERVED and not creates:
            self.blocks.start_read(value)

    def _choose_residents(self) -> None:
        """Choose the residents of the expected order. If all values fit, they stay where they are."""
        period, residency = self.order.period, self._residency
        sizes = {use.name: self.blocks.rounded(use.nbytes) for use in period.uses}
        lowest = max(
            (
                value.block.end
                for value in self.blocks.in_use.values()
                if value.lowest and value.block is not None
            ),
            default=0,
        )
        if sum(sizes.values()) <= self.nbytes - lowest:
            changed = residency.keep_everything()
        else:
            carried = sum(value.size for value in self.blocks.in_use.values() if not value.lowest)
            chooser = Chooser(period, sizes, carried, self._asked_lookahead)
            present = {
                value.name: value.block.start
                for value in self._values.values()
                if value.block is not None and value.is_kept
            }
            changed = residency.choose(chooser, sizes, lowest, self.nbytes, present)
        if not changed:
            return
        self.blocks.arena.set_boundary(residency.boundary)
        self._victims.clear()
        for value in [value for value in self._values.values() if value.is_kept]:
            if not residency.homes or residency.has(value) or value.state not in EVICTABLE:
                self._victims.add(value)
            else:
                # It occupies the residents' part, or memory that transient values share.
                self.blocks.evict(value)

    # Checks.

    def _value(self, name: str) -> Value:
        value = self._values.get(name)
        if value is None:
            raise UsageError(f"there is no value {name!r}")
        return value

    def _check_used(self, value: Value) -> None:
        if value.state < State.USED:
            raise UsageError(f"{value.name!r} is not in use")

    def _check_free(self, value: Value) -> None:
        if value.state >= State.USED:
            raise UsageError(f"{value.name!r} is in use already: release it first")

    def _check_fits(self, name: str, nbytes: int, size: int) -> None:
        """Raises: OutOfHostMemoryError if *size* bytes do not fit next to the values in use."""
        if self.blocks.arena.best_fit(size, above=True) is not None or any(
            end - start >= size for start, end in self.blocks.gaps()
        ):
            return
        in_use = sorted(
            self.blocks.in_use.values(),
            key=lambda value: value.block.start if value.block is not None else 0,
        )
        used = sum(value.size for value in in_use)
        enough = size + max(
            (value.block.end for value in in_use if value.block is not None), default=0
        )
        listed = ", ".join(f"{value.name!r} ({format_bytes(value.nbytes)})" for value in in_use[:8])
        more = f" and {len(in_use) - 8} more" if len(in_use) > 8 else ""
        raise OutOfHostMemoryError(
            f"no space for {name!r}, {format_bytes(nbytes)}, in a budget of {format_bytes(self.nbytes)}: {format_bytes(used)} are in use"
            f"{f' by {listed}{more}' if in_use else ''}; release some first, or make the budget at least {enough} bytes"
        )
