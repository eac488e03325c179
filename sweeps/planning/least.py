"""The least bytes that a period can move, whatever is kept: a linear program. Pure.

What a value does between two uses that follow each other is kept to some part, or read again for
the next use. A value that was changed is written once, unless all of it is kept until it changes
again or is dropped. What is kept and what is in use has no more room than there is, at every place
of the period. Parts of values and places in memory are no matter here, so nothing can move less.
Source: Berger et al., Practical Bounds on Optimal Caching with Variable Object Sizes, 2018; here
with writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .uses import Event


class Gap(NamedTuple):
    """From the end of a use to the begin of the next of the same value, which goes round the end of
    the period where *end* is not after *begin*.
    """

    name: str
    nbytes: int
    begin: int
    end: int


def least_bytes(events: Sequence[Event], nbytes: int) -> float:
    """Of a period that comes again and again, with *nbytes* of memory. Raises: ImportError without
    scipy; ValueError where not even the uses fit.
    """
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    places = len(events)
    in_use = np.zeros(places)
    gaps: list[Gap] = []
    chains: list[list[int]] = []  # gaps of one version of a value, from the change that made it
    # of each value: first and last place, whether created or changed there, and dropped
    uses: dict[str, list[tuple[int, int, bool, bool]]] = {}
    began: dict[str, int] = {}
    for place, event in enumerate(events):
        if event.verb in ("create", "need"):
            began[event.name] = place
        else:
            first = began.pop(event.name)
            in_use[first : place + 1] += event.nbytes
            uses.setdefault(event.name, []).append(
                (first, place, event.verb == "change", event.verb == "drop")
            )
    sizes = {event.name: event.nbytes for event in events}
    for name, found in uses.items():
        start = next((index for index, use in enumerate(found) if use[2]), 0)
        chain: list[int] = []
        changed = any(use[2] for use in found)
        for (_, last, is_changed, dropped), (first, *_) in zip(
            found[start:] + found[:start], found[start + 1 :] + found[: start + 1], strict=True
        ):
            if is_changed and chain:
                chains.append(chain)
                chain = []
            if dropped:
                continue
            chain.append(len(gaps))
            gaps.append(Gap(name, sizes[name], last, first))
        if chain and changed:
            chains.append(chain)
    # Variables: the part of each gap that is kept, then the part of each version that is written.
    unit = float(max(gap.nbytes for gap in gaps))
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    limits = [float(room) / unit for room in nbytes - in_use]
    if min(limits) < 0:
        raise ValueError("what is in use at once does not fit")
    for index, gap in enumerate(gaps):
        inside = (
            range(gap.begin + 1, gap.end)
            if gap.begin < gap.end
            else [*range(gap.begin + 1, places), *range(gap.end)]
        )
        rows += inside
        columns += [index] * len(inside)
        values += [gap.nbytes / unit] * len(inside)
    row = places
    for number, chain in enumerate(chains):
        for index in chain:  # written >= 1 - kept
            rows += [row, row]
            columns += [index, len(gaps) + number]
            values += [-1, -1]
            limits.append(-1)
            row += 1
    cost = np.array(
        [-gap.nbytes / unit for gap in gaps] + [gaps[chain[0]].nbytes / unit for chain in chains]
    )
    matrix = coo_array((values, (rows, columns)), shape=(row, len(cost))).tocsr()
    solved = linprog(cost, A_ub=matrix, b_ub=limits, bounds=(0, 1), method="highs")
    return float(solved.fun * unit + sum(gap.nbytes for gap in gaps))
