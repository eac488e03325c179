"""`ActivationCache`: moves saved tensors to a swapper, and back before backward needs them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..device.modes import check_no_capture
from ..device.stayed import ModifiedError, Stayed, is_plain, is_reused
from ..errors import OffloadError, UsageError, known
from ..io.section import Section
from ..swap.tier import Tier
from ..units import format_bytes
from .chunks import Chunk, Chunks
from .copies import Copier, Copy
from .order import BackwardOrder
from .saved import (
    Held,
    Moved,
    Packed,
    Parts,
    counter_of,
    is_distributed,
    is_weight,
    span,
)
from .storages import SavedBytes, Storages, bytes_of, weak_reference

_log = logging.getLogger(__name__)

_HELD = 2  # copies of saved tensors in flight that the computation does not wait for
# Tensors copied to a GPU ahead, unless the next node needs more.
_AHEAD = 2
_PREFETCHED = 8  # chunks to prefetch
_NEAR = 32  # a restored tensor stays on its device if it is needed again within so many
# How far to look for the next chunks, once for each chunk that is swapped in.
_FAR = 8192


@dataclasses.dataclass(frozen=True)
class ActivationStats:
    """Counters of a `save_on_nvme` since it was made. Bytes and seconds.

    Attributes
    ----------
    saved_bytes
        Of tensors copied from their device.
    shared_bytes
        Of tensors whose bytes were saved already, for another operation or as part of another
        tensor.
    kept_bytes
        Of tensors that stayed on their device because of their size: below ``min_bytes``, or above
        ``host_memory``.
    forward_wait_seconds
        Blocked, mostly in the forward pass, until writes had freed host memory.
    backward_wait_seconds
        Blocked, in the backward pass, until a tensor was read. Where one of the two is long, the
        drive limits the step.
    alive_bytes
        Of saved tensors that graphs still hold.
    bytes_written, bytes_read
        To and from the drives.
    host_bytes, peak_host_bytes
        Host memory in use: now, and at most.
    """

    saved_bytes: int = 0
    shared_bytes: int = 0
    kept_bytes: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    forward_wait_seconds: float = 0.0
    backward_wait_seconds: float = 0.0
    alive_bytes: int = 0
    host_bytes: int = 0
    peak_host_bytes: int = 0


class ActivationCache:
    """Packs tensors of *least_bytes* and more into the swapper of *tier*, and unpacks them. All
    methods are thread-safe.

    A tensor is copied from its device while computation goes on; the computation waits for the copy
    `_HELD` tensors later, which frees the memory without polling. In backward, each unpacked tensor
    predicts the next ones: the swapper prefetches their chunks, and the first are copied to their
    device.

    An exception in the middle of a call, such as KeyboardInterrupt, can leave the tables
    inconsistent. The next call then starts with empty tables, and tensors that were saved before
    are lost.
    """

    def __init__(self, tier: Tier, least_bytes: int) -> None:
        self._tier = tier
        self._least_bytes = max(least_bytes, 1)
        self._lock = threading.RLock()  # guards all of the below
        self._copier = Copier()
        # in flight, in the order of their start
        self._saving: deque[tuple[SavedBytes, Copy]] = deque()
        self._restoring: deque[tuple[SavedBytes, Copy]] = deque()
        self._warned_too_large = False
        self._searched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._warned_bypassing = False
        self._closed = False
        self._process_id = os.getpid()
        # Plain numbers, made an `ActivationStats` on request: a new dataclass for every tensor
        # costs more than counting.
        self._counts = dict.fromkeys(
            ("saved_bytes", "shared_bytes", "kept_bytes", "alive_bytes"), 0
        )
        self._moved: dict[str, Any] = {}
        self._section = Section("save_on_nvme")
        # A copy in flight must not lose its host memory. Finalizers run in reverse order, so the
        # tier, which is older, is closed after this.
        self._wait_at_end = weakref.finalize(self, _wait_for_all, self._saving, self._restoring)
        self._make_tables()

    def _make_tables(self) -> None:
        # Of saved tensors that no graph holds any more. Appended to without the lock.
        self._dropped: deque[Held] = deque()
        self._held: dict[int, Held] = {}  # by the saved tensor's number
        self._values: dict[int, SavedBytes] = {}  # by the same number
        self._order = BackwardOrder()
        self._storages = Storages()
        self._on_device: set[SavedBytes] = set()  # values with `memory`
        self._chunks = Chunks(self._tier, weakref.WeakMethod(self._finish_first))
        self._prefetched_at = 0  # `Chunks.swapped_in` at the last prefetch
        self._counts["alive_bytes"] = 0

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Context that changes the tables: empty ones if an exception has ended an earlier change."""
        with self._lock:
            if self._closed:
                raise UsageError(
                    "save_on_nvme is closed: make another, and close it after the last backward"
                )
            if self._section.interrupted_by:
                _wait_for_all(self._saving, self._restoring)
                self._tier.reset()
                self._chunks.abandon()
                self._make_tables()
                self._section.interrupted_by = ""
            with self._section:
                yield

    def begin(self) -> None:
        """A forward pass begins. Raises: UsageError when closed, or in a forked child process."""
        self._section.check_process()
        with self._changing():
            self._collect()
            if not self._values and self._chunks.begin_step():
                self._storages.begin_step()

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Offload *tensor*, or keep it on its device. Raises: the drive's errors; UnsupportedError."""
        # A forked DataLoader worker has neither the memory nor the engine. When closed, a
        # KeyboardInterrupt at the end of the context has left the hooks to all later passes.
        if is_weight(tensor) or self._closed or os.getpid() != self._process_id:
            return Stayed(tensor)
        if is_distributed(tensor):
            # Its parts do not share its version counter.
            return Parts(tensor, lambda part: self._pack(part, counter_of(tensor)))
        return self._pack(tensor, counter_of(tensor))

    def unpack(self, saved: Packed) -> torch.Tensor:
        """The tensor that was packed. Raises: RuntimeError when it was modified in place since; the
        drive's errors; UsageError when closed.
        """
        if isinstance(saved, Stayed):
            return saved.restore()
        if isinstance(saved, Parts):
            return saved.restore(self.unpack)
        saved.check()
        self._section.check_process()
        with self._changing():
            self._collect()
            held = self._held.get(saved.number)
            if held is None or held() is not saved:
                raise UsageError(
                    "save_on_nvme was interrupted after this tensor was saved, and has lost it: run the forward pass again"
                )
            value = self._values[saved.number]
            storage, offset = value.on_device() or self._restore_needed(value)
            if value.filled is not None:
                value.filled.precede(storage)
            if value.users == 1:
                self._drop(value)
            self._look_ahead(value, saved.number)
            return saved.restore(storage, offset)

    def unpack_in_checkpoint(self, saved: Packed) -> torch.Tensor:
        """`unpack` of a tensor that a function under `torch.utils.checkpoint` has saved itself."""
        try:
            return self.unpack(saved)
        except ModifiedError as error:
            raise ModifiedError(
                f"{error}; a save_on_nvme that a checkpointed function enters saves tensors, which are not recomputed then: enter it around the checkpoint"
            ) from None

    def offloads(self, tensor: torch.Tensor) -> bool:
        """Whether *tensor* is of the kind and size that `pack` offloads."""
        local: Any = tensor
        if is_distributed(tensor):
            local = local._local_tensor
        if is_weight(tensor) or not is_plain(local) or tensor.is_inference() or is_reused(local):
            return False
        begin, end = span(local)
        return self._fits(end - begin)

    def warn_bypassing(self, tensors: Iterable[torch.Tensor], of: Any = None) -> None:
        """Log, once, that a checkpoint keeps *tensors* in memory, and their bytes. The tensors of a
        function are looked for once: *of* is its code, or its class.
        """
        if self._warned_bypassing or (of is not None and of in self._searched):
            return
        if of is not None:
            self._searched.add(of)
        found = {id(tensor): tensor for tensor in tensors if self.offloads(tensor)}
        if found:
            self._warned_bypassing = True
            _log.warning(
                "%s or more that a checkpoint keeps from a closure, in objects, or with allow_cache_entry_mutation stay in memory until backward: "
                "pass them to the checkpointed function as arguments",
                format_bytes(sum(tensor.nbytes for tensor in found.values())),
            )

    def release_device(self) -> None:
        """Free device memory held by copies in flight."""
        with self._lock:
            if not self._section.interrupted_by:
                for _, copy in self._saving:
                    copy.release_device()

    def stats(self) -> ActivationStats:
        """The counters since this was made."""
        with self._lock:
            if not (self._closed or self._section.interrupted_by):
                with self._changing():
                    self._collect()
            moved = None if self._closed else self._tier.counters()
            if moved is not None:
                self._moved = {
                    "forward_wait_seconds": moved.room_wait_seconds,
                    "backward_wait_seconds": moved.read_wait_seconds,
                    "bytes_written": moved.bytes_written,
                    "bytes_read": moved.bytes_read,
                    "host_bytes": moved.resident_bytes,
                    "peak_host_bytes": moved.peak_bytes,
                }
            return ActivationStats(**self._counts, **self._moved)

    def close(self) -> None:
        """Wait for copies in flight, then free memory and drives. In a forked child, do nothing."""
        if os.getpid() != self._process_id:
            return
        with self._lock:
            self.stats()
            self._closed = True
            self._wait_at_end()
            for value in list(self._on_device):
                self._drop(value)
            self._tier.close()

    def __repr__(self) -> str:
        alive = format_bytes(self._counts["alive_bytes"])
        return f"{', '.join(self._tier.paths)}: {'closed' if self._closed else f'{alive} of saved tensors'}"

    def _pack(self, tensor: torch.Tensor, counter: torch.Tensor) -> Packed:
        autograd: Any = torch.autograd  # its stub is incomplete
        if not is_plain(tensor) or is_reused(tensor):
            return Stayed(tensor)
        begin, end = span(tensor)
        if not self._fits(end - begin):
            self._keep(end - begin)
            return Stayed(tensor)
        with self._changing():
            check_no_capture("keep its tensors on a drive: capture it outside of save_on_nvme")
            self._collect()
            storage = tensor.untyped_storage()
            if self._storages.lasts(storage):
                return Stayed(tensor)
            value = self._storages.find(storage, counter, begin, end)
            if value is None:
                value = self._save(storage, counter, begin, end)
            else:
                self._counts["shared_bytes"] += end - begin
            value.users += 1
            # A node saves all of its tensors before the next node gets its sequence number. Source:
            # at::sequence_number.
            number = self._order.save((threading.get_ident(), autograd._get_sequence_nr()))
            self._values[number] = value
            saved = Moved(tensor, number)
            held = self._held[number] = Held(saved, self._dropped.append)
            held.number = number
            return saved

    def _fits(self, nbytes: int) -> bool:
        return self._least_bytes <= nbytes <= self._tier.cap_bytes

    def _save(
        self, storage: torch.UntypedStorage, counter: torch.Tensor, begin: int, end: int
    ) -> SavedBytes:
        chunk, place = self._chunks.reserve(end - begin)
        value = SavedBytes(
            chunk,
            place,
            begin,
            end,
            counter._version,
            storage.device,
            weak_reference(storage),
            weakref.ref(counter),
        )
        try:
            copy = self._copier.save(bytes_of(storage, begin, end), self._host_memory_of(value))
        except BaseException:
            self._chunks.forget(chunk)
            self._chunks.unpin(chunk)
            raise
        if copy is None:
            self._chunks.unpin(chunk)
        else:
            value.copy = copy
            self._saving.append((value, copy))
            if len(self._saving) > _HELD:
                self._saving[-1 - _HELD][1].release_device()
        self._storages.add(value)
        self._counts["saved_bytes"] += end - begin
        self._counts["alive_bytes"] += end - begin
        return value

    def _restore_needed(self, value: SavedBytes) -> tuple[torch.UntypedStorage, int]:
        """`_restore` *value*, if need be in the device memory of tensors restored ahead."""
        try:
            return self._restore(value)
        except torch.OutOfMemoryError:
            if not self._on_device:
                raise
            while self._restoring:
                self._finish(*self._restoring[0])
            for other in list(self._on_device):
                self._drop(other)
            return self._restore(value)

    def _restore(self, value: SavedBytes) -> tuple[torch.UntypedStorage, int]:
        """Restore *value* on its device, where it stays until `_look_ahead` drops it."""
        if value.copy is not None:
            self._finish(value, value.copy)
        self._chunks.swap_in(value.chunk)
        try:
            value.memory, copy = self._copier.restore(self._host_memory_of(value), value.device)
        except BaseException:
            self._chunks.unpin(value.chunk)
            raise
        value.filled = value.copy = copy
        if copy is None:
            self._chunks.unpin(value.chunk)
        else:
            self._restoring.append((value, copy))
        self._on_device.add(value)
        storage = value.memory.untyped_storage()
        value.restored = weak_reference(storage)
        return storage, value.begin

    def _host_memory_of(self, value: SavedBytes) -> torch.Tensor:
        """The host memory of *value*, whose chunk is pinned."""
        return known(value.chunk.place)[value.place : value.place + value.nbytes]

    def _look_ahead(self, asked: SavedBytes, number: int) -> None:
        """Prefetch the tensors after *number*, and drop restored ones that are not needed soon."""
        self._order.ask(number)
        if self._on_device:
            near = {self._values[one] for one in self._order.after(number, _NEAR)}
            for value in self._on_device.difference(near):
                self._drop(value)
        # What fails ahead of its use fails again, and is raised, when backward needs it.
        with contextlib.suppress(OffloadError, torch.OutOfMemoryError):
            if self._prefetched_at != self._chunks.swapped_in:
                self._prefetched_at = self._chunks.swapped_in
                self._chunks.prefetch(self._next_chunks(asked.chunk, number))
            if self._copier.overlaps(asked.device):
                # A node unpacks all of its tensors before it computes. Only the next node's can be
                # copied while it does.
                for value in dict.fromkeys(
                    self._values[one] for one in self._order.next_node(number, _AHEAD)
                ):
                    if value.on_device() is None and self._copier.overlaps(value.device):
                        self._restore(value)

    def _next_chunks(self, asked: Chunk, number: int) -> list[Chunk]:
        """The chunks that backward needs after *number*, the next one first."""
        found: dict[Chunk, None] = {}
        for one in self._order.after(number, _FAR):
            found[self._values[one].chunk] = None
            if len(found) > _PREFETCHED:
                break
        found.pop(asked, None)
        return list(found)[:_PREFETCHED]

    def _drop(self, value: SavedBytes) -> None:
        """Free the restored bytes of *value* on its device."""
        value.memory = None
        self._on_device.discard(value)

    def _collect(self) -> None:
        """Process dropped tensors and finished copies."""
        while self._dropped:
            number = self._dropped.popleft().number
            self._order.forget(number)
            del self._held[number]
            value = self._values.pop(number)
            value.users -= 1
            if value.users == 0:
                self._storages.remove(value)
                self._drop(value)
                self._counts["alive_bytes"] -= value.nbytes
                self._chunks.forget(value.chunk)
        for in_flight in (self._saving, self._restoring):
            while in_flight and in_flight[0][1].done():
                self._finish(*in_flight[0])

    def _finish(self, value: SavedBytes, copy: Copy) -> None:
        copy.wait()
        (self._saving if (value, copy) in self._saving else self._restoring).remove((value, copy))
        value.copy = None
        self._chunks.unpin(value.chunk)

    def _finish_first(self) -> bool:
        """Wait for the oldest copy; False when none is in flight."""
        for in_flight in (self._saving, self._restoring):
            if in_flight:
                self._finish(*in_flight[0])
                return True
        return False

    def _keep(self, nbytes: int) -> None:
        self._counts["kept_bytes"] += nbytes
        if nbytes > self._tier.cap_bytes and not self._warned_too_large:
            self._warned_too_large = True
            warnings.warn(
                f"a saved tensor of {format_bytes(nbytes)} stays on its device: it is larger than host_memory, {format_bytes(self._tier.cap_bytes)}",
                RuntimeWarning,
                stacklevel=3,
            )


def _wait_for_all(*in_flight: deque[tuple[SavedBytes, Copy]]) -> None:
    for copies in in_flight:
        for _, copy in copies:
            with contextlib.suppress(RuntimeError):  # a CUDA error, with which the copy failed too
                copy.wait()
        copies.clear()
