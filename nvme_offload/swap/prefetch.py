"""`Prefetcher`: the cursor that loads values into memory ahead of their use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from ..errors import known
from .access_order import AccessOrder
from .blocks import Blocks
from .residency import Residency
from .value_states import State
from .values import Need, Value
from .victims import HINTED, Victims

_POSITIONS_PER_CALL = 256  # positions that one call of `advance` looks ahead
# A hint is redundant if the learned order contains the use within this many positions, plus twice
# the number of hints.
_HINT_SLACK = 8


class Prefetcher:
    """A cursor: values up to it are in memory or have a block. Hints take precedence."""

    def __init__(
        self,
        values: Mapping[str, Value],
        order: AccessOrder,
        blocks: Blocks,
        victims: Victims,
        residency: Residency,
        need: Need,
    ) -> None:
        self.cursor = 0  # a position of the learned order
        self.lookahead_bytes = 0  # how much is prefetched if there are no residents
        self._values = values
        self._order = order
        self._blocks = blocks
        self._victims = victims
        self._residency = residency
        self._need = need
        self._hints: OrderedDict[str, None] = OrderedDict()  # not acted on yet
        self._again: list[int] = []  # positions before the cursor whose memory was freed

    def hint(self, names: Iterable[str]) -> None:
        """Expect *names* next, in this order; ignores unknown ones and the followed order."""
        order = self._order
        known = [name for name in names if name in self._values]
        self._blocks.operations += len(known)
        if order.followed and not any(map(order.repeats, known)):
            near = order.now + 2 * len(known) + _HINT_SLACK
            places = [place for name in known if (place := order.next_use(name)) is not None]
            if len(places) == len(known) and places == sorted(places) and places[-1:] < [near]:
                return
        order.hint(known)
        self._hints.update(dict.fromkeys(known))

    def on_use(self, value: Value, expected: int) -> None:
        """Follow a use of *value*; *expected* is the position after it in the learned order."""
        now = self._order.now
        if self.cursor < now or (
            # it was evicted since, and later values may be evicted, too
            now == expected and value.state == State.OFFLOADED and not self._need.creates
        ):
            self.cursor = now
        self._drop_missed()

    def on_discard(self, value: Value) -> None:
        """Return to the next use of *value*: memory that was reserved for it is free."""
        order = self._order
        position = order.next_use(value.name)
        if position is None or position >= self.cursor:
            return
        if order.followed and self._blocks.placed == len(self._values):
            self._again.append(position)  # all other values are in memory
        else:
            self.cursor = position

    def restart(self) -> None:
        """Begin at the next use, and stop counting values as prefetched."""
        prefetched = self._blocks.prefetched
        self._blocks.operations += len(prefetched.values)
        for value in prefetched.values:
            prefetched.remove(value)
            if value.state == State.RESERVED and value is not self._need.value:
                self._blocks.drop(value)
        prefetched.values.clear()
        self._again.clear()
        self.cursor = self._order.now

    def on_idle(self, value: Value) -> None:
        """Keep or evict *value*, which has become idle."""
        order = self._order
        if order.followed:
            if not self._residency.has(value):
                position = order.next_use(value.name)
                if (
                    position is not None
                    and position >= self.cursor
                    and order.hinted(value.name) is None
                ):
                    self._blocks.evict(value)
                    return
            self._victims.add(value)
            return
        self._victims.add(value)
        if self._blocks.placed < len(self._values):
            self._victims.keep_reclaimable(self.lookahead_bytes)

    def _drop_missed(self) -> None:
        """Drop prefetched values that were not used at their position."""
        prefetched = self._blocks.prefetched
        while prefetched.values:
            value = prefetched.values[0]
            position = value.prefetched_for
            if position is not None and value is not self._need.value:
                if position >= self._order.now or (
                    position < 0 and self._order.hinted(value.name) is not None
                ):
                    return
                self._blocks.operations += 1
                prefetched.remove(value)
                if value.state == State.RESERVED:
                    self._blocks.drop(value)
                elif value.is_kept:
                    self.on_idle(value)
            prefetched.values.popleft()

    def advance(self) -> None:
        """Advance the cursor as far as memory allows."""
        hints, order = self._hints, self._order
        while hints:
            self._blocks.operations += 1
            name = next(iter(hints))
            value, hint = self._values.get(name), order.hinted(name)
            if (
                value is not None
                and hint is not None
                and not self._prefetch(value, -1, HINTED + hint)
            ):
                return
            del hints[name]
        if not order.followed:
            return
        again, self._again = sorted(self._again), []
        for position in again:
            if order.now <= position < self.cursor and not self._visit(position):
                self.cursor = position
        last = min(order.now + len(order.period), self.cursor + _POSITIONS_PER_CALL)
        while self.cursor < last and self._visit(self.cursor):
            self.cursor += 1

    def _visit(self, position: int) -> bool:
        """Load or reserve memory for the use at *position*; whether the cursor may advance."""
        order, use = self._order, self._order.at(position)
        self._blocks.operations += 1
        value = self._values.get(use.name)
        if value is None:
            if order.foretold:
                return False  # the value will be created later, and the uses after it are far away
            return not use.created or self._reserve(use.name, use.nbytes, position)
        if (
            use.created
            and value is not self._need.value
            and (value.block is None or value.block.reclaimable)
        ):
            return self._prepare_create(value, use.nbytes, position)
        return self._prefetch(value, position, position)

    def _fits(self, size: int) -> bool:
        """Whether *size* more bytes may be prefetched: with residents, all transient memory."""
        taken = self._blocks.prefetched.nbytes + size
        if self._residency.homes:
            taken += sum(
                value.size
                for value in self._blocks.in_use.values()
                if not (value.lowest or self._residency.has(value))
            )
            return taken <= self._residency.transient_bytes
        return taken <= self.lookahead_bytes

    def _place(self, value: Value, position: int, priority: int) -> bool:
        """Allocate a block for *value*, if one fits, by evicting values used later than *priority*."""
        if not self._fits(value.size):
            return False
        start = self._victims.find_space(value, priority)
        if start is None:
            return False
        self._blocks.place(value, start)
        self._blocks.prefetched.add(value, position)
        return True

    def _reserve(self, name: str, nbytes: int, position: int) -> bool:
        """Reserve a block for *name*, created at *position*; whether the cursor may advance."""
        if name in self._blocks.reservations:
            return True
        size = self._blocks.rounded(nbytes)
        value = Value(name, nbytes, nbytes, size, exists=False)
        if not self._place(value, position, position):
            return False
        self._blocks.reservations[name] = value
        return True

    def _prepare_create(self, value: Value, nbytes: int, position: int) -> bool:
        """Get a block for *value*, created anew with *nbytes*; whether the cursor may advance."""
        if value.block is not None and value.write is not None:
            return False  # by then its block is reclaimable and written, or is needed in place
        self.claim(value)
        if value.block is not None:
            return True
        # The value keeps its size until it is discarded.
        if value.size != self._blocks.rounded(nbytes):
            return True
        return self._place(value, position, position)

    def _prefetch(self, value: Value, position: int, priority: int) -> bool:
        """Load *value* for its use at *position*. Returns: whether the cursor may advance."""
        if value is self._need.value or value.read_failed:
            return True
        block = value.block
        if (
            block is not None
            and block.reclaimable
            and block.start < self._blocks.arena.boundary
            and self._residency.homes
            and self._residency.home(value) is None
            and not self._may_move(value)
        ):
            # It would stay in the residents' part. It is reclaimable there, and still in memory.
            return False
        self.claim(value)
        if value.block is not None:
            return True
        if value.state != State.OFFLOADED:  # it has no contents
            return True
        if not self._fits(value.size):
            return False
        if not self._residency.homes and self.reattach(value):
            self._blocks.prefetched.add(value, position)
            return True
        if not self._place(value, position, priority):
            return False
        self._blocks.start_read(value)
        return True

    def reattach(self, value: Value) -> bool:
        """Reassign to *value* the block from which it is being written, unless the block is reused."""
        if not self._blocks.reattach(value):
            return False
        self._victims.add(value)
        return True

    def claim(self, value: Value) -> None:
        """Make *value* not reclaimable, or drop it if it has to be read into its own part."""
        block = value.block
        if block is None:
            return
        if block.reclaimable:
            need = self._need
            # A create does not wait for the write of the old contents if the block stays.
            movable = value.write is None or value is not need.value or not need.creates
            if (
                self._residency.homes
                and movable
                and not self._residency.has(value)
                and self._may_move(value)
            ):
                self._blocks.drop(value)
                return
            self._blocks.arena.claim(block)
            self._victims.add(value)

    def _may_move(self, value: Value) -> bool:
        """Whether *value* is in the wrong part, and fits in the right one."""
        arena, home = self._blocks.arena, self._residency.home(value)
        if home is not None:
            return arena.is_reclaimable(home, home + value.size)
        return (
            known(value.block).start < arena.boundary
            and arena.best_fit(value.size, above=True) is not None
        )
