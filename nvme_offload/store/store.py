"""`TensorStore`: named tensors on one or more drives."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import NoSpaceError, OffloadError, UsageError
from ..hardware.config import AioConfig
from ..io.arguments import time_limit, whole_number
from ..io.closing import Closing
from ..io.engine import Engine, StrPath, checked_nbytes, close_at_exit, is_tensor
from ..io.section import Section, give_back
from .catalog import Catalog
from .slabs import Stripes
from .transfer import Transfer

if TYPE_CHECKING:
    import torch

    from ..io.engine import Buffer

_STEPS_REMEMBERED = 1000


@dataclasses.dataclass(frozen=True)
class StoreStats:
    """Counters of a store since it was made.

    Attributes
    ----------
    puts, gets : int
        Calls of `put` and `get`.
    bytes_read, bytes_written : int
        Bytes requested in reads from the drives, and in writes to them.
    bytes_written_by_step : tuple of int
        Bytes written between calls of `TensorStore.end_step`, for the last 1000 steps.
    """

    puts: int
    gets: int
    bytes_read: int
    bytes_written: int
    bytes_written_by_step: tuple[int, ...]


class TensorStore(Closing):
    """Named tensors in preallocated files on one or more drives, read and written asynchronously.

    A tensor of 4 MiB or more is striped over the drives; a smaller tensor goes to the drive with
    the fewest bytes for its weight. The share of a full drive goes to the other drives. All methods
    are thread-safe; a forked child cannot use the store.

    Parameters
    ----------
    paths : path or sequence of paths
        Directories, usually one per drive.
    config : AioConfig, optional
        Settings of the store's own engine. Excludes *engine*.
    weights : sequence of float, optional
        Shares of the drives, such as their measured speeds; equal by default.
    checksum : bool
        Compute a checksum of every byte written, and check it on reads.
    engine : Engine, optional
        An engine that the caller owns; the store does not close it.

    Attributes
    ----------
    paths : list of str
        As given.
    engine : Engine
        The engine in use.
    checksum : bool
        As given.

    Raises
    ------
    UsageError
        An argument is invalid.
    IOFailure
        A path is not a writable directory.
    UnsupportedError
        The drive or this build lacks a feature that *config* or *checksum* requires.

    Notes
    -----
    Every method raises `UsageError` for an unknown name, an invalid argument, and a closed store.

    Transfers of one name run in the order of the calls: a get waits for an earlier put, and a put
    of the same size waits for earlier gets. The call itself waits, unless *after* names the tickets
    of these transfers. In this case the transfer starts when they have succeeded, and fails with
    `CancelledError` if one fails.

    The files are unnamed: they vanish with the store or its process, even after kill -9, and stores
    in one directory never interfere. Source: open(2) for O_TMPFILE, fallocate(2), io_submit(2).
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
        self.paths = paths_of(paths, "a store")
        self._shares = _weight_list(weights, len(self.paths))
        if engine is not None and config is not None:
            raise UsageError(
                "pass config or engine, not both: an engine already includes a configuration"
            )
        self.checksum = checksum
        self._process_id = os.getpid()
        # Guards the catalog, the space and the counters. It is reentrant, and always entered by a
        # `with` of the lock itself. So an exception between two lines of this thread neither locks
        # this thread out nor occurs between acquire and release.
        self._lock = threading.RLock()
        self._changing = Section("store")
        self._counts = dict.fromkeys(("puts", "gets", "bytes_read", "bytes_written"), 0)
        self._bytes_written_before = 0
        self._bytes_written_by_step: deque[int] = deque(maxlen=_STEPS_REMEMBERED)
        with contextlib.ExitStack() as undo:
            self._owned_engine = undo.enter_context(Engine(config)) if engine is None else None
            self.engine = engine or self._owned_engine or Engine()
            self._space = Stripes(self.engine, self.paths, self._shares)
            self._catalog = Catalog(self._space, checksum)
            if checksum:
                with self.engine.open_anonymous(self.paths[0]) as file:
                    # If this build has no checksums, this raises.
                    self.engine.write(b"", file, checksum=True)
            undo.pop_all()
        _open_stores.add(self)

    def put(self, name: str, tensor: Buffer, *, after: Sequence[Transfer] = ()) -> Transfer:
        """Start writing a tensor, replacing the value of its name.

        Parameters
        ----------
        name : str
        tensor : torch.Tensor or buffer
            A contiguous tensor on the CPU, or an object with the buffer protocol. Its memory is
            held until the ticket is done, as by `Engine.write`; do not change its contents before.
        after : sequence of Transfer
            Tickets of this store that must succeed before this put starts.

        Returns
        -------
        Transfer
            `Transfer.wait` raises `IOFailure`, `NoSpaceError` or `CancelledError`.

        Raises
        ------
        NoSpaceError
            The tensor does not fit on the drives; the message has the numbers. The old value stays.

        Notes
        -----
        A tensor of the same size as the current value overwrites it in place. If that write fails,
        the value is lost, and `get` raises the error until the next put. A tensor of another size
        gets new space; the old value is freed if the write succeeds and stays if it fails. A
        cancelled put leaves the old value in either case. Source: io_submit(2).
        """
        _check_name(name)
        nbytes = checked_nbytes(tensor, writable=False)
        return self._begin(Transfer(name, True, nbytes, _transfers(after)), tensor)

    def get(self, name: str, out: Buffer, *, after: Sequence[Transfer] = ()) -> Transfer:
        """Start reading a tensor.

        Parameters
        ----------
        name : str
        out : torch.Tensor or writable buffer
            A contiguous buffer on the CPU, with the stored tensor's number of bytes. Its memory is
            held until the ticket is done, as by `Engine.read`; do not use its contents before.
        after : sequence of Transfer
            Tickets of this store that must succeed before this get starts.

        Returns
        -------
        Transfer
            `Transfer.wait` raises `IOFailure`, `TruncatedError`, `CancelledError`,
            `BufferChangedError` and, in a store with checksums, `CorruptionError`.

        Raises
        ------
        IOFailure, NoSpaceError
            The put that lost the value failed with it.

        Notes
        -----
        Source: io_submit(2).
        """
        _check_name(name)
        nbytes = checked_nbytes(out, writable=True)
        return self._begin(Transfer(name, False, nbytes, _transfers(after)), out)

    def start(self, transfer: Transfer, memory: torch.Tensor) -> None:
        """Start a transfer that the caller has ordered: it starts after all transfers in
        `Transfer.after`, and waits for no others. Raises: as `put` and `get`, which order their
        transfers themselves.

        Parameters
        ----------
        transfer : Transfer
            A planned transfer that has not started.
        memory : torch.Tensor
            As in `put` and `get`.
        """
        self._begin(transfer, memory, ordered=True)

    def finish(self, transfer: Transfer, timeout: float | None = None) -> None:
        """Wait until a transfer has finished, successfully or not, and record the outcome.

        Parameters
        ----------
        transfer : Transfer
            A transfer of this store.
        timeout : float, optional
            Seconds; None waits without a limit.

        Raises
        ------
        WaitTimeout
            *timeout* passed. The requests continue.
        """
        self.check_process()
        failure = transfer.outcome(time_limit(timeout))
        changing = self._changing
        with self._lock, contextlib.nullcontext() if changing.closed else changing:
            self._catalog.complete(transfer, failure)

    def delete(self, name: str, *, missing_ok: bool = False) -> None:
        """Delete a tensor. Its space is freed when the transfers in flight on it have finished.

        Parameters
        ----------
        name : str
        missing_ok : bool
            Whether to do nothing if the name has no tensor or the store is closed.
        """
        _check_name(name)
        if missing_ok and self._changing.closed:
            return
        with self._locked(), self._changing:
            if self._catalog.nbytes(name) is None:
                if missing_ok:
                    return
                raise UsageError(f"no tensor {name!r} in the store")
            self._catalog.forget(name)

    def retain(self, name: str) -> None:
        """Keep the present value of a name in addition to later values, until `commit` or
        `roll_back`. The next put gets separate space. Waits for a put in flight. If a value is
        retained already, that value stays.

        Parameters
        ----------
        name : str

        Raises
        ------
        IOFailure, NoSpaceError
            The put that lost the value failed with it.
        """
        with self._without_put(name):
            self._catalog.retain(name)

    def commit(self, name: str) -> None:
        """Release the value that `retain` kept. Its space is freed if there is a later value.

        Parameters
        ----------
        name : str
        """
        with self._locked(), self._changing:
            self._catalog.commit(name)

    def roll_back(self, name: str) -> None:
        """Return to the value that `retain` kept, and free the space of later values. Waits for a
        put in flight.

        Parameters
        ----------
        name : str
        """
        with self._without_put(name):
            self._catalog.roll_back(name)

    def nbytes(self, name: str) -> int:
        """Size of a tensor as of the last put, in bytes.

        Parameters
        ----------
        name : str
        """
        with self._locked(), self._changing:
            nbytes = self._catalog.nbytes(name)
        if nbytes is None:
            raise UsageError(f"no tensor {name!r} in the store")
        return nbytes

    def names(self) -> list[str]:
        """List every name, including names whose put is in flight or has failed."""
        with self._locked(), self._changing:
            return list(self._catalog.sizes())

    def __contains__(self, name: object) -> bool:
        with self._locked(), self._changing:
            return isinstance(name, str) and self._catalog.nbytes(name) is not None

    def __len__(self) -> int:
        return len(self.names())

    @property
    def used_bytes(self) -> int:
        """Bytes of the tensors on the drives, each extent rounded up to 4 KiB; puts in flight
        count.
        """
        with self._locked(), self._changing:
            return self._space.used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be put: allocated and unused, plus what the drives have available."""
        with self._locked(), self._changing:
            return self._space.nbytes - self._space.used_bytes + self._space.available_bytes

    def bytes_on(self, path: StrPath) -> int:
        """Bytes of the tensors on one drive, each extent rounded up to 4 KiB.

        Parameters
        ----------
        path : path
            One of `paths`.
        """
        with self._locked(), self._changing:
            if os.fspath(path) not in self.paths:
                raise UsageError(
                    f"{os.fspath(path)!r} is not a path of this store, which has {', '.join(self.paths)}"
                )
            drives = self._space.drives
            return sum(drive.used_bytes for drive in drives if drive.path == os.fspath(path))

    def reserve(self, nbytes: int) -> None:
        """Preallocate space, so that a drive that is too small is reported now.

        Parameters
        ----------
        nbytes : int
            Total bytes, including bytes in use.

        Raises
        ------
        NoSpaceError
            The drives are too small; the message has the requested size, the space of each drive,
            and the missing bytes.

        Notes
        -----
        Source: fallocate(2).
        """
        nbytes = whole_number("nbytes", nbytes)
        with self._locked(), self._changing:
            self._space.reserve(nbytes)

    def drain(self) -> None:
        """Wait until no transfer is in flight. Errors stay with their tickets."""
        with self._locked():
            self._changing.check()
        self._wait_for_all()

    def end_step(self) -> None:
        """End a training step in the counters: see `StoreStats.bytes_written_by_step`."""
        with self._locked(), self._changing:
            self._bytes_written_by_step.append(
                self._counts["bytes_written"] - self._bytes_written_before
            )
            self._bytes_written_before = self._counts["bytes_written"]

    def stats(self) -> StoreStats:
        """A snapshot of the counters. Cheap enough to poll."""
        with self._locked(), self._changing:
            return StoreStats(
                **self._counts, bytes_written_by_step=tuple(self._bytes_written_by_step)
            )

    def close(self) -> None:
        """Wait for every transfer and free the space. A second call, or a call in a forked child,
        does nothing.

        Raises
        ------
        IOFailure, NoSpaceError, TruncatedError, CorruptionError, BufferChangedError
            The first failure of an unawaited put or get.
        """
        if os.getpid() != self._process_id:
            return
        _open_stores.discard(self)
        with self._lock:
            self._changing.closed = True  # from here on, only `finish` changes the tables
        self._wait_for_all()
        with self._lock:
            self._space.close()
            unobserved = self._catalog.take_unobserved()
        if self._owned_engine is not None:
            self._owned_engine.close()
        if unobserved is not None:
            unobserved.raise_failure()

    def check_process(self) -> None:
        """Check that the process was not forked since the store was made. Raises: UsageError."""
        self._changing.check_process()

    @property
    def interrupted(self) -> bool:
        """Whether an exception has interrupted a call: see `reset`."""
        with self._lock:
            return bool(self._changing.interrupted_by)

    def reset(self) -> None:
        """Delete every tensor, after waiting for the transfers in flight.

        Call it to continue after an exception, such as KeyboardInterrupt or MemoryError, has
        interrupted a call. Until then, every other method except `close` raises UsageError.

        Raises
        ------
        UnsupportedError, IOFailure
            As when the store was made: a drive is gone.
        """
        with self._locked():
            changing = self._changing
            if changing.closed:
                raise UsageError("the store is closed")
            if not changing.interrupted_by:
                self._wait_for_all()  # records the outcomes, which frees the transfers' resources
                with changing:
                    for name in self._catalog.sizes():
                        self._catalog.forget(name)
                return
            changing.interrupted_by = "reset()"  # in case an exception interrupts this
            self._wait_for_all()
            if self._owned_engine is not None:
                # This also waits for a request whose transfer was lost.
                with contextlib.suppress(OffloadError):
                    self._owned_engine.close()
                self.engine = self._owned_engine = Engine(self._owned_engine.config)
            self._space.close()
            self._space = Stripes(self.engine, self.paths, self._shares)
            self._catalog = Catalog(self._space, self.checksum)
            changing.interrupted_by = ""

    def release_lock(self) -> None:
        """Release the lock if this thread holds it outside of a call: see `give_back`."""
        give_back(self._lock)

    def _locked(self) -> threading.RLock:
        """The lock. Raises UsageError in a forked child: a thread of the parent may hold the lock."""
        self.check_process()
        return self._lock

    @contextlib.contextmanager
    def _without_put(self, name: str) -> Iterator[None]:
        """Context that holds the lock with no put of *name* in flight. Waits for a put in flight."""
        while True:
            with self._locked(), self._changing:
                put = self._catalog.put_in_flight(name)
                if put is None:
                    yield
                    return
            self.finish(put)

    def _wait_for_all(self) -> None:
        """Wait until no transfer is in flight."""
        with self._lock:
            transfers = list(self._catalog.in_flight)
            end = Transfer.outcome if self._changing.interrupted_by else self.finish
        for transfer in transfers:
            end(transfer)

    def __repr__(self) -> str:
        state = "closed" if self._changing.closed else f"{len(self._catalog.sizes())} tensors"
        return f"<TensorStore {', '.join(self.paths)}: {state}>"

    def _begin(self, transfer: Transfer, buffer: Any, ordered: bool = False) -> Transfer:
        """Start *transfer*: after conflicting transfers of its name, unless it is *ordered*."""
        while True:
            with self._locked(), self._changing:
                blockers = [] if ordered else self._catalog.conflicts(transfer)
                if not blockers:
                    try:
                        self._start(transfer, buffer)
                    except NoSpaceError:
                        blockers = self._catalog.may_free_space() if transfer.writes else []
                        if not blockers:
                            raise
                    else:
                        if transfer.requests and not ordered:
                            transfer.after = ()  # the engine knows them now
                        return transfer
            for each in blockers:
                self.finish(each)

    def _start(self, transfer: Transfer, buffer: Any) -> None:
        """Submit a request for each segment. If one is refused, none stays in flight. Raises:
        OffloadError.
        """
        writes, requests = transfer.writes, transfer.requests
        after = [request for blocker in transfer.after for request in blocker.requests]
        put = None if writes or not self.checksum else self._catalog.put_in_flight(transfer.name)
        value = self._catalog.start(transfer)
        transfer.store = self
        try:
            address, owner = _memory(buffer) if value.segments else (0, None)
            for index, segment in enumerate(value.segments):
                if writes:
                    checksum: Any = self.checksum
                elif put is not None:
                    checksum = put.requests[index]  # known when this read starts
                else:
                    checksum = False if segment.checksum is None else segment.checksum
                start, nbytes, offset = address + segment.start, segment.nbytes, segment.offset
                file = segment.file
                requests.append(
                    self.engine._submit_at(
                        writes, start, nbytes, owner, file, offset, checksum, after
                    )
                )
        except OffloadError as refusal:
            self._catalog.abort(transfer, refusal)
            raise
        self._counts["puts" if writes else "gets"] += 1
        self._counts["bytes_written" if writes else "bytes_read"] += value.nbytes


_open_stores: weakref.WeakSet[TensorStore] = weakref.WeakSet()
close_at_exit(_open_stores)


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise UsageError(f"the name of a tensor must be a str, not {name!r}")


def _transfers(after: Sequence[Transfer]) -> tuple[Transfer, ...]:
    transfers = tuple(after)
    if not all(isinstance(each, Transfer) for each in transfers):
        raise UsageError(f"after must hold tickets of the store, not {list(transfers)!r}")
    return transfers


def _memory(buffer: Any) -> tuple[int, object]:
    """The address of a checked buffer, and the object that keeps it valid. For a tensor this is its
    storage, since the tensor itself can get another storage.
    """
    if is_tensor(buffer):
        return buffer.data_ptr(), buffer.untyped_storage()
    flat = np.frombuffer(buffer, np.uint8)
    return flat.ctypes.data, flat


def paths_of(given: StrPath | Sequence[StrPath], owner: str) -> list[str]:
    """The paths *given* to *owner* by a program, one or several. Raises: UsageError for none."""
    paths = [given] if isinstance(given, str | os.PathLike) else list(given)
    if not paths:
        raise UsageError(f"{owner} needs at least one path")
    return [os.fspath(path) for path in paths]


def _weight_list(weights: Sequence[float] | None, count: int) -> list[float]:
    given = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(given) != count or not all(math.isfinite(weight) and weight > 0 for weight in given):
        raise UsageError(
            f"weights must be {count} numbers above 0, one for each path, not {weights!r}"
        )
    return given
