"""`Runner` carries out the transfers of a schedule on a store."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..errors import NoSpaceError, OffloadError, WaitTimeout
from ..io.section import Section
from ..store.transfer import Stage, Transfer
from ..units import format_bytes
from .schedule import Schedule

if TYPE_CHECKING:
    from ..io.pool import PinnedPool
    from ..store.store import TensorStore

# A wait is logged after this time, then after twice this time, and so on.
_FIRST_WARNING_SECONDS = 5.0

_log = logging.getLogger(__name__)


class Runner:
    """Starts the transfers that *schedule* plans, waits for them, and records how they ended.

    *counts*: of `SwapperStats`, by field.

    The caller must hold the swapper's lock and be in its section *changing*: an exception other
    than an `OffloadError` leaves the tables in an unknown state, unless it interrupted a wait.
    """

    def __init__(
        self,
        store: TensorStore,
        schedule: Schedule,
        pool: PinnedPool,
        changing: Section,
        counts: dict[str, Any],
    ) -> None:
        import torch

        self.memory = torch.frombuffer(pool.memory, dtype=torch.uint8)
        self.retained: set[str] = set()  # names of which the store retains a value
        # Errors, by name, that no call has raised yet.
        self.write_errors: dict[str, OffloadError] = {}
        self.read_errors: dict[str, OffloadError] = {}
        self._store = store
        self._schedule = schedule
        self._changing = changing
        self._counts = counts
        # Reads and writes, in order of start.
        self._in_flight: tuple[deque[Transfer], deque[Transfer]] = (deque(), deque())
        self._to_start: deque[Transfer] = deque()  # planned and not started
        self._flushing = False  # `flush` is writing all changed values to the drive

    def obtain(self, name: str) -> tuple[int, bool]:
        """Provide the requested value: its offset, and whether it was read."""
        try:
            self.advance()
            while not self._schedule.ready(name):
                if name in self.read_errors:
                    raise self.read_errors.pop(name)
                failed = self._schedule.failed_write()
                if failed is not None:
                    if failed in self.write_errors:
                        raise self.write_errors.pop(failed)
                    self.advance()  # an earlier call has raised the error: try again
                    continue
                awaited = self._schedule.waits_for(name)
                started = time.perf_counter()
                self.finish(awaited[0])
                seconds = time.perf_counter() - started
                if awaited[-1].name == name and not awaited[-1].writes:
                    self._counts["read_wait_seconds"] += seconds
                else:
                    self._counts["room_wait_seconds"] += seconds
                self.advance()
        except BaseException as error:
            if self._changing.allows(error):
                self._schedule.cancel_need(name)
            raise
        return self._schedule.take(name)

    def advance(self) -> None:
        """Record the transfers that have ended, in order of start, and start the next ones."""
        for in_flight in self._in_flight:
            while in_flight and (in_flight[0].ended or in_flight[0].done()):
                self.finish(in_flight[0])
        while transfers := self._schedule.plan():
            self.start_all(transfers)

    def start_all(self, transfers: Iterable[Transfer] = ()) -> None:
        """Start *transfers*, after those that an earlier call could not start."""
        self._to_start.extend(transfers)
        while self._to_start:
            self._start(self._to_start[0])
            self._to_start.popleft()

    def _start(self, transfer: Transfer) -> None:
        if transfer.cancelled:  # a transfer that it waits for could not be started
            self._schedule.finished(transfer, succeeded=False)
            return
        memory = self.memory[transfer.offset : transfer.offset + transfer.nbytes]
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
                    self.finish(blocker)  # the store may have raised its failure
            self._note(transfer, error)
        else:
            self._in_flight[transfer.writes].append(transfer)

    def _make_room(self, nbytes: int) -> bool:
        """Free space on a full drive: delete the drive's copies of values that are in memory,
        *nbytes* in total. If there are none, wait for a transfer, whose value may then be both in
        memory and on the drive. Returns: whether either was possible.
        """
        spared = self._schedule.spare(nbytes, but=self.retained, stale=self._flushing)
        for name in spared:
            self.delete(name)
        in_flight = next(filter(None, self._in_flight), None)
        if not spared and in_flight is not None:
            self.finish(in_flight[0])
            return True
        return bool(spared)

    def finish(self, transfer: Transfer) -> None:
        """Wait for *transfer* and its predecessors, and record the transfers that have ended."""
        for blocker in transfer.after:
            if not blocker.ended:
                self.finish(blocker)
        in_flight = self._in_flight[transfer.writes]
        if transfer.stage is Stage.PLANNED:
            self.start_all([] if transfer in self._to_start else [transfer])
            self.finish(transfer)
        elif not transfer.ended:
            try:
                self._wait(transfer)
            except BaseException as interrupt:
                if not self._store.interrupted:
                    self._changing.ignore(interrupt)  # it interrupted a wait, and changed nothing
                raise
            self._note(transfer, transfer.observe())
        while in_flight and in_flight[0].ended:
            in_flight.popleft()

    def finish_all(self) -> None:
        """Wait until no transfer is in flight or planned."""
        self.start_all()
        while any(self._in_flight):
            for transfers in self._in_flight:
                while transfers:
                    self.finish(transfers[0])
            self.start_all(self._schedule.take_pending())

    def _wait(self, transfer: Transfer) -> None:
        """Wait until *transfer* has finished, and log the wait if it is long."""
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
            if transfer.writes:
                self._counts["bytes_written"] += transfer.nbytes
            else:
                self._counts["bytes_read"] += transfer.nbytes
            self.write_errors.pop(transfer.name, None)
            return
        # A call raises it later: drop its traceback and context, whose frames reference objects.
        error.with_traceback(None).__context__ = None
        (self.write_errors if transfer.writes else self.read_errors)[transfer.name] = error

    def settle(self, name: str) -> None:
        """Wait until no transfer of *name* is in flight."""
        while (blocking := self._schedule.blocking_transfer(name)) is not None:
            self.start_all(self._schedule.take_pending())
            self.finish(blocking)

    def forget_errors(self, name: str) -> None:
        """Drop the errors of *name*, because that value no longer exists."""
        self.write_errors.pop(name, None)
        self.read_errors.pop(name, None)

    def flush(self) -> None:
        """Write all changed values not in use, and wait. Raises: OffloadError, after all tries."""
        self.start_all()
        tried: set[str] = set()
        self._flushing = True
        try:
            while transfers := [*self._schedule.write_all(but=tried), *self._in_flight[True]]:
                for transfer in transfers:
                    if transfer.stage is Stage.PLANNED:
                        tried.add(transfer.name)
                        self.start_all([transfer])
                self.finish_writes()
        finally:
            self._flushing = False
        self.raise_write_errors()
        self.advance()

    def write_back(self, name: str) -> None:
        """Write *name*, which is not in use, if it has changed, and wait. Raises: OffloadError."""
        self.start_all()
        while True:
            self.start_all(self._schedule.write(name))
            blocking = self._schedule.blocking_transfer(name)
            if blocking is not None:  # it may also be a read that waits for the write
                started = time.perf_counter()
                self.finish(blocking)
                if not blocking.writes:
                    self._counts["read_wait_seconds"] += time.perf_counter() - started
            if name in self.write_errors:
                raise self.write_errors.pop(name)
            if blocking is None:
                return

    def finish_writes(self) -> None:
        """Wait until no write is in flight."""
        while self._in_flight[True]:
            self.finish(self._in_flight[True][0])

    def commit(self, name: str) -> None:
        """Make the store release the version of *name* that it retains, if any."""
        if name in self.retained:
            self._store.commit(name)
            self.retained.remove(name)

    def delete(self, name: str) -> None:
        """Delete *name* from the store, if it was ever written."""
        self.retained.discard(name)
        self._store.delete(name, missing_ok=True)

    def raise_write_errors(self, of_full_drive: bool = True) -> None:
        """Raise the first error of a write that no call has raised. Raises: OffloadError. Without
        *of_full_drive*, the error of a drive that was merely full is not raised: values that did
        not fit stay in memory, as intended.
        """
        errors = list(self.write_errors.values())
        self.write_errors.clear()
        for error in errors:
            if of_full_drive or not (isinstance(error, NoSpaceError) and error.operation == "put"):
                raise error
