"""The catalog of a store: the current value of each name, its users, and the puts in flight."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType

from ..errors import CancelledError, OffloadError, UsageError, WaitTimeout, time_limit
from ..io.engine import Ticket, cancel_all
from ..io.section import Section
from .slabs import Extent, Stripes

# The most that one checksum covers.
SUMMED_BYTES = 8 << 20


@dataclasses.dataclass
class Segment:
    """A piece of a stored tensor: *nbytes* from byte *start* of it, at *offset* of the extent's
    file, with a *checksum* where the store keeps them.
    """

    extent: Extent
    offset: int
    start: int
    nbytes: int
    checksum: int | None = None


@dataclasses.dataclass(eq=False)
class StoredTensor:
    """The bytes stored under a name, and their users.

    The space is freed once the value is *dropped* and has no users. *lost_by* is the put that
    failed while it overwrote the value.
    """

    nbytes: int
    extents: list[Extent]
    segments: list[Segment]
    users: int = 0
    dropped: bool = False
    lost_by: StoreTicket | None = None
    readers: list[StoreTicket] = dataclasses.field(default_factory=list)


class StoreTicket:
    """A handle on one put or get; made by `TensorStore.put` and `TensorStore.get`.

    The transfers do not depend on it: dropping a ticket neither cancels them nor releases the
    tensor's memory. A failure that nobody waited for is raised by `TensorStore.close`, unless the
    name was deleted.

    Attributes
    ----------
    name : str
        The name of the tensor.
    """

    def __init__(self, catalog: Catalog, name: str, value: StoredTensor, writes: bool) -> None:
        self.name = name
        self._catalog = catalog
        self._value = value
        self._writes = writes
        self._transfers: list[Ticket] = []
        self._failure: OffloadError | None = None
        self._completed = False
        self._observed = False  # somebody knows of the failure

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self._value.nbytes

    def done(self) -> bool:
        """Whether every transfer has finished, successfully or not. Never blocks."""
        return all(transfer.done() for transfer in self._transfers)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until every byte has been moved. A second call returns or raises the same.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None waits without a limit.

        Returns
        -------
        int
            Size of the tensor in bytes.

        Raises
        ------
        IOFailure, NoSpaceError, TruncatedError, CorruptionError, BufferChangedError
            The first failure of a transfer, after all of them have finished. The message names the
            tensor.
        CancelledError
            The put or get never started.
        WaitTimeout
            *timeout* passed. The transfers continue.
        UsageError
            The process was forked since the store was made, or *timeout* is not a number.
        """
        self.finish(timeout)
        self.raise_failure()
        return self.nbytes

    def cancel(self) -> bool:
        """Cancel the put or get before it starts. The name keeps its previous value.

        It and those that wait for it (*after*) fail with `CancelledError`, which
        `TensorStore.close` does not report.

        Returns
        -------
        bool
            False where it has finished, or a part of it has been submitted to a drive: it then
            continues.

        Raises
        ------
        UsageError
            The process was forked since the store was made.
        """
        self._catalog.check_process()
        if not cancel_all(self._transfers):
            return False
        self.finish()
        return True

    def raise_failure(self) -> None:
        """Raise the failure of a finished put or get, if there is one."""
        if self._failure is not None:
            self._observed = True
            raise copy.copy(self._failure)

    def finish(self, timeout: float | None = None) -> None:
        """Wait until every transfer has finished, and update the catalog. Raises: WaitTimeout;
        UsageError as `wait`.
        """
        self._catalog.check_process()
        outcome = self._outcome(time_limit(timeout))
        with self._catalog.lock, self._catalog.changing:
            self._catalog.complete(self, outcome)

    def _outcome(self, timeout: float | None = None) -> OffloadError | None:
        """Wait until every transfer has finished; the first failure. Raises: WaitTimeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        failure = None
        for transfer in self._transfers:
            try:
                transfer.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            except WaitTimeout:
                raise WaitTimeout(
                    f"{'put' if self._writes else 'get'} of tensor {self.name!r} did not finish within {timeout} s; it continues"
                ) from None
            except OffloadError as error:
                failure = failure or error
        if failure is not None:
            # the error is kept; what the frames of its traceback reference is not
            failure.with_traceback(None)
        return failure


class _OpenSection:
    """The `Section` of a *catalog*, which may not be closed."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def __enter__(self) -> None:
        if self._catalog.closed:
            raise UsageError("the store is closed")
        self._catalog.changing.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._catalog.changing.__exit__(kind, error, trace)


class Catalog:
    """The current value of each name. All methods but `locked`, `opened` and `check_process`
    need *lock*; methods that change a table need `changing` or `opened`, too.

    An in-flight put does not replace the current value until it completes. The space of the old
    value is freed when its last user is done.
    """

    def __init__(self, space: Stripes, summed: bool) -> None:
        # Reentrant, and entered by a `with` of the lock itself: an exception between two lines of
        # this thread neither leaves it locked for this thread nor between acquire and release.
        self.lock = threading.RLock()
        self.changing = Section("store")
        self.closed = False
        self.in_flight: dict[StoreTicket, None] = {}  # in order of submission
        self._space = space
        self._summed = summed
        self._process_id = os.getpid()
        self._changing_open = _OpenSection(self)
        self._stored: dict[str, StoredTensor] = {}
        self._puts: dict[str, StoreTicket] = {}  # in flight
        self._retained: dict[str, StoredTensor] = {}  # values that `roll_back` returns to
        self._unobserved: list[StoreTicket] = []  # failed, and nobody knows of it

    def check_process(self) -> None:
        """Refuse a process forked since. Raises: UsageError."""
        if os.getpid() != self._process_id:
            raise UsageError(
                "the store belongs to the process that this one was forked from: make one here"
            )

    def locked(self) -> threading.RLock:
        """The lock. Raises UsageError in a forked child, where a thread of the parent may hold it."""
        self.check_process()
        return self.lock

    @property
    def opened(self) -> _OpenSection:
        """As `changing`, of a store that is open. Raises UsageError where it is closed."""
        return self._changing_open

    @contextlib.contextmanager
    def settled(self, name: str) -> Iterator[None]:
        """The lock of an open store, with no put of *name* in flight: waits for one that is."""
        while True:
            with self.locked(), self.opened:
                blockers = self.conflicts(name)
                if not blockers:
                    yield
                    return
            for one in blockers:
                one.finish()

    def sizes(self) -> dict[str, int]:
        """Bytes by name, as of the last put; in-flight and failed puts count."""
        return {name: value.nbytes for name, value in self._stored.items()} | {
            name: put.nbytes for name, put in self._puts.items()
        }

    def nbytes(self, name: object) -> int | None:
        """Bytes of *name*, as in `sizes`; None where there is no such name."""
        found = self._puts.get(name) or self._stored.get(name)  # type: ignore[call-overload]
        return None if found is None else int(found.nbytes)

    def current(self, name: str) -> StoredTensor:
        """The value of *name*; that of the put in flight, if there is one. Raises: UsageError when
        there is none; the error of the put that lost it.
        """
        if name in self._puts:
            return self._puts[name]._value
        value = self._stored.get(name)
        if value is None:
            raise UsageError(f"no tensor {name!r} in the store")
        if value.lost_by is not None:
            value.lost_by.raise_failure()
        return value

    def conflicts(
        self, name: str, written_bytes: int | None = None, after: Sequence[StoreTicket] = ()
    ) -> list[StoreTicket]:
        """What a get of *name*, or a put of *written_bytes*, must wait for: the put in flight, and
        the readers of a value that the put would overwrite.

        Tickets in *after* are ordered by the engine, except for the put that a put replaces: two
        puts of one name are never in flight together.
        """
        put = self._puts.get(name)
        found: list[StoreTicket] = (
            [] if put is None or (written_bytes is None and put in after) else [put]
        )
        value = self._overwritten(name, written_bytes)
        if value is not None:
            found += [reader for reader in value.readers if reader not in after]
        return found

    def put_in_flight(self, name: str) -> StoreTicket | None:
        """The put of *name* that is not known to have finished."""
        return self._puts.get(name)

    def target_for(self, name: str, nbytes: int) -> StoredTensor:
        """What a put of *nbytes* to *name* writes to: the current value where it has that size and
        is not retained, else a new one. Raises: NoSpaceError.
        """
        return self._overwritten(name, nbytes) or self.new(nbytes, "put")

    def new(self, nbytes: int, operation: str) -> StoredTensor:
        """Allocate a value without a name, and cut it into segments. Raises: NoSpaceError."""
        extents = self._space.allocate(nbytes, operation)
        segments, start = [], 0
        for extent in extents:
            step = SUMMED_BYTES if self._summed else extent.nbytes
            for inner in range(0, extent.nbytes, step):
                segments.append(
                    Segment(
                        extent,
                        extent.offset + inner,
                        start + inner,
                        min(step, extent.nbytes - inner),
                    )
                )
            start += extent.nbytes
        return StoredTensor(nbytes, extents, segments)

    def retain(self, name: str) -> None:
        """Keep the value of *name*, of which no put is in flight, until `commit` or `roll_back`; the
        earlier one where one is kept already. Raises: as `current`.
        """
        if name not in self._retained:
            value = self._retained[name] = self.current(name)
            value.users += 1

    def commit(self, name: str) -> None:
        """Let go of the value that is retained of *name*. Raises: UsageError when there is none."""
        value = self._take_retained(name)
        self._free_if_unused(value)

    def roll_back(self, name: str) -> None:
        """Make the value that is retained the current one of *name*, of which no put is in flight.
        Raises: UsageError when there is none.
        """
        value, newer = self._take_retained(name), self._stored[name]
        if newer is not value:
            value.dropped = False
            self._stored[name] = value
            self.release(newer)

    def may_free_space(self) -> list[StoreTicket]:
        """The tickets in flight that may free space when they finish."""
        return [ticket for ticket in self.in_flight if ticket._writes or ticket._value.dropped]

    def start_ticket(self, name: str, value: StoredTensor, writes: bool) -> StoreTicket:
        """A ticket for a transfer of *value*, without its transfers yet."""
        if value.readers:
            for reader in list(value.readers):  # collect finished ones that nobody waits for
                if reader.done():
                    self.complete(reader, reader._outcome())
        ticket = StoreTicket(self, name, value, writes)
        value.users += 1
        self.in_flight[ticket] = None
        if writes:
            self._puts[name] = ticket
        else:
            value.readers.append(ticket)
        return ticket

    def abort(self, ticket: StoreTicket, refusal: OffloadError) -> None:
        """End a ticket one of whose transfers could not be started. The caller raises the error."""
        for transfer in ticket._transfers:
            transfer.cancel()
        with contextlib.suppress(OffloadError):
            ticket._outcome()
        self.complete(ticket, refusal)
        ticket._observed = True

    def complete(self, ticket: StoreTicket, failure: OffloadError | None) -> None:
        """Update the catalog for a ticket whose transfers have all finished. Idempotent."""
        if ticket._completed:
            return
        ticket._completed = True
        ticket._failure = failure
        del self.in_flight[ticket]
        value = ticket._value
        value.users -= 1
        if failure is not None:
            name_tensor(failure, ticket.name)
            if not value.dropped and not isinstance(failure, CancelledError):
                self._unobserved = [
                    earlier for earlier in self._unobserved if not earlier._observed
                ] + [ticket]
        if not ticket._writes:
            value.readers.remove(ticket)
        elif self._puts.get(ticket.name) is ticket:
            del self._puts[ticket.name]
            self._written(ticket)
        self._free_if_unused(value)

    def forget(self, name: str) -> None:
        """Drop the value of *name*, and that of its put in flight."""
        put = self._puts.pop(name, None)
        retained = self._take_retained(name) if name in self._retained else None
        for value in (self._stored.pop(name, None), put._value if put else None, retained):
            if value is not None:
                self.release(value)
        self._unobserved = [ticket for ticket in self._unobserved if ticket.name != name]

    def release(self, value: StoredTensor) -> None:
        """Free the space of *value* when it has no users."""
        value.dropped = True
        self._free_if_unused(value)

    def take_unobserved(self) -> StoreTicket | None:
        """The first failed ticket whose failure nobody knows of."""
        unobserved = [ticket for ticket in self._unobserved if not ticket._observed]
        self._unobserved.clear()
        return unobserved[0] if unobserved else None

    def _overwritten(self, name: str, nbytes: int | None) -> StoredTensor | None:
        """The current value of *name*, where a put of *nbytes* writes over it."""
        value = self._stored.get(name)
        if value is None or value.nbytes != nbytes or self._retained.get(name) is value:
            return None
        return value

    def _take_retained(self, name: str) -> StoredTensor:
        value = self._retained.pop(name, None)
        if value is None:
            raise UsageError(f"no value of tensor {name!r} is retained")
        value.users -= 1
        return value

    def _written(self, ticket: StoreTicket) -> None:
        value, old = ticket._value, self._stored.get(ticket.name)
        untouched = not ticket._transfers or isinstance(ticket._failure, CancelledError)
        if ticket._failure is not None and old is not value and (old is not None or untouched):
            self.release(value)  # the old value stays, or the first put of the name never started
            return
        if ticket._failure is not None and untouched:
            return  # nothing was overwritten
        value.lost_by = None if ticket._failure is None else ticket
        if ticket._failure is None:
            for segment, transfer in zip(value.segments, ticket._transfers, strict=True):
                segment.checksum = transfer.checksum
        self._stored[ticket.name] = value
        if old is not None and old is not value:
            self.release(old)

    def _free_if_unused(self, value: StoredTensor) -> None:
        if value.dropped and value.users == 0:
            self._space.free(value.extents)
            value.extents = []


def name_tensor(error: OffloadError, name: str) -> None:
    """Add the tensor's name to the message of a failed transfer."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, str) and not reason.endswith(suffix := f", of tensor {name!r}"):
        error.reason = reason + suffix  # type: ignore[attr-defined]
