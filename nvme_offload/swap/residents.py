"""Which values stay in memory through a period of uses, because that saves the most transfers, and
through how much of it the others pass.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from .access_order import NEVER, Period

# a transfer costs as much as so many bytes: where all else is equal, small values stay
REQUEST_BYTES = 256 << 10

_LARGEST = (1, 2, 4, 8, 16)  # so many of the largest values are tried as the first to stay
_TRIES = 4


class Passing(NamedTuple):
    """What room the values want that do not stay: *in_use* bytes at once, at most, and *nbytes*
    with those that are read meanwhile.
    """

    in_use: int
    nbytes: int


class Choice(NamedTuple):
    """*names* stay, the others pass through *passing_bytes*, and so *saved_bytes* of a period are
    not moved.
    """

    names: list[str]
    passing_bytes: int
    saved_bytes: int


class Chooser:
    """Chooses who stays in memory through *period*, for values that take *sizes*.

    *carried_bytes* are in use when a period ends. *ahead_bytes* are read ahead, None for as much as
    the two values take that are used next: one that is being read while the other is ready.
    """

    def __init__(
        self, period: Period, sizes: Mapping[str, int], carried_bytes: int, ahead_bytes: int | None
    ) -> None:
        numbers = {name: number for number, name in enumerate(sizes)}
        self._sizes = sizes
        self._numbers = numbers
        self._carried_bytes = carried_bytes
        self._ahead_bytes = ahead_bytes
        self._used = np.fromiter((numbers[name] for name in period.names), np.int64, len(period))
        self._ends = np.array(period.ends, np.int64)
        self._by_number = np.fromiter(sizes.values(), np.int64, len(sizes))
        everything = self.passing(())
        self.counts = transfers(period, sizes, everything.nbytes - everything.in_use)

    def saved(self, names: Collection[str]) -> int:
        """Bytes of a period that are not moved when *names* stay."""
        return sum(self.counts.get(name, 0) * self._sizes.get(name, 0) for name in names)

    def passing(self, stay: Collection[str]) -> Passing:
        """The room that all others want when the values *stay*: rather too much where one is in use
        until just before its next use. Costs O(uses).
        """
        sizes = self._by_number.copy()
        sizes[[self._numbers[name] for name in stay if name in self._numbers]] = 0
        taken = sizes[self._used]
        known = np.flatnonzero((taken > 0) & (self._ends != NEVER))
        change = np.zeros(len(taken) + 1, np.int64)
        np.add.at(change, known, taken[known])
        np.subtract.at(change, self._ends[known], taken[known])
        places = np.flatnonzero(taken)
        if not len(places):
            return Passing(self._carried_bytes, self._carried_bytes)
        in_use = change.cumsum()[places] + self._carried_bytes
        most = int(in_use.max())
        if self._ahead_bytes is not None:
            return Passing(most, most + self._ahead_bytes)
        here = self._used[places]
        first, second = np.roll(here, -1), np.roll(here, -2)
        ahead = sizes[first] * (first != here) + sizes[second] * (
            (second != here) & (second != first)
        )
        return Passing(most, int((in_use + ahead).max()))

    def choose(self, nbytes: int) -> Choice:
        """Who stays in *nbytes* of memory.

        A few values that are far larger than all others are tried as the first to stay: the room
        through which the others pass can be so much smaller then.
        """
        everything = self.passing(())
        by_size = sorted(
            (name for name, count in self.counts.items() if count),
            key=lambda name: self._sizes[name],
            reverse=True,
        )
        firsts = [
            (self.passing(by_size[:count]).nbytes, by_size[:count])
            for count in _LARGEST
            if count <= len(by_size)
        ]
        fitting = [
            (passing, first) for passing, first in firsts if passing + self._bytes(first) <= nbytes
        ]
        tried = [self._settled(nbytes, [], everything.nbytes)]
        if fitting and min(fitting)[0] < everything.nbytes:
            tried.append(self._settled(nbytes, min(fitting)[1], min(fitting)[0]))
        return max(tried, key=lambda choice: choice.saved_bytes)

    def _settled(self, nbytes: int, first: list[str], passing_bytes: int) -> Choice:
        """Those who stay, *first* among them, and the room that the others want then, which follow
        from each other.
        """
        rest = {name: count for name, count in self.counts.items() if name not in set(first)}
        best = Choice([], self.passing(()).nbytes, 0)
        for _ in range(_TRIES):
            left = nbytes - passing_bytes - self._bytes(first)
            if left < 0:
                break
            names = first + choose(rest, self._sizes, left)
            wanted = self.passing(names).nbytes
            saved = self.saved(names)
            if wanted <= nbytes - self._bytes(names) and saved > best.saved_bytes:
                best = Choice(names, wanted, saved)
            if wanted == passing_bytes:
                break
            passing_bytes = wanted
        return best

    def _bytes(self, names: Collection[str]) -> int:
        return sum(self._sizes[name] for name in names)


def transfers(period: Period, sizes: Mapping[str, int], near_bytes: int) -> dict[str, int]:
    """How many reads and writes a period of each value takes that does not stay, by name, in the
    order of their first use.

    Between two uses with at most *near_bytes* of others between it stays all the same. What was
    discarded is neither written nor read, and what is created is not read.
    """
    uses = period.uses
    before = [0]
    for use in uses:
        before.append(before[-1] + sizes[use.name])
    total = before[-1]
    counts = {}
    for name, places in period.places.items():
        here = [uses[place] for place in places]
        following = [*places[1:], places[0]]
        between = [
            before[later] - before[place + 1]
            for place, later in zip(places, following, strict=True)
        ]
        between[-1] += total
        leaves = [
            gap > near_bytes and not use.dropped for gap, use in zip(between, here, strict=True)
        ]
        count = 0
        if True in leaves:
            changed = False
            # so that the walk ends where the value leaves
            start = leaves.index(True) + 1 - len(here)
            for index in range(start, start + len(here)):
                changed = (changed or here[index].changed) and not here[index].dropped
                if leaves[index]:
                    count += changed + (not uses[following[index]].created)
                    changed = False
        counts[name] = count
    return counts


def choose(
    counts: Mapping[str, int],
    sizes: Mapping[str, int],
    nbytes: int,
    request_bytes: int = REQUEST_BYTES,
) -> list[str]:
    """The values that stay in *nbytes*, by transfers saved for each byte of room.

    Of those that save about the same, and do not all fit, as many as do are taken at even distances
    along the order of use: so the transfers of the others are spread over the period, and the drive
    does not stand idle while those are used that stay.
    """
    classes: dict[int, list[str]] = {}
    for name, count in counts.items():
        if count:
            density = count * (1 + request_bytes / sizes[name])
            classes.setdefault(round(4 * math.log2(density)), []).append(name)
    chosen: list[str] = []
    left = nbytes
    for density_class in sorted(classes, reverse=True):
        names = classes[density_class]
        total = sum(sizes[name] for name in names)
        if total <= left:
            chosen += names
            left -= total
            continue
        share = left / total
        owed = 0.0
        for name in names:
            size = sizes[name]
            owed += share * size
            if owed >= size / 2 and size <= left:
                owed -= size
                left -= size
                chosen.append(name)
    return chosen
