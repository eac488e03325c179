"""`Updater`: the steps of bundles, each by an optimizer of its own over what the bundle's value holds."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import mmap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..optimizer_traits import has_a_value_for_each, raw_step
from ..state_formats import Layout, StateFormat
from ..tier import Tier
from .bundles import Bundle, Piece, dense_strides
from .lanes import DeviceLane, HostLane, Lane

MASTER = "master"  # the key that the fp32 weights have in a state dict

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
Options = Mapping[int, Mapping[str, Any]]  # of each parameter group that a bundle has parts of


class Updater:
    """Opens bundles, steps over them and stores them. *make* makes the inner optimizers, which are called *name*."""

    def __init__(self, tier: Tier, state_format: StateFormat, make: Make, name: str) -> None:
        self._tier = tier
        self._format = state_format
        self.make = make
        self._name = name
        self.slack_bytes = 0  # of host memory, kept for what is beside the values
        self._resident_bytes = 0  # of the process, when freed memory was last given back
        self.attributes: dict[str, Any] = {}  # that were set, for inner optimizers to come
        self._host = HostLane(tier)
        self._scratch = torch.empty(0)
        self._lanes: dict[torch.device, Lane] = {}

    def drain(self) -> None:
        """Return when no bundle is in use."""
        for lane in self._lanes.values():
            lane.drain()

    def open(self, bundle: Bundle) -> torch.Tensor:
        """Have the bundle's bytes on its device, in use. Raises: as `TensorSwapper.swap_in`; nothing is changed by then, so that it may be tried again."""
        lane = self._lane(bundle)
        if bundle.layout is not None:
            return lane.fetch(bundle.name, bundle.layout.nbytes) if bundle.layout.nbytes else _nothing(bundle)
        layout = self._format.layout(bundle.numel, bundle.traits.states, bundle.dtype, self._name)
        memory = lane.renew(bundle.name, layout.nbytes).zero_() if layout.nbytes else _nothing(bundle)
        bundle.layout = layout
        for piece in bundle.pieces:
            piece.keys.clear()
            piece.look_at_strides()
            piece.stepped = False
            piece.changes = -1  # so that the master is made from the weight
        return memory

    def step(self, bundle: Bundle, memory: torch.Tensor, options: Options, seed: int) -> Options:
        """Update the parameters of the opened *bundle* by their gradients; what the inner optimizer has made of the *options*."""
        first = bundle.inner is None
        inner, memory = self._bound(bundle, memory, options, seed, raw_step)
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
    def reading(self, bundle: Bundle) -> Iterator[tuple[torch.Tensor | None, Mapping[str, torch.Tensor]]]:
        """The master and the states of a bundle that has a layout: flat, on the CPU, for the time of the context."""
        layout = bundle.layout
        assert layout is not None
        memory = self._host.fetch(bundle.name, layout.nbytes) if layout.nbytes else torch.empty(0, dtype=torch.uint8)
        try:
            yield self._format.unpack(layout, memory, bundle.with_gaps(_host_copies(bundle)), self._scratch_of(self._format.unpacked_elements(layout)))
        finally:
            if layout.nbytes:
                self._host.give_back(changed=False)

    def store(self, bundle: Bundle, dtypes: Mapping[str, torch.dtype], fill: Callable[[torch.Tensor | None, Mapping[str, torch.Tensor]], None]) -> None:
        """Make the bundle's value anew, with states of *dtypes*. *fill* is given all of it, of zeros and, where there is a master, of the weights."""
        layout = self._format.layout(bundle.numel, dtypes, bundle.dtype, self._name)
        memory = self._host.renew(bundle.name, layout.nbytes).zero_() if layout.nbytes else torch.empty(0, dtype=torch.uint8)
        try:
            flats = _host_copies(bundle)  # which the master, once it is rounded, is written to: the parameters themselves are not for us to load
            working = bundle.with_gaps(flats)
            master, states = self._format.unpack(layout, memory, working, self._scratch_of(self._format.unpacked_elements(layout)))
            if master is not None:
                for piece, flat in zip(bundle.pieces, flats, strict=True):
                    piece.flat_within(master).copy_(flat)
            fill(master, states)
            self._format.pack(layout, memory, working, master, states)
            bundle.layout = layout
        finally:
            if layout.nbytes:
                self._host.give_back(changed=True)

    # Inside.

    def _lane(self, bundle: Bundle) -> Lane:
        lane = self._lanes.get(bundle.device)
        if lane is None:
            lane = self._lanes[bundle.device] = HostLane(self._tier) if bundle.device.type == "cpu" else DeviceLane(self._tier, bundle.device)
        return lane

    def _give_back(self, bundle: Bundle, *, changed: bool) -> None:
        if bundle.layout is not None and bundle.layout.nbytes:
            self._lane(bundle).give_back(changed=changed)

    def _bound(
        self,
        bundle: Bundle,
        memory: torch.Tensor,
        options: Options,
        seed: int,
        act: Callable[[torch.optim.Optimizer], Callable[[torch.optim.Optimizer], Any]],
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
            piece.states.update({key: piece.within(states[key], strides) for key, strides in piece.keys.items()})
        inner = self._inner(bundle, options)
        act(inner)(inner)
        memory, master, states = self._collected(bundle, memory, working, master, states)
        self._format.pack(bundle.layout, memory, working, master, states, seed)
        if master is not None:
            for piece, weight, flat in zip(bundle.pieces, weights, flats, strict=True):
                if weight.data_ptr() != flat.data_ptr():
                    weight.copy_(flat.as_strided(piece.shape, piece.strides))
        self._unbind(bundle)
        return inner, memory

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
        found: dict[str, torch.dtype] = {}
        for piece in bundle.pieces:
            if bundle.inner is not None and piece.shadow in bundle.inner.state:
                piece.states = bundle.inner.state[piece.shadow]
            piece.keys = {key: dense_strides(value) for key, value in piece.states.items() if has_a_value_for_each(key, value, piece.shadow)}
            found.update({key: piece.states[key].dtype for key in piece.keys})
        kept = {key: slot.dtype for key, slot in layout.states.items()}
        if {**kept, **found} != kept:
            bundle.layout = self._format.layout(bundle.numel, {**kept, **found}, bundle.dtype, self._name)
            for piece in bundle.pieces:
                piece.states.update({key: piece.states[key].clone() for key in piece.keys})
            copied = None if master is None else master.clone()
            memory = self._lane(bundle).renew(bundle.name, bundle.layout.nbytes).zero_()
            master, states = self._format.unpack(bundle.layout, memory, working)
            if master is not None and copied is not None:
                master.copy_(copied)
        for piece in bundle.pieces:
            for key, strides in piece.keys.items():
                place = piece.within(states[key], strides)
                if place.data_ptr() != piece.states[key].data_ptr():
                    place.copy_(piece.states[key])
        return memory, master, states

    @staticmethod
    def _unbind(bundle: Bundle) -> None:
        for piece in bundle.pieces:
            for key in piece.keys:
                piece.states.pop(key, None)
            piece.shadow.grad = None
            piece.shadow.data = torch.empty(0, dtype=piece.shadow.dtype, device=piece.shadow.device)


def _nothing(bundle: Bundle) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=bundle.device)


def _host_copies(bundle: Bundle) -> list[torch.Tensor]:
    return [piece.in_memory_order(piece.of_weight()).to("cpu", copy=True) for piece in bundle.pieces]
