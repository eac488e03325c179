"""`Shelf`: what the graphs of a training step have saved, on its way to a swapper and back ahead of need."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..units import format_bytes
from .copies import Copier, Copy, check_no_capture
from .order import BackwardOrder
from .saved import Moved, Packed, Parts, Stayed, counter_of, is_distributed, is_plain, is_weight, span
from .storages import Storages, Value, bytes_of, weak_reference

if TYPE_CHECKING:
    import torch

    from ..tier import Tier

_HELD = 2  # tensors that computing need not wait for while they are copied away
_AHEAD = 2  # tensors that are copied to a GPU before they are asked for, if the next operation does not want more
_HINTED = 8  # tensors that the swapper is told of
_FIRST_BYTES = 256 << 20  # of host memory, as far as there may be so much
_GROWTH = 4  # times as much, where it does not do
_NEAR = 32  # saved tensors among which one that is needed again stays on its device


@dataclasses.dataclass(frozen=True)
class ActivationStats:
    """What became of saved tensors since their context was made.

    saved_bytes: that left their device. shared_bytes: of tensors whose memory had been saved already. kept_bytes: of those that stayed on it for their
    size, too small or too large. bytes_written, bytes_read: to and from the drive. forward_wait_seconds, backward_wait_seconds: that saving waited for
    room, and backward for a tensor: where they are long, the drive is what a step waits for. alive_bytes: that graphs have here now.
    host_bytes, peak_host_bytes: of host memory, now and at most.
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


class _Waiting:
    """Adds to one of *waits* the seconds in which this thread stands still: what it computes itself is no waiting."""

    __slots__ = ("_began", "_name", "_waits")

    def __init__(self, waits: dict[str, float], name: str) -> None:
        self._waits = waits
        self._name = name

    def __enter__(self) -> None:
        self._began = time.perf_counter() - time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._waits[self._name] += max(time.perf_counter() - time.thread_time() - self._began, 0.0)


class Shelf:
    """Packs tensors of *least_bytes* and more into the swapper of *tier*, and unpacks them. All methods may be called from any thread.

    A tensor is copied away beside the computation, which waits for that `_HELD` tensors later, so that the memory is free then without anybody having
    to look. As backward goes back through the saves, it is known at each which come next: the swapper is told of them, and the first are copied to
    their device already.
    """

    def __init__(self, tier: Tier, least_bytes: int, copier: Copier | None = None) -> None:
        self._tier = tier
        self._least_bytes = max(least_bytes, 1)
        self._lock = threading.RLock()  # for all that follows
        self._copier = copier or Copier()
        self._saving: deque[tuple[Value, Copy]] = deque()  # under way, the first started first
        self._bringing: deque[tuple[Value, Copy]] = deque()
        self._gone: deque[int] = deque()  # numbers of saved tensors that no graph has any more; appended to without the lock
        self._values: dict[int, Value] = {}  # by the number of each saved tensor
        self._order = BackwardOrder()
        self._storages = Storages()
        self._on_device: set[Value] = set()  # those with memory
        self._free_numbers: list[int] = []
        self._numbers = 0
        self._asked_bytes = 0  # of the tier
        self._told_too_large = False
        self._closed = False
        self._process_id = os.getpid()
        # Counted apart, and made `ActivationStats` when asked for: a new object for every tensor costs more than to count.
        self._counts = dict.fromkeys(("saved_bytes", "shared_bytes", "kept_bytes", "alive_bytes"), 0)
        self._waits = dict.fromkeys(("forward_wait_seconds", "backward_wait_seconds"), 0.0)
        self._moved: dict[str, int] = {}
        # A copy under way must not lose its place; the tier, which is older than this, is closed after it.
        self._wait_at_end = weakref.finalize(self, _wait_for_all, self._saving, self._bringing)

    def begin(self) -> None:
        """A forward pass begins. Raises: UsageError when closed, and in a process forked since this was made."""
        self._check_process()
        with self._lock:
            self._check_open()
            self._collect()
            if not self._values and self._asked_bytes:
                self._tier.swapper.step()
                self._storages.begin_step()

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Take *tensor*, or leave it where it is. Raises: the drive's errors; UnsupportedError; UsageError when closed."""
        if is_weight(tensor) or os.getpid() != self._process_id:  # the worker of a DataLoader has neither the memory nor the engine
            return Stayed(tensor)
        if is_distributed(tensor):
            return Parts(tensor, lambda part: self._pack(part, counter_of(tensor)))  # its parts do not count how often it was modified
        return self._pack(tensor, counter_of(tensor))

    def unpack(self, saved: Packed) -> torch.Tensor:
        """The tensor that was packed. Raises: RuntimeError when it was modified since; the drive's errors; UsageError when closed."""
        import torch

        if isinstance(saved, Stayed):
            return saved.restore()
        if isinstance(saved, Parts):
            return saved.restore(self.unpack)
        saved.check()
        self._check_process()
        with self._lock, torch.no_grad():
            self._check_open()
            self._collect()
            value = self._values[saved.number]
            storage, offset = value.on_device() or self._bring(value)
            if value.filled is not None:
                value.filled.precede(storage)
            self._look_ahead(saved.number)
            return saved.restore(storage, offset)

    def let_go(self) -> None:
        """Hold no memory of a device."""
        with self._lock:
            self._collect()
            for _, copy in self._saving:
                copy.let_go()

    def stats(self) -> ActivationStats:
        """What was done since this was made."""
        with self._lock:
            if self._asked_bytes and not self._closed:
                self._collect()
                moved = self._tier.swapper.stats()
                self._moved = {
                    "bytes_written": moved.bytes_written,
                    "bytes_read": moved.bytes_read,
                    "host_bytes": moved.resident_bytes,
                    "peak_host_bytes": moved.peak_bytes,
                }
            return ActivationStats(
                **self._counts,
                forward_wait_seconds=self._waits["forward_wait_seconds"],
                backward_wait_seconds=self._waits["backward_wait_seconds"],
                **self._moved,
            )

    def close(self) -> None:
        """Wait for what is under way, and give everything back."""
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
        import torch

        autograd: Any = torch.autograd  # not all of it is in its stub
        if not is_plain(tensor):
            return Stayed(tensor)
        begin, end = span(tensor)
        with self._lock:
            if not self._least_bytes <= end - begin <= self._tier.cap_bytes:
                self._keep(end - begin)
                return Stayed(tensor)
            check_no_capture(tensor)
            self._check_open()
            self._collect()
            storage = tensor.untyped_storage()
            if self._storages.lasts(storage):
                return Stayed(tensor)
            value = self._storages.find(storage, counter, begin, end)
            if value is None:
                value = self._save(storage, counter, begin, end)
            else:
                self._count(shared_bytes=end - begin)
            value.users += 1
            # All that a node saves is saved before the next one has its number. Source: at::sequence_number.
            number = self._order.save((threading.get_ident(), autograd._get_sequence_nr()))
            self._values[number] = value
            return Moved(tensor, number, self._gone)

    def _save(self, storage: torch.UntypedStorage, counter: torch.Tensor, begin: int, end: int) -> Value:
        with _Waiting(self._waits, "forward_wait_seconds"):
            self._grow(end - begin)
            if self._free_numbers:
                number = heapq.heappop(self._free_numbers)  # the lowest: so a step has the names of the one before
            else:
                number, self._numbers = self._numbers, self._numbers + 1
            value = Value(number, begin, end, counter._version, storage.device, weak_reference(storage), weakref.ref(counter))
            try:
                place = self._with_room(lambda: self._tier.swapper.create(value.name, value.nbytes))
            except BaseException:
                heapq.heappush(self._free_numbers, number)
                raise
        try:
            copy = self._copier.save(bytes_of(storage, begin, end), place)
        except BaseException:
            self._discard(value)
            raise
        if copy is None:
            self._tier.swapper.release(value.name, changed=True)
        else:
            value.copy = copy
            self._saving.append((value, copy))
            if len(self._saving) > _HELD:
                self._saving[-1 - _HELD][1].let_go()
        self._storages.add(value)
        self._count(saved_bytes=value.nbytes, alive_bytes=value.nbytes)
        return value

    def _bring(self, value: Value) -> tuple[torch.UntypedStorage, int]:
        """Bring *value* to its device, where it stays until `_look_ahead` finds that it is not needed soon."""
        with _Waiting(self._waits, "backward_wait_seconds"):
            if value.copy is not None:
                self._finish(value, value.copy)
            place = self._with_room(lambda: self._tier.swapper.swap_in(value.name))
        try:
            value.memory, copy = self._copier.bring(place, value.device)
        except BaseException:
            self._tier.swapper.release(value.name, changed=False)
            raise
        value.filled = value.copy = copy
        if copy is None:
            self._tier.swapper.release(value.name, changed=False)
        else:
            self._bringing.append((value, copy))
        self._on_device.add(value)
        storage = value.memory.untyped_storage()
        value.restored = weak_reference(storage)
        return storage, value.begin

    def _look_ahead(self, number: int) -> None:
        """Backward is at *number*: see that what it wants next is on its way, and that nothing else stays on a device."""
        self._order.ask(number)
        near = list(dict.fromkeys(self._values[one] for one in self._order.after(number, _NEAR)))
        for value in self._on_device.difference(near):
            self._drop(value)
        self._tier.swapper.prefetch([value.name for value in near[:_HINTED]])
        # A node asks for all of its own before it computes: what the next one wants can only come beside this one's computing.
        for value in dict.fromkeys(self._values[one] for one in self._order.next_node(number, _AHEAD)):
            if self._copier.overlaps(value.device) and value.on_device() is None:
                self._bring(value)

    def _drop(self, value: Value) -> None:
        """Let go of what came back of *value* to its device."""
        value.memory = None
        self._on_device.discard(value)

    def _collect(self) -> None:
        """Draw the consequences of what has ended: saved tensors, and copies."""
        while self._gone:
            number = self._gone.popleft()
            self._order.forget(number)
            value = self._values.pop(number)
            value.users -= 1
            if value.users == 0:
                self._storages.remove(value)
                self._drop(value)
                self._count(alive_bytes=-value.nbytes)
                if value.copy is None:
                    self._discard(value)
        for under_way in (self._saving, self._bringing):
            while under_way and under_way[0][1].done():
                self._finish(*under_way[0])

    def _finish(self, value: Value, copy: Copy) -> None:
        """Wait for *copy*, which is under way, and give back the place."""
        copy.wait()
        changed = (value, copy) in self._saving
        (self._saving if changed else self._bringing).remove((value, copy))
        value.copy = None
        if value.users:
            self._tier.swapper.release(value.name, changed=changed)
        else:
            self._discard(value)

    def _discard(self, value: Value) -> None:
        self._tier.swapper.discard(value.name)
        heapq.heappush(self._free_numbers, value.number)

    def _with_room(self, ask: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What *ask* gets from the swapper, once enough copies have given back their places."""
        while True:
            try:
                return ask()
            except UsageError:  # what is in use leaves no room
                if not self._finish_first():
                    raise

    def _finish_first(self) -> bool:
        """Wait for a copy; False when there is none."""
        for under_way in (self._saving, self._bringing):
            if under_way:
                self._finish(*under_way[0])
                return True
        return False

    def _grow(self, nbytes: int) -> None:
        """See that there is host memory for *nbytes* more, as far as the tier's cap allows."""
        wanted = self._counts["alive_bytes"] + nbytes
        if wanted <= self._asked_bytes or self._asked_bytes >= self._tier.cap_bytes:
            return
        while self._finish_first():
            pass  # memory that is in use cannot be exchanged for more
        # Far more at a time, since everything goes to the drive meanwhile.
        more = max(wanted, _GROWTH * self._asked_bytes, _FIRST_BYTES) - self._asked_bytes
        self._tier.require(more)
        self._asked_bytes += more

    def _keep(self, nbytes: int) -> None:
        self._count(kept_bytes=nbytes)
        if nbytes > self._tier.cap_bytes and not self._told_too_large:
            self._told_too_large = True
            warnings.warn(
                f"a saved tensor of {format_bytes(nbytes)} stays on its device: host_memory is {format_bytes(self._tier.cap_bytes)}, and must hold it",
                RuntimeWarning,
                stacklevel=3,
            )

    def _count(self, **more: int) -> None:
        for name, count in more.items():
            self._counts[name] += count

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise UsageError("save_on_nvme belongs to the process that this one was forked from: make one here")

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("save_on_nvme is closed: make another, and close it after the last backward")


def _wait_for_all(*under_way: deque[tuple[Value, Copy]]) -> None:
    for copies in under_way:
        for _, copy in copies:
            with contextlib.suppress(RuntimeError):  # CUDA has failed, and the copy with it
                copy.wait()
        copies.clear()
