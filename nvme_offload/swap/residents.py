"""Chooses the residents of a period: the values that save the most transfers by staying in memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from .access_order import NEVER, Period

# The fixed cost of a transfer, in bytes: all else being equal, small values stay.
_REQUEST_BYTES = 256 << 10

# Residents that save this share of the best choice are kept, since a new choice moves them all.
_GOOD_ENOUGH = 0.95
_LEAST_GOOD = 0.75  # the share if a single value exceeds the remainder
_LARGEST_COUNTS = (1, 2, 4, 8, 16)  # counts of the largest values to try as fixed residents
_TRIES = 4


class Transient(NamedTuple):
    """The memory of non-residents: the maximum *in_use*, and *nbytes* including prefetch."""

    in_use: int
    nbytes: int


class Choice(NamedTuple):
    """The residents *names*, the memory that the others share, and the bytes saved per period."""

    names: list[str]
    transient_bytes: int
    saved_bytes: int


class Chooser:
    """Chooses the residents of *period*, for values of *sizes*.

    *carried_bytes* are in use when a period ends. *ahead_bytes* are prefetched; None for the size
    of the next two values, one of which is read while the other is ready.
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
        everything = self.transient(())
        self.counts = transfers(period, sizes, everything.nbytes - everything.in_use)

    def saved(self, names: Collection[str]) -> int:
        """Bytes per period that are not transferred when *names* are resident."""
        return sum(self.counts.get(name, 0) * self._sizes.get(name, 0) for name in names)

    def transient(self, stay: Collection[str]) -> Transient:
        """The memory that the other values need if *stay* are resident. Costs O(uses)."""
        sizes = self._by_number.copy()
        sizes[[self._numbers[name] for name in stay if name in self._numbers]] = 0
        taken = sizes[self._used]
        known = np.flatnonzero((taken > 0) & (self._ends != NEVER))
        change = np.zeros(len(taken) + 1, np.int64)
        np.add.at(change, known, taken[known])
        np.subtract.at(change, self._ends[known], taken[known])
        places = np.flatnonzero(taken)
        if not len(places):
            return Transient(self._carried_bytes, self._carried_bytes)
        in_use = change.cumsum()[places] + self._carried_bytes
        most = int(in_use.max())
        if self._ahead_bytes is not None:
            return Transient(most, most + self._ahead_bytes)
        here = self._used[places]
        first, second = np.roll(here, -1), np.roll(here, -2)
        ahead = sizes[first] * (first != here) + sizes[second] * (
            (second != here) & (second != first)
        )
        return Transient(most, int((in_use + ahead).max()))

    def choose(self, nbytes: int) -> Choice:
        """Choose the residents of *nbytes* of memory.

        It also tries a few of the largest values as fixed residents: the other values may then need
        far less transient memory.
        """
        used = [name for name, count in self.counts.items() if count]
        by_size = sorted(used, key=self._sizes.__getitem__, reverse=True)
        first: list[str] = []
        least = self.transient(()).nbytes
        tried = [self._solve(nbytes, first, least)]
        for count in _LARGEST_COUNTS:
            largest = by_size[:count]
            transient = self.transient(largest).nbytes
            if transient < least and transient + self._bytes(largest) <= nbytes:
                least, first = transient, largest
        if first:
            tried.append(self._solve(nbytes, first, least))
        return max(tried, key=lambda choice: choice.saved_bytes)

    def more(self, stay: Collection[str], nbytes: int) -> list[str]:
        """The residents for *nbytes* of memory in addition to the values that *stay*."""
        rest = {name: count for name, count in self.counts.items() if name not in stay}
        return choose(rest, self._sizes, nbytes)

    def is_near(self, stay: Collection[str], saved: int) -> bool:
        """Whether *stay* save nearly *saved* bytes, or less by the savings of one value."""
        own = self.saved(stay)
        one = max(
            (count * self._sizes[name] for name, count in self.counts.items() if name not in stay),
            default=0,
        )
        return own >= _GOOD_ENOUGH * saved or own >= max(saved - one, _LEAST_GOOD * saved)

    def _solve(self, nbytes: int, first: list[str], transient_bytes: int) -> Choice:
        """The residents, with *first*: they determine the transient memory and depend on it."""
        rest = {name: count for name, count in self.counts.items() if name not in set(first)}
        best = Choice([], self.transient(()).nbytes, 0)
        for _ in range(_TRIES):
            left = nbytes - transient_bytes - self._bytes(first)
            if left < 0:
                break
            names = first + choose(rest, self._sizes, left)
            wanted = self.transient(names).nbytes
            saved = self.saved(names)
            if wanted <= nbytes - self._bytes(names) and saved > best.saved_bytes:
                best = Choice(names, wanted, saved)
            if wanted == transient_bytes:
                break
            transient_bytes = wanted
        return best

    def _bytes(self, names: Collection[str]) -> int:
        return sum(self._sizes[name] for name in names)


def transfers(period: Period, sizes: Mapping[str, int], near_bytes: int) -> dict[str, int]:
    """The number of reads and writes per period of each value if it is not resident, by name, in
    order of first use.

    A value stays in memory between two uses if at most *near_bytes* of other values are used
    between them. A discarded value is neither written nor read. A created value is not read.
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
        evicted = [
            gap > near_bytes and not use.dropped for gap, use in zip(between, here, strict=True)
        ]
        count = 0
        if True in evicted:
            changed = False
            # Start after an eviction, so that the walk ends at an eviction.
            start = evicted.index(True) + 1 - len(here)
            for index in range(start, start + len(here)):
                changed = (changed or here[index].changed) and not here[index].dropped
                if evicted[index]:
                    count += changed + (not uses[following[index]].created)
                    changed = False
        counts[name] = count
    return counts


def choose(counts: Mapping[str, int], sizes: Mapping[str, int], nbytes: int) -> list[str]:
    """The values resident in *nbytes*, chosen by transfers saved per byte of memory.

    If values that save about the same do not all fit, choose some at even distances along the order
    of use. This spreads the transfers of the other values over the period, so that the drive is not
    idle while residents are used.
    """
    classes: dict[int, list[str]] = {}
    for name, count in counts.items():
        if count:
            density = count * (1 + _REQUEST_BYTES / sizes[name])
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
