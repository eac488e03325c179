"""`TensorSwapper`: named tensors in a fixed memory budget, backed by a store."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..io.closing import Closing
from ..io.section import Section, give_back
from ..units import format_bytes
from .runner import Runner
from .schedule import Schedule

if TYPE_CHECKING:
    import torch

    from ..io.pool import PinnedPool
    from ..store.store import TensorStore
    from .values import Glimpse

_COUNTED = (
    *("bytes_read", "bytes_written", "read_wait_seconds", "room_wait_seconds"),
    *("hits", "misses"),
)


@dataclasses.dataclass(frozen=True)
class SwapperStats:
    """Counters of a swapper since it was made.

    Attributes
    ----------
    bytes_read, bytes_written : int
        Bytes read from and written to the drive.
    read_wait_seconds, room_wait_seconds : float
        Time that callers waited for a read, and for memory to become free.
    hits, misses : int
        Swap-ins of values still in memory since their last use, and of values that were read,
        prefetched or not.
    resident_bytes, peak_bytes : int
        Bytes of the budget that values occupy: now, and the maximum so far.
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
    """Named byte arrays in the memory of a pool, swapped to a store if they do not fit.

    A value is in use from `create` or `swap_in` to `release`: its tensor is the memory of the pool
    itself, and must not be used afterwards. An idle value stays in memory while there is space,
    without I/O. Otherwise the value that is needed last is evicted (written back if it changed),
    and prefetched before it is needed again. The swapper learns the order of use from one `step` to
    the next, and accepts hints through `prefetch`.

    All methods are thread-safe; a call that waits for the drive blocks other calls. The engine's
    threads start transfers that wait for other transfers, without a call.

    Parameters
    ----------
    store : TensorStore
        The store, which the caller owns; close it after the swapper.
    pool : PinnedPool
        The pool, which the caller owns and no other swapper uses; the swapper takes all of its
        memory. With one value in use at a time, a pool that holds the largest value is enough.
    lookahead_bytes : int, optional
        How much to prefetch. By default the size of the next two values of a learned order; before
        an order is learned, twice the largest value, at most half of the memory.

    Raises
    ------
    UsageError
        An argument is invalid, or another swapper uses the pool.

    Notes
    -----
    Values that were not flushed are lost when the swapper is closed. Every method raises
    `UsageError` for an unknown name, an invalid size, a closed swapper, and a value whose state does
    not allow the call: in use, or not in use.
    """

    def __init__(
        self, store: TensorStore, pool: PinnedPool, *, lookahead_bytes: int | None = None
    ) -> None:
        if lookahead_bytes is not None and lookahead_bytes < 0:
            raise UsageError(f"{lookahead_bytes} bytes cannot be read ahead")
        pool.take(self)
        self._store = store
        self._pool = pool
        # Guards all attributes below. A call holds it to its end, including waits.
        self._lock = threading.RLock()
        self._changing = Section("swapper")
        self._lookahead_bytes = lookahead_bytes
        self._counts: dict[str, Any] = dict.fromkeys(_COUNTED, 0)  # `reset` does not change them
        self._begin()

    def _begin(self) -> None:
        """Begin without values, in unused memory."""
        self._schedule = Schedule(self._pool.nbytes, self._lookahead_bytes)
        self._runner = Runner(self._store, self._schedule, self._pool, self._changing, self._counts)

    def create(
        self, name: str, nbytes: int, *, lowest: bool = False, once: bool = False
    ) -> torch.Tensor:
        """Create a value, replacing an existing one. It is in use; its contents are undefined.

        Parameters
        ----------
        name : str
        nbytes : int
            Size in bytes.
        lowest : bool
            Place it at the lowest address not in use, and evict the values there. For long uses,
            which would otherwise fragment the memory.
        once : bool
            Expect later periods to use the contents, instead of creating the value anew.

        Returns
        -------
        torch.Tensor
            One dimension of *nbytes* unsigned bytes, valid until `release`.

        Raises
        ------
        OutOfHostMemoryError
            The values in use leave no space; the message gives a sufficient size.
        OffloadError
            The error of a write-back that had to free memory. The value written back stays in
            memory, and *name* is not created.
        """
        with self._lock, self._changing:
            tensor = self._create(name, operator.index(nbytes), lowest, once)
            self._runner.commit(name)  # `retain` kept a version of the replaced value
            self._drop_newer(name)
            return tensor

    def swap_in(self, name: str, *, in_order: bool = True) -> torch.Tensor:
        """Load a value into memory, and start its use. Waits for the drive and for memory.

        Parameters
        ----------
        name : str
        in_order : bool
            Whether the planner learns this use. Pass False if timing decides its place among the
            uses of another thread. A `prefetch` hint can then keep or prefetch the value.

        Returns
        -------
        torch.Tensor
            One dimension of unsigned bytes, as many as created, valid until `release`. After a
            release with fewer bytes, only these bytes have contents.

        Raises
        ------
        OutOfHostMemoryError
            The values in use leave no space.
        IOFailure, TruncatedError, CorruptionError
            The value cannot be read; the call can be repeated.
        OffloadError
            The error of a write-back that had to free memory, as in `create`.
        """
        with self._lock, self._changing:
            self._schedule.need(name, in_order)
            self._runner.read_errors.pop(name, None)
            tensor, was_read = self._obtain(name)
            self._counts["misses"] += was_read
            self._counts["hits"] += not was_read
            return tensor

    def release(self, name: str, *, changed: bool, nbytes: int | None = None) -> None:
        """End the use of the value *name*. Never waits.

        Parameters
        ----------
        name : str
        changed : bool
            Whether the contents changed since `swap_in`. A created value has changed.
        nbytes : int, optional
            The number of leading bytes to keep of a changed value; all by default.
        """
        kept = None if nbytes is None else operator.index(nbytes)
        with self._lock:
            with self._changing:
                self._schedule.release(name, changed, kept)
            self._pump()

    def swap_out(self, name: str, tensor: torch.Tensor) -> None:
        """Store a copy of *tensor*, on any device, as the value *name*, replacing an existing one.
        Raises: as `create`.
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
        """Hint that *names* are used next, in this order, after the names of earlier hints; a
        repeated name moves to its new place. Unknown names are ignored. Never waits.
        """
        names = list(names)  # before the section: an error in the caller's iterable is not ours
        with self._lock:
            with self._changing:
                self._schedule.hint(names)
            self._pump()

    def discard(self, name: str) -> None:
        """Delete the value *name*, in use or not. Its tensor must not be used afterwards. Waits for
        a transfer of the value in flight.
        """
        with self._lock:
            with self._changing:
                self._schedule.size(name)  # raises for an unknown name
                self._drop(name)
                self._drop_newer(name)
            self._pump()

    def stays(self, name: str) -> bool:
        """Whether the plan is to keep the value *name*, which need not exist yet, in memory from
        one use to the next. False until an order of use has been learned.
        """
        with self._lock:
            return self._schedule.stays(name)

    @property
    def everything_stays(self) -> bool:
        """Whether the plan is to keep all values in memory."""
        with self._lock:
            return self._schedule.everything_stays

    def has_room(self, nbytes: int) -> bool:
        """Whether a new value of *nbytes* fits into memory in addition to the values that stay
        there.
        """
        with self._lock:
            return self._schedule.blocks.has_room(nbytes)

    def upcoming(self, count: int) -> list[tuple[Glimpse, torch.Tensor]]:
        """The next values of the learned order, at most *count*, for copies of their contents
        before their use. None unless all values stay in memory. Returns for each value, in order,
        what `is_as_glimpsed` takes, and its memory, which another value may get at any time.
        """
        with self._lock:
            return [
                (seen, self._runner.memory[seen.block.start :][: seen.value.nbytes])
                for seen in self._schedule.upcoming(count)
            ]

    def is_as_glimpsed(self, glimpse: Glimpse) -> bool:
        """Whether the present use of a value found the contents that `upcoming` showed with
        *glimpse*, in the same memory.
        """
        with self._lock:
            return self._schedule.is_as_glimpsed(glimpse)

    def changes(self, name: str) -> None:
        """Make the planner learn now that this use of *name* changes the value, because `release`
        comes after the end of the period.
        """
        with self._lock:
            self._schedule.order.changed(name)

    def foretell(self, sizes: Mapping[str, int], *, at_once: int = 1, stay: bool = False) -> None:
        """Announce the order of use before one can be learned: *sizes* are the bytes of the values
        that each period uses and changes, by name, in order of use, *at_once* of them at the same
        time. They need not exist yet. The swapper chooses the values that stay in memory
        immediately, so they need not move later. With *stay* they stay even if the actual order of
        use differs: the drive has space for little more than the other values. Ignored if a value
        was used before.
        """
        sizes = dict(sizes)
        with self._lock, self._changing:
            self._schedule.foretell(sizes, at_once, stay)

    @property
    def learned(self) -> bool:
        """Whether an order of use is known, from a whole period of uses or from `foretell`."""
        with self._lock:
            return self._schedule.order.learned

    def step(self) -> None:
        """End a period of the order of use; call it once per training step."""
        with self._lock:
            with self._changing:
                self._schedule.step()
            self._pump()

    def flush(self) -> None:
        """Write back every changed value that is not in use, and wait. The values stay in memory.

        Raises
        ------
        OffloadError
            The first error of a write, after trying all writes. A value whose write failed stays in
            memory, and the next `flush` writes it again.
        """
        with self._lock, self._changing:
            self._runner.flush()

    def write_back(self, name: str) -> None:
        """Write back the value *name*, which is not in use, if it has changed, and wait. The value
        stays where it is, even if the write fails. Raises: OffloadError.
        """
        with self._lock, self._changing:
            self._runner.write_back(name)

    def retain(self, name: str) -> None:
        """Keep the on-drive version of the value *name*, in use, until `commit` or `roll_back`.
        Later writes of the value go to separate space. Its contents have not changed since
        `swap_in`, and the drive must have them: call `write_back` before `swap_in`.
        """
        with self._lock, self._changing:
            if name not in self._runner.retained:
                self._schedule.retain(name)
                self._store.retain(name)
                self._runner.retained.add(name)

    def renew_beside(self, name: str) -> torch.Tensor:
        """Create a newer version of the value *name* in other memory, until `commit` or
        `roll_back`. The value keeps its contents, and both may be in use. Returns the memory of the
        newer version, valid until its `release` by `newer_name`; its contents are undefined.
        Raises: as `create`.
        """
        return self.create(newer_name(name), self.nbytes(name))

    def commit(self, name: str) -> None:
        """Release the older version of *name* that `retain` or `renew_beside` has kept, if there is
        one. Neither version of `renew_beside` may be in use. Raises: as `swap_in`.
        """
        newer = newer_name(name)
        with self._lock:
            with self._changing:
                if newer not in self._schedule:
                    self._runner.commit(name)
                    return
                for one in (name, newer):
                    self._runner.settle(one)
                replaced = self._schedule.replace(name, newer)
                if replaced:
                    for one in (name, newer):
                        self._runner.forget_errors(one)
                        self._runner.delete(one)
            if not replaced:  # memory was short, and the newer version is on the drive
                source = self.swap_in(newer)
                with self._changing:
                    memory = self._create(name, source.numel(), lowest=False, once=True)
                memory.copy_(source)
                self.release(name, changed=True)
                self.discard(newer)

    def keep(self, name: str) -> None:
        """After an update of *name* that was interrupted: as `commit` after `retain`; after
        `renew_beside`, drop the newer version.
        """
        with self._lock, self._changing:
            if not self._drop_newer(name):
                self._runner.commit(name)

    def roll_back(self, name: str) -> None:
        """Return to the version of *name* that `retain` or `renew_beside` kept; the newer version
        is not in use. Waits for a transfer of the value in flight. The next use in this period is
        not learned, because it repeats an earlier use.
        """
        with self._lock:
            with self._changing:
                if self._drop_newer(name):
                    self._schedule.order.repeat(name)
                    return
                if name not in self._runner.retained:
                    raise UsageError(f"nothing is retained of {name!r}")
                self._runner.settle(name)
                self._schedule.roll_back(name)
                self._runner.forget_errors(name)
                self._store.roll_back(name)
                self._runner.retained.remove(name)
            self._pump()

    def lacks_writes(self) -> bool:
        """Wait for writes in flight. Returns: whether a write has failed whose error no call has
        raised. Its value is in memory, and `flush` writes it again.
        """
        with self._lock, self._changing:
            self._runner.finish_writes()
            return bool(self._runner.write_errors)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Context in which calls of other threads wait. At its end it must have no value in use."""
        with self._lock:
            yield

    def in_use(self) -> bool:
        """Whether any value is in use: between `create` or `swap_in` and `release`."""
        with self._lock:
            return self._schedule.in_use()

    @property
    def interrupted(self) -> bool:
        """Whether an exception has interrupted a call: see `reset`."""
        with self._lock:
            return bool(self._changing.interrupted_by)

    def reset(self) -> None:
        """Delete every value, in use or not, and every tensor of the store. Raises: as
        `TensorStore.reset`.

        Call it to continue after an exception, such as KeyboardInterrupt or MemoryError, has
        interrupted a call. Until then, every other method that uses values raises UsageError.
        """
        with self._lock:
            if self._changing.closed:
                raise UsageError("the swapper is closed")
            self._changing.interrupted_by = "reset()"  # in case an exception interrupts this
            self._store.reset()  # no transfer uses the memory from here on
            self._begin()
            self._changing.interrupted_by = ""

    def end_uses(self) -> None:
        """Release all values as changed, except values of ``create(lowest=True)``. Does nothing
        while `interrupted`. For the only user of the swapper, after an exception has ended a call.
        """
        self.release_lock()
        with self._lock:
            if not (self._changing.interrupted_by or self._changing.closed):
                with self._changing:
                    for name in self._schedule.names_in_use():
                        self._schedule.release(name, True, None)

    def release_lock(self) -> None:
        """Release the lock if this thread holds it outside of a call: see `give_back`."""
        give_back(self._lock)

    def grow(self, nbytes: int, *, pin: bool = True) -> None:
        """Grow the pool and the budget to *nbytes* in total. All values stay where they are, even
        values in use. *pin*, and errors: as of `PinnedPool.grow`.
        """
        import torch

        with self._lock:
            self._changing.check()
            self._pool.grow(nbytes, pin=pin)  # if it raises MemoryError, nothing has changed
            with self._changing:
                pool = self._pool
                if pool.nbytes > self._schedule.nbytes:
                    self._runner.memory = torch.frombuffer(pool.memory, dtype=torch.uint8)
                    self._schedule.grow(pool.nbytes)
            self._pump()

    def nbytes(self, name: str) -> int:
        """Size of the value *name* as created, in bytes."""
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
        """A snapshot of the counters. Cheap enough to poll: it never waits."""
        # Do not take the lock: a call holds it while it waits for the drive.
        blocks = self._schedule.blocks
        return SwapperStats(
            **self._counts,
            resident_bytes=blocks.used_bytes,
            peak_bytes=blocks.peak_bytes,
            unused_prefetches=blocks.unused_prefetches,
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
            if self._changing.closed:
                return
            interrupted = self._changing.interrupted_by or self._store.interrupted
            if not interrupted:
                with self._changing:
                    self._runner.finish_all()
                    for name in self._schedule.names():
                        self._runner.delete(name)
            # The store waits for the transfers of an interrupted swapper, and frees their space.
            self._changing.closed = True
            self._runner.memory = self._runner.memory.new_empty(0)
            self._pool.give_back()
            if not interrupted:
                self._runner.raise_write_errors(of_full_drive=False)

    def __repr__(self) -> str:
        used, total = (
            format_bytes(self._schedule.blocks.used_bytes),
            format_bytes(self._schedule.nbytes),
        )
        return f"<TensorSwapper {'closed' if self._changing.closed else f'{len(self._schedule.names())} values, {used} of {total} in memory'}>"

    def _obtain(self, name: str) -> tuple[torch.Tensor, bool]:
        """Provide the value that was requested from the schedule. Returns: its tensor, and whether
        it was read.
        """
        offset, was_read = self._runner.obtain(name)
        return self._runner.memory[offset : offset + self._schedule.size(name)], was_read

    def _create(self, name: str, nbytes: int, lowest: bool, once: bool) -> torch.Tensor:
        """As `create`, which also drops other versions of the value."""
        while (blocking := self._schedule.blocks_create(name, nbytes)) is not None:
            self._runner.start_all(self._schedule.take_pending())
            self._runner.finish(blocking)
        self._schedule.create(name, nbytes, lowest, once)
        self._runner.forget_errors(name)
        try:
            return self._obtain(name)[0]
        except BaseException as error:
            whole = self._changing.allows(error) and not self._store.interrupted
            if whole and name not in self._schedule:
                self._runner.delete(name)
            raise

    def _drop(self, name: str) -> None:
        self._runner.settle(name)
        self._schedule.discard(name)
        self._runner.forget_errors(name)
        self._runner.delete(name)

    def _drop_newer(self, name: str) -> bool:
        """Delete the version that `renew_beside` has made, if there is one. Returns: whether."""
        newer = newer_name(name)
        if newer not in self._schedule:
            return False
        self._drop(newer)
        return True

    def _pump(self) -> None:
        """Start the transfers that can start now, in a separate section: the call itself has ended."""
        with self._changing:
            self._runner.advance()


def newer_name(name: str) -> str:
    """The name of the newer version of *name*: see `TensorSwapper.renew_beside`."""
    return f"{name}+"
