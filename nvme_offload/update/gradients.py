"""`GradientValues`: gradients that wait for an update, in host memory, on a drive or on a GPU."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..device.copies import CopyStreams
from ..device.room import DeviceRoom
from ..errors import OutOfHostMemoryError
from ..swap.tier import Tier

# copies in flight between a GPU and the host; beyond this number, the caller waits
_IN_FLIGHT = 64
_IN_FLIGHT_BYTES = 128 << 20


class Flat(NamedTuple):
    """The gradients of a bucket or a sub-group: *numel* elements of one value of a tier."""

    name: str
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The size of the value in bytes."""
        return self.numel * self.dtype.itemsize


@dataclasses.dataclass
class _Use:
    """A value in use. *discards*: the end of the use discards the value."""

    memory: torch.Tensor
    changed: bool = False
    discards: bool = False


class _Copy(NamedTuple):
    """A copy between a GPU and elements *start* to *stop* of the value *name*. It ends with the
    event *done*; *kept* holds *nbytes* of tensors alive until then.
    """

    name: str
    start: int
    stop: int
    done: Any  # torch.cuda.Event
    nbytes: int
    kept: Any


class GradientCopies:
    """Copies between pinned host memory and the GPU *device*, and sums there, concurrent with its
    current stream. All methods return the event at the end of the copy.

    *in_order*: later work of the current stream comes after the copies and may change their tensors.
    Otherwise the caller keeps the tensors unchanged until the event.
    """

    def __init__(self, device: torch.device, in_order: bool) -> None:
        cuda: Any = torch.cuda  # untyped there
        self._device = device
        self._streams = CopyStreams()
        self._adding = None if in_order else cuda.Stream(device)

    def bring(self, into: torch.Tensor, place: torch.Tensor) -> Any:
        """Copy *place* to *into*, before later work of the current stream."""
        same = into.dtype == place.dtype
        brought, done = self._streams.bring(place, self._device, into if same else None)
        if not same:
            into.copy_(brought)
        return done

    def send(self, place: torch.Tensor, values: torch.Tensor, made: Any = None) -> Any:
        """Copy *values* to *place* after the event *made*, or after all work so far."""
        stream = torch.cuda.current_stream(self._device)
        done = self._streams.start(place, values, after=made or stream.record_event())
        if self._adding is None:
            stream.wait_event(done)
        return done

    def add(
        self, place: torch.Tensor, values: torch.Tensor, change: Callable[[torch.Tensor], None]
    ) -> tuple[Any, torch.Tensor]:
        """Add *values* to *place* after *change*. Returns: the event, and the sum on the GPU."""
        total = torch.empty_like(values)
        current = torch.cuda.current_stream(self._device)
        stream = current if self._adding is None else self._adding
        # the current stream may still use this memory for the tensor that was there before
        stream.wait_event(self._streams.start(total, place, after=current.record_event()))
        with torch.cuda.stream(stream):
            change(total)
            total.add_(values)
            added = stream.record_event()
        return self.send(place, total, added), total


class GradientValues:
    """Gradients in values of *tier*. A value is in use from its first access until another value is
    accessed, and while the copies of a GPU use it; `settle` ends all uses.

    *make_room* releases the other values of the tier that are in use. *room*: if given, new values
    are on the GPU *device* instead while they fit. *in_order*: see `GradientCopies`.

    Raises, wherever a value is accessed: as `TensorSwapper.swap_in`. The caller may repeat the call.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        make_room: Callable[[], None] = lambda: None,
        device: torch.device | None = None,
        room: DeviceRoom | None = None,
        in_order: bool = False,
    ) -> None:
        self._tier = tier
        self._make_room = make_room
        self._device = device
        self._room = room
        self._in_order = in_order
        self._on_device: dict[str, torch.Tensor] = {}
        self._existing: set[str] = set()  # names of values of the tier
        self._uses: dict[str, _Use] = {}
        self._current: str | None = None  # the name in use whose next access may follow
        self._taking: str | None = None  # a name that is about to be in use
        self._devices: dict[torch.device, GradientCopies] = {}
        self._copies: deque[_Copy] = deque()

    def __contains__(self, flat: Flat) -> bool:
        return flat.name in self._existing or flat.name in self._on_device

    # Contents. *start* is the first of the elements that are accessed.

    def write(self, flat: Flat, start: int, values: torch.Tensor) -> None:
        """Replace elements by *values*. Other elements of a new value are undefined."""
        whole = values.numel() == flat.numel
        place = self._place(flat, start, values.numel(), changed=True, anew=whole)
        copies = self._copies_between(place, values)
        if copies is None:
            place.copy_(values)
        else:
            self._note(flat, start, copies.send(place, values), values)

    def add(
        self,
        flat: Flat,
        start: int,
        values: torch.Tensor,
        change: Callable[[torch.Tensor], None] = lambda _: None,
    ) -> torch.Tensor:
        """Apply *change* to elements, then add *values* to them. Returns: the sum on the device of
        *values*, ready for the current stream if `in_order`.
        """
        place = self._place(flat, start, values.numel(), changed=True)
        copies = self._copies_between(place, values)
        if copies is None:
            total = place.to(values.device)
            change(total)
            place.copy_(total.add_(values))
        else:
            done, total = copies.add(place, values, change)
            self._note(flat, start, done, total, values, change)
        return total

    def read(self, flat: Flat, start: int, into: torch.Tensor) -> None:
        """Copy elements to *into*, and convert them to its dtype."""
        place = self._place(flat, start, into.numel(), changed=False)
        copies = self._copies_between(place, into)
        if copies is None:
            into.copy_(place.to(into.device))  # converts on the device of *into*
        else:
            self._note(flat, start, copies.bring(into, place), into)

    def discard(self, *flats: Flat) -> None:
        """Discard values that exist; a value in use, at the end of its use."""
        for name in [flat.name for flat in flats]:
            self._on_device.pop(name, None)
            if name in self._uses:
                self._uses[name].discards = True
                self._leave(name)
            elif name in self._existing:
                self._delete(name)

    def expire(self, *flats: Flat) -> None:
        """As `discard`, but memory on the GPU stays for new contents while there is room for it."""
        keeps = self._on_device if self._has_room() else {}
        self.discard(*[flat for flat in flats if flat.name not in keeps])

    def clear(self) -> None:
        """Discard all values. None is in use afterwards."""
        for use in self._uses.values():
            use.discards = True
        self.settle()
        for name in list(self._existing):
            self._delete(name)
        self._on_device.clear()

    # Uses.

    def settle(self) -> None:
        """Return when no value of the tier is in use here."""
        self._finish_copies()
        for name in list(self._uses):
            self._leave(name)

    def cancel(self) -> None:
        """End all uses after an exception, which may have interrupted any method of this class."""
        self._forget_copies()
        if self._taking is not None:
            self._tier.end_use(self._taking, changed=True)
        for name, use in list(self._uses.items()):
            if use.discards:
                self._delete(name)
            else:
                self._tier.end_use(name, changed=True)
        self._uses.clear()
        self._current = self._taking = None

    def reset(self) -> None:
        """Forget all values after their copies, without a use of the swapper."""
        self._forget_copies()
        for names in (self._on_device, self._existing, self._uses):
            names.clear()
        self._current = self._taking = None

    # Internals.

    def _has_room(self, more: int = 0) -> bool:
        held = sum(value.nbytes for value in self._on_device.values())
        return self._room is not None and self._room.suffices(held, more)

    def _place(
        self, flat: Flat, start: int, numel: int, *, changed: bool, anew: bool = False
    ) -> torch.Tensor:
        """Elements of *flat*, whose value stays in use. No copy of them is in flight: the streams of
        the two directions are not ordered after each other. *anew*: the contents of an idle value
        are not needed.
        """
        name, stop = flat.name, start + numel
        if flat not in self and self._has_room(flat.nbytes):
            self._on_device[name] = torch.empty(flat.numel, dtype=flat.dtype, device=self._device)
        if name in self._on_device:
            return self._on_device[name][start:stop]
        for copy in self._copies:
            if copy.name == name and copy.start < stop and start < copy.stop:
                copy.done.synchronize()
        if name != self._current:
            if self._current is not None:
                self._leave(self._current)
            if name not in self._uses:
                self._uses[name] = _Use(self._obtain(flat, anew).view(flat.dtype))
                self._taking = None
            self._current = name
        use = self._uses[name]
        use.changed |= changed
        use.discards = False
        return use.memory[start:stop]

    def _obtain(self, flat: Flat, anew: bool) -> torch.Tensor:
        swapper, name = self._tier.swapper, flat.name

        def ask() -> torch.Tensor:
            if name in self._existing and not anew:
                return swapper.swap_in(name)
            made = swapper.create(name, flat.nbytes)
            self._existing.add(name)
            return made

        self._taking = name
        try:
            return ask()
        except OutOfHostMemoryError:  # values whose copies have not ended take the room
            self._finish_copies()
            self._make_room()
            return ask()

    def _leave(self, name: str) -> None:
        """End the use of *name* as soon as none of its copies is in flight."""
        if name == self._current:
            self._current = None
        if name not in self._uses or any(copy.name == name for copy in self._copies):
            return
        if self._uses[name].discards:
            self._delete(name)
        else:
            self._tier.swapper.release(name, changed=self._uses[name].changed)
        del self._uses[name]  # last: until then, `cancel` ends the use

    def _delete(self, name: str) -> None:
        self._tier.forget([name])
        self._existing.discard(name)

    # Copies of a GPU.

    def _copies_between(self, one: torch.Tensor, other: torch.Tensor) -> GradientCopies | None:
        """The copies of the GPU; None if it has both tensors, or none."""
        if one.is_cuda == other.is_cuda:
            return None
        device = one.device if one.is_cuda else other.device
        if device not in self._devices:
            self._devices[device] = GradientCopies(device, self._in_order)
        return self._devices[device]

    def _note(self, flat: Flat, start: int, done: Any, there: torch.Tensor, *kept: Any) -> None:
        """Record a copy of *there*. If `in_order`, the stream keeps the memory of its tensors."""
        nbytes = 0 if self._in_order else there.nbytes
        held = () if self._in_order else (there, *kept)
        self._copies.append(_Copy(flat.name, start, start + there.numel(), done, nbytes, held))
        while (
            len(self._copies) > _IN_FLIGHT
            or sum(copy.nbytes for copy in self._copies) > _IN_FLIGHT_BYTES
            or (self._copies and self._copies[0].done.query())
        ):
            self._finish_first()

    def _finish_copies(self) -> None:
        while self._copies:
            self._finish_first()

    def _finish_first(self) -> None:
        copy = self._copies.popleft()
        copy.done.synchronize()
        if copy.name != self._current:
            self._leave(copy.name)

    def _forget_copies(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)
        self._copies.clear()
