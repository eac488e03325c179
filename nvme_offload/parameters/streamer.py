"""`Streamer`: brings the parameters of a model to the device when they are used."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..device.modes import check_no_capture, outside_of_modes
from ..device.room import DeviceRoom
from ..errors import OffloadError, UsageError
from ..sizes import evenly
from ..swap.access_order import AccessOrder
from ..swap.tier import Tier
from ..units import format_bytes
from . import apart, idle
from .buckets import Bucket, Place
from .compiled import CompiledBlock, check_not_frozen, compiled_blocks
from .copied import Hook, ModuleParameters, StateCopies
from .home import Home
from .saved import SavedTensors, hide_from_compiler, others_receive_tensors, pop, push
from .slots import Slot, Slots

# Buckets that are fetched before their use. With fewer, the GPU waits; with more, their copies delay
# copies of optimizer states, which are needed earlier.
AHEAD = 3
_USES_A_LOOK = 4  # at the GPU's memory, where slots take all free memory

# Writes the values of parameters to the memory of each.
Load = Callable[[Mapping[torch.Tensor, torch.Tensor]], None]

_untyped_torch: Any = torch._C
_log = logging.getLogger(__name__)


class Streamer:
    """Streams *buckets*, the parameters of *model*, from *tier* to *device*.

    A parameter is in use while the forward pass runs of the module that owns it, or of a module
    that has read it from its owner. Its class is then `UsedParameter`. At other times the class is
    `IdleParameter`, and a function that gets it brings the values for the time of the call. In
    backward, a tensor that autograd has saved brings the values back. *load* writes the first values
    of parameters to memory, which is allocated *step* bytes at a time.

    A bucket keeps its slot after its use until another bucket needs the slot. *poison*: fill the
    memory of a slot with NaN when its bucket leaves, for tests.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tier: Tier,
        device: torch.device,
        buckets: Sequence[Bucket],
        slots: Slots,
        load: Load,
        *,
        step: int,
        grows: bool = False,
        poison: bool = False,
    ) -> None:
        self._tier = tier
        self._device = device
        self._home = Home(tier, device)
        self._buckets = {bucket.name: bucket for bucket in buckets}
        self._of: dict[torch.Tensor, Bucket] = {
            place.parameter: bucket for bucket in buckets for place in bucket.places
        }
        # Spread, so that fetches of the others are spread over the order.
        self._ranks = {name: evenly(number) for number, name in enumerate(self._buckets)}
        self.slots = slots
        self._least_slots = slots.count
        self._room = DeviceRoom(device, slots.each_nbytes) if grows else None
        self._uses = 0
        self._poison = poison
        self._lock = threading.RLock()  # backward() has a thread for every GPU
        self._order = AccessOrder()
        self._clock = 0
        self._last: Bucket | None = None
        self._ahead = 0  # the place in the order up to which buckets are on the device
        self._unused: set[Bucket] = set()  # fetched and not used yet
        self._first_module: weakref.ref[torch.nn.Module] | None = None
        self._placeholders: dict[tuple[torch.dtype, torch.Size], torch.Tensor] = {}
        self._is_reset = False  # `_begin_load` has reset the tier, and not ended
        self._has_seen_autocast = False
        self._running = _Running()
        self._model = weakref.ref(model)
        self._admit(buckets, load, step)
        tier.abandon_with(self, list(self._buckets), [bucket.tier_nbytes for bucket in buckets])
        self._watch(model)

    # Uses.

    def begin(self, bucket: Bucket) -> None:
        """Begin a use of *bucket*. Raises: as `TensorSwapper.swap_in`; no use has begun then."""
        idle.check_no_derivative()
        check_no_capture(
            "use streamed parameters, whose memory changes: leave the graph out, or stream only other modules"
        )
        with self._lock, outside_of_modes():
            self._uses += 1
            if self._room is not None and self._uses % _USES_A_LOOK == 0:
                self._leave_room(self._room)
            self._present(bucket)
            bucket.users += 1
            self._note(bucket)

    def end(self, bucket: Bucket) -> None:
        """End a use of *bucket*."""
        with self._lock:
            bucket.users -= 1
            if bucket.users == 0:
                for parameter in bucket.shown:
                    parameter.__class__ = idle.IdleParameter
                bucket.shown.clear()

    def _show(self, parameter: Any, bucket: Bucket) -> None:
        """Let functions get *parameter* as any Parameter until no use of *bucket* is open."""
        with self._lock:
            if type(parameter) is not idle.UsedParameter:
                bucket.shown.append(parameter)
                parameter.__class__ = idle.UsedParameter

    @contextlib.contextmanager
    def using(
        self, parameters: Iterable[torch.nn.Parameter], *, exposes: bool = True
    ) -> Iterator[None]:
        """Context in which *parameters* are in use. *exposes*: the caller may keep a view, such as
        `data`, through which a change does not show.
        """
        begun: list[Bucket] = []
        hooks = None
        try:
            for parameter in parameters:
                bucket = self._of[parameter]
                if bucket not in begun:
                    self.begin(bucket)
                    begun.append(bucket)
                self._show(parameter, bucket)
            hooks = push(self)
            yield
        finally:
            pop(hooks)
            for bucket in begun:
                with self._lock:
                    slot = bucket.slot
                    self.end(bucket)
                    if not slot.is_free:  # the caller has a view
                        bucket.written = True
                        bucket.exposed += exposes

    def view(
        self,
        bucket: Bucket,
        dtype: torch.dtype,
        offset: int,
        size: torch.Size,
        stride: tuple[int, ...],
    ) -> torch.Tensor:
        """A view of the values of *bucket*, which keeps the slot until it is dropped."""
        with self._lock, outside_of_modes(), torch.inference_mode(False):
            slot = self._present(bucket)
            empty: Any = torch.empty(0, dtype=dtype, device=self._device)
            viewed: torch.Tensor = empty.set_(slot.storage, offset, size, stride)
            self._note(bucket)
            return viewed

    def replace_data(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
        """Carry out ``parameter.data = values``. Raises: UsageError."""
        if values is parameter:
            return
        if not apart.has_form_of(parameter, values):
            idle.refuse_form()
        bucket = self._of[parameter]
        with self.using([parameter]), self._lock, outside_of_modes():
            self.changes(parameter)
            apart.assign(bucket, parameter, values)

    def number_of_memory(self, parameter: torch.nn.Parameter) -> int:
        """A number that differs for each memory that the program has assigned to *parameter*."""
        bucket = self._of[parameter]
        return bucket.apart.get(parameter) or bucket.numbers.get(parameter, 0)

    def changes(self, parameter: torch.nn.Parameter) -> None:
        """The program may change *parameter* in a way that its version does not show."""
        bucket = self._of[parameter]
        bucket.written = True
        bucket.exposed += 1

    def exposure_of(self, parameter: torch.nn.Parameter) -> idle.Exposure:
        """The tensors through which *parameter* may change while its version stays."""
        bucket = self._of[parameter]
        lasts = parameter in bucket.apart or bucket.exposed > bucket.exposed_until
        return idle.Exposure(bucket.exposed, lasts)

    def copy_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The values of *parameter*, streamed or not, in host memory. Raises: as
        `TensorSwapper.swap_in`.
        """
        if parameter not in self._of:
            return parameter.detach().cpu()
        with self._lock, outside_of_modes(), torch.inference_mode(False):
            bucket = self._of[parameter]
            place = bucket.place_of(parameter)
            copied = torch.empty(place.shape, dtype=place.dtype)
            if parameter in bucket.apart:
                copied.copy_(apart.memory_of(place.parameter))
            elif bucket.slot is not None:
                bucket.slot.begin_use()
                copied.copy_(place.within(bucket.slot.buffer))
            else:
                self._home.read(bucket, lambda memory: copied.copy_(place.within(memory)))
            return copied

    # Slots.

    def _present(self, bucket: Bucket) -> Slot:
        slot = bucket.slot or self._fetch(bucket)
        slot.begin_use()
        return slot

    def _fetch(self, bucket: Bucket) -> Slot:
        slot = self.slots.take(self._empty, before=self._order.now + AHEAD)
        slot = slot or self.slots.take(self._empty, before=-math.inf) or self.slots.exceed()
        self._ahead = self._order.now
        self._fill(slot, bucket)
        with contextlib.suppress(OffloadError):  # it is stored, or the error raised, as it leaves
            self._store_next()
        return slot

    def _fetch_following(self) -> None:
        """Fetch the next `AHEAD` buckets in the order that are not on the device, as far as slots
        are free for them.
        """
        order = self._order
        self._ahead = max(self._ahead, order.now)
        while len(self._unused) < AHEAD and self._ahead < order.now + len(order.period):
            following = self._buckets[order.at(self._ahead).name]
            if following.slot is None:
                slot = self.slots.take(self._empty, before=self._ahead)
                if slot is None:
                    return
                self._fill(slot, following)
                self._unused.add(following)
                self._store_next()
            self._ahead += 1

    def _store_next(self) -> None:
        """Copy back the values of the slot that `take` would empty now, so that filling it need not wait."""
        slot = self.slots.next_to_leave()
        if slot is not None and slot.bucket is not None:
            self._store_changes(slot, slot.bucket)

    def _fill(self, slot: Slot, bucket: Bucket) -> None:
        with torch.inference_mode(False):
            self._home.fill(slot, bucket)
            idle.as_it_is(_put_all_data, bucket, lambda place: place.within(slot.buffer))
        bucket.versions = idle.as_it_is(_versions, bucket)
        bucket.written, bucket.exposed_until = False, bucket.exposed
        bucket.slot, slot.bucket = slot, bucket
        slot.count_own_references()

    def _empty(self, slot: Slot) -> None:
        """Take the bucket out of *slot*. Raises: as `TensorSwapper.create`; nothing is changed then."""
        bucket = slot.bucket
        if bucket is None:
            return
        with torch.inference_mode(False):
            apart.rejoin(bucket, slot)
        self._store_changes(slot, bucket)
        with torch.inference_mode(False):
            bucket.slot = slot.bucket = None
            self._unused.discard(bucket)
            for place in bucket.places:
                # It is idle already, unless a KeyboardInterrupt has ended a use.
                place.parameter.__class__ = idle.IdleParameter
            idle.as_it_is(_put_all_data, bucket, self._placeholder)
            if self._poison:
                if slot.copied is not None:
                    torch.cuda.synchronize(self._device)
                slot.buffer.fill_(255)
                if slot.copied is not None:
                    torch.cuda.synchronize(self._device)

    def _store_changes(self, slot: Slot, bucket: Bucket) -> None:
        """Copy the values in *slot* back if they have changed."""
        if not bucket.written and bucket.versions == idle.as_it_is(_versions, bucket):
            return
        with torch.inference_mode(False):
            self._home.store(slot, bucket)
        bucket.versions = idle.as_it_is(_versions, bucket)
        if slot.is_free:
            bucket.written, bucket.exposed_until = False, bucket.exposed

    def _placeholder(self, place: Place) -> torch.Tensor:
        """Memory for one element, NaN in every floating-point dtype."""
        key = place.dtype, place.shape
        if key not in self._placeholders:
            ones = torch.full((place.dtype.itemsize,), 255, dtype=torch.uint8, device=self._device)
            self._placeholders[key] = ones.view(place.dtype).expand(place.shape)
        return self._placeholders[key]

    # The order of uses.

    def _note(self, bucket: Bucket) -> None:
        """Record a use of *bucket*, and fetch the buckets that are used next."""
        if bucket is self._last:
            return
        if self._last is not None and self._last.slot is not None:
            self._last.slot.end_use()
        self._last = bucket
        self._unused.discard(bucket)
        expected = self._order.now + 1
        self._order.use(bucket.name, bucket.nbytes, created=False)
        if not self._order.followed:
            self._clock += 1
            bucket.next_use, bucket.leaves = -self._clock, (-self._clock, 0.0)
            return
        if self._order.now == expected:
            self._find_next_use(bucket)
        else:
            self._unused.clear()
            self._find_next_uses()
        # A transfer that fails here fails again, and raises, where its bucket is used or leaves.
        with contextlib.suppress(OffloadError, torch.OutOfMemoryError):
            self._fetch_following()

    def _find_next_use(self, bucket: Bucket) -> None:
        position = self._order.next_use(bucket.name)
        bucket.next_use = math.inf if position is None else position
        # In a cycle, no choice saves more fetches than another. So always the same buckets stay: the
        # tier then learns which are fetched.
        cycles = len(self._order.period.places.get(bucket.name, ())) < 2
        bucket.leaves = (math.inf, self._ranks[bucket.name]) if cycles else (bucket.next_use, 0.0)

    def _find_next_uses(self) -> None:
        if self._order.followed:
            for bucket in self._buckets.values():
                self._find_next_use(bucket)

    def _begin_period(self) -> None:
        if self._order.step():
            self._unused.clear()
        self._ahead = self._order.now
        self._last = None
        self._tier.swapper.step()
        self._find_next_uses()
        self.slots.trim(self._empty)
        if self._room is not None:
            self._leave_room(self._room)
            while self.slots.count < len(self._buckets) and self._has_room(1, self._room):
                self.slots.count += 1

    def _leave_room(self, room: DeviceRoom) -> None:
        """Have fewer slots if forward and backward passes need more memory than before, as they do for
        longer sequences.
        """
        if self.slots.count > self._least_slots and room.has_new_peak():
            while self.slots.count > self._least_slots and not self._has_room(0, room):
                self.slots.count -= 1
            self.slots.trim(self._empty)

    def _has_room(self, more: int, room: DeviceRoom) -> bool:
        """Whether the GPU has memory for *more* slots."""
        there, wanted = self.slots.nbytes, (self.slots.count + more) * self.slots.each_nbytes
        return room.suffices(there, wanted - there)

    # Modules.

    def _admit(self, buckets: Sequence[Bucket], load: Load, step: int) -> None:
        """Move all parameters to the tier, which grows by *step* bytes. After an exception they are in
        memory again.
        """
        moved: list[Bucket] = []
        left, free = sum(bucket.tier_nbytes for bucket in buckets), 0
        try:
            self._tier.require(0, pin=False)
            for bucket in buckets:
                if bucket.tier_nbytes > free:
                    more = min(max(bucket.tier_nbytes, step), left)
                    self._tier.require(more, pin=False, ahead=False)
                    left, free = left - more, free + more
                free -= bucket.tier_nbytes

                def fill(memory: torch.Tensor, places: Sequence[Place] = bucket.places) -> None:
                    load({place.parameter: place.within(memory) for place in places})

                self._home.admit(bucket, fill)
                moved.append(bucket)
                for place in bucket.places:
                    put_data(place.parameter, self._placeholder(place))
                    idle.bind(place.parameter, self)
            self._tier.pin()
        except BaseException:
            for bucket in moved:
                for place in bucket.places:
                    values = self.copy_of(place.parameter)
                    idle.unbind(place.parameter)
                    place.parameter.data = values
            raise

    def _watch(self, model: torch.nn.Module) -> None:
        compiled: set[torch.nn.Module] = set()
        copies = StateCopies(self._of, self.copy_of)
        for block in compiled_blocks(model):
            block.replace(functools.partial(self._call_compiled, block))
            compiled.update(block.modules)
            hide_from_compiler()
        for module in model.modules():
            untyped: Any = module
            streams = any(one in self._of for one in module._parameters.values())
            if streams or module is model:
                untyped.register_load_state_dict_pre_hook(Hook(self._begin_load))
            if streams:
                untyped.register_state_dict_post_hook(Hook(copies.put))
            if module in compiled:
                continue  # the compiler would trace the rest
            if streams:
                module._parameters = ModuleParameters(self.read, module._parameters)
            module.register_forward_pre_hook(Hook(self._enter), prepend=True)
            module.register_forward_hook(Hook(self._leave), always_call=True)

    def _call_compiled(self, block: CompiledBlock, *args: Any, **kwargs: Any) -> Any:
        """Call *block* with all of its parameters in use, as the plain ones that were compiled."""
        check_not_frozen()
        self._begin(block.module, block.parameters)
        streamed = [one for one in block.parameters if one in self._of]
        try:
            for parameter in streamed:
                parameter.__class__ = torch.nn.Parameter
            return block.call(*args, **kwargs)
        finally:
            for parameter in streamed:
                parameter.__class__ = idle.UsedParameter
            self._leave(block.module)

    def read(self, parameter: torch.nn.Parameter) -> None:
        """A program has read *parameter* from its module: it is in use until the forward pass ends
        of the module that runs now.
        """
        frames = self._running.frames
        bucket = self._of.get(parameter)
        if frames and bucket is not None:
            if bucket not in frames[-1].buckets:
                self.begin(bucket)
                frames[-1].buckets.append(bucket)
            self._show(parameter, bucket)

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        self._begin(module, module._parameters.values())

    def _begin(
        self, module: torch.nn.Module, parameters: Iterable[torch.nn.Parameter | None]
    ) -> None:
        """The forward pass of *module* begins: *parameters* are in use until it ends."""
        running = self._running
        if module is self._model():
            self._leave(module)  # a KeyboardInterrupt may have left it running
        if not running.frames:
            _check_not_traced()
        idle.check_no_derivative()
        if not running.frames and _untyped_torch._current_graph_task_id() == -1:
            if self._first_module is None:
                self._first_module = weakref.ref(module)
            elif self._first_module() is module:
                with self._lock, outside_of_modes():
                    self._begin_period()
        running.frames.append(_Frame(module, push(self)))
        if not self._has_seen_autocast and torch.is_autocast_enabled(self._device.type):
            self._check_autocast(torch.get_autocast_dtype(self._device.type))
        for parameter in parameters:
            if parameter is not None:
                self.read(parameter)

    def _check_autocast(self, dtype: torch.dtype) -> None:
        """Warn if the copies that autocast makes of weights need more memory than the slots."""
        if not torch.is_grad_enabled():
            return
        self._has_seen_autocast = True
        if others_receive_tensors() and not torch.is_autocast_cache_enabled():
            return
        copied = {torch.float32, torch.float16, torch.bfloat16} - {dtype}
        places = (place for bucket in self._buckets.values() for place in bucket.places)
        elements = sum(place.shape.numel() for place in places if place.dtype in copied)
        if (copies := elements * dtype.itemsize) > self.slots.count * self.slots.each_nbytes:
            _log.warning(
                "autocast copies weights to %s, and up to %s of copies stay until backward: convert the model to that dtype before offload.parameters, "
                "or combine cache_enabled=False of torch.autocast with offload.activations()",
                dtype,
                format_bytes(copies),
            )

    def _leave(self, module: torch.nn.Module, *_: Any) -> None:
        running = self._running
        # The end of a recomputation skips the ends of the modules that run.
        while running.frames:
            frame = running.frames.pop()
            for bucket in frame.buckets:
                self.end(bucket)
            pop(frame.hooks)
            if frame.module is module:
                break

    def _begin_load(
        self,
        module: torch.nn.Module,
        state: Mapping[str, Any],
        prefix: str,
        metadata: Mapping[str, Any],
        *_: Any,
    ) -> None:
        """The program is about to load weights. If an exception has interrupted a call of the tier,
        its values are lost: they are NaN until the program has loaded them. Raises: UsageError.
        """
        if metadata.get("assign_to_params_buffers") and any(
            prefix + name in state and parameter in self._of
            for name, parameter in module.named_parameters(remove_duplicate=False)
        ):
            raise UsageError(
                "load_state_dict(assign=True) would replace parameters that stream by others: leave assign out"
            )
        with self._lock, torch.inference_mode(False):
            if not (self._tier.interrupted or self._is_reset):
                return
            self._is_reset = True
            self._home.reset()
            for bucket in self._buckets.values():
                if bucket.slot is None:
                    self._home.admit(bucket, lambda memory: memory.fill_(255))
                else:
                    bucket.written = True
            self._is_reset = False


def _put_all_data(bucket: Bucket, values_of: Callable[[Place], torch.Tensor]) -> None:
    for place in bucket.places:
        if place.parameter not in bucket.apart:
            place.parameter.data = values_of(place)


def _versions(bucket: Bucket) -> list[int]:
    return [place.parameter._version for place in bucket.places]


def put_data(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Carry out ``parameter.data = values``, also for a *parameter* on the meta device."""
    if parameter.is_meta:
        swap: Any = torch.utils.swap_tensors  # untyped there
        # `data` has its own version counter; several parameters may have the same placeholder.
        swap(parameter, torch.nn.Parameter(values.data, parameter.requires_grad))
    else:
        parameter.data = values


def _check_not_traced() -> None:
    proxies = _untyped_torch._TorchDispatchModeKey.PROXY
    if (
        torch.compiler.is_compiling()
        or _untyped_torch._is_tracing()
        or _untyped_torch._get_dispatch_mode(proxies) is not None
    ):
        idle.refuse_tracing()


class _Frame:
    """The forward pass of a module: the buckets in use, and hooks on saved tensors, until it ends."""

    __slots__ = ("buckets", "hooks", "module")

    def __init__(self, module: torch.nn.Module, hooks: SavedTensors | None) -> None:
        self.module = module
        self.hooks = hooks
        self.buckets: list[Bucket] = []


class _Running(threading.local):
    """The forward passes that run in a thread, the innermost last."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
