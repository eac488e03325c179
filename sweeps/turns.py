"""Rounds of interleaved runs: the order of the sides, and when no further round begins."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from .command import BEGAN

Side = TypeVar("Side")


def there_and_back(sides: Sequence[Side], number: int) -> list[Side]:
    """The order in round *number*: A B C, then C B A."""
    return list(sides[:: -1 if number % 2 else 1])


def rounds(count: int, seconds: float | None, notes: list[str]) -> Iterator[int]:
    """Numbers of rounds, up to *count*.

    Stops, with a note, before a round that would end later than *seconds* after the start of the
    command if it took as long as the longest so far. The first round always runs.
    """
    longest = 0.0
    for number in range(count):
        began = time.monotonic()
        if seconds is not None and number > 0 and began + longest > BEGAN + seconds:
            notes.append(f"{number} of {count} rounds fitted into the given time.")
            return
        yield number
        longest = max(longest, time.monotonic() - began)


@contextlib.contextmanager
def interruptible(facts: dict[str, str], notes: list[str]) -> Iterator[None]:
    """Measure: an interrupt ends the `with` block, and *notes* say so; *facts* get the time."""
    began = time.monotonic()
    try:
        yield
    except KeyboardInterrupt:
        notes.insert(0, "Interrupted: not all rounds ran.")
    finally:
        facts["took"] = f"{time.monotonic() - began:.0f} s"
