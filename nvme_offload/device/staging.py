"""`HostStager` and `DeviceStager` move values of a tier to the device of updates, and back."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import OutOfHostMemoryError
from ..optimizer_states.tree import dense_strides
from ..sizes import PLACES
from ..swap.tier import Tier
from .copies import CopyStreams

CPU = torch.device("cpu")
_ALIGNED_BYTES = 256  # the alignment of tensors in PyTorch's CUDA allocator
# Bytes of values that stay in host memory and are being copied back there. Beyond this, the CPU
# waits for the oldest copy. It is enough for the updates of several layers, so that autograd can
# launch the backward pass of the next layer meanwhile.
_IN_FLIGHT_BYTES = 4 << 30


class HostStager:
    """Moves values of *tier* to the device of updates, and back. This class is for updates on the CPU,
    which use values where they are. The caller holds one value at a time: from `fetch` or `renew` until
    `give_back`.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._held: str | None = None
        self._taking: str | None = None  # a name that is about to be held

    def fetch(self, name: str, nbytes: int) -> torch.Tensor:
        """The first *nbytes* of value *name*, on the device. Raises: as `TensorSwapper.swap_in`."""
        self._taking = name
        memory = self._tier.swapper.swap_in(name)[:nbytes]
        self._held, self._taking = name, None
        return memory

    def renew(self, name: str, nbytes: int) -> torch.Tensor:
        """Memory that replaces the value *name*, held or not. Raises: as `TensorSwapper.create`."""
        self._held = None
        self._tier.forget([name])
        self._taking = name
        memory = self._tier.swapper.create(name, nbytes, once=True)
        self._held, self._taking = name, None
        return memory

    def give_back(self, *, changed: bool, nbytes: int | None = None) -> None:
        """Release the caller's value, if it holds one. Of a *changed* value, the first *nbytes* are
        kept; all by default. Never waits for a drive.
        """
        if self._held is not None:
            name, self._held = self._held, None
            self._tier.swapper.release(name, changed=changed, nbytes=nbytes)

    def drain(self) -> None:
        """Wait until host memory has the contents of every value that the caller has released, and of
        every tensor that `take_back` copies.
        """

    def cancel(self) -> None:
        """Drain, and release the caller's value with its contents in host memory. For use after an
        exception; the swapper may have ended the uses of all values already.
        """
        name = self._held or self._taking
        self._held = self._taking = None
        if name is not None:
            self._tier.end_use(name, changed=True)  # the value may be new


class _Return(NamedTuple):
    """A value whose copy is in flight: see `HostStager.give_back`."""

    name: str
    changed: bool
    nbytes: int | None
    done: Any  # torch.cuda.Event
    memory: torch.Tensor | None


class Returns:
    """Values of a tier that stay in use until the copy engine of a GPU no longer uses their memory."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._returns: deque[_Return] = deque()

    def __len__(self) -> int:
        return len(self._returns)

    def __contains__(self, name: str) -> bool:
        return any(returned.name == name for returned in self._returns)

    def add(
        self,
        name: str,
        *,
        changed: bool,
        nbytes: int | None = None,
        done: Any,
        memory: torch.Tensor | None = None,
    ) -> None:
        """Release the value *name* after the event *done*, as `TensorSwapper.release` does.
        *memory*: its memory, for `resume`.
        """
        self._returns.append(_Return(name, changed, nbytes, done, memory))

    def resume(self, name: str) -> _Return | None:
        """The use of *name* whose copy is in flight, which the caller continues; None without one."""
        found = next((one for one in self._returns if one.name == name), None)
        if found is not None:
            self._returns.remove(found)
        return found

    def release(self, at_most: int) -> None:
        """Release values whose copies have ended, and wait for all but *at_most* copies."""
        while self._returns and (len(self._returns) > at_most or self._returns[0].done.query()):
            self._returns[0].done.synchronize()
            returned = self._returns.popleft()
            self._tier.swapper.release(
                returned.name, changed=returned.changed, nbytes=returned.nbytes
            )

    def end(self, name: str) -> None:
        """Wait for the copy of the value *name*, if one is in flight, and release the value."""
        for returned in [one for one in self._returns if one.name == name]:
            returned.done.synchronize()
            self._returns.remove(returned)
            self._tier.swapper.release(name, changed=returned.changed, nbytes=returned.nbytes)

    def with_room(self, ask: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call *ask* until enough copies have ended. Raises: OutOfHostMemoryError."""
        while True:
            try:
                return ask()
            except OutOfHostMemoryError:
                if not self._returns:
                    raise
                self.release(at_most=len(self._returns) - 1)

    def cancel(self) -> None:
        """Release all values, after an exception that may have interrupted a method of this class."""
        while self._returns:
            returned = self._returns.popleft()
            returned.done.synchronize()
            self._tier.end_use(returned.name, changed=returned.changed, nbytes=returned.nbytes)


class _Place:
    """Memory of the device for one bucket: its value, and *weights* and gradients from host memory.
    *free*: the event after which the memory may be overwritten.
    """

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.weights: torch.Tensor | None = None
        self.free: Any = None


class DeviceStager(HostStager):
    """As `HostStager`, for updates on a GPU: copies to the GPU and back run while the current stream
    computes.

    A value stays in use until its copy to the host has ended, so that the swapper never writes
    incomplete contents to the drive.
    """

    def __init__(self, tier: Tier, device: torch.device) -> None:
        super().__init__(tier)
        self._device = device
        self._copies = CopyStreams()
        # The copies of gradients wait until FSDP2 has written them. Copies of the next value need not.
        self._gradient_copies = CopyStreams()
        self._places = deque(_Place() for _ in range(PLACES))
        self._returns = Returns(tier)
        self._host = torch.empty(0)  # of the value that the caller holds
        self._filled: Any = None  # the end of the copy from it, if there is one
        self._has_weights = False  # whether weights were copied since the last `give_back`
        self._taken_back: Any = None  # the event after the last weights that were copied back

    def fetch(self, name: str, nbytes: int) -> torch.Tensor:
        """See `HostStager`."""
        self._returns.release(at_most=self._most_in_flight(name, nbytes))
        self._taking = name
        host = self._returns.with_room(lambda: self._tier.swapper.swap_in(name))
        memory = self._place(nbytes)
        filled = self._copies.start(memory, host[:nbytes], after=self._places[0].free)
        torch.cuda.current_stream(self._device).wait_event(filled)
        self._host, self._filled = host, filled
        self._held, self._taking = name, None
        return memory

    def renew(self, name: str, nbytes: int) -> torch.Tensor:
        """See `HostStager`."""
        if self._held is not None and self._filled is not None:
            self._filled.synchronize()  # the copy reads the memory that is discarded
        self._held = self._filled = None
        self._returns.release(at_most=0 if name in self._returns else PLACES - 1)
        self._tier.forget([name])
        self._taking = name
        host = self._returns.with_room(lambda: self._tier.swapper.create(name, nbytes, once=True))
        memory = self._place(nbytes)
        if self._places[0].free is not None:
            torch.cuda.current_stream(self._device).wait_event(self._places[0].free)
        self._host = host
        self._held, self._taking = name, None
        return memory

    def give_back(self, *, changed: bool, nbytes: int | None = None) -> None:
        """See `HostStager`."""
        place = self._places[0]
        if self._held is None and not self._has_weights:
            return
        stream = torch.cuda.current_stream(self._device)
        name, self._held, self._has_weights = self._held, None, False
        if name is None and self._taken_back is not None:
            stream.wait_event(self._taken_back)
        place.free = stream.record_event()
        if name is not None and place.memory is not None:
            if changed:  # the stream is `take_back`'s, so this runs after it
                kept = self._host[:nbytes]
                place.free = self._copies.start(
                    kept, place.memory[: kept.numel()], after=place.free
                )
            self._returns.add(name, changed=changed, nbytes=nbytes, done=place.free)
        self._places.rotate(-1)

    def bring(
        self, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], written: Any
    ) -> list[torch.Tensor]:
        """Copy weights and gradients from host memory to the device, the gradients after the event
        *written*. The caller keeps the copies until `give_back`. Call it at most once before
        `give_back`, and after `fetch` or `renew` if there is a value.
        """
        place, stream = self._places[0], torch.cuda.current_stream(self._device)
        parts = [*weights, *gradients]
        sizes = [-(-part.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for part in parts]
        if place.weights is None or place.weights.numel() < sum(sizes):
            torch.cuda.synchronize(self._device)  # as in `_place`
            place.weights = None
            place.weights = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            torch.cuda.synchronize(self._device)
        self._has_weights = True
        if place.free is not None:
            self._gradient_copies.wait(self._device, True, place.free)
        brought: list[torch.Tensor] = []
        for part, start in zip(parts, itertools.accumulate(sizes, initial=0), strict=False):
            flat = place.weights[start : start + part.nbytes].view(part.dtype)
            target = flat.as_strided(part.shape, dense_strides(part))
            if len(brought) < len(weights):
                filled = self._copies.start(target, part, after=place.free)
            else:
                filled = self._gradient_copies.start(target, part, after=written)
            stream.wait_event(filled)
            brought.append(target)
        return brought

    def take_back(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy the second tensor of each pair, on the device, into the first, in host memory. The
        first tensor may be read after `drain`.
        """
        made = torch.cuda.current_stream(self._device).record_event()
        for target, source in pairs:
            self._taken_back = self._copies.start(target, source, after=made)

    def drain(self) -> None:
        """See `HostStager`."""
        self._returns.release(at_most=0)
        if self._taken_back is not None:
            self._taken_back.synchronize()
            self._taken_back = None

    def cancel(self) -> None:
        """See `HostStager`."""
        torch.cuda.synchronize(self._device)
        self._has_weights, self._taken_back = False, None
        super().cancel()
        self._returns.cancel()

    def _most_in_flight(self, name: str, nbytes: int) -> int:
        """How many values may be in flight to host memory when *name* is fetched."""
        if name in self._returns:
            return 0
        if not self._tier.swapper.stays(name):
            return PLACES - 1  # another value may need the memory
        return max(PLACES - 1, _IN_FLIGHT_BYTES // nbytes)

    def _place(self, nbytes: int) -> torch.Tensor:
        place = self._places[0]
        if place.memory is None or place.memory.numel() < nbytes:
            # This is rare. Any stream may use the old memory, or the new memory.
            torch.cuda.synchronize(self._device)
            place.memory = None
            place.memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            torch.cuda.synchronize(self._device)
        return place.memory[:nbytes]
