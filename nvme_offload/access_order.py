"""`AccessOrder`: in what order named values are used, learned from one period of training to the next."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

_LONGEST_PERIOD = 1 << 20  # uses: who never ends a period must not fill the memory with the record of it


class Use(NamedTuple):
    """One use of a value. *created*: the user brings the bytes, so that it takes room and no read."""

    name: str
    nbytes: int
    created: bool


class AccessOrder:
    """Learns the order of uses from one period to the next, and takes hints, which come first.

    What is predicted is the period before, from where it seems to be now. A use that is not the predicted one is looked up there together with
    the use before it (wherever in the period: an evaluation, say, runs through the forward pass once more), then alone, ahead; what is found
    nowhere changes no prediction. A use takes O(log n).
    """

    def __init__(self) -> None:
        self._uses: list[Use] = []  # of the period before
        self._creates = False
        self._places: dict[str, list[int]] = {}
        self._pairs: dict[tuple[str, str], list[int]] = {}  # places of the second
        self._next = 0
        self._record: list[Use] = []
        self._last = ""
        self._hints: dict[str, tuple[int, int]] = {}  # name -> (number, period), in order
        self._hint_number = 0
        self._period = 0

    @property
    def learned(self) -> bool:
        """Whether a whole period has been seen."""
        return bool(self._uses)

    @property
    def creates(self) -> bool:
        """Whether values are created in every period, as far as is known."""
        return self._creates

    @property
    def round(self) -> list[Use]:
        """The uses of a period in which every value is used once and none is created; none where it is not so."""
        return self._uses if len(self._places) == len(self._uses) and not self._creates else []

    def use(self, use: Use) -> None:
        """*use* happens now."""
        self._record.append(use)
        if use.name in self._hints:  # those hinted before it were not needed
            for name in list(self._hints):
                del self._hints[name]
                if name == use.name:
                    break
        if self._uses:
            place = self._place_of(use.name)
            if place is not None:
                self._next = (place + 1) % len(self._uses)
        self._last = use.name
        if len(self._record) >= _LONGEST_PERIOD:
            self.step()

    def step(self) -> None:
        """A period ends here. Hints of the period before, which nobody followed, are forgotten."""
        if self._record:
            self._uses, self._record, self._next = self._record, [], 0
            self._creates = any(use.created for use in self._uses)
            self._places, self._pairs = {}, {}
            for place, use in enumerate(self._uses):
                self._places.setdefault(use.name, []).append(place)
                self._pairs.setdefault((self._uses[place - 1].name, use.name), []).append(place)
        self._hints = {name: hint for name, hint in self._hints.items() if hint[1] == self._period}
        self._period += 1

    def hint(self, names: Iterator[str]) -> None:
        """*names* are used next, in this order, after what was hinted before and is not among them."""
        for name in names:
            self.forget_hint(name)
            self._hints[name] = (self._hint_number, self._period)
            self._hint_number += 1

    def forget_hint(self, name: str) -> None:
        """*name* is not used next after all."""
        self._hints.pop(name, None)

    def next_use(self, name: str) -> int | None:
        """How far away the next use of *name* is: a number to compare with others, 0 for the very next; None when it is not known."""
        first = next(iter(self._hints.values()), (self._hint_number, 0))[0]
        hint = self._hints.get(name)
        if hint is not None:
            return hint[0] - first
        places = self._places.get(name)
        if places is None:
            return None
        index = bisect_left(places, self._next)
        place = places[index] if index < len(places) else places[0] + len(self._uses)
        return self._hint_number - first + place - self._next

    def upcoming(self) -> Iterator[tuple[int, Use]]:
        """Every name that is known to be used again, with its distance, the nearest first. The size of a hinted name is not known here: 0."""
        seen = set()
        first = None
        for name, (number, _) in self._hints.items():
            first = number if first is None else first
            seen.add(name)
            yield number - first, Use(name, 0, False)
        ahead = 0 if first is None else self._hint_number - first
        for distance, use in enumerate(itertools.chain(itertools.islice(self._uses, self._next, None), itertools.islice(self._uses, self._next))):
            if use.name not in seen:
                seen.add(use.name)
                yield ahead + distance, use

    def _place_of(self, name: str) -> int | None:
        if self._uses[self._next].name == name:
            return self._next
        pairs = self._pairs.get((self._last, name))
        if pairs:
            index = bisect_left(pairs, self._next)
            return pairs[index % len(pairs)]
        places = self._places.get(name, [])
        index = bisect_left(places, self._next)
        return places[index] if index < len(places) else None
