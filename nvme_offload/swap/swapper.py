"""`TensorSwapper`: named tensors in a fixed memory budget, backed by a store."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ..errors import NoSpaceError, OffloadError, UsageError, WaitTimeout
from ..io.closing import Closing
from ..io.section import Section
from ..store.transfer import Stage, Transfer
from ..units import format_bytes
from .schedule import Schedule

if TYPE_CHECKING:
    import torch

    from ..io.pool import PinnedPool
    from ..store.store import TensorStore

# a wait is logged after this, then after twice as long, and so on
_FIRST_WARNING_SECONDS = 5.0

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SwapperStats:
    """Counters of a swapper since it was made.

    Attributes
    ----------
    bytes_read, bytes_written : int
        From and to the drive.
    read_wait_seconds, room_wait_seconds : float
        Time that callers waited for a read, and for memory to become free.
    hits, misses : int
        Swap-ins of values still in memory since their last use, and of values that were read,
        prefetched or not.
    resident_bytes, peak_bytes : int
        Bytes of the budget that values occupy, now and at most.
    unused_prefetches : int
        Values that were prefetched and evicted before use.
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
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def waited_seconds(self) -> float:
        """Time that callers waited for the drive: `read_wait_seconds` and `room_wait_seconds`."""
        return self.read_wait_seconds + self.room_wait_seconds


class TensorSwapper(Closing):
    """Named byte arrays in the memory of a pool, swapped to a store where they do not fit.

    A value is in use from `create` or `swap_in` to `release`: its tensor is the memory of the pool
    itself, and must not be used afterwards. An idle value stays in memory while there is space,
    without I/O. Otherwise the value needed last is evicted (written back if it changed), and
    prefetched before it is needed again. The order of need is learned from one `step` to the next,
    and taken from `prefetch`.

    All methods are thread-safe; a call that waits for the drive blocks the others. Transfers that
    wait for other transfers are started by the engine's threads, without a call.

    Parameters
    ----------
    store : TensorStore
        The caller's; close it after the swapper.
    pool : PinnedPool
        The caller's, which no other swapper uses; the swapper takes all of its memory. With one
        value in use at a time, a pool that holds the largest value is enough.
    lookahead_bytes : int, optional
        How much to prefetch. By default the size of the next two values of a learned order; before
        that, twice the largest value, at most half of the memory.

    Raises
    ------
    UsageError
        An argument is invalid, or another swapper uses the pool.

    Notes
    -----
    Values that were not flushed are lost when the swapper is closed. Every method raises
    `UsageError` for an unknown name, an invalid size, or a closed swapper.
    """

    def __init__(
        self, store: TensorStore, pool: PinnedPool, *, lookahead_bytes: int | None = None
    ) -> None:
        import torch

        if lookahead_bytes is not None and lookahead_bytes < 0:
            raise UsageError(f"{lookahead_bytes} bytes cannot be read ahead")
        pool.take(self)
        self._store = store
        self._pool = pool
        self._memory: torch.Tensor | None = torch.frombuffer(pool.memory, dtype=torch.uint8)
        # guards all attributes below; held for a whole call, including waits
        self._lock = threading.RLock()
        self._changing = Section("swapper")
        self._lookahead_bytes = lookahead_bytes
        # counters, which `reset` leaves
        self._bytes = {False: 0, True: 0}
        self._read_wait_seconds = 0.0
        self._room_wait_seconds = 0.0
        self._hits = 0
        self._misses = 0
        self._begin()

    def _begin(self) -> None:
        """Begin without values, in memory that nothing uses."""
        self._schedule = Schedule(self._pool.nbytes, self._lookahead_bytes)
        # reads and writes, in order of start
        self._in_flight: tuple[deque[Transfer], deque[Transfer]] = (deque(), deque())
        self._to_start: deque[Transfer] = deque()  # planned and not started
        self._retained: set[str] = set()
        self._flushing = False  # the drive is to have a copy of everything
        self._write_errors: dict[str, OffloadError] = {}  # not raised yet
        self._read_errors: dict[str, OffloadError] = {}

    def create(self, name: str, nbytes: int, *, lowest: bool = False) -> torch.Tensor:
        """Create a value, replacing an existing one. It is in use; its contents are undefined.

        Parameters
        ----------
        name : str
            The name.
        nbytes : int
            Size in bytes.
        lowest : bool
            Place it at the lowest free address, evicting what is there. For long uses, which would
            otherwise fragment the memory.

        Returns
        -------
        torch.Tensor
            One dimension of *nbytes* unsigned bytes, valid until `release`.

        Raises
        ------
        UsageError
            *name* is in use.
        OutOfHostMemoryError
            The values in use leave no space; the message gives a sufficient size.
        OffloadError
            The error of a write-back that was to free memory. That value stays in memory, and
            *name* is not created.
        """
        nbytes = operator.index(nbytes)
        with self._lock, self._changing:
            self._live()
            while (blocking := self._schedule.blocks_create(name, nbytes)) is not None:
                self._start_all(self._schedule.take_pending())
                self._finish(blocking)
            self._schedule.create(name, nbytes, lowest)
            self._write_errors.pop(name, None)  # that value is no more
            self._read_errors.pop(name, None)
            try:
                tensor = self._obtain(name)[0]
            except BaseException as error:
                whole = self._changing.allows(error) and not self._store.interrupted
                if whole and name not in self._schedule:
                    self._delete(name)
                raise
            self._commit(name)  # what `retain` kept is of the value that was replaced
            return tensor

    def swap_in(self, name: str, *, in_order: bool = True) -> torch.Tensor:
        """Bring a value into memory. It is in use. Waits for the drive and for memory.

        Parameters
        ----------
        name : str
            The name.
        in_order : bool
            Whether the use is part of the order that is learned. It is not where it comes between
            those of another thread, by chance: a hint of `prefetch` then keeps the value, or has it
            read ahead.

        Returns
        -------
        torch.Tensor
            One dimension of unsigned bytes, as many as created, valid until `release`. After a
            release with fewer bytes only those have contents.

        Raises
        ------
        UsageError
            There is no such value, or it is in use.
        OutOfHostMemoryError
            The values in use leave no space.
        IOFailure, TruncatedError, CorruptionError
            The value cannot be read; the call can be repeated.
        OffloadError
            The error of a write-back that was to free memory, as in `create`.
        """
        with self._lock, self._changing:
            self._live()
            self._schedule.need(name, in_order)
            self._read_errors.pop(name, None)
            tensor, was_read = self._obtain(name)
            self._misses += was_read
            self._hits += not was_read
            return tensor

    def release(self, name: str, *, changed: bool, nbytes: int | None = None) -> None:
        """End the use of a value. Never waits.

        Parameters
        ----------
        name : str
            The name.
        changed : bool
            Whether the contents changed since `swap_in`; a value that was created has changed.
        nbytes : int, optional
            Of a changed value, the leading bytes to keep; all unless given.

        Raises
        ------
        UsageError
            The value is not in use, or *nbytes* is out of range.
        """
        kept = None if nbytes is None else operator.index(nbytes)
        with self._lock:
            with self._changing:
                self._live()
                self._schedule.release(name, changed, kept)
            self._pump()

    def swap_out(self, name: str, tensor: torch.Tensor) -> None:
        """Store a copy of a tensor as a value, replacing an existing one.

        Parameters
        ----------
        name : str
            The name.
        tensor : torch.Tensor
            On any device.

        Raises
        ------
        UsageError, OutOfHostMemoryError, OffloadError
            As `create`.
        """
        import torch

        source = tensor.detach().reshape(-1)
        memory = self.create(name, source.numel() * source.element_size())
        try:
            memory.copy_(source.view(torch.uint8))
        except BaseException:
            if not self._changing.interrupted_by:
                self.discard(name)
            raise
        self.release(name, changed=True)

    def prefetch(self, names: Iterable[str]) -> None:
        """Hint which values are used next. Never waits.

        Parameters
        ----------
        names : iterable of str
            In order of use; after earlier hints, except for names that are repeated here. Unknown
            names are ignored.
        """
        names = list(
            names
        )  # outside of the section, in which an error of the caller is one of ours
        with self._lock:
            with self._changing:
                self._live()
                self._schedule.hint(names)
            self._pump()

    def discard(self, name: str) -> None:
        """Delete a value, in use or not; its tensor must not be used any more. Waits for a transfer
        of it in flight.

        Parameters
        ----------
        name : str
            The name.

        Raises
        ------
        UsageError
            There is no such value.
        """
        with self._lock:
            with self._changing:
                self._live()
                self._schedule.size(name)  # raises for an unknown name
                self._settle(name)
                self._schedule.discard(name)
                self._write_errors.pop(name, None)
                self._read_errors.pop(name, None)
                self._delete(name)
            self._pump()

    def stays(self, name: str) -> bool:
        """Whether the plan is to keep a value in memory from one use to the next.

        Parameters
        ----------
        name : str
            The name, of a value or of one to come.

        Returns
        -------
        bool
            False until an order of use has been learned.
        """
        with self._lock:
            return self._schedule.stays(name)

    def retain(self, name: str) -> None:
        """Keep what the drive has of a value in use, until `commit` or `roll_back`: what is written
        later gets space of its own.

        Parameters
        ----------
        name : str
            The name, of a value whose contents have not changed since `swap_in`.

        Raises
        ------
        UsageError
            The value is not in use, or memory alone has its newest version: `write_back` comes
            before `swap_in`.
        """
        with self._lock, self._changing:
            self._live()
            if name not in self._retained:
                self._schedule.retain(name)
                self._store.retain(name)
                self._retained.add(name)

    def commit(self, name: str) -> None:
        """Let go of what `retain` kept.

        Parameters
        ----------
        name : str
            The name; one of which nothing is kept is ignored.
        """
        with self._lock, self._changing:
            self._live()
            self._commit(name)

    def roll_back(self, name: str) -> None:
        """Return to what `retain` kept. Waits for a transfer of the value in flight. The next use
        in this period is no part of the order of use, as it repeats one.

        Parameters
        ----------
        name : str
            The name.

        Raises
        ------
        UsageError
            The value is in use, or nothing is kept of it.
        """
        with self._lock:
            with self._changing:
                self._live()
                if name not in self._retained:
                    raise UsageError(f"nothing is retained of {name!r}")
                self._settle(name)
                self._schedule.roll_back(name)
                self._write_errors.pop(name, None)
                self._read_errors.pop(name, None)
                self._store.roll_back(name)
                self._retained.remove(name)
            self._pump()

    def foretell(self, sizes: Mapping[str, int], *, at_once: int = 1, stay: bool = False) -> None:
        """Announce the order of use before one can be learned: values that stay in memory are chosen
        at once, and need not move later. Ignored where something was used before.

        Parameters
        ----------
        sizes : mapping of str to int
            Bytes of the values that each period uses and changes, by name, in order of use. They may
            not exist yet.
        at_once : int
            How many of them are in use together.
        stay : bool
            Never have other values stay in memory instead, even if they are used in another way: the
            drive has little more room than for those that do not.
        """
        sizes = dict(sizes)
        with self._lock, self._changing:
            self._live()
            self._schedule.foretell(sizes, at_once, stay)

    @property
    def learned(self) -> bool:
        """Whether an order of use has been learned, by a whole period that was seen, or foretold."""
        with self._lock:
            return self._schedule.order.learned

    def step(self) -> None:
        """End a period of the order of use; call it once per training step."""
        with self._lock:
            with self._changing:
                self._live()
                self._schedule.step()
            self._pump()

    def flush(self) -> None:
        """Write back every changed value that is not in use, and wait. The values stay in memory.

        Raises
        ------
        OffloadError
            The first error of a write, after all were tried. A value whose write failed stays in
            memory, and the next `flush` writes it again.
        """
        with self._lock, self._changing:
            self._live()
            self._start_all()
            tried: set[str] = set()
            self._flushing = True
            try:
                while transfers := [*self._schedule.write_all(but=tried), *self._in_flight[True]]:
                    for transfer in transfers:
                        if transfer.stage is Stage.PLANNED:
                            tried.add(transfer.name)
                            self._start_all([transfer])
                    while self._in_flight[True]:
                        self._finish(self._in_flight[True][0])
            finally:
                self._flushing = False
            self._raise_write_errors()
            self._advance()

    def write_back(self, name: str) -> None:
        """Have the drive have the newest version of a value that is not in use, and wait. The value
        stays where it is.

        Parameters
        ----------
        name : str
            The name.

        Raises
        ------
        UsageError
            There is no such value, or it is in use.
        OffloadError
            The error of the write. The value stays in memory.
        """
        with self._lock, self._changing:
            self._live()
            self._start_all()
            while True:
                self._start_all(self._schedule.write(name))
                blocking = self._schedule.blocking_transfer(name)
                if blocking is not None:  # a read, too, which may wait for the write
                    started = time.perf_counter()
                    self._finish(blocking)
                    if not blocking.writes:
                        self._read_wait_seconds += time.perf_counter() - started
                if name in self._write_errors:
                    raise self._write_errors.pop(name)
                if blocking is None:
                    return

    def lacks_writes(self) -> bool:
        """Wait for writes in flight; whether one failed that no call has raised. Its value is in
        memory, and `flush` writes it again.
        """
        with self._lock, self._changing:
            self._live()
            while self._in_flight[True]:
                self._finish(self._in_flight[True][0])
            return bool(self._write_errors)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Context in which calls of other threads wait, so that none of them finds memory taken by a
        value that is in use in the context alone.
        """
        with self._lock:
            yield

    def in_use(self) -> bool:
        """Whether any value is in use: between `create` or `swap_in` and `release`."""
        with self._lock:
            return self._schedule.in_use()

    @property
    def interrupted(self) -> bool:
        """Whether an exception has ended a call in the middle: see `reset`."""
        with self._lock:
            return bool(self._changing.interrupted_by)

    def reset(self) -> None:
        """Delete every value, in use or not, and every tensor of the store.

        It is how to go on after an exception such as KeyboardInterrupt or MemoryError has ended a
        call in the middle. Every other method that uses values raises UsageError then.

        Raises
        ------
        UsageError, UnsupportedError, IOFailure
            As `TensorStore.reset`.
        """
        with self._lock:
            self._live()
            self._changing.interrupted_by = "reset()"  # should an exception end this
            self._store.reset()  # no transfer uses the memory from here on
            self._begin()
            self._changing.interrupted_by = ""

    def end_uses(self) -> None:
        """End every use of a value, as `release` does of a changed one, except for uses
        of ``create(lowest=True)``. Does nothing while `interrupted`.

        For the only user of the swapper, after an exception has ended one of its calls in this
        thread: it need not know which values are in use.
        """
        self.release_lock()
        with self._lock:
            if not self._changing.interrupted_by:
                with self._changing:
                    for name in self._schedule.names_in_use():
                        self._schedule.release(name, True, None)

    def release_lock(self) -> None:
        """Release the lock where this thread has it outside of a call: an exception has ended a
        `with` at its last line.
        """
        while self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.release()

    def grow(self, nbytes: int) -> None:
        """Grow the pool and the budget. Values stay where they are, including those in use.

        Parameters
        ----------
        nbytes : int
            The budget in all, in bytes.

        Raises
        ------
        UsageError, MemoryError, UnsupportedError
            As `PinnedPool.grow`.
        """
        import torch

        with self._lock:
            self._live()
            self._pool.grow(nbytes)  # a MemoryError of which changes nothing
            with self._changing:
                pool = self._pool
                if pool.nbytes > self._schedule.nbytes:
                    self._memory = torch.frombuffer(pool.memory, dtype=torch.uint8)
                    self._schedule.grow(pool.nbytes)
            self._pump()

    def nbytes(self, name: str) -> int:
        """Size of a value as created.

        Parameters
        ----------
        name : str
            The name.

        Returns
        -------
        int
            Bytes.

        Raises
        ------
        UsageError
            There is no such value.
        """
        with self._lock:
            return self._schedule.size(name)

    def names(self) -> list[str]:
        """List every value, in memory or not."""
        with self._lock:
            return self._schedule.names()

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._schedule

    def stats(self) -> SwapperStats:
        """Counters since the swapper was made. Cheap enough to poll: it never waits.

        Returns
        -------
        SwapperStats
            A snapshot.
        """
        # without the lock, which a call holds while it waits for the drive
        schedule = self._schedule
        return SwapperStats(
            bytes_read=self._bytes[False],
            bytes_written=self._bytes[True],
            read_wait_seconds=self._read_wait_seconds,
            room_wait_seconds=self._room_wait_seconds,
            hits=self._hits,
            misses=self._misses,
            resident_bytes=schedule.used_bytes,
            peak_bytes=schedule.peak_bytes,
            unused_prefetches=schedule.unused_prefetches,
        )

    def close(self) -> None:
        """Wait for transfers in flight, delete the values from the store, and release the memory. A
        second call does nothing.

        Raises
        ------
        OffloadError
            The first error of a write that no call has raised, unless the drive was merely full.
        """
        with self._lock:
            if self._memory is None:
                return
            if self._changing.interrupted_by or self._store.interrupted:
                # The store waits for the transfers, which hold their memory, and frees the space.
                self._release_memory()
                return
            with self._changing:
                self._finish_all()
            self._release_memory()
            for name in self._schedule.names():
                self._delete(name)
            # what a full drive had no room for was in memory, as it is meant to be
            for name, error in list(self._write_errors.items()):
                if isinstance(error, NoSpaceError) and error.operation == "put":
                    del self._write_errors[name]
            self._raise_write_errors()

    def __repr__(self) -> str:
        used, total = format_bytes(self._schedule.used_bytes), format_bytes(self._schedule.nbytes)
        return f"<TensorSwapper {'closed' if self._memory is None else f'{len(self._schedule.names())} values, {used} of {total} in memory'}>"

    def _obtain(self, name: str) -> tuple[torch.Tensor, bool]:
        """Provide the value that the schedule was told to need; its tensor, and whether it was
        read.
        """
        try:
            self._advance()
            while not self._schedule.ready(name):
                if name in self._read_errors:
                    raise self._read_errors.pop(name)
                failed = self._schedule.failed_write()
                if failed is not None:
                    if failed in self._write_errors:
                        raise self._write_errors.pop(failed)
                    self._advance()  # the error was raised already: try again
                    continue
                awaited = self._schedule.waits_for(name)
                started = time.perf_counter()
                self._finish(awaited[0])
                seconds = time.perf_counter() - started
                if awaited[-1].name == name and not awaited[-1].writes:
                    self._read_wait_seconds += seconds
                else:
                    self._room_wait_seconds += seconds
                self._advance()
        except BaseException as error:
            if self._changing.allows(error):
                self._schedule.cancel_need(name)
            raise
        offset, was_read = self._schedule.take(name)
        return self._live()[offset : offset + self._schedule.size(name)], was_read

    def _pump(self) -> None:
        """As `_advance`, outside of a section."""
        with self._changing:
            self._advance()

    def _advance(self) -> None:
        """Note the transfers that have ended, in order of start, and start the next ones."""
        for in_flight in self._in_flight:
            while in_flight and (in_flight[0].ended or in_flight[0].done()):
                self._finish(in_flight[0])
        while transfers := self._schedule.plan():
            self._start_all(transfers)

    def _start_all(self, transfers: Iterable[Transfer] = ()) -> None:
        """Start *transfers*, after those that an error kept an earlier call from starting."""
        self._to_start.extend(transfers)
        while self._to_start:
            self._start(self._to_start[0])
            self._to_start.popleft()

    def _start(self, transfer: Transfer) -> None:
        if transfer.cancelled:  # a transfer that it waits for could not be started
            self._schedule.finished(transfer, succeeded=False)
            return
        memory = self._live()[transfer.offset : transfer.offset + transfer.nbytes]
        try:
            while True:
                try:
                    self._store.start(transfer, memory)
                    break
                except NoSpaceError:
                    if not (transfer.writes and self._make_room(transfer.nbytes)):
                        raise
        except OffloadError as error:
            for blocker in transfer.after:
                if blocker.name == transfer.name and not blocker.ended:
                    self._finish(blocker)  # the store may have raised its failure
            self._note(transfer, error)
        else:
            self._in_flight[transfer.writes].append(transfer)

    def _make_room(self, nbytes: int) -> bool:
        """The drive is full: delete what it has of values that are in memory, of *nbytes* together;
        where there is nothing, wait for a transfer, whose value may be in memory and on the drive
        then. Whether any of these could be done.
        """
        spared = self._schedule.spare(nbytes, but=self._retained, stale=self._flushing)
        for name in spared:
            self._delete(name)
        in_flight = next(filter(None, self._in_flight), None)
        if not spared and in_flight is not None:
            self._finish(in_flight[0])
            return True
        return bool(spared)

    def _finish(self, transfer: Transfer) -> None:
        """Wait for *transfer* and all that it waits for, and note those that have ended."""
        for blocker in transfer.after:
            if not blocker.ended:
                self._finish(blocker)
        in_flight = self._in_flight[transfer.writes]
        if transfer.stage is Stage.PLANNED:
            self._start_all([] if transfer in self._to_start else [transfer])
            self._finish(transfer)
        elif not transfer.ended:
            try:
                self._wait(transfer)
            except BaseException as interrupt:
                if not self._store.interrupted:
                    self._changing.ignore(interrupt)  # it ended a wait, and changed nothing
                raise
            self._note(transfer, transfer.observe())
        while in_flight and in_flight[0].ended:
            in_flight.popleft()

    def _finish_all(self) -> None:
        self._start_all()
        while any(self._in_flight):
            for transfers in self._in_flight:
                while transfers:
                    self._finish(transfers[0])
            self._start_all(self._schedule.take_pending())

    def _wait(self, transfer: Transfer) -> None:
        """Wait until *transfer* has finished, and log it where that takes long."""
        next_warning, waited = _FIRST_WARNING_SECONDS, 0.0
        while True:
            try:
                self._store.finish(transfer, next_warning)
                return
            except WaitTimeout:
                waited += next_warning
                next_warning = waited
                others = [each for each in itertools.chain(*self._in_flight) if not each.ended]
                _log.warning(
                    "waiting for the drive for %d s: the %s of %s of %r; %d transfers of %s are in flight",
                    waited,
                    "write" if transfer.writes else "read",
                    format_bytes(transfer.nbytes),
                    transfer.name,
                    len(others),
                    format_bytes(sum(each.nbytes for each in others)),
                )

    def _note(self, transfer: Transfer, error: OffloadError | None) -> None:
        cancelled = transfer.cancelled
        self._schedule.finished(transfer, succeeded=error is None)
        if cancelled:  # the transfer that it waited for reports the failure
            return
        if error is None:
            self._bytes[transfer.writes] += transfer.nbytes
            self._write_errors.pop(transfer.name, None)
            return
        # Kept until a call raises it: drop the traceback and the context, and what their frames
        # reference.
        error.with_traceback(None).__context__ = None
        if transfer.writes:
            self._write_errors[transfer.name] = error
        else:  # raised when the value is needed; a failed prefetch is read again then
            self._read_errors[transfer.name] = error

    def _settle(self, name: str) -> None:
        """Wait until no transfer of *name* is in flight."""
        while (blocking := self._schedule.blocking_transfer(name)) is not None:
            self._start_all(self._schedule.take_pending())
            self._finish(blocking)

    def _commit(self, name: str) -> None:
        if name in self._retained:
            self._store.commit(name)
            self._retained.remove(name)

    def _delete(self, name: str) -> None:
        self._retained.discard(name)
        self._store.delete(name, missing_ok=True)  # absent where it was never written

    def _raise_write_errors(self) -> None:
        errors = list(self._write_errors.values())
        self._write_errors.clear()
        if errors:
            raise errors[0]

    def _release_memory(self) -> None:
        self._memory = None
        self._pool.give_back()

    def _live(self) -> torch.Tensor:
        if self._memory is None:
            raise UsageError("the swapper is closed")
        return self._memory
