"""`Health`: whether an optimizer can continue after an exception."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from ..errors import UsageError


@dataclasses.dataclass
class Progress:
    """The progress of the calls in one thread. An exception leaves it unchanged.

    *running*: a call has begun and has not returned, so values may be in use. *changing*: a change
    of parameters or states is not recorded yet, so a second attempt would give other bits.
    """

    running: bool = False
    changing: bool = False


@dataclasses.dataclass
class Health:
    """The traces of exceptions, for the next call. *calls* and *jobs*: of the program and of the
    queue's thread. *broken*: why parameters and states are out of sync. *cause*: the exception that
    ended the last call.
    """

    calls: Progress = dataclasses.field(default_factory=Progress)
    jobs: Progress = dataclasses.field(default_factory=Progress)
    broken: str = ""
    cause: str = ""
    closed: bool = False

    def mark_broken(self, reason: str) -> None:
        """Parameters and states are out of sync; the first *reason* counts."""
        self.broken = self.broken or reason

    def note(self, error: BaseException, progress: Progress | None = None) -> None:
        """*error* ends a call, or with *progress* a job."""
        cause = f" ({type(error).__name__}: {error})"
        if progress is None:
            self.cause, progress = cause, self.calls
        if progress.changing:
            self.mark_broken(f"a step failed in the midst of an update{cause}")

    @contextlib.contextmanager
    def out_of_sync(self, reason: str) -> Iterator[None]:
        """Context of a change. An exception in it leaves the optimizer broken."""
        self.broken = reason
        yield
        self.broken = ""

    def check_open(self) -> None:
        """Raises: UsageError if the optimizer is closed."""
        if self.closed:
            raise UsageError("the optimizer is closed")

    def check(self) -> None:
        """Raises: UsageError if the optimizer is closed or broken."""
        self.check_open()
        if self.broken:
            raise UsageError(
                f"{self.broken}, so that parameters and states are no longer of one step: load both from a checkpoint"
            )
