"""`TensorStore`: named tensors on one or more drives."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from .config import AioConfig
from .engine import Engine, StrPath, Ticket
from .engine import _buffer as _checked_buffer  # what a buffer must be is the engine's to say
from .errors import NoSpaceError, OffloadError, UsageError, WaitTimeout
from .slabs import Extent, Stripes
from .snapshot import WINDOW_BYTES, Part, Snapshot, name_tensor

if TYPE_CHECKING:
    from .engine import Buffer

_STEPS_REMEMBERED = 1000


@dataclasses.dataclass(frozen=True)
class StoreStats:
    """What a store has been asked to move since it was made, snapshots' reads and restores' writes included.

    puts, gets: calls. bytes_written_by_step: for each of the last 1000 calls of `TensorStore.end_step`, the bytes written since the one before.
    """

    puts: int
    gets: int
    bytes_read: int
    bytes_written: int
    bytes_written_by_step: tuple[int, ...]


@dataclasses.dataclass(eq=False)
class _Value:
    """The bytes of a name, and who uses them: they keep their room until they are *gone* and nobody does; *lost_by* is the put that failed on them."""

    nbytes: int
    extents: list[Extent]
    parts: list[Part]
    users: int = 0
    gone: bool = False
    lost_by: StoreTicket | None = None
    readers: list[StoreTicket | _Hold] = dataclasses.field(default_factory=list)


class _Hold:
    """One who reads a value without a ticket: a snapshot."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def _finish(self) -> None:
        self._over.wait()


class StoreTicket:
    """The caller's handle on one put or get.

    Lifetime: the transfers do not need it: dropping a ticket neither cancels them nor frees the tensor's memory early. A failure that nobody
    waited for is raised by `TensorStore.close`, unless the name was deleted.
    """

    def __init__(self, store: TensorStore, name: str, value: _Value, writes: bool) -> None:
        self.name = name
        self._store = store
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
        """Return the bytes asked for once every one of them has been moved; a second call answers the same.

        Units: *timeout* in seconds, None for as long as it takes.
        Raises: IOFailure, NoSpaceError, TruncatedError or CorruptionError, which name the tensor: the first of the parts' failures, when all
        parts are finished; WaitTimeout when they are not in time, which leaves them going on; UsageError in a process forked since.
        """
        self._finish(timeout)
        self._raise()
        return self.nbytes

    def _raise(self) -> None:
        if self._failure is not None:
            self._heard = True
            raise copy.copy(self._failure)

    def _finish(self, timeout: float | None = None) -> None:
        """Wait for the end of every part, and let the store know. Raises: WaitTimeout, UsageError."""
        self._store._check_process()
        self._store._settle(self, self._outcome(timeout))

    def _outcome(self, timeout: float | None = None) -> OffloadError | None:
        """Wait for the end of every part; the first failure of them. Raises: WaitTimeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        failure = None
        for transfer in self._transfers:
            try:
                transfer.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            except WaitTimeout:
                raise WaitTimeout(f"{'put' if self._writes else 'get'} of tensor {self.name!r} is not done within {timeout} s; it goes on") from None
            except OffloadError as error:
                failure = failure or error
        return failure


class TensorStore:
    """Named tensors in preallocated files on the drives of *paths*, read and written asynchronously.

    A tensor of 4 MiB or more is cut over the drives in proportion to *weights* (equal ones unless given: pass measured speeds), a smaller one goes
    to the drive that has the least for its weight; a drive that is full leaves its part to the others. *checksum* sums every byte on its way out
    and checks it on its way back. The engine is made with *config*, or is the caller's *engine*, which the store does not close.

    Transfers on one name keep the order of the calls: a get waits for the put before it, and a put of the same size for the gets before it, both
    inside the call. All methods may be called from any thread, but not from a process forked since. The files have no names: they are gone with
    the store or its process, also after kill -9, and stores in one directory never meet.

    Raises: UsageError; IOFailure when a path is no directory that can be written to; UnsupportedError when the drive or this build lacks
    something that *config* or *checksum* wants.
    Source: open(2) for O_TMPFILE, fallocate(2), io_submit(2).
    """

    def __init__(
        self,
        paths: StrPath | Sequence[StrPath],
        config: AioConfig | None = None,
        *,
        weights: Sequence[float] | None = None,
        checksum: bool = False,
        engine: Engine | None = None,
    ) -> None:
        self.paths = _path_list(paths)
        shares = _weight_list(weights, len(self.paths))
        if engine is not None and config is not None:
            raise UsageError("an engine has its configuration already: pass config or engine, not both")
        self.checksum = checksum
        self._process_id = os.getpid()
        self._lock = threading.Lock()  # for all that follows
        self._closed = False
        self._values: dict[str, _Value] = {}
        self._puts: dict[str, StoreTicket] = {}  # by name, while they are under way
        self._unsettled: dict[StoreTicket, None] = {}  # in order
        self._unheard: list[StoreTicket] = []  # failed, and nobody knows yet
        self._counts = dict.fromkeys(("puts", "gets", "bytes_read", "bytes_written"), 0)
        self._bytes_written_before = 0
        self._bytes_written_by_step: deque[int] = deque(maxlen=_STEPS_REMEMBERED)
        with contextlib.ExitStack() as undo:
            self._owned_engine = undo.enter_context(Engine(config)) if engine is None else None
            self.engine = engine or self._owned_engine or Engine()
            self._room = Stripes(self.engine, self.paths, shares)
            if checksum:
                with self.engine.open_anonymous(self.paths[0]) as file:
                    self.engine.write(b"", file, checksum=True)  # refused here where this build has none
            undo.pop_all()

    def put(self, name: str, tensor: Buffer) -> StoreTicket:
        """Start writing *tensor* under *name*, in place of what was there.

        A tensor of the size that *name* has overwrites it: when the write fails, the old value is lost as well, and `get` raises that error until
        the next put. One of another size gets a new place; the old one is freed when the write is done, and stays the value when it fails.

        Shapes: *tensor* is contiguous, on the CPU, or has the buffer protocol.
        Lifetime: its memory is held until the ticket is done; do not change its contents before.
        Raises: UsageError; NoSpaceError, with the numbers, when it does not fit on the drives, which leaves *name* as it was; from
        `StoreTicket.wait` IOFailure and NoSpaceError.
        Source: io_submit(2).
        """
        nbytes = _checked_buffer(tensor, writable=False).nbytes
        while True:
            with self._used_by_caller():
                value = self._values.get(name)
                conflicts = self._transfers_on(name, reads=value is not None and value.nbytes == nbytes)
                if not conflicts:
                    try:
                        if value is None or value.nbytes != nbytes:
                            value = self._new_value(nbytes, "put")
                    except NoSpaceError:
                        conflicts += [ticket for ticket in self._unsettled if ticket._value.gone or ticket._writes]  # which may free room
                        if not conflicts:
                            raise
                    else:
                        self._counts["puts"] += 1
                        return self._start_put(name, value, tensor)
            for under_way in conflicts:
                under_way._finish()

    def get(self, name: str, out: Buffer) -> StoreTicket:
        """Start reading tensor *name* into *out*, as of the last put.

        Shapes: *out* is contiguous, on the CPU, with the stored tensor's number of bytes, or has the buffer protocol and is writable.
        Lifetime: *out* is held until the ticket is done; do not use its contents before.
        Raises: UsageError when there is no such tensor or the sizes differ; the error of the put that lost it; from `StoreTicket.wait` IOFailure,
        TruncatedError, and CorruptionError where the store keeps checksums.
        Source: io_submit(2).
        """
        nbytes = _checked_buffer(out, writable=True).nbytes
        while True:
            with self._used_by_caller():
                conflicts = self._transfers_on(name, reads=False)
                if not conflicts:
                    value = self._value(name)
                    if nbytes != value.nbytes:
                        raise UsageError(f"tensor {name!r} has {value.nbytes} bytes, not the {nbytes} of what it is to be read into")
                    for reader in list(value.readers):  # those that nobody waits for would pile up
                        if isinstance(reader, StoreTicket) and reader.done():
                            self._settle_locked(reader, reader._outcome())
                    self._counts["gets"] += 1
                    ticket = StoreTicket(self, name, value, writes=False)
                    self._submit(ticket, out)
                    return ticket
            for under_way in conflicts:
                under_way._finish()

    def delete(self, name: str) -> None:
        """Forget tensor *name*; its room is free once the transfers under way on it are finished. Raises: UsageError when there is none."""
        with self._used_by_caller():
            if name not in self._values and name not in self._puts:
                raise UsageError(f"no tensor {name!r} in the store")
            self._forget(name)

    def nbytes(self, name: str) -> int:
        """Bytes of tensor *name*, as of the last put. Raises: UsageError when there is none."""
        with self._used_by_caller():
            ticket = self._puts.get(name)
            if ticket is None and name not in self._values:
                raise UsageError(f"no tensor {name!r} in the store")
            return ticket.nbytes if ticket else self._values[name].nbytes

    def names(self) -> list[str]:
        """Every name in the store, those included whose put is under way or was lost."""
        with self._used_by_caller():
            return list(dict.fromkeys([*self._values, *self._puts]))

    def __contains__(self, name: object) -> bool:
        with self._used_by_caller():
            return name in self._values or name in self._puts

    def __len__(self) -> int:
        return len(self.names())

    @property
    def used_bytes(self) -> int:
        """Bytes on the drives that tensors have, each part rounded up to 4 KiB, those under way included."""
        with self._used_by_caller():
            return self._room.used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that could still be put: what the store has allocated and not used, and what the drives have left."""
        with self._used_by_caller():
            return self._room.nbytes - self._room.used_bytes + self._room.available_bytes

    def bytes_on(self, path: StrPath) -> int:
        """Bytes that tensors have on *path*, one of the store's. Raises: UsageError."""
        with self._used_by_caller():
            found = [drive.used_bytes for drive in self._room.drives if drive.path == os.fspath(path)]
            if not found:
                raise UsageError(f"{os.fspath(path)!r} is not a path of this store, which has {', '.join(self.paths)}")
            return sum(found)

    def reserve(self, nbytes: int) -> None:
        """Allocate room for *nbytes* in all, what is used already included, so that a drive that is too small is known now.

        Raises: NoSpaceError, with what was asked for, what each drive has and what is missing; UsageError.
        Source: fallocate(2).
        """
        if nbytes < 0:
            raise UsageError(f"room for {nbytes} bytes cannot be reserved")
        with self._used_by_caller():
            self._room.reserve(nbytes)

    def snapshot(self, directory: StrPath, names: Iterable[str] | None = None) -> None:
        """Write the tensors *names*, all unless given, into *directory*, so that `restore` finds them there in another process.

        The directory is made where it is missing, and may lie on any drive; one whose filesystem has no O_DIRECT is written through the page cache.
        An older snapshot in it stays the valid one until the new one is whole and synced, also when this process is killed or the power goes, so
        there must be room for both. Puts under way are waited for; a put of the same size to one of the names waits until the snapshot is written.

        Units: 32 MiB of memory, for reads and writes that overlap.
        Raises: UsageError, also where another snapshot is just being written to *directory*; the error of a put that lost one of the names;
        NoSpaceError and IOFailure; CorruptionError where the store keeps checksums. The older snapshot is whole after each of them.
        Source: rename(2), fsync(2), flock(2).
        """
        chosen = self.names() if names is None else list(dict.fromkeys(names))
        with self._held(chosen) as values:
            Snapshot(self.engine, directory).save({name: value.parts for name, value in values.items()})

    def restore(self, directory: StrPath) -> list[str]:
        """Put every tensor of the snapshot in *directory*, and return their names; tensors that have these names are replaced.

        All are read and checked before the first is replaced, so there must be room for both, and nothing is changed by a restore that fails.

        Units: 32 MiB of memory, for reads and writes that overlap.
        Raises: UsageError when there is no snapshot in *directory*, or one is just being written; CorruptionError when it is not as it was written;
        UnsupportedError when a later version or a build with other checksums wrote it; NoSpaceError and IOFailure.
        Source: flock(2).
        """
        with self._used_by_caller():
            under_way = list(self._unsettled)
        for ticket in under_way:  # which may free room
            ticket._finish()
        with Snapshot(self.engine, directory).opened() as saved:
            values: dict[str, _Value] = {}
            try:
                with self._used_by_caller():
                    for name, nbytes in saved.sizes().items():
                        values[name] = self._new_value(nbytes, "restore")
                parts = saved.load({name: value.extents for name, value in values.items()}, self.checksum)
                with self._used_by_caller():
                    for name, value in values.items():
                        value.parts = parts[name]
                        self._counts["bytes_written"] += value.nbytes
                        self._forget(name)
                        self._values[name] = value
            except BaseException:
                with self._lock:
                    for value in values.values():
                        self._let_go(value)
                raise
        return list(values)

    def end_step(self) -> None:
        """Close the books of a training step: see `StoreStats.bytes_written_by_step`."""
        with self._used_by_caller():
            self._bytes_written_by_step.append(self._counts["bytes_written"] - self._bytes_written_before)
            self._bytes_written_before = self._counts["bytes_written"]

    def stats(self) -> StoreStats:
        """Counters since the store was made; cheap enough to poll."""
        with self._used_by_caller():
            return StoreStats(**self._counts, bytes_written_by_step=tuple(self._bytes_written_by_step))

    def close(self) -> None:
        """Wait for every transfer and give the room back; a second call does nothing, nor does one in a forked child.

        Raises: the first failure of a put or get that nobody waited for.
        """
        if os.getpid() != self._process_id:
            return
        with self._lock:
            self._closed = True
            unsettled = list(self._unsettled)
        for ticket in unsettled:
            ticket._finish()
        with self._lock:
            self._room.close()
            unheard = [ticket for ticket in self._unheard if not ticket._heard]
            self._unheard.clear()
            self._values.clear()
        if self._owned_engine is not None:
            self._owned_engine.close()
        if unheard:
            unheard[0].wait()

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except OffloadError:
            if error is None:
                raise

    def __repr__(self) -> str:
        return f"<TensorStore {', '.join(self.paths)}{' closed' if self._closed else f': {len(self._values)} tensors'}>"

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise UsageError("the store belongs to the process that this one was forked from: make one here")

    @contextlib.contextmanager
    def _used_by_caller(self) -> Iterator[None]:
        self._check_process()  # before the lock, which a thread that is not in the child may hold
        with self._lock:
            if self._closed:
                raise UsageError("the store is closed")
            yield

    @contextlib.contextmanager
    def _held(self, names: Sequence[str]) -> Iterator[dict[str, _Value]]:
        """The values of *names*, which are neither overwritten nor freed meanwhile."""
        hold = _Hold()
        values: dict[str, _Value] = {}
        try:
            for name in names:
                conflicts: Sequence[StoreTicket | _Hold] = [hold]
                while conflicts:
                    with self._used_by_caller():
                        conflicts = self._transfers_on(name, reads=False)
                        if not conflicts:
                            value = values[name] = self._value(name)
                            value.users += 1
                            value.readers.append(hold)
                            self._counts["bytes_read"] += value.nbytes
                    for under_way in conflicts:
                        under_way._finish()
            yield values
        finally:
            with self._lock:
                for value in values.values():
                    value.users -= 1
                    value.readers.remove(hold)
                    self._free_if_unused(value)
            hold._over.set()

    def _value(self, name: str) -> _Value:
        value = self._values.get(name)
        if value is None:
            raise UsageError(f"no tensor {name!r} in the store")
        if value.lost_by is not None:
            value.lost_by._raise()
        return value

    def _transfers_on(self, name: str, reads: bool) -> list[StoreTicket | _Hold]:
        """The put under way on *name*, and with *reads* the gets too."""
        found: list[StoreTicket | _Hold] = [self._puts[name]] if name in self._puts else []
        if reads:
            found += self._values[name].readers
        return found

    def _new_value(self, nbytes: int, operation: str) -> _Value:
        """Room for a value, and its parts. Raises: NoSpaceError."""
        extents = self._room.take(nbytes, operation)
        parts, start = [], 0
        for extent in extents:
            step = WINDOW_BYTES if self.checksum else extent.nbytes
            for inner in range(0, extent.nbytes, step):
                parts.append(Part(extent, extent.offset + inner, start + inner, min(step, extent.nbytes - inner)))
            start += extent.nbytes
        return _Value(nbytes, extents, parts)

    def _start_put(self, name: str, value: _Value, tensor: Buffer) -> StoreTicket:
        ticket = StoreTicket(self, name, value, writes=True)
        self._puts[name] = ticket
        self._submit(ticket, tensor)
        return ticket

    def _submit(self, ticket: StoreTicket, buffer: Buffer) -> None:
        """Start the transfers of every part; when one is refused, no ticket is left behind. Raises: OffloadError."""
        value = ticket._value
        value.users += 1
        self._unsettled[ticket] = None
        if not ticket._writes:
            value.readers.append(ticket)
        self._counts["bytes_written" if ticket._writes else "bytes_read"] += value.nbytes
        whole = len(value.parts) == 1
        memory: Any = buffer if whole else _flat(buffer)
        try:
            for part in value.parts:
                piece = memory if whole else memory[part.start : part.start + part.nbytes]
                file = part.extent.file
                if ticket._writes:
                    transfer = self.engine.write(piece, file, part.offset, checksum=self.checksum)
                else:
                    transfer = self.engine.read(piece, file, part.offset, checksum=False if part.checksum is None else part.checksum)
                ticket._transfers.append(transfer)
        except OffloadError as refusal:
            for transfer in ticket._transfers:
                with contextlib.suppress(OffloadError):
                    transfer.wait()
            self._settle_locked(ticket, refusal)
            ticket._heard = True
            raise

    def _settle(self, ticket: StoreTicket, failure: OffloadError | None) -> None:
        with self._lock:
            self._settle_locked(ticket, failure)

    def _settle_locked(self, ticket: StoreTicket, failure: OffloadError | None) -> None:
        """Draw the consequences of a ticket whose transfers are all finished, once."""
        if ticket._settled:
            return
        ticket._settled = True
        ticket._failure = failure
        del self._unsettled[ticket]
        value = ticket._value
        value.users -= 1
        if failure is not None:
            name_tensor(failure, ticket.name)
            if not value.gone:
                self._unheard = [earlier for earlier in self._unheard if not earlier._heard] + [ticket]
        if not ticket._writes:
            value.readers.remove(ticket)
        elif self._puts.get(ticket.name) is ticket:
            del self._puts[ticket.name]
            if ticket._transfers or failure is None:
                self._commit(ticket, value, failure)
            elif self._values.get(ticket.name) is not value:  # refused before anything was written
                self._let_go(value)
        self._free_if_unused(value)

    def _commit(self, ticket: StoreTicket, value: _Value, failure: OffloadError | None) -> None:
        old = self._values.get(ticket.name)
        if failure is not None and old not in (None, value):
            self._let_go(value)
            return
        value.lost_by = None if failure is None else ticket
        if failure is None and self.checksum:
            for part, transfer in zip(value.parts, ticket._transfers, strict=True):
                part.checksum = transfer.checksum
        self._values[ticket.name] = value
        if old is not None and old is not value:
            self._let_go(old)

    def _forget(self, name: str) -> None:
        for value in (self._values.pop(name, None), ticket._value if (ticket := self._puts.pop(name, None)) else None):
            if value is not None:
                self._let_go(value)
        self._unheard = [ticket for ticket in self._unheard if ticket.name != name]

    def _let_go(self, value: _Value) -> None:
        value.gone = True
        self._free_if_unused(value)

    def _free_if_unused(self, value: _Value) -> None:
        if value.gone and value.users == 0:
            self._room.give_back(value.extents)
            value.extents = []


def _flat(buffer: Any) -> Any:
    """The bytes of a buffer that the engine takes, in one dimension, so that it can be cut."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        storage = buffer.untyped_storage()
        return torch.empty(0, dtype=torch.uint8).set_(storage, buffer.data_ptr() - storage.data_ptr(), (buffer.nbytes,))
    return np.frombuffer(buffer, np.uint8)


def _path_list(paths: StrPath | Sequence[StrPath]) -> list[str]:
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise UsageError("a store needs at least one path")
    return [os.fspath(path) for path in given]


def _weight_list(weights: Sequence[float] | None, count: int) -> list[float]:
    given = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(given) != count or not all(math.isfinite(weight) and weight > 0 for weight in given):
        raise UsageError(f"weights must be {count} numbers above 0, one for each path, not {weights!r}")
    return given
