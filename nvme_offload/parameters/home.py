"""`Home`: the buckets' values in a tier, and the copies between them and slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..device.copies import CopyStreams
from ..device.staging import Returns
from ..swap.tier import Tier
from .buckets import Bucket
from .slots import Slot

# Copies to or from a GPU that host memory is held for, if the values do not stay there.
_IN_FLIGHT = 2


class Home:
    """Copies buckets between *tier* and slots of *device*. Copies to and from a GPU run on separate
    streams, in the order of events; the CPU does not wait for them.
    """

    def __init__(self, tier: Tier, device: torch.device) -> None:
        self._tier = tier
        self._device = device
        self._copies = CopyStreams()
        self._returns = Returns(tier)

    def admit(self, bucket: Bucket, fill: Callable[[torch.Tensor], None]) -> None:
        """Make the value of *bucket*, whose bytes *fill* writes."""
        memory = self._tier.swapper.create(bucket.name, bucket.nbytes)
        try:
            fill(memory)
        finally:
            self._tier.end_use(bucket.name, changed=True)

    def read(self, bucket: Bucket, use: Callable[[torch.Tensor], Any]) -> None:
        """Call *use* with the bytes of *bucket* in host memory, valid for the time of the call."""
        memory = self._obtain(bucket, lambda: self._tier.swapper.swap_in(bucket.name))
        try:
            use(memory)
        finally:
            self._tier.end_use(bucket.name, changed=False)

    def fill(self, slot: Slot, bucket: Bucket) -> None:
        """Copy the values of *bucket* into *slot*. Raises: as `TensorSwapper.swap_in`."""
        target = slot.buffer[: bucket.nbytes]
        if self._device.type != "cuda":
            self.read(bucket, target.copy_)
            return
        memory = self._obtain(bucket, lambda: self._tier.swapper.swap_in(bucket.name))
        slot.filled = self._start(target, memory, slot)
        self._returns.add(bucket.name, changed=False, done=slot.filled)
        slot.streams.clear()

    def store(self, slot: Slot, bucket: Bucket) -> None:
        """Copy the values in *slot* back. Raises: as `TensorSwapper.create`."""
        source = slot.buffer[: bucket.nbytes]
        memory = self._obtain(bucket, lambda: self._tier.swapper.create(bucket.name, bucket.nbytes))
        if self._device.type != "cuda":
            try:
                memory.copy_(source)
            finally:
                self._tier.end_use(bucket.name, changed=True)
            return
        slot.emptied = self._start(memory, source, slot)
        self._returns.add(bucket.name, changed=True, done=slot.emptied)

    def _start(self, target: torch.Tensor, source: torch.Tensor, slot: Slot) -> Any:
        for event in slot.ends_of_uses():
            self._copies.wait(self._device, target.is_cuda, event)
        done = self._copies.start(target, source, after=None)
        self._copies.outlast(slot.buffer, target.is_cuda)
        return done

    def _obtain(self, bucket: Bucket, ask: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Host memory of *bucket*. This may wait for copies of other buckets."""
        stays = self._tier.swapper.stays(bucket.name)
        self._returns.release(at_most=len(self._returns) if stays else _IN_FLIGHT)
        self._returns.end(bucket.name)
        return self._returns.with_room(ask)
