"""`TensorStore`: named tensors on one or more drives."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import NoSpaceError, UsageError, whole_number
from ..hardware.config import AioConfig
from ..io.closing import Closing
from ..io.engine import Engine, StrPath, Ticket, close_at_exit
from .slabs import Stripes
from .snapshot import Snapshot
from .values import StoreTicket as StoreTicket
from .values import Value, Values

if TYPE_CHECKING:
    from ..io.engine import Buffer

_STEPS_REMEMBERED = 1000
_FIELD_NAME = re.compile(":[^:]*:")  # in the format of a buffer


@dataclasses.dataclass(frozen=True)
class StoreStats:
    """What a store has been asked to move since it was made, snapshots' reads and restores' writes
    included.

    puts, gets: calls. bytes_written_by_step: for each of the last 1000 calls of
    `TensorStore.end_step`, the bytes written since the one before.
    """

    puts: int
    gets: int
    bytes_read: int
    bytes_written: int
    bytes_written_by_step: tuple[int, ...]


class TensorStore(Closing):
    """Named tensors in preallocated files on the drives of *paths*, read and written
    asynchronously.

    A tensor of 4 MiB or more is cut over the drives in proportion to *weights* (equal ones unless
    given: pass measured speeds), a smaller one goes to the drive that has the least for its weight;
    a drive that is full leaves its part to the others. *checksum* sums every byte on its way out
    and checks it on its way back. The engine is made with *config*, or is the caller's *engine*,
    which the store does not close.

    Transfers on one name keep the order of the calls: a get waits for the put before it, and a put
    of the same size for the gets before it, both inside the call, unless it names their tickets
    (*after*): it then starts by itself when they ended well, and ends with CancelledError as soon
    as one failed. All methods may be called from any thread, but not from a process forked since.
    The files have no names: they are gone with the store or its process, also after kill -9, and
    stores in one directory never meet.

    Raises: UsageError; IOFailure when a path is no directory that can be written to;
    UnsupportedError when the drive or this build lacks something that *config* or *checksum* wants.
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
            raise UsageError(
                "an engine has its configuration already: pass config or engine, not both"
            )
        self.checksum = checksum
        self._counts = dict.fromkeys(("puts", "gets", "bytes_read", "bytes_written"), 0)
        self._bytes_written_before = 0
        self._bytes_written_by_step: deque[int] = deque(maxlen=_STEPS_REMEMBERED)
        with contextlib.ExitStack() as undo:
            self._owned_engine = undo.enter_context(Engine(config)) if engine is None else None
            self.engine = engine or self._owned_engine or Engine()
            self._room = Stripes(self.engine, self.paths, shares)
            # its lock is for the room and the counts, too
            self._values = Values(self._room, checksum)
            if checksum:
                with self.engine.open_anonymous(self.paths[0]) as file:
                    # refused here where this build has none
                    self.engine.write(b"", file, checksum=True)
            undo.pop_all()
        _open_stores.add(self)

    def put(self, name: str, tensor: Buffer, *, after: Sequence[StoreTicket] = ()) -> StoreTicket:
        """Start writing *tensor* under *name*, in place of what was there, once all of *after*
        ended well.

        A tensor of the size that *name* has overwrites it: when the write fails, the old value is
        lost as well, and `get` raises that error until the next put. One of another size gets a new
        place; the old one is freed when the write is done, and stays the value when it fails. One
        that was cancelled leaves the old value in either case.

        Shapes: *tensor* is contiguous, on the CPU, or has the buffer protocol. Lifetime: its memory
        is held until the ticket is done, as by `Engine.write`; do not change its contents before.
        Raises: UsageError; NoSpaceError, with the numbers, when it does not fit on the drives,
        which leaves *name* as it was; from `StoreTicket.wait` IOFailure, NoSpaceError and
        CancelledError. Source: io_submit(2).
        """
        if not isinstance(name, str):
            raise UsageError(f"the name of a tensor must be a str, not {name!r}")
        nbytes = _checked_nbytes(tensor, writable=False)
        while True:
            with self._values.using():
                under_way = self._values.conflicts(name, nbytes, after)
                if not under_way:
                    try:
                        return self._start(
                            name, self._values.place_for(name, nbytes), tensor, True, after
                        )
                    except NoSpaceError:
                        under_way += self._values.may_free_room()
                        if not under_way:
                            raise
            for one in under_way:
                one.finish()

    def get(self, name: str, out: Buffer, *, after: Sequence[StoreTicket] = ()) -> StoreTicket:
        """Start reading tensor *name* into *out*, as of the last put, once all of *after* ended
        well.

        Shapes: *out* is contiguous, on the CPU, with the stored tensor's number of bytes, or has
        the buffer protocol and is writable. Lifetime: the memory of *out* is held until the ticket
        is done, as by `Engine.read`; do not use its contents before. Raises: UsageError when there
        is no such tensor or the sizes differ; the error of the put that lost it; from
        `StoreTicket.wait` IOFailure, TruncatedError, CancelledError, BufferChangedError, and
        CorruptionError where the store keeps checksums. Source: io_submit(2).
        """
        nbytes = _checked_nbytes(out, writable=True)
        while True:
            with self._values.using():
                under_way = self._values.conflicts(name, after=after)
                if not under_way:
                    value = self._values.current(name)
                    if nbytes != value.nbytes:
                        raise UsageError(
                            f"tensor {name!r} has {value.nbytes} bytes, not the {nbytes} of what it is to be read into"
                        )
                    return self._start(name, value, out, False, after)
            for one in under_way:
                one.finish()

    def delete(self, name: str) -> None:
        """Forget tensor *name*; its room is free once the transfers under way on it are finished.
        Raises: UsageError when there is none.
        """
        with self._values.using():
            if self._values.nbytes(name) is None:
                raise UsageError(f"no tensor {name!r} in the store")
            self._values.forget(name)

    def nbytes(self, name: str) -> int:
        """Bytes of tensor *name*, as of the last put. Raises: UsageError when there is none."""
        with self._values.using():
            nbytes = self._values.nbytes(name)
        if nbytes is None:
            raise UsageError(f"no tensor {name!r} in the store")
        return nbytes

    def names(self) -> list[str]:
        """Every name in the store, those included whose put is under way or was lost."""
        with self._values.using():
            return list(self._values.sizes())

    def __contains__(self, name: object) -> bool:
        with self._values.using():
            return self._values.nbytes(name) is not None

    def __len__(self) -> int:
        return len(self.names())

    @property
    def used_bytes(self) -> int:
        """Bytes on the drives that tensors have, each part rounded up to 4 KiB, those under way
        included.
        """
        with self._values.using():
            return self._room.used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that could still be put: what the store has allocated and not used, and what the
        drives have left.
        """
        with self._values.using():
            return self._room.nbytes - self._room.used_bytes + self._room.available_bytes

    def bytes_on(self, path: StrPath) -> int:
        """Bytes that tensors have on *path*, one of the store's. Raises: UsageError."""
        with self._values.using():
            found = [
                drive.used_bytes for drive in self._room.drives if drive.path == os.fspath(path)
            ]
            if not found:
                raise UsageError(
                    f"{os.fspath(path)!r} is not a path of this store, which has {', '.join(self.paths)}"
                )
            return sum(found)

    def reserve(self, nbytes: int) -> None:
        """Allocate room for *nbytes* in all, what is used already included, so that a drive that is
        too small is known now.

        Raises: NoSpaceError, with what was asked for, what each drive has and what is missing;
        UsageError. Source: fallocate(2).
        """
        nbytes = whole_number("nbytes", nbytes)
        with self._values.using():
            self._room.reserve(nbytes)

    def drain(self) -> None:
        """Wait until no transfer is under way. Their errors stay with their tickets."""
        with self._values.using():
            under_way = list(self._values.unsettled)
        for ticket in under_way:
            ticket.finish()

    def snapshot(self, directory: StrPath, names: Iterable[str] | None = None) -> None:
        """Write the tensors *names*, all unless given, into *directory*, so that `restore` finds
        them there in another process.

        The directory is made where it is missing, and may lie on any drive; one whose filesystem
        has no O_DIRECT is written through the page cache. An older snapshot in it stays the valid
        one until the new one is whole and synced, also when this process is killed or the power
        goes, so there must be room for both. Puts under way are waited for; a put of the same size
        to one of the names waits until the snapshot is written.

        Units: 32 MiB of memory, for reads and writes that overlap. Raises: UsageError, also where
        another snapshot is just being written to *directory*; the error of a put that lost one of
        the names; NoSpaceError and IOFailure; CorruptionError where the store keeps checksums. The
        older snapshot is whole after each of them. Source: rename(2), fsync(2), flock(2).
        """
        chosen = self.names() if names is None else list(dict.fromkeys(names))
        with self._values.held(chosen) as values:
            with self._values.using():
                self._counts["bytes_read"] += sum(value.nbytes for value in values.values())
            Snapshot(self.engine, directory).save(
                {name: value.parts for name, value in values.items()}
            )

    def restore(self, directory: StrPath) -> list[str]:
        """Put every tensor of the snapshot in *directory*, and return their names; tensors that
        have these names are replaced.

        All are read and checked before the first is replaced, so there must be room for both, and
        nothing is changed by a restore that fails.

        Units: 32 MiB of memory, for reads and writes that overlap. Raises: UsageError when there is
        no snapshot in *directory*, or one is just being written; CorruptionError when it is not as
        it was written; UnsupportedError when a later version or a build with other checksums wrote
        it; NoSpaceError and IOFailure. Source: flock(2).
        """
        with self._values.using():
            under_way = self._values.may_free_room()
        for ticket in under_way:
            ticket.finish()
        with Snapshot(self.engine, directory).opened() as saved:
            values: dict[str, Value] = {}
            try:
                with self._values.using():
                    for name, nbytes in saved.sizes().items():
                        values[name] = self._values.new(nbytes, "restore")
                parts = saved.load(
                    {name: value.extents for name, value in values.items()}, self.checksum
                )
                with self._values.using():
                    for name, value in values.items():
                        value.parts = parts[name]
                        self._counts["bytes_written"] += value.nbytes
                        self._values.install(name, value)
            except BaseException:
                with self._values.lock:
                    for value in values.values():
                        self._values.let_go(value)
                raise
        return list(values)

    def end_step(self) -> None:
        """Close the books of a training step: see `StoreStats.bytes_written_by_step`."""
        with self._values.using():
            self._bytes_written_by_step.append(
                self._counts["bytes_written"] - self._bytes_written_before
            )
            self._bytes_written_before = self._counts["bytes_written"]

    def stats(self) -> StoreStats:
        """Counters since the store was made; cheap enough to poll."""
        with self._values.using():
            return StoreStats(
                **self._counts, bytes_written_by_step=tuple(self._bytes_written_by_step)
            )

    def close(self) -> None:
        """Wait for every transfer and give the room back; a second call does nothing, nor does one
        in a forked child.

        Raises: the first failure of a put or get that nobody waited for.
        """
        try:
            self._values.check_process()
        except UsageError:
            return
        _open_stores.discard(self)
        with self._values.lock:
            self._values.closed = True
            under_way = list(self._values.unsettled)
        for ticket in under_way:
            ticket.finish()
        with self._values.lock:
            self._room.close()
            unheard = self._values.take_unheard()
        if self._owned_engine is not None:
            self._owned_engine.close()
        if unheard is not None:
            unheard.raise_failure()

    def __repr__(self) -> str:
        state = "closed" if self._values.closed else f"{len(self._values.sizes())} tensors"
        return f"<TensorStore {', '.join(self.paths)}: {state}>"

    def _start(
        self, name: str, value: Value, buffer: Buffer, writes: bool, after: Sequence[StoreTicket]
    ) -> StoreTicket:
        """Start the transfers of every part; when one is refused, none is left under way. Raises:
        OffloadError.
        """
        put = self._values.put_under_way(name) if self.checksum and not writes else None
        ticket = self._values.begin(name, value, writes)
        blockers = (
            [transfer._request for other in after for transfer in other._transfers] if after else []
        )
        try:
            address, owner = _memory(buffer) if value.parts else (0, None)
            for index, part in enumerate(value.parts):
                if writes:
                    checksum: bool | int | Ticket = self.checksum
                elif put is not None:
                    checksum = put._transfers[index]  # whose sum is known when this read starts
                else:
                    checksum = False if part.checksum is None else part.checksum
                ticket._transfers.append(
                    self.engine._submit_at(
                        writes,
                        address + part.start,
                        part.nbytes,
                        owner,
                        part.extent.file,
                        part.offset,
                        checksum,
                        blockers,
                    )
                )
        except BaseException as refusal:
            self._values.refuse(ticket, refusal)
            raise
        self._counts["puts" if writes else "gets"] += 1
        self._counts["bytes_written" if writes else "bytes_read"] += value.nbytes
        return ticket


_open_stores: weakref.WeakSet[TensorStore] = weakref.WeakSet()
close_at_exit(_open_stores)


def _checked_nbytes(buffer: Any, writable: bool) -> int:
    """Bytes of what the engine would take. It is asked before there is anything to undo, and a part
    of it alone says less than the whole does.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        if (
            not (buffer.is_cpu and buffer.layout is torch.strided and buffer.is_contiguous())
            or buffer.is_conj()
            or buffer.is_neg()
        ):
            raise UsageError(
                "a tensor must be contiguous and on the CPU, and no conjugate or negative view: pass tensor.cpu().contiguous() or the like"
            )
        return int(buffer.nbytes)
    try:
        view = memoryview(buffer)
    except (BufferError, TypeError, ValueError) as error:
        raise UsageError(
            f"a buffer must be a tensor on the CPU or have the buffer protocol: {error}"
        ) from None
    if not view.c_contiguous or (writable and view.readonly):
        raise UsageError(f"a buffer must be contiguous{' and writable' if writable else ''}")
    if "O" in _FIELD_NAME.sub("", view.format):
        raise UsageError(
            "the elements of the buffer are Python objects, whose bytes mean nothing on a drive"
        )
    return view.nbytes


def _memory(buffer: Any) -> tuple[int, object]:
    """The address of such a buffer, and what keeps it there: of a tensor the storage, since the
    tensor itself can be pointed elsewhere.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        return buffer.data_ptr(), buffer.untyped_storage()
    flat = np.frombuffer(buffer, np.uint8)
    return flat.ctypes.data, flat


def _path_list(paths: StrPath | Sequence[StrPath]) -> list[str]:
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise UsageError("a store needs at least one path")
    return [os.fspath(path) for path in given]


def _weight_list(weights: Sequence[float] | None, count: int) -> list[float]:
    given = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(given) != count or not all(math.isfinite(weight) and weight > 0 for weight in given):
        raise UsageError(
            f"weights must be {count} numbers above 0, one for each path, not {weights!r}"
        )
    return given
