"""`Home`: the buckets' values in a tier, and the copies between them and slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..device.copies import CopyStreams
from ..device.staging import Returns
from ..errors import known
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

    def admit(self, bucket: Bucket, fill: Callable[[torch.Tensor], Any]) -> None:
        """Make the value of *bucket*, whose bytes *fill* writes."""
        memory = self._tier.swapper.create(bucket.name, bucket.nbytes)
        try:
            fill(memory)
        finally:
            self._tier.end_use(bucket.name, changed=True)

    def reset(self) -> None:
        """Delete all values, also after an exception has interrupted a call of the tier."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._returns = Returns(self._tier)
        self._tier.reset()

    def read(self, bucket: Bucket, use: Callable[[torch.Tensor], Any]) -> None:
        """Call *use* with the bytes of *bucket* in host memory, valid for the time of the call."""
        self._returns.end(bucket.name)
        memory = self._obtain(bucket, self._tier.swapper.swap_in, stays=False)
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
        slot.begin_copy(self._start(target, slot, bucket, self._tier.swapper.swap_in))

    def store(self, slot: Slot, bucket: Bucket) -> None:
        """Copy the values in *slot* back. Raises: as `TensorSwapper.create`."""
        source = slot.buffer[: bucket.nbytes]
        if self._device.type != "cuda":
            self.admit(bucket, lambda memory: memory.copy_(source))
            return

        def create(name: str) -> torch.Tensor:
            return self._tier.swapper.create(name, bucket.nbytes)

        slot.begin_copy(self._start(source, slot, bucket, create, back=True))

    def _start(
        self,
        values: torch.Tensor,
        slot: Slot,
        bucket: Bucket,
        ask: Callable[[str], torch.Tensor],
        *,
        back: bool = False,
    ) -> Any:
        """Start a copy of *bucket* to *values* in *slot*, or *back*. Returns: the event at its end."""
        stays = self._tier.swapper.stays(bucket.name)
        resumed = self._returns.in_flight(bucket.name) if stays else None
        if resumed is None:
            self._returns.end(bucket.name)
            memory, changed = self._obtain(bucket, ask, stays=stays), back
        else:
            # A wait for the copy in flight would take the CPU's lead over the GPU.
            memory, changed = known(resumed.memory), back or resumed.changed
            self._copies.wait(self._device, not back, resumed.done)
        for event in slot.ends_of_uses():
            self._copies.wait(self._device, not back, event)
        done = self._copies.start(*((memory, values) if back else (values, memory)), after=None)
        self._copies.outlast(slot.buffer, not back)
        self._returns.add(bucket.name, changed=changed, done=done, memory=memory)
        return done

    def _obtain(
        self, bucket: Bucket, ask: Callable[[str], torch.Tensor], *, stays: bool
    ) -> torch.Tensor:
        """Host memory of *bucket*. Unless it *stays* there, this may wait for copies of others."""
        self._returns.release(at_most=len(self._returns) if stays else _IN_FLIGHT)
        return self._returns.with_room(lambda: ask(bucket.name))
