"""Numbers that programs pass."""

from __future__ import annotations

import operator

from ..errors import UsageError


def whole_number(name: str, value: int) -> int:
    """*value*, anything with `__index__`, as an int from 0 to 2**63 - 1: a size or a file offset. Raises:
    UsageError, which calls it *name*.
    """
    try:
        count = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} must be a whole number, not {value!r}") from None
    if not 0 <= count < 1 << 63:
        raise UsageError(f"{name} must be from 0 to 2**63 - 1, not {count}")
    return count


def time_limit(seconds: float | None) -> float | None:
    """*seconds*, the timeout of a wait; None waits without a limit. Raises: UsageError if it is not a
    number, or nan.
    """
    if seconds is not None and (not isinstance(seconds, int | float) or seconds != seconds):
        raise UsageError(f"a timeout is a number of seconds, or None, not {seconds!r}")
    return seconds
