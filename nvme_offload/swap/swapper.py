"""`TensorSwapper`: named tensors in a fixed budget of memory where they fit, and on the drive where
they do not.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import OffloadError, UsageError, WaitTimeout
from ..io.closing import Closing
from ..units import format_bytes
from .schedule import Schedule, Transfer

if TYPE_CHECKING:
    import torch

    from ..io.pool import PinnedPool
    from ..store.store import StoreTicket, TensorStore

# after which a wait says what it is for; then after twice as long, and so on
_PATIENCE_SECONDS = 5.0

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SwapperStats:
    """What a swapper did since it was made.

    bytes_read, bytes_written: from and to the drive. read_wait_seconds, room_wait_seconds: that
    callers waited for a read, and for room. hits, misses: swap-ins of values that were in memory
    since their last use, and of values that had to be read, ahead of need or not. resident_bytes,
    peak_bytes: of the budget that values take, now and at most. unused_prefetches: values read
    ahead that left before their use.
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

    @property
    def bytes_moved(self) -> int:
        """Both directions together."""
        return self.bytes_read + self.bytes_written

    @property
    def waited_seconds(self) -> float:
        """That callers waited for the drive, for either reason."""
        return self.read_wait_seconds + self.room_wait_seconds


class TensorSwapper(Closing):
    """Named arrays of bytes in the memory of *pool*, all of which it takes, and in *store* where
    they do not fit.

    A value is in use from `create` or `swap_in` to `release`: its tensor is the memory itself, and
    must not be touched afterwards. What is not in use stays in memory while there is room, without
    touching the drive; otherwise what is needed last leaves, and is read back ahead of need. The
    order of need is learned from one `step` to the next, and taken from `prefetch`. With one value
    in use at a time every budget will do that holds the largest. *lookahead_bytes* is how much is
    read ahead: by default as much as the next two values take once the order is known, and until
    then twice the largest value, at most half of the memory.

    What comes next starts when the transfers end that it waits for, in the engine's threads: it
    takes no call. All methods may be called from any thread; one that waits for the drive makes the
    others wait.

    Lifetime: the store and the pool are the caller's, and closed after this. What was not flushed
    is gone when this is closed. Raises: UsageError, as every method that is given a wrong name or
    size; the drive's errors as said at each.
    """

    def __init__(
        self, store: TensorStore, pool: PinnedPool, *, lookahead_bytes: int | None = None
    ) -> None:
        import torch

        if lookahead_bytes is not None and lookahead_bytes < 0:
            raise UsageError(f"{lookahead_bytes} bytes cannot be read ahead")
        if pool.used_bytes:
            raise UsageError(
                f"a swapper takes the whole memory of its pool, of which {format_bytes(pool.used_bytes)} are in use"
            )
        self._store = store
        self._pool = pool
        # of the pool, so that nobody else has it
        self._taken = [pool.empty(pool.nbytes, torch.uint8)]
        self._memory: torch.Tensor | None = self._taken[0]
        # for all that follows; held through a whole call, waits included
        self._lock = threading.RLock()
        self._schedule = Schedule(pool.nbytes, lookahead_bytes)
        self._tickets: dict[Transfer, StoreTicket] = {}  # of the transfers under way
        # reads and writes, the first started first
        self._under_way: tuple[deque[Transfer], deque[Transfer]] = (deque(), deque())
        self._empty: list[Transfer] = []  # reads of no bytes, while they wait for others
        self._to_start: deque[Transfer] = deque()  # decided, and not started yet
        self._interrupted = False  # an exception ended the call that was to start them
        self._on_drive: set[str] = set()  # names that were put into the store
        self._write_errors: dict[str, OffloadError] = {}  # that nobody was told of
        self._read_errors: dict[str, OffloadError] = {}
        self._bytes = {False: 0, True: 0}
        self._read_wait_seconds = 0.0
        self._room_wait_seconds = 0.0
        self._hits = 0
        self._misses = 0

    def create(self, name: str, nbytes: int, *, lowest: bool = False) -> torch.Tensor:
        """Make room for a new value *name*, in place of an older one; it is in use, its contents
        are undefined.

        What stays in use for long is best placed *lowest*, whoever has to leave, so that it does
        not divide the room of others.

        Shapes: one dimension of *nbytes* unsigned bytes. Raises: UsageError when *name* is in use;
        OutOfHostMemoryError when what is in use leaves no room, which says what would; the error of
        a write that was to make room, which leaves that value in memory, and *name* without one.
        """
        nbytes = operator.index(nbytes)
        with self._lock:
            self._live()
            while (hindrance := self._schedule.hinders_create(name, nbytes)) is not None:
                self._start_all(self._schedule.decided())
                self._finish(hindrance)
            self._schedule.create(name, nbytes, lowest)
            self._write_errors.pop(name, None)  # that value is no more
            self._read_errors.pop(name, None)
            try:
                return self._obtain(name)[0]
            except BaseException:
                if name not in self._schedule:
                    self._delete(name)
                raise

    def swap_in(self, name: str) -> torch.Tensor:
        """Bring the value *name* into memory; it is in use. Waits for the drive and for room.

        Shapes: one dimension of as many unsigned bytes as it was created with; where it was
        released with fewer, only those have its value. Raises: as `create`; IOFailure,
        TruncatedError or CorruptionError when it cannot be read, which may be tried again.
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
        """The caller is done with *name*, and has *changed* it or not. Of a changed value only the
        first *nbytes* need be kept. Never waits.
        """
        with self._lock:
            self._live()
            self._schedule.release(
                name, changed, None if nbytes is None else operator.index(nbytes)
            )
            self._pump()

    def swap_out(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy of *tensor*, on whatever device, as the value *name*, in place of an older
        one. Raises: as `create`.
        """
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
        """*names* are used next, in this order; after what was hinted before and is not among them.
        Never waits; unknown names are passed over.
        """
        with self._lock:
            self._live()
            self._schedule.hint(names)
            self._pump()

    def discard(self, name: str) -> None:
        """Forget the value *name*, in use or not; its tensor must not be touched any more. Waits
        for a transfer of it that is under way.
        """
        with self._lock:
            self._live()
            self._schedule.size(name)  # refuses an unknown one
            while (hindrance := self._schedule.hindrance(name)) is not None:
                self._start_all(self._schedule.decided())
                self._finish(hindrance)
            self._schedule.discard(name)
            self._write_errors.pop(name, None)
            self._read_errors.pop(name, None)
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
        """Return when every changed value that is not in use is on the drive; it stays in memory as
        well.

        Raises: the first error of a write, after the others were tried; what could not be written
        stays in memory, and is tried again by the next.
        """
        with self._lock:
            self._live()
            self._start_all()
            tried: set[str] = set()
            while transfers := [*self._schedule.write_all(but=tried), *self._under_way[True]]:
                for transfer in transfers:
                    if transfer not in self._tickets and not transfer.ended:
                        tried.add(transfer.name)
                        self._start_all([transfer])
                while self._under_way[True]:
                    self._finish(self._under_way[True][0])
            self._raise_write_errors()
            self._pump()

    def lacks_writes(self) -> bool:
        """Whether a write has failed that nobody was told of, once those under way are done: the
        value is in memory, and `flush` tries it again.
        """
        with self._lock:
            self._live()
            while self._under_way[True]:
                self._finish(self._under_way[True][0])
            return bool(self._write_errors)

    def in_use(self) -> bool:
        """Whether any value is between `create` or `swap_in` and `release`."""
        with self._lock:
            return self._schedule.in_use()

    def grow(self, nbytes: int) -> None:
        """Have a budget of *nbytes* in all, which the pool grows to: values stay where they are,
        those in use too. Raises: as `PinnedPool.grow`.
        """
        import torch

        with self._lock:
            self._live()
            pool = self._pool
            pool.grow(nbytes)
            if pool.nbytes > self._schedule.nbytes:
                self._taken.append(pool.empty(pool.nbytes - self._schedule.nbytes, torch.uint8))
                self._memory = torch.frombuffer(pool.memory, dtype=torch.uint8)
                self._schedule.grow(pool.nbytes)
                self._pump()

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
        """Wait for the transfers under way, delete what is in the store, and let the memory go; a
        second call does nothing.

        Raises: the first error of a write that no call has raised.
        """
        with self._lock:
            if self._memory is None:
                return
            self._finish_all()
            self._memory = None
            self._taken.clear()
            for name in list(self._on_drive):
                self._delete(name)
            self._raise_write_errors()

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
                started = time.perf_counter()
                self._finish(awaited[0])
                seconds = time.perf_counter() - started
                if awaited[-1].name == name and not awaited[-1].writes:
                    self._read_wait_seconds += seconds
                else:
                    self._room_wait_seconds += seconds
                self._pump()
        except BaseException:
            self._schedule.give_up(name)
            raise
        offset, was_read = self._schedule.take(name)
        return self._live()[offset : offset + self._schedule.size(name)], was_read

    def _pump(self) -> None:
        """Note which transfers have ended, the first started first, and start those that
        come next.
        """
        tickets = self._tickets
        for under_way in self._under_way:
            while under_way and (under_way[0].ended or tickets[under_way[0]].done()):
                self._finish(under_way[0])
        while transfers := self._schedule.plan():
            self._start_all(transfers)

    def _start_all(self, transfers: Iterable[Transfer] = ()) -> None:
        """Start *transfers*, after those that an exception such as Ctrl-C kept an earlier call from
        starting.
        """
        if self._interrupted:
            # the one that was being started then: two reads to one place must not be under way
            self._store.drain()
            self._interrupted = False
        self._to_start.extend(transfers)
        while self._to_start:
            transfer = self._to_start.popleft()
            try:
                self._start(transfer)
            except BaseException:
                if (
                    not transfer.ended
                    and transfer not in self._tickets
                    and transfer not in self._empty
                ):
                    self._to_start.appendleft(transfer)
                    self._interrupted = True
                raise

    def _start(self, transfer: Transfer) -> None:
        if transfer.void:  # it waits for one that could not even be started
            self._schedule.finished(transfer, well=False)
            return
        if transfer.nbytes == 0:
            if any(not blocker.ended for blocker in transfer.after):
                self._empty.append(transfer)
            else:
                self._schedule.finished(transfer, well=True)
            return
        memory = self._live()[transfer.offset : transfer.offset + transfer.nbytes]
        try:
            if transfer.writes:
                ticket = self._store.put(transfer.name, memory)
                self._on_drive.add(transfer.name)
            elif transfer.after:
                after = [self._tickets[blocker] for blocker in transfer.after if not blocker.ended]
                ticket = self._store.get(transfer.name, memory, after=after)
            else:
                ticket = self._store.get(transfer.name, memory)
        except OffloadError as error:
            for blocker in transfer.after:
                if blocker.name == transfer.name and not blocker.ended:
                    self._finish(blocker)  # whose failure the store told, perhaps
            self._note(transfer, error)
        else:
            self._tickets[transfer] = ticket
            self._under_way[transfer.writes].append(transfer)

    def _finish(self, transfer: Transfer) -> None:
        """Wait for *transfer*, and for all that it waits for; those that have ended are noted, and
        no more under way.
        """
        if self._interrupted:
            self._start_all()
        for blocker in transfer.after:
            if not blocker.ended:
                self._finish(blocker)
        under_way = self._under_way[transfer.writes]
        ticket = self._tickets.pop(transfer, None)
        if ticket is not None:
            error = None
            try:
                self._wait(transfer, ticket)
            except OffloadError as failure:
                error = failure
            except BaseException:
                self._tickets[transfer] = ticket
                raise
            self._note(transfer, error)
        elif not transfer.ended:
            self._empty.remove(transfer)
            self._schedule.finished(transfer, well=True)
        while under_way and under_way[0].ended:
            under_way.popleft()

    def _finish_all(self) -> None:
        self._start_all()
        while any(self._under_way) or self._empty:
            for transfers in (*self._under_way, self._empty):
                while transfers:
                    self._finish(transfers[0])
            self._start_all(self._schedule.decided())

    def _wait(self, transfer: Transfer, ticket: StoreTicket) -> None:
        """Wait for *ticket*, and say so where that takes long. Raises: OffloadError."""
        patience, waited = _PATIENCE_SECONDS, 0.0
        while True:
            try:
                ticket.wait(patience)
                return
            except WaitTimeout:
                waited += patience
                patience = waited
                what = "write" if transfer.writes else "read"
                _log.warning(
                    "waiting for the drive for %d s: the %s of %s of %r; %d transfers of %s are under way",
                    waited,
                    what,
                    format_bytes(transfer.nbytes),
                    transfer.name,
                    len(self._tickets) + 1,
                    format_bytes(transfer.nbytes + sum(other.nbytes for other in self._tickets)),
                )

    def _note(self, transfer: Transfer, error: OffloadError | None) -> None:
        void = transfer.void
        self._schedule.finished(transfer, well=error is None)
        if void:  # one that it waited for has failed, which says why
            return
        if error is None:
            self._bytes[transfer.writes] += transfer.nbytes
            self._write_errors.pop(transfer.name, None)
            return
        # Kept until it is raised to somebody else: the frames that it came through, and all that
        # they hold, are not kept with it.
        error.with_traceback(None).__context__ = None
        if transfer.writes:
            self._write_errors[transfer.name] = error
        else:  # raised where it is needed; where it was read ahead, it is read again then
            self._read_errors[transfer.name] = error

    def _delete(self, name: str) -> None:
        if name in self._on_drive:
            self._on_drive.remove(name)
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
