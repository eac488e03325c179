"""The minimum of bytes that a period moves, over all choices of resident values: a linear program.
Pure.

Between two consecutive uses, a fraction of a value stays in memory and the rest is read again for
the next use. A changed value is written once, unless it stays in memory entirely until it changes
again or is dropped. At every place of the period, resident and used bytes fit into memory.
Fractions of values and addresses are ignored, so no planner can move less. Source: Berger et al.,
Practical Bounds on Optimal Caching with Variable Object Sizes, 2018; here with writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .uses import Event


class Gap(NamedTuple):
    """The time between two uses of a value. It wraps around the end of the period if *end* is not
    after *begin*.
    """

    name: str
    nbytes: int
    begin: int
    end: int


def least_bytes(events: Sequence[Event], nbytes: int) -> float:
    """The minimum for a repeating period with *nbytes* of memory. Raises: ImportError without
    scipy; ValueError if the uses alone do not fit.
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
    # Variables: the resident fraction of each gap, then the written fraction of each version.
    unit = float(max(gap.nbytes for gap in gaps))
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    limits = [float(room) / unit for room in nbytes - in_use]
    if min(limits) < 0:
        raise ValueError("values in concurrent use do not fit")
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
