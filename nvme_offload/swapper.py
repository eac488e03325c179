"""`TensorSwapper`: named tensors in a fixed budget of memory where they fit, and on the drive where they do not."""

from __future__ import annotations

import dataclasses
import logging
import operator
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from .errors import OffloadError, UsageError, WaitTimeout
from .schedule import Schedule, Transfer
from .units import format_bytes

if TYPE_CHECKING:
    import torch

    from .pool import PinnedPool
    from .store import StoreTicket, TensorStore

_POLL_SECONDS = 0.001  # how often who waits for one transfer looks at the others: little beside the time that one takes

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SwapperStats:
    """What a swapper did since it was made.

    bytes_read, bytes_written: from and to the drive. read_wait_seconds, room_wait_seconds: that callers waited for a read, and for room.
    hits, misses: swap-ins of values that were in memory since their last use, and of values that had to be read, ahead of need or not.
    resident_bytes, peak_bytes: of the budget that values take, now and at most. unused_prefetches: values read ahead that left before their use.
    """

    bytes_read: int
    bytes_written: int
    read_wait_seconds: float
    room_wait_seconds: float
    hits: int
    misses: int
    resident_bytes: int
    peak_bytes: int
    unused_prefetches: int


class _Flight(NamedTuple):
    """A transfer under way."""

    transfer: Transfer
    ticket: StoreTicket


class TensorSwapper:
    """Named arrays of bytes in the memory of *pool*, all of which it takes, and in *store* where they do not fit.

    A value is in use from `create` or `swap_in` to `release`: its tensor is the memory itself, and must not be touched afterwards. What is not in
    use stays in memory while there is room, without touching the drive; otherwise what is needed last leaves, and is read back ahead of need. The
    order of need is learned from one `step` to the next, and taken from `prefetch`. With one value in use at a time every budget will do that
    holds the largest. *lookahead_bytes* is how much is read ahead: by default twice the largest value, at most half of the memory.

    All methods may be called from any thread; one that waits for the drive makes the others wait.

    Lifetime: the store and the pool are the caller's, and closed after this. What was not flushed is gone when this is closed.
    Raises: UsageError, as every method that is given a wrong name or size; the drive's errors as said at each.
    """

    def __init__(self, store: TensorStore, pool: PinnedPool, *, lookahead_bytes: int | None = None) -> None:
        import torch

        if lookahead_bytes is not None and lookahead_bytes < 0:
            raise UsageError(f"{lookahead_bytes} bytes cannot be read ahead")
        if pool.used_bytes:
            raise UsageError(f"a swapper takes the whole memory of its pool, of which {format_bytes(pool.used_bytes)} are in use")
        self._store = store
        self._memory: torch.Tensor | None = pool.empty(pool.nbytes, torch.uint8)
        self._lock = threading.RLock()  # for all that follows; held through a whole call, waits included
        self._schedule = Schedule(pool.nbytes, lookahead_bytes)
        self._flights: dict[str, _Flight] = {}  # by name, the first started first
        self._on_drive: set[str] = set()  # names that were put into the store
        self._write_errors: dict[str, OffloadError] = {}  # that nobody was told of
        self._read_errors: dict[str, OffloadError] = {}
        self._bytes = {False: 0, True: 0}
        self._read_wait_seconds = 0.0
        self._room_wait_seconds = 0.0
        self._hits = 0
        self._misses = 0

    def create(self, name: str, nbytes: int, *, lowest: bool = False) -> torch.Tensor:
        """Make room for a new value *name*, in place of an older one; it is in use, its contents are undefined.

        What stays in use for long is best placed *lowest*, whoever has to leave, so that it does not divide the room of others.

        Shapes: one dimension of *nbytes* unsigned bytes.
        Raises: UsageError when *name* is in use, or when what is in use leaves no room, which says what would; the error of a write that was
        to make room, which leaves that value in memory, and *name* without one.
        """
        nbytes = operator.index(nbytes)
        with self._lock:
            self._live()
            while name in self._flights and (nbytes != self._schedule.size(name) or not self._flights[name].transfer.writes):
                self._finish(name)
            self._schedule.create(name, nbytes, lowest)
            self._write_errors.pop(name, None)  # that value is no more
            self._read_errors.pop(name, None)
            return self._obtain(name)[0]

    def swap_in(self, name: str) -> torch.Tensor:
        """Bring the value *name* into memory; it is in use. Waits for the drive and for room.

        Shapes: one dimension of as many unsigned bytes as it was created with; where it was released with fewer, only those have its value.
        Raises: as `create`; IOFailure, TruncatedError or CorruptionError when it cannot be read, which may be tried again.
        """
        with self._lock:
            self._live()
            self._schedule.need(name)
            self._read_errors.pop(name, None)
            tensor, was_read = self._obtain(name)
            self._misses += was_read
            self._hits += not was_read
            return tensor

    def release(self, name: str, *, changed: bool, nbytes: int | None = None) -> None:
        """The caller is done with *name*, and has *changed* it or not. Of a changed value only the first *nbytes* need be kept. Never waits."""
        with self._lock:
            self._live()
            self._schedule.release(name, changed, None if nbytes is None else operator.index(nbytes))
            self._pump()

    def swap_out(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy of *tensor*, on whatever device, as the value *name*, in place of an older one. Raises: as `create`."""
        import torch

        source = tensor.detach().reshape(-1)
        room = self.create(name, source.numel() * source.element_size())
        try:
            room.copy_(source.view(torch.uint8))
        except BaseException:
            self.discard(name)
            raise
        self.release(name, changed=True)

    def prefetch(self, names: Iterable[str]) -> None:
        """*names* are used next, in this order; after what was hinted before and is not among them. Never waits; unknown names are passed over."""
        with self._lock:
            self._live()
            self._schedule.order.hint(name for name in names if name in self._schedule)
            self._pump()

    def discard(self, name: str) -> None:
        """Forget the value *name*, in use or not; its tensor must not be touched any more. Waits for a transfer of it that is under way."""
        with self._lock:
            self._live()
            self._schedule.size(name)  # refuses an unknown one
            if name in self._flights:
                self._finish(name)
            self._schedule.discard(name)
            self._write_errors.pop(name, None)
            self._read_errors.pop(name, None)
            if name in self._on_drive:
                self._on_drive.remove(name)
                self._delete(name)
            self._pump()

    @property
    def learned(self) -> bool:
        """Whether an order of use is known: a whole period of it has been seen."""
        with self._lock:
            return self._schedule.order.learned

    def step(self) -> None:
        """One period of the order of use ends here: call it once a training step."""
        with self._lock:
            self._live()
            self._schedule.step()
            self._pump()

    def flush(self) -> None:
        """Return when every changed value that is not in use is on the drive; it stays in memory as well.

        Raises: the first error of a write, after the others were tried; what could not be written stays in memory, and is tried again by the next.
        """
        with self._lock:
            self._live()
            tried: set[str] = set()
            while True:
                for transfer in self._schedule.write_all(but=tried):
                    tried.add(transfer.name)
                    self._start(transfer)
                writing = next((name for name, flight in self._flights.items() if flight.transfer.writes), None)
                if writing is None:
                    break
                self._finish(writing)
            self._raise_write_errors()
            self._pump()

    def in_use(self) -> bool:
        """Whether any value is between `create` or `swap_in` and `release`."""
        with self._lock:
            return self._schedule.in_use()

    def move(self, pool: Callable[[], PinnedPool]) -> None:
        """Go on with the memory of the pool that *pool* makes, once that of the present one is let go: values are on the drive meanwhile.

        Raises: UsageError when a value is in use, or the largest would not fit; as `flush`; and what *pool* raises, which leaves this closed.
        """
        import torch

        with self._lock:
            self._live()
            if self._schedule.in_use():
                raise UsageError("a value is in use, so that the memory cannot be exchanged: release it first")
            self.flush()
            for name in list(self._flights):
                self._finish(name)
            self._memory = None
            made = pool()
            self._schedule.resize(made.nbytes)
            self._memory = made.empty(made.nbytes, torch.uint8)

    def nbytes(self, name: str) -> int:
        """Bytes of the room of *name*, as it was created. Raises: UsageError when there is none."""
        with self._lock:
            return self._schedule.size(name)

    def names(self) -> list[str]:
        """Every value, in memory or not."""
        with self._lock:
            return self._schedule.names()

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._schedule

    def stats(self) -> SwapperStats:
        """Counters since the swapper was made; cheap enough to poll."""
        with self._lock:
            return SwapperStats(
                bytes_read=self._bytes[False],
                bytes_written=self._bytes[True],
                read_wait_seconds=self._read_wait_seconds,
                room_wait_seconds=self._room_wait_seconds,
                hits=self._hits,
                misses=self._misses,
                resident_bytes=self._schedule.used_bytes,
                peak_bytes=self._schedule.peak_bytes,
                unused_prefetches=self._schedule.dropped_unused,
            )

    def close(self) -> None:
        """Wait for the transfers under way, delete what is in the store, and let the memory go; a second call does nothing.

        Raises: the first error of a write that no call has raised.
        """
        with self._lock:
            if self._memory is None:
                return
            for name in list(self._flights):
                self._finish(name)
            self._memory = None
            for name in self._on_drive:
                self._delete(name)
            self._raise_write_errors()

    def __enter__(self) -> TensorSwapper:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except OffloadError as failure:
            if error is None:
                raise
            _log.error("beside the exception that ends the with block: %s", failure)

    def __repr__(self) -> str:
        used, total = format_bytes(self._schedule.used_bytes), format_bytes(self._schedule.nbytes)
        return f"<TensorSwapper {'closed' if self._memory is None else f'{len(self._schedule.names())} values, {used} of {total} in memory'}>"

    def _obtain(self, name: str) -> tuple[torch.Tensor, bool]:
        """Bring what the schedule was told to be needed; its tensor, and whether it was read."""
        try:
            self._pump()
            while not self._schedule.ready(name):
                if name in self._read_errors:
                    raise self._read_errors.pop(name)
                failed = self._schedule.obstacle()
                if failed is not None:
                    if failed in self._write_errors:
                        raise self._write_errors.pop(failed)
                    self._pump()  # everybody knows: try it again
                    continue
                awaited = self._schedule.waits_for(name)
                first = next(flying for flying in self._flights if flying in awaited)
                started = time.perf_counter()
                self._wait_for_any(first)
                seconds = time.perf_counter() - started
                if first == name:
                    self._read_wait_seconds += seconds
                else:
                    self._room_wait_seconds += seconds
                self._pump()
        except BaseException:
            self._schedule.give_up(name)
            raise
        offset, was_read = self._schedule.take(name)
        return self._live()[offset : offset + self._schedule.size(name)], was_read

    def _wait_for_any(self, name: str) -> None:
        """Return when the transfer of *name* has ended, or another: what can follow that one should not wait for *name*, or one direction stands idle."""
        ticket = self._flights[name].ticket
        while not any(flight.ticket.done() for flight in self._flights.values()):
            try:
                ticket.wait(_POLL_SECONDS)
            except WaitTimeout:
                continue
            except OffloadError:
                self._finish(name)  # which keeps the error
            return

    def _pump(self) -> None:
        """See which transfers have ended, and start those that come next.

        No thread does this while the caller computes. A write and a read are under way by then; that nothing follows them before the next call was
        measured to cost nothing where the drive is what a step waits for, and at most a sixth where computing takes as long as the transfers,
        which one more value of lookahead gives back.
        """
        for name in [name for name, flight in self._flights.items() if flight.ticket.done()]:
            self._finish(name)
        while transfers := self._schedule.plan():
            for transfer in transfers:
                self._start(transfer)

    def _start(self, transfer: Transfer) -> None:
        memory = self._live()[transfer.offset : transfer.offset + transfer.nbytes]
        if transfer.nbytes == 0:
            self._schedule.finished(transfer, well=True)
            return
        try:
            ticket = self._store.put(transfer.name, memory) if transfer.writes else self._store.get(transfer.name, memory)
        except OffloadError as error:
            self._note(transfer, error)
        else:
            self._flights[transfer.name] = _Flight(transfer, ticket)
            if transfer.writes:
                self._on_drive.add(transfer.name)

    def _finish(self, name: str) -> None:
        """Wait for the transfer of *name*."""
        flight = self._flights[name]
        error = None
        try:
            flight.ticket.wait()
        except OffloadError as failure:
            error = failure
        del self._flights[name]
        self._note(flight.transfer, error)

    def _note(self, transfer: Transfer, error: OffloadError | None) -> None:
        self._schedule.finished(transfer, well=error is None)
        if error is None:
            self._bytes[transfer.writes] += transfer.nbytes
            self._write_errors.pop(transfer.name, None)
            return
        # Kept until it is raised to somebody else: the frames that it came through, and all that they hold, are not kept with it.
        error.with_traceback(None).__context__ = None
        if transfer.writes:
            self._write_errors[transfer.name] = error
        else:  # raised where it is needed; where it was read ahead, it is read again then
            self._read_errors[transfer.name] = error

    def _delete(self, name: str) -> None:
        if name in self._store:  # not where its only write failed
            self._store.delete(name)

    def _raise_write_errors(self) -> None:
        errors = list(self._write_errors.values())
        self._write_errors.clear()
        if errors:
            raise errors[0]

    def _live(self) -> torch.Tensor:
        if self._memory is None:
            raise UsageError("the swapper is closed")
        return self._memory
