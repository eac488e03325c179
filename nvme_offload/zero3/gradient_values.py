"""`GradientValues`: the memory of gradients, each a value of a tier or, on a GPU, a tensor there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..device.room import DeviceRoom
from ..swap.tier import Tier


class GradientValues:
    """Values of *tier* by name, of which one at a time is in use. If *device* is a GPU, new values
    are there if they fit (`DeviceRoom`).

    *wait_for_copies* returns when every copy to or from the accelerator that was started here has
    ended. *aside*: bytes that updates take on a GPU.
    """

    def __init__(
        self, tier: Tier, wait_for_copies: Callable[[], None], device: torch.device, aside: int
    ) -> None:
        self._tier = tier
        self._wait_for_copies = wait_for_copies
        self._device = device
        self._room = DeviceRoom(device, aside) if device.type != "cpu" else None
        self._on_device: dict[str, torch.Tensor] = {}
        # The name and the tensor of the value to which gradients are being added.
        self._open: tuple[str, torch.Tensor] | None = None
        self._taken: str | None = None  # the value that is in use, or is about to be

    def abandon(self) -> None:
        """Drop the values on the device, after the copies to values of the tier."""
        if self._open is not None:
            self._wait_for_copies()
        self._on_device.clear()

    def pause(self) -> None:
        """Allow the value in use to be evicted."""
        if self._open is not None:
            self._wait_for_copies()
        self.give_back()

    def give_back(self) -> None:
        """Release the value in use, even if an interrupted call left it in use."""
        name, self._open, self._taken = self._taken, None, None
        if name is not None:
            self._tier.end_use(name, changed=True)

    def on_device(self, name: str) -> torch.Tensor | None:
        """The value *name* if it is on the device."""
        return self._on_device.get(name)

    def use(self, name: str, numel: int, dtype: torch.dtype, *, exists: bool) -> torch.Tensor:
        """The value *name*, in use; a new one unless it *exists*. The value in use before is
        released.
        """
        value = self._on_device.get(name)
        if value is None and not exists and self._room is not None:
            nbytes = numel * dtype.itemsize
            if self._room.suffices(self._device_bytes, nbytes):
                value = torch.zeros(numel, dtype=dtype, device=self._device)
                self._on_device[name] = value
        if value is not None:
            return value
        if self._open is None or self._open[0] != name:
            self.pause()
            self._taken = name
            memory = (
                self._tier.swapper.swap_in(name)
                if exists
                else self._tier.swapper.create(name, numel * dtype.itemsize)
            )
            self._open = name, memory.view(dtype)
        return self._open[1]

    def fetch(
        self, name: str, dtype: torch.dtype, into: torch.Tensor, spans: Sequence[tuple[int, int]]
    ) -> None:
        """Copy the ranges *spans* of the value *name* into the same ranges of *into*."""
        value = self._on_device.get(name)
        if value is None:
            self._taken = name
            value = self._tier.swapper.swap_in(name).view(dtype)
        for start, end in spans:
            # Convert on the device: a copy between devices would convert on the host.
            into[start:end].copy_(value[start:end].to(self._device))
        if self._taken is not None:
            self._tier.swapper.release(name, changed=False)
            self._taken = None

    def discard(self, names: Sequence[str]) -> None:
        """Discard the values *names*."""
        for name in names:
            self._on_device.pop(name, None)
        self._tier.forget(names)

    def make_room(self) -> None:
        """Drop the values on the device, which are invalid, if the last step needed more memory. New
        ones are made there if they fit.
        """
        if self._room is not None and not self._room.suffices(self._device_bytes):
            self._on_device.clear()

    @property
    def _device_bytes(self) -> int:
        return sum(value.nbytes for value in self._on_device.values())
