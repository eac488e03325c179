"""`HostStager` and `DeviceStager` bring values of a tier to the device where an update uses them, and
take them back.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..errors import OutOfHostMemoryError
from ..optimizer_states.tree import dense_strides
from ..swap.tier import Tier
from .copies import CopyStreams

CPU = torch.device("cpu")
_ALIGNED_BYTES = 256  # as the allocator of CUDA memory aligns tensors
PLACES = 3  # on a GPU: one is filled, one is computed on, one is emptied
# Bytes of values that stay in host memory and are on their way back there, beyond which the CPU
# waits for the oldest: enough for the updates of several layers, so that autograd launches the
# backward pass of the next layer meanwhile.
_IN_FLIGHT_BYTES = 4 << 30


class Stager(Protocol):
    """Brings values of a tier to a device. The caller has one value at a time: from `fetch` or
    `renew` until `give_back`.
    """

    def fetch(self, name: str, nbytes: int) -> torch.Tensor:
        """The first *nbytes* of value *name*, on the device. Raises: as `TensorSwapper.swap_in`, and
        nothing is changed.
        """

    def renew(self, name: str, nbytes: int) -> torch.Tensor:
        """Room for *nbytes* in place of the value *name*, which the caller may have. Raises: as
        `TensorSwapper.create`.
        """

    def give_back(self, *, changed: bool, nbytes: int | None = None) -> None:
        """The caller is done with its value, if it has one. Of a *changed* value the first *nbytes*
        are kept, all unless given. Never waits for a drive.
        """

    def bring(
        self, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], written: Any
    ) -> list[torch.Tensor]:
        """Copy both from host memory to the device, the gradients after the event *written*. The
        caller has the copies until `give_back`. Called at most once before `give_back`, after
        `fetch` or `renew` if there is a value.
        """

    def take_back(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy the second tensor of each pair, on the device, into the first, in host memory. The
        first may be read after `drain`.
        """

    def drain(self) -> None:
        """Return when host memory has the contents of every value that the caller is done with."""

    def cancel(self) -> None:
        """Drain, and release the value that the caller has as it is in host memory: after an
        exception that has left the swapper as it was.
        """

    def recover(self) -> None:
        """Have nothing, and no copy under way, after an exception. Uses the swapper for nothing."""


class HostStager:
    """For updates on the CPU, which use values where they are."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._held: str | None = None
        self._taking: str | None = None  # a name that is about to be held

    def fetch(self, name: str, nbytes: int) -> torch.Tensor:
        """See `Stager`."""
        self._taking = name
        memory = self._tier.swapper.swap_in(name)[:nbytes]
        self._held, self._taking = name, None
        return memory

    def renew(self, name: str, nbytes: int) -> torch.Tensor:
        """See `Stager`."""
        self._held = None
        self._tier.forget([name])
        self._taking = name
        memory = self._tier.swapper.create(name, nbytes)
        self._held, self._taking = name, None
        return memory

    def give_back(self, *, changed: bool, nbytes: int | None = None) -> None:
        """See `Stager`."""
        if self._held is not None:
            name, self._held = self._held, None
            self._tier.swapper.release(name, changed=changed, nbytes=nbytes)

    def bring(
        self, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], written: Any
    ) -> list[torch.Tensor]:
        """See `Stager`."""
        return [*weights, *gradients]

    def take_back(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """See `Stager`. Nothing is copied: both tensors of a pair are the same."""

    def drain(self) -> None:
        """See `Stager`."""

    def cancel(self) -> None:
        """See `Stager`."""
        name = self._taking if self._held is None else self._held
        self._held = self._taking = None
        if name is not None:
            self._tier.end_use(name, changed=True)

    def recover(self) -> None:
        """See `Stager`."""
        self._held = self._taking = None


class _Return(NamedTuple):
    """A value whose copy is under way: see `Stager.give_back`."""

    name: str
    changed: bool
    nbytes: int | None
    done: Any  # torch.cuda.Event


class Returns:
    """Values of a tier that stay in use until the copy engine of a GPU is done with their memory."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._returns: deque[_Return] = deque()

    def __len__(self) -> int:
        return len(self._returns)

    def __contains__(self, name: str) -> bool:
        return any(returned.name == name for returned in self._returns)

    def add(self, name: str, *, changed: bool, nbytes: int | None = None, done: Any) -> None:
        """Release the value *name* after the event *done*, as `TensorSwapper.release` does."""
        self._returns.append(_Return(name, changed, nbytes, done))

    def release(self, at_most: int) -> None:
        """Release the values whose copies have ended, and wait until at most *at_most* copies are
        under way.
        """
        while self._returns and (len(self._returns) > at_most or self._returns[0].done.query()):
            self._returns[0].done.synchronize()
            returned = self._returns.popleft()
            self._tier.swapper.release(
                returned.name, changed=returned.changed, nbytes=returned.nbytes
            )

    def cancel(self) -> None:
        """As `release` all, after an exception that may have come in the middle of this class."""
        while self._returns:
            returned = self._returns.popleft()
            returned.done.synchronize()
            self._tier.end_use(returned.name, changed=returned.changed, nbytes=returned.nbytes)

    def clear(self) -> None:
        """Forget the values, whose uses the swapper has ended."""
        self._returns.clear()


class _Place:
    """Memory of the device for one bucket: its value, and *weights* and gradients from host memory.
    *free*: the event after which both may be overwritten.
    """

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.weights: torch.Tensor | None = None
        self.free: Any = None


class DeviceStager:
    """For updates on a GPU: copies to it and from it run while the current stream computes.

    A value stays in use until its copy to the host is done, so that the swapper writes nothing that
    is not there yet.
    """

    def __init__(self, tier: Tier, device: torch.device) -> None:
        self._tier = tier
        self._device = device
        self._copies = CopyStreams()
        self._places = deque(_Place() for _ in range(PLACES))
        self._returns = Returns(tier)
        # What the caller has: its name, its memory on the host, and the end of the copy from there.
        self._held: tuple[str, torch.Tensor, Any] | None = None
        self._taking: str | None = None  # a name that is about to be held
        self._has_weights = False  # since the last `give_back`
        self._taken_back: Any = None  # the event after the last weights that were copied back

    def fetch(self, name: str, nbytes: int) -> torch.Tensor:
        """See `Stager`."""
        self._returns.release(at_most=self._most_in_flight(name, nbytes))
        self._taking = name
        host = self._obtain(lambda: self._tier.swapper.swap_in(name))
        memory = self._place(nbytes)
        filled = self._copies.start(memory, host[:nbytes], after=self._places[0].free)
        torch.cuda.current_stream(self._device).wait_event(filled)
        self._held, self._taking = (name, host, filled), None
        return memory

    def renew(self, name: str, nbytes: int) -> torch.Tensor:
        """See `Stager`."""
        if self._held is not None:
            filled = self._held[2]
            if filled is not None:
                filled.synchronize()  # the copy reads what is discarded
            self._held = None
        self._returns.release(at_most=0 if name in self._returns else PLACES - 1)
        self._tier.forget([name])
        self._taking = name
        host = self._obtain(lambda: self._tier.swapper.create(name, nbytes))
        memory = self._place(nbytes)
        if self._places[0].free is not None:
            torch.cuda.current_stream(self._device).wait_event(self._places[0].free)
        self._held, self._taking = (name, host, None), None
        return memory

    def give_back(self, *, changed: bool, nbytes: int | None = None) -> None:
        """See `Stager`."""
        place = self._places[0]
        if self._held is None and not self._has_weights:
            return
        stream = torch.cuda.current_stream(self._device)
        held, self._held, self._has_weights = self._held, None, False
        if held is None and self._taken_back is not None:
            stream.wait_event(self._taken_back)
        place.free = stream.record_event()
        if held is not None and place.memory is not None:
            name, host, _ = held
            if changed:  # on the stream of `take_back`, so after it
                kept = host[:nbytes]
                place.free = self._copies.start(
                    kept, place.memory[: kept.numel()], after=place.free
                )
            self._returns.add(name, changed=changed, nbytes=nbytes, done=place.free)
        self._places.rotate(-1)

    def bring(
        self, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], written: Any
    ) -> list[torch.Tensor]:
        """See `Stager`."""
        place, stream = self._places[0], torch.cuda.current_stream(self._device)
        parts = [*weights, *gradients]
        sizes = [-(-part.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for part in parts]
        if place.weights is None or place.weights.numel() < sum(sizes):
            torch.cuda.synchronize(self._device)  # as in `_place`
            place.weights = None
            place.weights = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            torch.cuda.synchronize(self._device)
        self._has_weights = True
        filled = None
        brought: list[torch.Tensor] = []
        for part, start in zip(parts, itertools.accumulate(sizes, initial=0), strict=False):
            flat = place.weights[start : start + part.nbytes].view(part.dtype)
            target = flat.as_strided(part.shape, dense_strides(part))
            after = place.free if len(brought) < len(weights) else written
            filled = self._copies.start(target, part, after=after)
            brought.append(target)
        if filled is not None:
            stream.wait_event(filled)
        return brought

    def take_back(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """See `Stager`."""
        made = torch.cuda.current_stream(self._device).record_event()
        for target, source in pairs:
            self._taken_back = self._copies.start(target, source, after=made)

    def drain(self) -> None:
        """See `Stager`."""
        self._returns.release(at_most=0)
        if self._taken_back is not None:
            self._taken_back.synchronize()
            self._taken_back = None

    def cancel(self) -> None:
        """See `Stager`."""
        torch.cuda.synchronize(self._device)
        name = self._taking if self._held is None else self._held[0]
        self._held, self._taking, self._has_weights = None, None, False
        if name is not None:
            self._tier.end_use(name, changed=True)  # it may be new
        self._returns.cancel()
        self._taken_back = None

    def recover(self) -> None:
        """See `Stager`."""
        torch.cuda.synchronize(self._device)
        self._held, self._taking, self._has_weights = None, None, False
        self._taken_back = None
        self._returns.clear()

    def _most_in_flight(self, name: str, nbytes: int) -> int:
        """How many values may be on their way back when *name* is fetched: few where it is not to
        stay in host memory, since another value may need the memory; none if *name* itself is on its way.
        """
        if name in self._returns:
            return 0
        if not self._tier.swapper.stays(name):
            return PLACES - 1
        return max(PLACES - 1, _IN_FLIGHT_BYTES // nbytes)

    def _obtain(self, ask: Any) -> torch.Tensor:
        while True:
            try:
                host: torch.Tensor = ask()
            except OutOfHostMemoryError:  # beside what is on its way back
                if not self._returns:
                    raise
                self._returns.release(at_most=len(self._returns) - 1)
            else:
                return host

    def _place(self, nbytes: int) -> torch.Tensor:
        place = self._places[0]
        if place.memory is None or place.memory.numel() < nbytes:
            # Rarely: any of the streams may use the old memory, or the new memory.
            torch.cuda.synchronize(self._device)
            place.memory = None
            place.memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            torch.cuda.synchronize(self._device)
        return place.memory[:nbytes]
