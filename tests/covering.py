"""Parametrizes tests by a covering set of combinations of values."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def covering(*, pairs: bool = True, **values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by *values*, a sequence for each argument.

    The quick cases have each value at least once. With *pairs*, slow cases add each pair of values
    of two arguments that no quick case has.
    """
    sizes = [len(choices) for choices in values.values()]
    # shifted, so that an argument is not combined with the same value of another one
    chosen = [
        tuple((row + shift) % size for shift, size in enumerate(sizes))
        for row in range(max(sizes) if all(sizes) else 0)
    ]
    quick = len(chosen)
    if pairs:
        pairs_of = {case: _pairs(case) for case in itertools.product(*map(range, sizes))}
        missing = set().union(*pairs_of.values()).difference(*map(_pairs, chosen))
        while missing:
            chosen.append(max(pairs_of, key=lambda case: len(missing & pairs_of[case])))
            missing -= pairs_of[chosen[-1]]
    return pytest.mark.parametrize(
        list(values),
        [
            pytest.param(
                *(choices[index] for choices, index in zip(values.values(), case, strict=True)),
                marks=() if number < quick else pytest.mark.slow,
            )
            for number, case in enumerate(chosen)
        ],
        ids=lambda value: getattr(value, "__name__", str(value)),
    )


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(case), 2))
