"""The values of a store: what bytes each name has, who uses them, and what follows when a transfer
ends.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import threading
import time
from collections.abc import Iterator, Sequence

from ..errors import CancelledError, OffloadError, UsageError, WaitTimeout, time_limit
from ..io.engine import Ticket, cancel_all
from .slabs import Extent, Stripes
from .snapshot import WINDOW_BYTES, Part, name_tensor


@dataclasses.dataclass(eq=False)
class Value:
    """The bytes of a name, and who uses them: they keep their room until they are *gone* and nobody
    does; *lost_by* is the put that failed on them.
    """

    nbytes: int
    extents: list[Extent]
    parts: list[Part]
    users: int = 0
    gone: bool = False
    lost_by: StoreTicket | None = None
    readers: list[StoreTicket | Hold] = dataclasses.field(default_factory=list)


class Hold:
    """One who reads values without a ticket: a snapshot."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def finish(self) -> None:
        """Wait for the end of it."""
        self.over.wait()


class StoreTicket:
    """The caller's handle on one put or get.

    Lifetime: the transfers do not need it: dropping a ticket neither cancels them nor frees the
    tensor's memory early. A failure that nobody waited for is raised by `TensorStore.close`, unless
    the name was deleted.
    """

    def __init__(self, values: Values, name: str, value: Value, writes: bool) -> None:
        self.name = name
        self._values = values
        self._value = value
        self._writes = writes
        self._transfers: list[Ticket] = []
        self._failure: OffloadError | None = None
        self._settled = False
        self._heard = False  # the failure, by someone

    @property
    def nbytes(self) -> int:
        """The bytes asked for."""
        return self._value.nbytes

    def done(self) -> bool:
        """Whether every part is finished, well or not; never blocks."""
        return all(transfer.done() for transfer in self._transfers)

    def wait(self, timeout: float | None = None) -> int:
        """Return the bytes asked for once every one of them has been moved; a second call answers
        the same.

        Units: *timeout* in seconds, None for as long as it takes. Raises: IOFailure, NoSpaceError,
        TruncatedError or CorruptionError, which name the tensor: the first of the parts' failures,
        when all parts are finished; CancelledError when it never started; WaitTimeout when they are
        not in time, which leaves them going on; UsageError in a process forked since.
        """
        self.finish(timeout)
        self.raise_failure()
        return self.nbytes

    def cancel(self) -> bool:
        """End the put or get before it starts, and with it those that are to follow it: they fail
        with CancelledError, which `TensorStore.close` is silent of. The name then has the value
        that it had before.

        Returns whether it was ended so; False where it is finished, or where a drive was asked for
        some of it already: then it goes on. Raises: UsageError in a process forked since.
        """
        self._values.check_process()
        if not cancel_all(self._transfers):
            return False
        self.finish()
        return True

    def raise_failure(self) -> None:
        """Raise what went wrong, if anything did, in a transfer that is finished."""
        if self._failure is not None:
            self._heard = True
            raise copy.copy(self._failure)

    def finish(self, timeout: float | None = None) -> None:
        """Wait for the end of every part, good or bad, and draw the consequences. Raises:
        WaitTimeout; UsageError as `wait`.
        """
        self._values.check_process()
        outcome = self._outcome(time_limit(timeout))
        with self._values.lock:
            self._values.settle(self, outcome)

    def _outcome(self, timeout: float | None = None) -> OffloadError | None:
        """Wait for the end of every part; the first failure of them. Raises: WaitTimeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        failure = None
        for transfer in self._transfers:
            try:
                transfer.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            except WaitTimeout:
                raise WaitTimeout(
                    f"{'put' if self._writes else 'get'} of tensor {self.name!r} is not done within {timeout} s; it goes on"
                ) from None
            except OffloadError as error:
                failure = failure or error
        if failure is not None:
            failure.with_traceback(None)  # kept, unlike what the frames hold that it came through
        return failure


class Use:
    """The lock of *values*, held, of a store that can be used: see `Values.using`."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def __enter__(self) -> None:
        values = self._values
        values.check_process()  # before the lock, which a thread that is not in the child may hold
        values.lock.acquire()
        if values.closed:
            values.lock.release()
            raise UsageError("the store is closed")

    def __exit__(self, *_: object) -> None:
        self._values.lock.release()


class Values:
    """What is under which name. All but `using`, `held` and `check_process` want *lock* to be held,
    as it is within `using`.

    A put to a name is beside its value until it is done: then it is the value, and the room of the
    old one is free when nobody uses it any more.
    """

    def __init__(self, room: Stripes, summed: bool) -> None:
        self.lock = threading.Lock()
        self.closed = False
        self.unsettled: dict[StoreTicket, None] = {}  # in order
        self._room = room
        self._summed = summed
        self._process_id = os.getpid()
        self._use = Use(self)
        self._values: dict[str, Value] = {}
        self._puts: dict[str, StoreTicket] = {}  # while they are under way
        self._unheard: list[StoreTicket] = []  # failed, and nobody knows yet

    def check_process(self) -> None:
        """Raises: UsageError in a process forked since."""
        if os.getpid() != self._process_id:
            raise UsageError(
                "the store belongs to the process that this one was forked from: make one here"
            )

    def using(self) -> Use:
        """The lock, held, of a store that can be used. Raises: UsageError."""
        return self._use

    @contextlib.contextmanager
    def held(self, names: Sequence[str]) -> Iterator[dict[str, Value]]:
        """The values of *names*, which are neither overwritten nor freed meanwhile. Raises: as
        `current`.
        """
        hold = Hold()
        values: dict[str, Value] = {}
        try:
            for name in names:
                while True:
                    with self.using():
                        under_way = self.conflicts(name)
                        if not under_way:
                            values[name] = self.current(name)
                            values[name].users += 1
                            values[name].readers.append(hold)
                            break
                    for one in under_way:
                        one.finish()
            yield values
        finally:
            with self.lock:
                for value in values.values():
                    value.users -= 1
                    value.readers.remove(hold)
                    self._free_if_unused(value)
            hold.over.set()

    def sizes(self) -> dict[str, int]:
        """Bytes of every name as of its last put, those under way and those lost included."""
        return {name: value.nbytes for name, value in self._values.items()} | {
            name: put.nbytes for name, put in self._puts.items()
        }

    def nbytes(self, name: object) -> int | None:
        """The same of one name, None when there is no such."""
        found = self._puts.get(name) or self._values.get(name)  # type: ignore[call-overload]
        return None if found is None else int(found.nbytes)

    def current(self, name: str) -> Value:
        """The value of *name*: what is being put to it, if anything. Raises: UsageError when there
        is none; the error of the put that lost it.
        """
        if name in self._puts:
            return self._puts[name]._value
        value = self._values.get(name)
        if value is None:
            raise UsageError(f"no tensor {name!r} in the store")
        if value.lost_by is not None:
            value.lost_by.raise_failure()
        return value

    def conflicts(
        self, name: str, written_bytes: int | None = None, after: Sequence[StoreTicket] = ()
    ) -> list[StoreTicket | Hold]:
        """What a get of *name* has to wait for, or a put of *written_bytes*: the put under way, and
        where it would overwrite, who reads.

        Those of *after* need not be waited for, but for the put that a put replaces: two of one
        name are never under way.
        """
        put = self._puts.get(name)
        found: list[StoreTicket | Hold] = (
            [] if put is None or (written_bytes is None and put in after) else [put]
        )
        value = self._values.get(name)
        if value is not None and value.readers and value.nbytes == written_bytes:
            found += [reader for reader in value.readers if reader not in after]
        return found

    def put_under_way(self, name: str) -> StoreTicket | None:
        """The put of *name* that is not known to be finished."""
        return self._puts.get(name)

    def place_for(self, name: str, nbytes: int) -> Value:
        """What a put of *nbytes* to *name* writes to: the value that is there when it has that
        size, else a new one. Raises: NoSpaceError.
        """
        value = self._values.get(name)
        return value if value is not None and value.nbytes == nbytes else self.new(nbytes, "put")

    def new(self, nbytes: int, operation: str) -> Value:
        """Room for a value that has no name yet, and its parts. Raises: NoSpaceError."""
        extents = self._room.take(nbytes, operation)
        parts, start = [], 0
        for extent in extents:
            # what has a sum of its own can be checked as a snapshot copies it
            step = WINDOW_BYTES if self._summed else extent.nbytes
            for inner in range(0, extent.nbytes, step):
                parts.append(
                    Part(
                        extent,
                        extent.offset + inner,
                        start + inner,
                        min(step, extent.nbytes - inner),
                    )
                )
            start += extent.nbytes
        return Value(nbytes, extents, parts)

    def may_free_room(self) -> list[StoreTicket]:
        """The transfers under way that may free room when they end."""
        return [ticket for ticket in self.unsettled if ticket._writes or ticket._value.gone]

    def begin(self, name: str, value: Value, writes: bool) -> StoreTicket:
        """A ticket for a transfer of *value*, without its parts yet."""
        if value.readers:
            for reader in list(value.readers):  # those that nobody waits for would pile up
                if isinstance(reader, StoreTicket) and reader.done():
                    self.settle(reader, reader._outcome())
        ticket = StoreTicket(self, name, value, writes)
        value.users += 1
        self.unsettled[ticket] = None
        if writes:
            self._puts[name] = ticket
        else:
            value.readers.append(ticket)
        return ticket

    def refuse(self, ticket: StoreTicket, refusal: BaseException) -> None:
        """End a ticket of which a part could not even be started; the caller hears of it."""
        for transfer in ticket._transfers:
            transfer.cancel()
        with contextlib.suppress(OffloadError):
            ticket._outcome()
        self.settle(
            ticket,
            refusal
            if isinstance(refusal, OffloadError)
            else OffloadError(f"interrupted by {refusal!r}"),
        )
        ticket._heard = True

    def settle(self, ticket: StoreTicket, failure: OffloadError | None) -> None:
        """Draw the consequences of a ticket whose transfers are all finished, once."""
        if ticket._settled:
            return
        ticket._settled = True
        ticket._failure = failure
        del self.unsettled[ticket]
        value = ticket._value
        value.users -= 1
        if failure is not None:
            name_tensor(failure, ticket.name)
            if not value.gone and not isinstance(failure, CancelledError):
                self._unheard = [earlier for earlier in self._unheard if not earlier._heard] + [
                    ticket
                ]
        if not ticket._writes:
            value.readers.remove(ticket)
        elif self._puts.get(ticket.name) is ticket:
            del self._puts[ticket.name]
            self._commit(ticket)
        self._free_if_unused(value)

    def install(self, name: str, value: Value) -> None:
        """Make *value*, which is whole, that of *name*."""
        self.forget(name)
        self._values[name] = value

    def forget(self, name: str) -> None:
        """Let go of what *name* has, and of what is being put to it."""
        put = self._puts.pop(name, None)
        for value in (self._values.pop(name, None), put._value if put else None):
            if value is not None:
                self.let_go(value)
        self._unheard = [ticket for ticket in self._unheard if ticket.name != name]

    def let_go(self, value: Value) -> None:
        """Free the room of *value* when nobody uses it any more."""
        value.gone = True
        self._free_if_unused(value)

    def take_unheard(self) -> StoreTicket | None:
        """The first ticket that failed and whose failure nobody knows."""
        unheard = [ticket for ticket in self._unheard if not ticket._heard]
        self._unheard.clear()
        return unheard[0] if unheard else None

    def _commit(self, ticket: StoreTicket) -> None:
        value, old = ticket._value, self._values.get(ticket.name)
        untouched = not ticket._transfers or isinstance(ticket._failure, CancelledError)
        if ticket._failure is not None and old is not value and (old is not None or untouched):
            self.let_go(value)  # the old value stays, or nothing was started of the first one
            return
        if ticket._failure is not None and untouched:
            return  # nothing was overwritten yet
        value.lost_by = None if ticket._failure is None else ticket
        if ticket._failure is None:
            for part, transfer in zip(value.parts, ticket._transfers, strict=True):
                part.checksum = transfer.checksum
        self._values[ticket.name] = value
        if old is not None and old is not value:
            self.let_go(old)

    def _free_if_unused(self, value: Value) -> None:
        if value.gone and value.users == 0:
            self._room.give_back(value.extents)
            value.extents = []
