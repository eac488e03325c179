"""`HostStager` and `DeviceStager` move values of a tier to the device of updates, and back."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import OutOfHostMemoryError, known
from ..optimizer_states.tree import dense_strides
from ..sizes import PLACES
from ..swap.swapper import newer_name
from ..swap.tier import Tier
from ..swap.values import Glimpse
from .copies import CopyStreams
from .room import DeviceRoom

CPU = torch.device("cpu")
_ALIGNED_BYTES = 256  # the alignment of tensors in PyTorch's CUDA allocator
# Bytes of values that stay in host memory and are being copied back there. Beyond this, the CPU
# waits for the oldest copy. It is enough for the updates of several layers, so that autograd can
# launch the backward pass of the next layer meanwhile.
_IN_FLIGHT_BYTES = 4 << 30
_MANY = 16  # waits for copies from which `_Waits.are_long` decides


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

    def renew_beside(self, memory: torch.Tensor) -> torch.Tensor:
        """Continue with a newer version of the caller's value, which has *memory*: see
        `TensorSwapper.renew_beside`. Returns: the memory of the newer version, with the same contents.
        Raises: as `TensorSwapper.create`.
        """
        name = known(self._held)
        self._taking = newer_name(name)
        newer = self._tier.swapper.renew_beside(name)[: memory.numel()]
        newer.copy_(memory)
        self._held, self._taking = self._taking, None
        self._tier.swapper.release(name, changed=False)
        return newer

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

    def ease(self) -> None:
        """As `drain`, but do not wait where nothing but the copied values' next use depends on it."""

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
        """Release the value *name* after the event *done*, as `TensorSwapper.release` does, instead of
        after an earlier event. *memory*: its memory, for a caller that continues the use.
        """
        if changed:
            self._tier.swapper.changes(name)
        others = (one for one in self._returns if one.name != name)
        # In one line: an exception must neither lose the use nor leave it twice.
        self._returns = deque([*others, _Return(name, changed, nbytes, done, memory)])

    def in_flight(self, name: str) -> _Return | None:
        """The use of *name* whose copy is in flight. The caller may continue it, up to `add`."""
        return next((one for one in self._returns if one.name == name), None)

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

    *glimpse*: of the value that was copied before its use, for the swapper. *filled*: the end of the
    last copy to *memory*.
    """

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.weights: torch.Tensor | None = None
        self.free: Any = None
        self.filled: Any = None
        self.glimpse: Glimpse | None = None

    @property
    def ahead(self) -> str | None:
        """The name of the value that was copied before its use."""
        return None if self.glimpse is None else self.glimpse.value.name

    def sized(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """`memory`, made larger if it has less than *nbytes*."""
        if self.memory is None or self.memory.numel() < nbytes:
            # This is rare. Any stream may use the old memory, or the new memory.
            torch.cuda.synchronize(device)
            self.memory = None
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)
        return self.memory[:nbytes]


class _Waits:
    """The waits of a stream for copies: whether they take much of its time."""

    def __init__(self) -> None:
        self._waits: deque[tuple[Any, Any]] = deque()  # events before and after each

    def wait(self, stream: Any, event: Any) -> None:
        """Make *stream* wait for *event*."""
        cuda: Any = torch.cuda
        before = stream.record_event(cuda.Event(enable_timing=True))
        stream.wait_event(event)
        self._waits.append((before, stream.record_event(cuda.Event(enable_timing=True))))

    def are_long(self) -> bool:
        """Whether enough waits have ended, and took more than a twentieth of the time."""
        if len(self._waits) <= _MANY or not self._waits[_MANY - 1][1].query():
            return False
        waits = [self._waits.popleft() for _ in range(_MANY)]
        whole: float = waits[0][0].elapsed_time(waits[-1][1])
        waited: float = sum(before.elapsed_time(after) for before, after in waits)
        return waited > whole / 20


class DeviceStager(HostStager):
    """As `HostStager`, for updates on a GPU: copies to the GPU and back run while the current stream
    computes.

    A value stays in use until its copy to the host has ended, so that the swapper never writes
    incomplete contents to the drive.

    With *looks_ahead*, values that stay in host memory are copied to the device before their use: a
    released place is filled with the value that is expected next. While the stream waits
    long for copies, there are more places, as the memory of the device allows.
    """

    def __init__(self, tier: Tier, device: torch.device, *, looks_ahead: bool = False) -> None:
        super().__init__(tier)
        self._device = device
        self._looks_ahead = looks_ahead
        self._names: set[str] = set()  # of values that were fetched
        self._waits = _Waits()
        self._room = DeviceRoom(device, 0)
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
        swapper = self._tier.swapper
        host = self._returns.with_room(lambda: swapper.swap_in(name))
        place = self._choose_place(name)
        is_there = place.ahead == name and swapper.is_as_glimpsed(known(place.glimpse))
        place.glimpse = None  # before its memory changes, in case of an exception
        memory = place.sized(nbytes, self._device)
        if not is_there:
            place.filled = self._copies.start(memory, host[:nbytes], after=place.free)
        self._names.add(name)
        self._wait_for(place.filled)
        self._host, self._filled = host, place.filled
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
        place = self._choose_place(None)
        place.glimpse = None
        memory = place.sized(nbytes, self._device)
        stream = torch.cuda.current_stream(self._device)
        for event in (place.free, place.filled):
            if event is not None:
                stream.wait_event(event)
        self._host = host
        self._held, self._taking = name, None
        return memory

    def renew_beside(self, memory: torch.Tensor) -> torch.Tensor:
        """See `HostStager`."""
        name = known(self._held)
        self._taking = newer_name(name)
        self._host = self._returns.with_room(lambda: self._tier.swapper.renew_beside(name))
        self._held, self._taking = self._taking, None
        self._returns.add(name, changed=False, done=self._filled)
        return memory

    def give_back(self, *, changed: bool, nbytes: int | None = None) -> None:
        """See `HostStager`."""
        place = self._places[0]
        if self._held is None and not self._has_weights:
            return
        stream = torch.cuda.current_stream(self._device)
        name, self._held, self._has_weights = self._held, None, False
        host, self._host = self._host, torch.empty(0)  # `close` frees what nothing refers to
        if name is None and self._taken_back is not None:
            stream.wait_event(self._taken_back)
        place.free = stream.record_event()
        if name is not None and place.memory is not None:
            if changed:  # the stream is `take_back`'s, so this runs after it
                kept = host[:nbytes]
                place.free = self._copies.start(
                    kept, place.memory[: kept.numel()], after=place.free
                )
            self._returns.add(name, changed=changed, nbytes=nbytes, done=place.free)
        self._places.rotate(-1)
        if self._looks_ahead:
            self._look_ahead()

    def bring(
        self, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], written: Any
    ) -> list[torch.Tensor]:
        """Copy weights and gradients from host memory to the device, the gradients after the event
        *written*. The caller keeps the copies until `give_back`. Call it at most once before
        `give_back`, and after `fetch` or `renew` if there is a value.
        """
        place, stream = self._places[0], torch.cuda.current_stream(self._device)
        self._looks_ahead = False  # in the forward pass, weights are copied to the device
        parts = [*weights, *gradients]
        sizes = [-(-part.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for part in parts]
        if place.weights is None or place.weights.numel() < sum(sizes):
            torch.cuda.synchronize(self._device)  # as in `_Place.sized`
            place.weights = None
            place.weights = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            torch.cuda.synchronize(self._device)
        self._has_weights = True
        if place.free is not None:
            self._gradient_copies.wait(self._device, True, place.free)
        brought: list[torch.Tensor] = []
        filled: dict[CopyStreams, Any] = {}  # the ends of their copies
        for part, start in zip(parts, itertools.accumulate(sizes, initial=0), strict=False):
            flat = place.weights[start : start + part.nbytes].view(part.dtype)
            target = flat.as_strided(part.shape, dense_strides(part))
            is_weight = len(brought) < len(weights)
            copies, after = (
                (self._copies, place.free) if is_weight else (self._gradient_copies, written)
            )
            filled[copies] = copies.start(target, part, after=after)
            brought.append(target)
        for event in filled.values():
            stream.wait_event(event)
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

    def ease(self) -> None:
        """See `HostStager`. The CPU uses the weights that are copied back."""
        if self._taken_back is not None or not self._tier.swapper.everything_stays:
            self.drain()

    def cancel(self) -> None:
        """See `HostStager`."""
        torch.cuda.synchronize(self._device)
        self._has_weights, self._taken_back = False, None
        for place in self._places:
            place.glimpse = None
        super().cancel()
        self._returns.cancel()

    def _most_in_flight(self, name: str, nbytes: int) -> int:
        """How many values may be in flight to host memory when *name* is fetched."""
        if name in self._returns:
            return 0
        if not self._tier.swapper.stays(name):
            return PLACES - 1  # another value may need the memory
        return max(len(self._places) - 1, _IN_FLIGHT_BYTES // nbytes)

    def _choose_place(self, name: str | None) -> _Place:
        """Move a place to the front: if possible the place with the value *name*, otherwise the first
        without a value, otherwise the first.
        """
        chosen = next(
            (place for ahead in (name, None) for place in self._places if place.ahead == ahead),
            self._places[0],
        )
        others = (place for place in self._places if place is not chosen)
        # In one line: an exception must not drop a place, whose memory copies may be using.
        self._places = deque([chosen, *others])
        return chosen

    def _wait_for(self, filled: Any) -> None:
        stream = torch.cuda.current_stream(self._device)
        if self._looks_ahead:
            self._waits.wait(stream, filled)
        else:
            stream.wait_event(filled)

    def _look_ahead(self) -> None:
        """Start copying the values that are expected next to places without a value. Their memory may
        be freed meanwhile: it waits for the GPU first.
        """
        upcoming = [
            one
            for one in self._tier.swapper.upcoming(2 * len(self._places))
            if one[0].value.name in self._names
        ]
        if self._waits.are_long():
            self._add_places(min(len(self._places), len(upcoming) - len(self._places)))
        if len(self._places) > PLACES and self._room.has_new_peak():
            self._drop_places()
        present = {place.ahead for place in self._places}
        vacant = (place for place in self._places if place.glimpse is None)
        for place, (glimpse, source) in zip(
            vacant,
            [one for one in upcoming[: len(self._places)] if one[0].value.name not in present],
            strict=False,
        ):
            target = place.sized(source.numel(), self._device)
            place.filled = self._copies.start(target, source, after=place.free)
            place.glimpse = glimpse

    def _add_places(self, count: int) -> None:
        for _ in range(count):
            if self._has_room(1):
                self._places.append(_Place())

    def _drop_places(self) -> None:
        """Have fewer places if forward and backward passes need more memory than before."""
        if not self._has_room(0):
            torch.cuda.synchronize(self._device)  # copies may use the memory
            while len(self._places) > PLACES and not self._has_room(0):
                self._places.pop()

    def _has_room(self, more: int) -> bool:
        """Whether the memory of the device suffices for the places and *more* of them."""
        each = max(0 if one.memory is None else one.memory.numel() for one in self._places)
        return self._room.suffices(each * len(self._places), each * more)
