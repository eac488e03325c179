"""`Updater`: steps over buckets, each by an inner optimizer on the states in the bucket's value."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..errors import known
from ..optimizer_states.adam_by_kernels import can_step_by_kernels, step_by_kernels
from ..optimizer_states.formats import Layout, StateFormat, put_in_place
from ..optimizer_states.one_pass import Part, is_packed_adam, step_in_one_pass
from ..optimizer_states.packed import Look
from ..optimizer_states.traits import raw_step
from ..optimizer_states.tree import drop_memory, travelling
from ..optimizer_states.widening import (
    least_eps,
    looks_at,
    mark_far_blocks,
    round_near,
    wide_enough,
)
from ..swap.tier import Tier
from .buckets import Bucket, Fragment, local
from .modes import callers_modes
from .progress import Progress
from .values import Values, finder

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
Options = Mapping[int, Mapping[str, Any]]  # by index of the group, for all groups of a bucket


class Updater(Values):
    """Updates and stores buckets. *make* makes the inner optimizers, which are called *name*."""

    def __init__(self, tier: Tier, state_format: StateFormat, make: Make, name: str) -> None:
        super().__init__(tier, state_format, name)
        self.make = make
        # attributes set by the program, for inner optimizers made later
        self.attributes: dict[str, Any] = {}
        self._streams: dict[torch.device, Any] = {}  # for buckets that visit a device
        self.notes_norms = False  # whether to set `Fragment.norm` for buckets that visit a device
        self._written: Any = None  # the event after which their gradients are in host memory

    def open(self, bucket: Bucket) -> None:
        """Load the bucket's bytes onto its device, and begin their use. Raises: as
        `TensorSwapper.swap_in`; nothing is changed then, so the call can be repeated.
        """
        with self._on_stream(bucket):
            if bucket.layout is None:
                layout = self._layout(bucket, bucket.traits.states)
                for fragment in bucket.fragments:
                    fragment.leaves, fragment.keys, fragment.rest = {}, {}, {}
                    fragment.look_at_strides()
                    fragment.stepped = False
                    fragment.has_master = False
                bucket.layout, bucket.rest_bytes, bucket.is_stored = layout, 0, False
            self._open(bucket)

    def retain(self, bucket: Bucket) -> None:
        """Keep the old version of the value of the opened *bucket*: a value that stays in memory gets
        other memory for its next version, of others the drive keeps the old one. Raises: as
        `TensorSwapper.create`.
        """
        if self.tier.swapper.stays(bucket.name):
            with self._on_stream(bucket):
                bucket.memory = self._stager(bucket).renew_beside(known(bucket.memory))
        else:
            self.tier.swapper.retain(bucket.name)
        bucket.is_retained = True

    def step(self, bucket: Bucket, options: Options, seed: int, progress: Progress) -> Options:
        """Update the parameters of the opened *bucket* by their gradients; return the *options* as
        the inner optimizer left them. *progress* records when the change begins.
        """
        first = bucket.inner is None
        self._heed(seed)
        self._format = wide_enough(self._format, self._name, options.values())
        with self._on_stream(bucket):
            inner = self._stepped_in_one_pass(bucket, options, seed, progress)
            if inner is None:
                inner = self._bound(bucket, options, seed, _step, progress, steps=True)
            self._give_back(bucket, changed=True)
        if bucket.device.type == "cpu":
            # The first step frees the states that the inner optimizer made, whose bytes are in the
            # bucket's value now; later steps free temporary tensors.
            self._trim(at_most=0 if first else self.slack_bytes)
        for fragment in bucket.fragments:
            fragment.stepped |= fragment.weight.gradient is not None
            fragment.weight.updated()
        return dict(zip(bucket.groups, inner.param_groups, strict=True))

    def call(
        self,
        bucket: Bucket,
        options: Options,
        method: Callable[[torch.optim.Optimizer], Any],
        progress: Progress,
    ) -> Options:
        """Apply *method* to the inner optimizer of the opened *bucket*. It may change parameters
        and states. Otherwise as `step`.
        """
        with self._on_stream(bucket):
            inner = self._bound(bucket, options, 0, method, progress)
            self._give_back(bucket, changed=True)
        for fragment in bucket.fragments:
            fragment.weight.updated(always=True)
        return dict(zip(bucket.groups, inner.param_groups, strict=True))

    def step_alone(
        self, groups: list[dict[str, Any]], options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """The *options* after a step of an inner optimizer of *groups*, one group of samples without
        gradients; unchanged if the class cannot step without gradients.
        """
        inner = self._made(groups)
        inner.param_groups[0].update(copy.deepcopy(dict(options)))
        try:
            with callers_modes():
                _step(inner)
        except Exception:
            return options
        return inner.param_groups[0]

    def start(self, bucket: Bucket, options: Options) -> None:
        """Store the states that the inner optimizer has before its first step, if any."""
        weights = {fragment.weight: fragment.weight.parameter for fragment in bucket.fragments}
        # packing writes to the weights the bits that they have, and a graph may have saved them
        preserved = torch.autograd.grad_mode._unsafe_preserve_version_counter(
            tuple(local(parameter).detach() for parameter in weights.values())
        )
        with preserved, self._on_stream(bucket):
            self._bound(bucket, options, 0, lambda _: None, Progress())
            self._give_back(bucket, changed=True)

    def keeps_layout(self, bucket: Bucket, seed: int) -> bool:
        """Whether a step with this *seed* leaves the layout of *bucket* unchanged."""
        self._heed(seed)
        return not looks_at(self._format, seed + 1) and not self._is_too_narrow(
            known(bucket.layout)
        )

    def recover(self, buckets: Iterable[Bucket]) -> None:
        """Close all buckets after an exception, which has ended the uses of all values."""
        for stager in [*self._stagers.values(), self._host]:
            stager.cancel()
        for bucket in buckets:
            self._unbind(bucket)
            if not bucket.is_stored:  # its update has not ended
                bucket.layout = None

    def reset(self, buckets: Iterable[Bucket]) -> None:
        """As `recover`, before the tier is reset."""
        self.recover(buckets)
        self._forget_looks()

    # Internals.

    def _on_stream(self, bucket: Bucket) -> contextlib.AbstractContextManager[None]:
        """The stream for a bucket that visits a device. The update on it waits for the current
        stream only before it reads gradients, which FSDP2 copies to host memory there.
        """
        if not bucket.visits_device:
            return contextlib.nullcontext()
        self._written = torch.cuda.current_stream(bucket.device).record_event()
        if bucket.device not in self._streams:
            make: Any = torch.cuda.Stream
            self._streams[bucket.device] = make(bucket.device)
        there: contextlib.AbstractContextManager[None] = torch.cuda.stream(
            self._streams[bucket.device]
        )
        return there

    def _stepped_in_one_pass(
        self, bucket: Bucket, options: Options, seed: int, progress: Progress
    ) -> torch.optim.Optimizer | None:
        """The inner optimizer after a step over packed states; None if it has to make the step."""
        layout, memory = known(bucket.layout), known(bucket.memory)
        looks = looks_at(self._format, seed + 1)
        if (
            bucket.inner is None
            or self._is_too_narrow(layout)
            or (looks and (seed == 0 or bucket.device.type == "cpu"))
            or not is_packed_adam(bucket.inner, layout)
        ):
            return None
        weights, flats, given = _given(bucket)
        if looks and len(given) < len(bucket.fragments):  # it looks at all states
            return None
        if any(
            fragment.keys.keys() != layout.states.keys()
            or gradient.layout is not torch.strided
            or any(strides != fragment.strides for strides in fragment.keys.values())
            for fragment, gradient in given.items()
        ):
            return None
        gradients = {
            fragment: fragment.in_memory_order(gradient.resolve_neg())
            for fragment, gradient in given.items()
        }
        inner = self._inner(bucket, options)
        groups = dict(zip(bucket.groups, inner.param_groups, strict=True))

        def parts(there: Sequence[torch.Tensor], given: Iterable[torch.Tensor]) -> list[Part]:
            weights = dict(zip(bucket.fragments, there, strict=True))
            return [
                Part(
                    fragment.shadow,
                    groups[fragment.group],
                    weights[fragment],
                    gradient,
                    fragment.place,
                    fragment.first_block,
                )
                for fragment, gradient in zip(gradients, given, strict=True)
            ]

        there: Sequence[torch.Tensor] = flats

        def begin() -> None:
            progress.changing = True
            if layout.master is not None and self._format.in_place:
                master = layout.master.of(memory).view(torch.float32)
                for fragment, flat in zip(bucket.fragments, there, strict=True):
                    weight = flat.as_strided(fragment.shape, fragment.strides)
                    self._follow(fragment, weight, fragment.within(master))

        how, own = (inner, self._format, layout, memory), parts(flats, gradients.values())
        if bucket.device.type == "cpu":
            if not step_in_one_pass(*how, own, seed, begin):
                return None
        elif not can_step_by_kernels(inner, own):
            return None
        else:
            if bucket.visits_device:
                there, brought = self._brought(bucket, flats, gradients)
                own = parts(there, brought.values())
            look = None
            if looks:
                look = Look(self._findings.flag(bucket.device), least_eps(options.values()))
            step_by_kernels(*how, own, seed, begin, look)
            if looks:
                self._findings.note(bucket.device)
                self._looked_in = seed
        self._put_back(bucket, weights, flats, there, gradients)
        return inner

    def _bound(
        self,
        bucket: Bucket,
        options: Options,
        seed: int,
        act: Callable[[torch.optim.Optimizer], Any],
        progress: Progress,
        *,
        steps: bool = False,
    ) -> torch.optim.Optimizer:
        """Bind the inner optimizer to the states of *bucket*, call *act* with it, and pack the results."""
        layout, memory = known(bucket.layout), known(bucket.memory)
        weights, flats, gradients = _given(bucket)
        own, there = weights, flats
        if bucket.visits_device:
            there, gradients = self._brought(bucket, flats, gradients)
            own = [
                flat.as_strided(fragment.shape, fragment.strides)
                for fragment, flat in zip(bucket.fragments, there, strict=True)
            ]
        working = bucket.with_gaps(there)
        widened, unpacked = self._room_beside(bucket, layout)
        master, states = self._format.unpack(layout, memory, working, unpacked)
        for fragment, weight in zip(bucket.fragments, own, strict=True):
            if master is not None:
                self._follow(fragment, weight, fragment.within(master))
            fragment.shadow.data = weight if master is None else fragment.within(master)
            if fragment in gradients:
                fragment.shadow.grad = fragment.in_update_dtype(
                    gradients[fragment],
                    widened,
                    copy=bucket.is_retained and not bucket.visits_device,
                )
            for key, leaf in fragment.leaves.items():
                leaf.data = fragment.state(key, states, memory[layout.nbytes :])
        with callers_modes():
            inner = self._inner(bucket, options)
            progress.changing = True
            act(inner)
        states = self._collected(bucket, master, states)
        names = bucket.block_names() if self._format.eight_bit else None
        if steps and looks_at(self._format, seed + 1):
            layout = known(bucket.layout)
            if seed == 0:  # nothing was rounded yet
                if self._widen(layout, states, seed, options.values()):
                    states = self._collected(bucket, master, states)
                if self._widened_when == seed:
                    round_near(known(bucket.layout), states, self._far, seed, names)
            elif not self._format.wide:
                eps = least_eps(options.values())
                self._findings.add(mark_far_blocks(layout, states, eps))
                self._looked_in = seed
        self._format.pack(
            known(bucket.layout), known(bucket.memory), working, master, states, seed, names
        )
        if master is None and not bucket.visits_device:
            flats = weights  # the inner optimizer has changed the weights themselves
        self._put_back(bucket, weights, flats, there)
        self._unbind(bucket)
        return inner

    def _put_back(
        self,
        bucket: Bucket,
        weights: Sequence[torch.Tensor],
        flats: Sequence[torch.Tensor],
        there: Sequence[torch.Tensor],
        changed: Container[Fragment] | None = None,
    ) -> None:
        """Copy the weights *there*, where the update ran, to *flats*, and these, if they are copies, to
        the *weights* of the *changed* fragments, or of all.
        """
        apart = [
            (
                fragment,
                # a weight itself may have gaps
                weight if flat is weight else flat.as_strided(fragment.shape, fragment.strides),
            )
            for fragment, weight, flat in zip(bucket.fragments, weights, flats, strict=True)
            if (changed is None or fragment in changed)
            and (flat.data_ptr() != weight.data_ptr() or fragment.is_scattered)
        ]
        if bucket.visits_device:
            stager: Any = self._stager(bucket)
            stager.take_back(list(zip(flats, there, strict=True)))
            if apart:
                stager.drain()
        for fragment, weight in apart:
            fragment.put_weight(weight)
        has_masters = self._format.in_place and bucket.update_dtype != bucket.dtype
        for fragment in bucket.fragments:
            fragment.has_master, fragment.rounded = True, None
            if has_masters and bucket.device.type == "cpu":
                fragment.rounded = fragment.fingerprint()

    def _brought(
        self,
        bucket: Bucket,
        flats: Sequence[torch.Tensor],
        gradients: Mapping[Fragment, torch.Tensor],
    ) -> tuple[list[torch.Tensor], dict[Fragment, torch.Tensor]]:
        """Copies of weights and gradients on the device that the bucket visits."""
        stager: Any = self._stager(bucket)
        brought = stager.bring(flats, list(gradients.values()), self._written)
        there = dict(zip(gradients, brought[len(flats) :], strict=True))
        if self.notes_norms:
            for fragment, gradient in there.items():
                fragment.norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        return brought[: len(flats)], there

    def _room_beside(
        self, bucket: Bucket, layout: Layout
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scratch memory for widened gradients, and for unpacked states that are not views."""
        if bucket.device.type != "cpu":
            return self._scratch[:0], None  # a GPU's allocator reuses freed memory
        gradients = bucket.numel if bucket.update_dtype != bucket.dtype else 0
        scratch = self._scratch_of(gradients + self._format.unpacked_elements(layout))
        return scratch[:gradients], scratch[gradients:]

    def _made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        inner = self.make(groups)
        for name, value in self.attributes.items():
            setattr(inner, name, value)
        return inner

    def _inner(self, bucket: Bucket, options: Options) -> torch.optim.Optimizer:
        given = {index: copy.deepcopy(dict(options[index])) for index in bucket.groups}
        if bucket.inner is None:
            shadows = {
                index: [fragment.shadow for fragment in bucket.fragments if fragment.group == index]
                for index in given
            }
            inner = self._made([{**given[index], "params": shadows[index]} for index in given])
            loaded = {
                fragment.shadow: fragment.states for fragment in bucket.fragments if fragment.states
            }
            # an earlier version of the class may have made these states, so the class converts
            # them, as in its own load_state_dict
            if loaded:
                inner.state.update(loaded)
                inner.__setstate__({"state": inner.state, "param_groups": inner.param_groups})
            bucket.inner = inner  # last: an exception leaves none, or a complete one
        for group, new in zip(bucket.inner.param_groups, given.values(), strict=True):
            group.update(new)
        return bucket.inner

    def _collected(
        self,
        bucket: Bucket,
        master: torch.Tensor | None,
        states: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Move all offloaded states to their places: in the bucket's value, and in *states*."""
        for fragment in bucket.fragments:
            if bucket.inner is not None and fragment.shadow in bucket.inner.state:
                fragment.states = bucket.inner.state[fragment.shadow]
            fragment.leaves = travelling(fragment.states, fragment.shape, fragment.shadow)
        found, rest_bytes = bucket.arrange(
            {fragment: fragment.leaves for fragment in bucket.fragments}
        )
        leaves = [leaf for fragment in bucket.fragments for leaf in fragment.leaves.values()]
        held = leaves if master is None else [*leaves, master]
        self._relay(bucket, {**bucket.dtypes, **found}, rest_bytes, held)
        layout, memory = known(bucket.layout), known(bucket.memory)
        places = {}
        for key, slot in layout.states.items():
            if not slot.rounded:
                places[key] = slot.values.of(memory).view(slot.dtype)
            elif key in states:
                places[key] = states[key]
            else:
                places[key] = torch.zeros(layout.numel, dtype=slot.dtype, device=memory.device)
        find = finder(master, places, memory[layout.nbytes :])
        put_in_place(
            [
                (find(fragment, key), leaf)
                for fragment in bucket.fragments
                for key, leaf in fragment.leaves.items()
            ],
            [memory, *places.values()],
        )
        return places

    @staticmethod
    def _unbind(bucket: Bucket) -> None:
        bucket.memory = None
        for fragment in bucket.fragments:
            fragment.shadow.grad = None
            drop_memory([*fragment.leaves.values(), fragment.shadow])


def _step(inner: torch.optim.Optimizer) -> None:
    raw_step(inner)(inner)


def _given(
    bucket: Bucket,
) -> tuple[list[torch.Tensor], list[torch.Tensor], Mapping[Fragment, torch.Tensor]]:
    """The weights of the fragments, the same in the order of memory, and the gradients."""
    weights = bucket.weights()
    flats = [
        fragment.in_memory_order(weight)
        for fragment, weight in zip(bucket.fragments, weights, strict=True)
    ]
    gradients = ((fragment, fragment.of_gradient()) for fragment in bucket.fragments)
    return weights, flats, {one: gradient for one, gradient in gradients if gradient is not None}
