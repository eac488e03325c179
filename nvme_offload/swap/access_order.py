"""`AccessOrder`: in what order named values are used, learned from one period of training to the
next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

_LONGEST_PERIOD = 1 << 20  # uses: who never ends a period must not fill the memory with its record
NEVER = -1
_RECENT = 32  # uses, by which it is judged whether the order is followed


class Use(NamedTuple):
    """One use of a value.

    created: the user brings the bytes, so that it takes room and no read. changed: its bytes were
    other ones at the end. dropped: it was discarded after it, so that nothing is left to keep.
    """

    name: str
    nbytes: int
    created: bool
    changed: bool
    dropped: bool


class Period:
    """The uses of one period, in order, and at which places each name is used. Never changed.

    *ends* has for each use the place of the first that began after its end; `NEVER` where there was
    none.
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
        if self._pairs is None:  # first asked for when somebody leaves the order
            self._pairs = {}
            for place, name in enumerate(self.names):
                self._pairs.setdefault((self.names[place - 1], name), []).append(place)
        return self._pairs.get((first, second), [])


class AccessOrder:
    """Learns the order of uses from one period to the next, and takes hints, which come first.

    The period before is walked by a cursor, *now*: the position of the use that is expected next.
    Positions count on from period to period; position p is place p modulo the length. A use that is
    not the expected one is looked up together with the use before it (wherever in the period: an
    evaluation runs through the forward pass once more), then alone, ahead; the cursor goes behind
    what is found. What is found nowhere moves nothing. A use costs O(log n).
    """

    def __init__(self) -> None:
        self.period = Period([], [])
        self.now = 0
        self._record: list[Use] = []
        self._ends: list[int] = []  # of the uses in it
        self._last_at: dict[str, int] = {}  # name -> its last place in the record
        self._last = ""
        self._strayed = 0  # one bit for each of the last uses: it was not the expected one
        self._had_extras = False
        self._hints: OrderedDict[str, tuple[int, int]] = OrderedDict()  # name -> (number, period)
        self._hint_number = 0
        self._periods = 0

    @property
    def learned(self) -> bool:
        """Whether a whole period has been seen."""
        return bool(self.period.uses)

    @property
    def followed(self) -> bool:
        """Whether an order is known, and at least half of the last uses were the expected ones."""
        return bool(self.period.uses) and self._strayed.bit_count() <= _RECENT // 2

    @property
    def full(self) -> bool:
        """Whether the record is so long that a period must end."""
        return len(self._record) >= _LONGEST_PERIOD

    def use(self, name: str, nbytes: int, created: bool) -> None:
        """*name* is used now."""
        self._last_at[name] = len(self._record)
        self._record.append(Use(name, nbytes, created, created, False))
        self._ends.append(NEVER)
        if name in self._hints:
            while self._hints.popitem(last=False)[0] != name:
                pass  # hinted before it, and not needed
        names = self.period.names
        if names:
            now = self.now
            if names[now % len(names)] == name:
                self.now = now + 1
                self._strayed = (self._strayed << 1) & 0xFFFFFFFF
            else:
                self._strayed = (self._strayed << 1 | 1) & 0xFFFFFFFF
                found = self._position_of(name)
                if found is not None:
                    self.now = found + 1
        self._last = name

    def changed(self, name: str) -> None:
        """The last use of *name* has changed it."""
        place = self._last_at.get(name)
        if place is not None and not self._record[place].changed:
            self._record[place] = self._record[place]._replace(changed=True)

    def ended(self, name: str) -> None:
        """The last use of *name* has ended."""
        place = self._last_at.get(name)
        if place is not None:
            self._ends[place] = len(self._record)

    def dropped(self, name: str) -> None:
        """*name* was discarded after its last use."""
        self.forget_hint(name)
        place = self._last_at.get(name)
        if place is not None:
            self._record[place] = self._record[place]._replace(dropped=True)

    def step(self) -> bool:
        """A period ends here; whether another one is expected from now on.

        A period that holds the expected one whole, and other uses between, is the same with an
        evaluation or a checkpoint: the first of its kind teaches nothing. Hints of the period
        before, which nobody followed, are forgotten.
        """
        for name in [name for name, hint in self._hints.items() if hint[1] != self._periods]:
            del self._hints[name]
        self._periods += 1
        record, self._record, self._last_at = self._record, [], {}
        ends, self._ends = self._ends, []
        if not record:
            return False
        known = self.period.uses
        if record == known:
            self._had_extras = False
            adopt = False
        else:
            extras = len(record) > len(known) > 0 and _holds(record, known)
            adopt = not extras or self._had_extras
            self._had_extras = extras and not adopt
        if adopt:
            self.period = Period(record, ends)
            self._strayed = 0
        self.now = -(-self.now // len(self.period)) * len(self.period)
        return adopt

    def hint(self, names: Iterable[str]) -> None:
        """*names* are used next, in this order, after what was hinted before."""
        for name in names:
            self._hints.pop(name, None)
            self._hints[name] = (self._hint_number, self._periods)
            self._hint_number += 1

    def hinted(self, name: str) -> int | None:
        """The number of the hint of *name*, which grows from hint to hint; None where there is
        none.
        """
        hint = self._hints.get(name)
        return None if hint is None else hint[0]

    def forget_hint(self, name: str) -> None:
        """*name* is not used next after all."""
        self._hints.pop(name, None)

    def next_use(self, name: str) -> int | None:
        """The position of the next use of *name* in the learned order; None when it is not
        known.
        """
        period = self.period
        places = period.places.get(name)
        if places is None:
            return None
        length = len(period.uses)
        begin, place = divmod(self.now, length)
        index = bisect_left(places, place)
        return begin * length + (places[index] if index < len(places) else places[0] + length)

    def at(self, position: int) -> Use:
        """The use that is expected at *position*."""
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
    """Whether *known* can be read in *record* with other uses between."""
    rest = iter(record)
    return all(any(use == other for other in rest) for use in known)
