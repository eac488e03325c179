"""`AccessOrder` learns, from period to period, the order in which named values are used."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_LONGEST_PERIOD = 1 << 20  # uses; bounds the record if no period ever ends
NEVER = -1
_RECENT = 32  # number of last uses that `followed` counts


class Use(NamedTuple):
    """One use of a value.

    *created*: the user provides the contents in each period, so the use needs memory but no read.
    *changed*: the contents changed. *dropped*: the value was discarded afterwards.
    """

    name: str
    nbytes: int
    created: bool
    changed: bool
    dropped: bool


class Period:
    """The uses of one period in order, and the places of each name. Immutable.

    *ends* has, for each use, the place of the first use that began after it ended, or `NEVER`.
    """

    def __init__(self, uses: list[Use], ends: list[int]) -> None:
        self.uses = uses
        self.ends = ends
        self.names = [use.name for use in uses]
        self.places: dict[str, list[int]] = {}
        for place, name in enumerate(self.names):
            self.places.setdefault(name, []).append(place)
        self._pairs: dict[tuple[str, str], list[int]] | None = None

    def __len__(self) -> int:
        return len(self.uses)

    def pairs(self, first: str, second: str) -> list[int]:
        """The places where *second* is used right after *first*."""
        if self._pairs is None:  # built on first deviation from the order
            self._pairs = {}
            for place, name in enumerate(self.names):
                self._pairs.setdefault((self.names[place - 1], name), []).append(place)
        return self._pairs.get((first, second), [])


class AccessOrder:
    """Learns the order of uses from period to period, and takes hints, which have precedence.

    The cursor *now* walks the previous period: it is the position of the next expected use.
    Positions increase over periods; position p is place p modulo the length. An unexpected use is
    first looked up together with the use before it, anywhere in the period (an evaluation repeats
    the forward pass), then alone, ahead of the cursor. The cursor moves behind the match. An
    unknown use does not move the cursor. A use costs O(log n).
    """

    def __init__(self) -> None:
        self.period = Period([], [])
        self.now = 0
        self.foretold = False  # the period was foretold, and none has ended yet
        self._record: list[Use] = []
        self._ends: list[int] = []  # the ends of the uses in the record
        self._last_at: dict[str, int] = {}  # name -> its last place in the record
        self._last = ""
        self._repeated: set[str] = set()  # names whose next use is not part of the order
        self._misses = 0  # a bit for each recent use: 1 if it was unexpected
        self._had_extras = False
        self._hints: OrderedDict[str, tuple[int, int]] = OrderedDict()  # name -> (number, period)
        self._hint_number = 0
        self._periods = 0

    @property
    def learned(self) -> bool:
        """Whether a whole period has been seen or foretold."""
        return bool(self.period.uses)

    @property
    def followed(self) -> bool:
        """Whether an order is known, and at least half of the last uses were expected."""
        return bool(self.period.uses) and self._misses.bit_count() <= _RECENT // 2

    @property
    def full(self) -> bool:
        """Whether the record has reached its limit, so that the period must end."""
        return len(self._record) >= _LONGEST_PERIOD

    def foretell(self, sizes: Mapping[str, int], at_once: int) -> bool:
        """Expect periods to use and change the values of *sizes*, in this order, with *at_once*
        values in use at the same time. Returns: False, and changes nothing, if values have been
        used before.
        """
        if self._record or self.period.uses or not sizes:
            return False
        uses = [Use(name, nbytes, False, True, False) for name, nbytes in sizes.items()]
        ends = [min(place + at_once, len(uses)) for place in range(len(uses))]
        self.period = Period(uses, ends)
        self.foretold = True
        return True

    def use(self, name: str, nbytes: int, created: bool, in_order: bool = True) -> None:
        """Record a use of *name*. It is learned only if *in_order*."""
        if name in self._hints:
            while self._hints.popitem(last=False)[0] != name:
                pass  # the use was hinted earlier, and skipped
        if not in_order or name in self._repeated:
            self._repeated.discard(name)
            self._last_at.pop(name, None)
            return
        self._last_at[name] = len(self._record)
        self._record.append(Use(name, nbytes, created, created, False))
        self._ends.append(NEVER)
        names = self.period.names
        if names:
            now = self.now
            if names[now % len(names)] == name:
                self.now = now + 1
                self._misses = (self._misses << 1) & 0xFFFFFFFF
            else:
                self._misses = (self._misses << 1 | 1) & 0xFFFFFFFF
                found = self._position_of(name)
                if found is not None:
                    self.now = found + 1
        self._last = name

    def changed(self, name: str) -> None:
        """Record that the last use of *name* changed it."""
        place = self._last_at.get(name)
        if place is not None and not self._record[place].changed:
            self._record[place] = self._record[place]._replace(changed=True)

    def repeat(self, name: str) -> None:
        """Do not learn the next use of *name* in this period: it repeats an earlier use."""
        self._repeated.add(name)

    def repeats(self, name: str) -> bool:
        """Whether `repeat` has announced the next use of *name*."""
        return name in self._repeated

    def ended(self, name: str) -> None:
        """Record that the last use of *name* has ended."""
        place = self._last_at.get(name)
        if place is not None:
            self._ends[place] = len(self._record)

    def dropped(self, name: str) -> None:
        """Record that *name* was discarded after its last use."""
        self._hints.pop(name, None)
        self._repeated.discard(name)
        place = self._last_at.get(name)
        if place is not None:
            self._record[place] = self._record[place]._replace(dropped=True)

    def step(self) -> bool:
        """End a period. Returns: whether the expected order changes.

        A period that contains the expected one, with other uses in between, counts as the expected
        period with an evaluation or a checkpoint: the first such period is not learned. Hints from
        the period before that were not followed are dropped.
        """
        for name in [name for name, hint in self._hints.items() if hint[1] != self._periods]:
            del self._hints[name]
        self._periods += 1
        self._repeated.clear()
        record, self._record, self._last_at = self._record, [], {}
        ends, self._ends = self._ends, []
        if not record:
            return False
        known, foretold, self.foretold = self.period.uses, self.foretold, False
        if record == known:
            self._had_extras = False
            adopt = foretold  # the record has the actual ends of uses
        else:
            extras = len(record) > len(known) > 0 and _holds(record, known)
            adopt = not extras or self._had_extras
            self._had_extras = extras and not adopt
        if adopt:
            self.period = Period(record, ends)
        self.now = -(-self.now // len(self.period)) * len(self.period)
        return adopt

    def hint(self, names: Iterable[str]) -> None:
        """Expect *names* to be used next, in this order, after the names hinted before."""
        for name in names:
            self._hints.pop(name, None)
            self._hints[name] = (self._hint_number, self._periods)
            self._hint_number += 1

    def hinted(self, name: str) -> int | None:
        """The number of the hint for *name*, increasing from hint to hint; None without a hint."""
        hint = self._hints.get(name)
        return None if hint is None else hint[0]

    def next_use(self, name: str) -> int | None:
        """The position of the next use of *name* in the learned order; None if unknown."""
        period = self.period
        places = period.places.get(name)
        if places is None:
            return None
        length = len(period.uses)
        begin, place = divmod(self.now, length)
        index = bisect_left(places, place)
        return begin * length + (places[index] if index < len(places) else places[0] + length)

    def at(self, position: int) -> Use:
        """The use expected at *position*."""
        return self.period.uses[position % len(self.period.uses)]

    def _position_of(self, name: str) -> int | None:
        period = self.period
        begin, place = divmod(self.now, len(period))
        pairs = period.pairs(self._last, name)
        if pairs:
            index = bisect_left(pairs, place)
            found = pairs[index] if index < len(pairs) else pairs[0] + len(period)
            return begin * len(period) + found
        places = period.places.get(name, [])
        index = bisect_left(places, place)
        return begin * len(period) + places[index] if index < len(places) else None


def _holds(record: list[Use], known: list[Use]) -> bool:
    """Whether *known* is a subsequence of *record*."""
    rest = iter(record)
    return all(any(use == other for other in rest) for use in known)
