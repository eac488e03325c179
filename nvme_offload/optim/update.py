"""`Updater`: the steps of bundles, each by an optimizer of its own over what the bundle's value holds."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import OutOfHostMemoryError
from ..optimizer_states import Layout, StateFormat, far_blocks, looks_at, round_near, wide_enough, widened
from ..optimizer_states.traits import raw_step
from ..optimizer_states.tree import Key, travelling
from ..swap.tier import Tier
from ..units import format_bytes
from .bundles import Bundle, Piece
from .lanes import DeviceLane, HostLane, Lane

_LOADING = -1  # in the place of a step
MASTER = "master"  # the key that the fp32 weights have in a state dict

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
Find = Callable[[Piece, Key], torch.Tensor]  # what travels of a piece, by its key
Options = Mapping[int, Mapping[str, Any]]  # of each parameter group that a bundle has parts of


class Updater:
    """Opens bundles, steps over them and stores them. *make* makes the inner optimizers, which are called *name*."""

    def __init__(self, tier: Tier, state_format: StateFormat, make: Make, name: str) -> None:
        self._tier = tier
        self._format = state_format
        self.make = make
        self._name = name
        self.slack_bytes = 0  # of host memory, kept for what is beside the values
        self._widened_when: int | None = None
        self._far: torch.Tensor | None = None  # blocks of the bundle in use
        self._resident_bytes = 0  # of the process, when freed memory was last given back
        self.attributes: dict[str, Any] = {}  # that were set, for inner optimizers to come
        self._host = HostLane(tier)
        self._scratch = torch.empty(0)
        self._lanes: dict[torch.device, Lane] = {}

    @property
    def wide(self) -> bool:
        """Whether states are kept in 16 bits where 8 would be too few; to be set before states are loaded, for those that were kept so."""
        return self._format.wide

    @wide.setter
    def wide(self, needed: bool) -> None:
        self._widened_when = None
        self._format = dataclasses.replace(self._format, wide=self._format.wide or (needed and self._format.eight_bit))

    def drain(self) -> None:
        """Return when no bundle is in use."""
        for lane in self._lanes.values():
            lane.drain()

    def open(self, bundle: Bundle) -> torch.Tensor:
        """Have the bundle's bytes on its device, in use. Raises: as `TensorSwapper.swap_in`; nothing is changed by then, so that it may be tried again."""
        lane = self._lane(bundle)
        if bundle.layout is not None:
            return lane.fetch(bundle.name, bundle.nbytes) if bundle.nbytes else _nothing(bundle)
        layout = self._format.layout(bundle.numel, bundle.traits.states, bundle.dtype, self._name)
        memory = lane.renew(bundle.name, layout.nbytes).zero_() if layout.nbytes else _nothing(bundle)
        bundle.layout, bundle.rest_bytes = layout, 0
        for piece in bundle.pieces:
            piece.leaves, piece.keys, piece.rest = {}, {}, {}
            piece.look_at_strides()
            piece.stepped = False
            piece.changes = -1  # so that the master is made from the weight
        return memory

    def step(self, bundle: Bundle, memory: torch.Tensor, options: Options, seed: int) -> Options:
        """Update the parameters of the opened *bundle* by their gradients; what the inner optimizer has made of the *options*."""
        first = bundle.inner is None
        self._format = wide_enough(self._format, self._name, options.values())
        inner, memory = self._bound(bundle, memory, options, seed, raw_step, steps=True)
        self._give_back(bundle, changed=True)
        if bundle.device.type == "cpu":
            # At first of the states that the inner optimizer has made, whose bytes are in the bundle's value now; later of what it computes with.
            self._trim(at_most=0 if first else self.slack_bytes)
        for piece in bundle.pieces:
            piece.stepped |= piece.weight.parameter.grad is not None
            piece.weight.updated()
        return dict(zip(bundle.groups, inner.param_groups, strict=True))

    def call(self, bundle: Bundle, memory: torch.Tensor, options: Options, method: Callable[[torch.optim.Optimizer], Any]) -> Options:
        """Let the inner optimizer of the opened *bundle* do what *method* does, which may change parameters and states; as `step`."""
        inner, _ = self._bound(bundle, memory, options, 0, lambda _: method)
        self._give_back(bundle, changed=True)
        for piece in bundle.pieces:
            piece.weight.updated(always=True)
        return dict(zip(bundle.groups, inner.param_groups, strict=True))

    def start(self, bundle: Bundle, memory: torch.Tensor, options: Options) -> None:
        """Keep what the inner optimizer has before its first step, for one that has something by then."""
        self._bound(bundle, memory, options, 0, lambda inner: lambda _: None)
        self._give_back(bundle, changed=True)

    def fail(self, bundle: Bundle) -> None:
        """Give an opened bundle back after an error, as it was in memory."""
        self._unbind(bundle)
        self._give_back(bundle, changed=bundle.device.type == "cpu")

    # Whole values, for checkpoints; on the CPU, wherever the parameters are.

    @contextlib.contextmanager
    def reading(self, bundle: Bundle) -> Iterator[Find]:
        """The states of the pieces of a bundle that has a layout, and their masters, by key: on the CPU, for the time of the context."""
        layout = bundle.layout
        assert layout is not None
        memory = self._host.fetch(bundle.name, bundle.nbytes) if bundle.nbytes else torch.empty(0, dtype=torch.uint8)
        try:
            scratch = self._scratch_of(self._format.unpacked_elements(layout))
            working = [] if self._format.in_place else bundle.with_gaps(_host_copies(bundle))
            master, states = self._format.unpack(layout, memory, working, scratch)
            yield _finder(master, states, memory[layout.nbytes :])
        finally:
            if bundle.nbytes:
                self._host.give_back(changed=False)
            self._trim(at_most=self.slack_bytes)

    def store(
        self, bundle: Bundle, forms: Mapping[Piece, Mapping[Key, torch.Tensor]], fill: Callable[[Find], None], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Make the bundle's value anew, for states of *forms*. *fill* can have the place of each, of zeros, and where there are masters, of the weights."""
        if not self._store(bundle, forms, fill, groups):
            self._store(bundle, forms, fill, groups)

    def _store(
        self, bundle: Bundle, forms: Mapping[Piece, Mapping[Key, torch.Tensor]], fill: Callable[[Find], None], groups: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Whether the states have fitted the format; if not it is another one now."""
        dtypes, rest_bytes = bundle.arrange(forms)
        layout = bundle.layout = self._format.layout(bundle.numel, dtypes, bundle.dtype, self._name)
        bundle.rest_bytes = rest_bytes
        memory = self._renewed(bundle, self._host)
        try:
            flats = _host_copies(bundle)  # which the master, once it is rounded, is written to: the parameters themselves are not for us to load
            working = bundle.with_gaps(flats)
            master, states = self._format.unpack(layout, memory, working, self._scratch_of(self._format.unpacked_elements(layout)))
            if master is not None:
                for piece, flat in zip(bundle.pieces, flats, strict=True):
                    piece.flat_within(master).copy_(flat)
            fill(_finder(master, states, memory[layout.nbytes :]))
            names = bundle.block_names("cpu") if self._format.eight_bit else None
            if self._format.eight_bit:
                if self._widen(layout, states, _LOADING, [groups[index] for index in bundle.groups]):
                    return False
                if self._widened_when == _LOADING:
                    round_near(layout, states, self._far, 0, names)
            self._format.pack(layout, memory, working, master, states, 0, names)
            return True
        finally:
            if bundle.nbytes:
                self._host.give_back(changed=True)

    # Inside.

    def _lane(self, bundle: Bundle) -> Lane:
        lane = self._lanes.get(bundle.device)
        if lane is None:
            lane = self._lanes[bundle.device] = HostLane(self._tier) if bundle.device.type == "cpu" else DeviceLane(self._tier, bundle.device)
        return lane

    def _give_back(self, bundle: Bundle, *, changed: bool) -> None:
        if bundle.nbytes:
            self._lane(bundle).give_back(changed=changed)

    def _bound(
        self,
        bundle: Bundle,
        memory: torch.Tensor,
        options: Options,
        seed: int,
        act: Callable[[torch.optim.Optimizer], Callable[[torch.optim.Optimizer], Any]],
        *,
        steps: bool = False,
    ) -> tuple[torch.optim.Optimizer, torch.Tensor]:
        """Let the inner optimizer *act* on what *memory* holds, and pack what comes of it."""
        assert bundle.layout is not None
        weights = bundle.weights()
        flats = [piece.in_memory_order(weight) for piece, weight in zip(bundle.pieces, weights, strict=True)]
        working = bundle.with_gaps(flats)
        widened, unpacked = self._room_beside(bundle, bundle.layout)
        master, states = self._format.unpack(bundle.layout, memory, working, unpacked)
        for piece, weight in zip(bundle.pieces, weights, strict=True):
            if master is not None:
                self._follow(piece, weight, piece.within(master))
            piece.shadow.data = weight if master is None else piece.within(master)
            piece.shadow.grad = piece.gradient(widened)
            for key, leaf in piece.leaves.items():
                leaf.data = piece.state(key, states, memory[bundle.layout.nbytes :])
        inner = self._inner(bundle, options)
        act(inner)(inner)
        memory, master, states = self._collected(bundle, memory, working, master, states)
        names = bundle.block_names() if self._format.eight_bit else None
        if steps and looks_at(self._format, seed + 1):
            if self._widen(bundle.layout, states, seed, options.values()):
                memory, master, states = self._collected(bundle, memory, working, master, states)
            if self._widened_when == seed:
                round_near(bundle.layout, states, self._far, seed, names)
        self._format.pack(bundle.layout, memory, working, master, states, seed, names)
        if master is not None:
            for piece, weight, flat in zip(bundle.pieces, weights, flats, strict=True):
                if weight.data_ptr() != flat.data_ptr():
                    weight.copy_(flat.as_strided(piece.shape, piece.strides))
        self._unbind(bundle)
        return inner, memory

    def _widen(self, layout: Layout, states: Mapping[str, torch.Tensor], when: int, groups: Iterable[Mapping[str, Any]]) -> bool:
        """Whether *states* have shown that they need 16 bits, in which all are kept from now on, which is *when*."""
        self._far = None
        if self._format.wide and self._widened_when != when:
            return False
        self._far = far_blocks(layout, states, min((eps for group in groups if isinstance(eps := group.get("eps"), int | float)), default=0.0))
        if self._far is None or self._format.wide:
            return False
        self._format, self._widened_when = widened(self._format, self._name), when
        return True

    def _room_beside(self, bundle: Bundle, layout: Layout) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where gradients of 16 bits are widened, and what is no view is unpacked. On a GPU that is the allocator's business."""
        if bundle.device.type != "cpu":
            return self._scratch[:0], None
        gradients = bundle.numel if bundle.update_dtype != bundle.dtype else 0
        scratch = self._scratch_of(gradients + self._format.unpacked_elements(layout))
        return scratch[:gradients], scratch[gradients:]

    def _trim(self, at_most: int) -> None:
        """Give freed memory back to the kernel where the process has grown by more than *at_most* bytes since that was done: it costs page faults later.

        glibc keeps freed memory, and between allocations of many sizes ever more of it. Source: malloc_trim(3), which only glibc has; proc_pid_statm(5).
        """
        if self._resident() > self._resident_bytes + at_most:
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)
            self._resident_bytes = self._resident()

    @staticmethod
    def _resident() -> int:
        with Path("/proc/self/statm").open("rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE

    def _scratch_of(self, elements: int) -> torch.Tensor:
        """On the CPU always the same memory, since fresh pages cost more than what is done with them, and glibc keeps much of what it is given back.

        Source: malloc(3); chunks that are aligned beyond its own unit are cut from larger ones.
        """
        if self._scratch.numel() < elements:
            self._scratch = torch.empty(0)  # before the larger one is there
            self._scratch = torch.empty(elements, dtype=torch.float32)
        return self._scratch[:elements]

    def _follow(self, piece: Piece, weight: torch.Tensor, master: torch.Tensor) -> None:
        """Where somebody else has changed the *weight*, let the *master* follow; elsewhere it keeps what the weight does not have."""
        if piece.changes != piece.weight.changes and self._format.in_place:
            new = torch.ones_like(weight, dtype=torch.bool) if piece.changes < 0 else master.to(weight.dtype) != weight
            master.copy_(torch.where(new, weight.to(master.dtype), master))
        piece.changes = piece.weight.changes

    def _inner(self, bundle: Bundle, options: Options) -> torch.optim.Optimizer:
        given = {index: copy.deepcopy(dict(options[index])) for index in bundle.groups}
        if bundle.inner is None:
            shadows = {index: [piece.shadow for piece in bundle.pieces if piece.group == index] for index in given}
            bundle.inner = self.make([{**given[index], "params": shadows[index]} for index in given])
            for name, value in self.attributes.items():
                setattr(bundle.inner, name, value)
            loaded = {piece.shadow: piece.states for piece in bundle.pieces if piece.states}
            if loaded:  # by an earlier version of the class, perhaps, so that it must look at them as it does when it loads by itself
                bundle.inner.state.update(loaded)
                bundle.inner.__setstate__({"state": bundle.inner.state, "param_groups": bundle.inner.param_groups})
        for group, new in zip(bundle.inner.param_groups, given.values(), strict=True):
            group.update(new)
        return bundle.inner

    def _collected(
        self, bundle: Bundle, memory: torch.Tensor, working: list[torch.Tensor], master: torch.Tensor | None, states: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
        """See that all that travels is in *states*; where the bundle's value has no place for it, make it anew."""
        layout = bundle.layout
        assert layout is not None
        for piece in bundle.pieces:
            if bundle.inner is not None and piece.shadow in bundle.inner.state:
                piece.states = bundle.inner.state[piece.shadow]
            piece.leaves = travelling(piece.states, piece.shape, piece.shadow)
        kept = {key: slot.dtype for key, slot in layout.states.items()}
        found, rest_bytes = bundle.arrange({piece: piece.leaves for piece in bundle.pieces})
        too_few = self._format.wide and any(slot.exponents is not None for slot in layout.states.values())
        if {**kept, **found} != kept or rest_bytes > bundle.rest_bytes or too_few:
            bundle.layout, bundle.rest_bytes = self._format.layout(bundle.numel, {**kept, **found}, bundle.dtype, self._name), rest_bytes
            for piece in bundle.pieces:
                for leaf in piece.leaves.values():
                    leaf.data = leaf.clone()
            copied = None if master is None else master.clone()
            memory = self._renewed(bundle, self._lane(bundle))
            master, states = self._format.unpack(bundle.layout, memory, working)
            if master is not None and copied is not None:
                master.copy_(copied)
        find = _finder(master, states, memory[bundle.layout.nbytes :] if bundle.layout is not None else memory)
        moved = [(place, leaf) for piece in bundle.pieces for key, leaf in piece.leaves.items() if (place := find(piece, key)).data_ptr() != leaf.data_ptr()]
        own = {one.untyped_storage().data_ptr() for one in (memory, *states.values())} if moved else set()
        # What has changed places with another is where the other is to be.
        copies = [(place, leaf.clone() if leaf.untyped_storage().data_ptr() in own else leaf) for place, leaf in moved]
        for place, leaf in copies:
            place.copy_(leaf)
        return memory, master, states

    def _renewed(self, bundle: Bundle, lane: Lane) -> torch.Tensor:
        """Room of zeros in place of the bundle's value, for which more host memory is asked for than was foreseen, if need be."""
        if bundle.nbytes > bundle.room_bytes:
            self._tier.require(bundle.nbytes - bundle.room_bytes)
            bundle.room_bytes = bundle.nbytes
        if not bundle.nbytes:
            return _nothing(bundle)
        try:
            return lane.renew(bundle.name, bundle.nbytes).zero_()
        except OutOfHostMemoryError as error:
            enough = max(bundle.nbytes * 8 // 7, bundle.nbytes + self.slack_bytes) + 2 * mmap.PAGESIZE
            raise OutOfHostMemoryError(
                f"{self._name} keeps {format_bytes(bundle.nbytes)} of states for parameters that are updated together, which shows as it makes them, and "
                f"host_memory has no room for them: allow at least {enough} bytes ({format_bytes(enough)})"
            ) from error

    @staticmethod
    def _unbind(bundle: Bundle) -> None:
        for piece in bundle.pieces:
            for leaf in piece.leaves.values():
                leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            piece.shadow.grad = None
            piece.shadow.data = torch.empty(0, dtype=piece.shadow.dtype, device=piece.shadow.device)


def _nothing(bundle: Bundle) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=bundle.device)


def _finder(master: torch.Tensor | None, states: Mapping[Key, torch.Tensor], rest: torch.Tensor) -> Find:
    return lambda piece, key: piece.within(master) if key == MASTER and master is not None else piece.state(key, states, rest)


def _host_copies(bundle: Bundle) -> list[torch.Tensor]:
    return [piece.in_memory_order(piece.of_weight()).to("cpu", copy=True) for piece in bundle.pieces]
