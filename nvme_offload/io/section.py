"""`Section`: notices that an exception has ended a change of tables in the middle."""

from __future__ import annotations

import os
import threading

from ..errors import InvariantError, OffloadError, UsageError


class Section:
    """A context for code that changes tables, under the lock of the tables.

    Code in the context raises an `OffloadError` only where the tables are consistent. Any other
    exception can come between two lines, as Ctrl-C does. Every later context is refused then, as
    after the *owner* was closed.
    """

    def __init__(self, owner: str) -> None:
        # The class of the exception; "" if the tables are consistent and no context is entered.
        self.interrupted_by = ""
        self.closed = False
        self._owner = owner
        self._process_id = os.getpid()
        self._harmless: BaseException | None = None

    def check(self) -> None:
        """Raises: UsageError if the tables are unknown, or the owner is closed or another process's."""
        self.check_process()
        if self.closed:
            raise UsageError(
                f"the {self._owner} is closed: close it, or its owner, after the last use"
            )
        if self.interrupted_by:
            raise UsageError(
                f"{self.interrupted_by} interrupted a call of the {self._owner}, which is only partly applied: load a checkpoint, "
                "or call reset(), which deletes its tensors"
            )

    def check_process(self) -> None:
        """Check that the process was not forked since the owner was made: a child has no pinned memory,
        and a signal would end it if it read some. Raises: UsageError.
        """
        if os.getpid() != self._process_id:
            raise UsageError(
                f"the {self._owner} belongs to the process that this one was forked from: make one here"
            )

    def ignore(self, error: BaseException) -> None:
        """Treat *error* as an `OffloadError`: it was raised where the tables are consistent."""
        self._harmless = error

    def __enter__(self) -> None:
        self.check()
        self.interrupted_by = "an exception"

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        harmless = error is None or self.allows(error)
        self.interrupted_by = "" if harmless else type(error).__name__
        self._harmless = None

    def allows(self, error: BaseException) -> bool:
        """Whether *error* leaves the tables consistent."""
        return error is self._harmless or (
            isinstance(error, OffloadError) and not isinstance(error, InvariantError)
        )


def give_back(lock: threading.RLock) -> None:
    """Release *lock* if this thread holds it outside of a call, because an exception has ended a
    `with` at its last line.
    """
    while lock._is_owned():  # type: ignore[attr-defined]
        lock.release()
