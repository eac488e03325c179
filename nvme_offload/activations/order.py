"""`BackwardOrder`: which saved tensors backward wants next."""

from __future__ import annotations

from bisect import bisect_left


class BackwardOrder:
    """Serial numbers of saved tensors, in the order of their saves, and which of them backward has yet to ask for. Pure bookkeeping.

    Backward goes back from wherever it is: through one of several graphs, or through one that a checkpoint has just made anew. That it should ask
    in the very order of the saves within an operation, or for one tensor twice, changes nothing but how well the next ones are told.
    """

    def __init__(self) -> None:
        self._alive: list[int] = []
        self._waiting: list[int] = []  # of these

    def saved(self, serial: int) -> None:
        """A tensor was saved; each has a higher number than the one before."""
        self._alive.append(serial)
        self._waiting.append(serial)

    def forgotten(self, serial: int) -> None:
        """No graph has it any more."""
        _remove(self._alive, serial)
        _remove(self._waiting, serial)

    def asked(self, serial: int) -> None:
        """Backward asks for it; for the second time where it goes through a graph that was retained once more, and all of it waits again."""
        if not _remove(self._waiting, serial):
            self._waiting = self._alive.copy()
            _remove(self._waiting, serial)

    def after(self, serial: int, count: int) -> list[int]:
        """The *count* tensors that are likely asked for after *serial*, the next one first."""
        place = bisect_left(self._waiting, serial)
        return self._waiting[max(place - count, 0) : place][::-1]


def _remove(numbers: list[int], number: int) -> bool:
    place = bisect_left(numbers, number)
    found = place < len(numbers) and numbers[place] == number
    if found:
        del numbers[place]
    return found
