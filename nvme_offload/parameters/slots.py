"""`Slots`: a fixed number of pieces of device memory, each with the values of one bucket."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from ..device.stayed import reuse
from ..units import format_bytes
from .buckets import Bucket

_log = logging.getLogger(__name__)


class Slot:
    """Memory of *device* for one bucket, in a storage that nothing else shares.

    Attributes: *bucket*, whose values it has; *copied*, the event at the end of the last copy in or
    out, None on a CPU.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        # Outside of inference mode: autograd saves views of this memory.
        with torch.inference_mode(False):
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.storage = self.buffer.untyped_storage()
        reuse(self, self.storage)
        self.bucket: Bucket | None = None
        self.copied: Any = None
        # Kernels of these streams may use the memory since then: those before the events *_ends*, if
        # there are any.
        self._streams: list[Any] = []
        self._ends: list[Any] = []
        self._allocated_on: Any = None
        if device.type == "cuda":
            # PyTorch's allocator reuses memory in the order of a stream: kernels of this stream may
            # still use it.
            self._allocated_on = torch.cuda.current_stream(device)
            self._streams.append(self._allocated_on)
        self._own_references = 0  # besides the references of the parameters

    def count_own_references(self) -> None:
        """The tensors that refer to the memory now are the bucket's own."""
        self._own_references = references_to(self.storage) - self._parameters_here

    @property
    def is_free(self) -> bool:
        """Whether no use is open, and no tensor but the bucket's own refers to the memory. A view
        that autograd or the program has kept is such a tensor.
        """
        users = 0 if self.bucket is None else self.bucket.users
        own = self._own_references + self._parameters_here
        return users == 0 and references_to(self.storage) <= own

    def begin_use(self) -> None:
        """Make the current stream wait for the last copy: one in brings the values, and one out reads
        values that the use may change.
        """
        if self.copied is not None:
            self._ends = []
            stream = torch.cuda.current_stream(self.buffer.device)
            if stream not in self._streams:
                stream.wait_event(self.copied)
                if stream != self._allocated_on:
                    # Once dropped, the memory is reused only after the kernels of this stream.
                    self.buffer.record_stream(stream)
                self._streams.append(stream)

    def end_use(self) -> None:
        """Let later copies wait only for kernels that were launched before, if the slot is free."""
        if self._streams and self.is_free:
            self._ends = [stream.record_event() for stream in self._streams]

    def ends_of_uses(self) -> list[Any]:
        """The events after which no kernel uses the values, and the last copy has ended."""
        ends = self._ends or [stream.record_event() for stream in self._streams]
        return ends if self.copied is None else [*ends, self.copied]

    def begin_copy(self, copied: Any) -> None:
        """A copy in or out, which waits for `ends_of_uses`, ends with the event *copied*."""
        self.copied = copied
        self._streams, self._ends = [], []

    @property
    def _parameters_here(self) -> int:
        return 0 if self.bucket is None else len(self.bucket.places) - len(self.bucket.apart)


def references_to(storage: Any) -> int:
    """How many objects refer to *storage*, itself included."""
    return int(torch._C._storage_Use_Count(storage._cdata))


class Slots:
    """*count* slots of *nbytes* each on *device*; fewer if it has no memory for another one.

    There are more for as long as tensors refer to all of them: a slot that a tensor refers to is
    never given to another bucket.
    """

    def __init__(self, device: torch.device, count: int, nbytes: int) -> None:
        self._device = device
        self.each_nbytes = nbytes
        self.count = count
        self._slots: list[Slot] = []
        self._by_storage: dict[int, Slot] = {}
        self._has_warned = False

    @property
    def nbytes(self) -> int:
        """The device memory of all slots."""
        return len(self._slots) * self.each_nbytes

    def holding(self, tensor: torch.Tensor) -> Slot | None:
        """The slot whose memory *tensor* refers to."""
        slot = self._by_storage.get(tensor.untyped_storage()._cdata)
        return None if slot is None or slot.bucket is None else slot

    def take(self, empty: Callable[[Slot], None], before: float) -> Slot | None:
        """An empty slot. If there is none, *empty* empties the free slot whose bucket leaves first, of
        those that are used after *before*. None if no slot qualifies. Raises: as *empty*.
        """
        while True:
            chosen = next((slot for slot in self._slots if slot.bucket is None), None)
            if chosen is not None:
                return chosen
            if len(self._slots) < self.count:
                try:
                    return self._add()
                except torch.OutOfMemoryError:
                    if not self._slots:
                        raise
                    self.count = len(self._slots)
            chosen = self._first_to_leave(before)
            if chosen is None:
                return None
            empty(chosen)
            if len(self._slots) > self.count:
                self._drop(chosen)

    def next_to_leave(self) -> Slot | None:
        """The slot that `take` would empty now; None if it would empty none."""
        if len(self._slots) < self.count or any(slot.bucket is None for slot in self._slots):
            return None
        return self._first_to_leave()

    def trim(self, empty: Callable[[Slot], None]) -> None:
        """Return to the number of slots that was asked for, as far as no tensor refers to the others.
        Raises: as *empty*.
        """
        while len(self._slots) > self.count:
            chosen = self._first_to_leave()
            if chosen is None:
                return
            empty(chosen)
            self._drop(chosen)

    def _first_to_leave(self, before: float = -math.inf) -> Slot | None:
        """The free slot whose bucket leaves first, of those that are used after *before*."""
        chosen, first = None, (-math.inf, 0.0)
        for slot in self._slots:
            bucket = slot.bucket
            leaves = (math.inf, math.inf) if bucket is None else bucket.leaves
            after = bucket is None or bucket.next_use > before
            if after and leaves > first and slot.is_free:
                chosen, first = slot, leaves
        return chosen

    def exceed(self) -> Slot:
        """One slot more, for a bucket that is needed while tensors refer to all others."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "tensors refer to all %s on the device for streamed parameters, so more is taken: drop views of parameters that the program keeps, "
                "or allow more gpu_memory",
                format_bytes(self.nbytes),
            )
        return self._add()

    def _add(self) -> Slot:
        slot = Slot(self._device, self.each_nbytes)
        self._slots.append(slot)
        self._by_storage[slot.storage._cdata] = slot
        return slot

    def _drop(self, slot: Slot) -> None:
        self._slots.remove(slot)
        del self._by_storage[slot.storage._cdata]
