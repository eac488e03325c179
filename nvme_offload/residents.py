"""Which values stay in memory through a period of uses, because that saves the most transfers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .access_order import Period

REQUEST_BYTES = 256 << 10  # a transfer costs as much as so many bytes: where all else is equal, small values stay


def transfers(period: Period, sizes: Mapping[str, int], near_bytes: int) -> dict[str, int]:
    """How many reads and writes a period of each value takes that does not stay, by name, in the order of their first use.

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
        between = [before[later] - before[place + 1] for place, later in zip(places, following, strict=True)]
        between[-1] += total
        leaves = [gap > near_bytes and not use.dropped for gap, use in zip(between, here, strict=True)]
        count = 0
        if True in leaves:
            changed = False
            start = leaves.index(True) + 1 - len(here)  # so that the walk ends where the value leaves
            for index in range(start, start + len(here)):
                changed = (changed or here[index].changed) and not here[index].dropped
                if leaves[index]:
                    count += changed + (not uses[following[index]].created)
                    changed = False
        counts[name] = count
    return counts


def choose(counts: Mapping[str, int], sizes: Mapping[str, int], nbytes: int, request_bytes: int = REQUEST_BYTES) -> list[str]:
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
