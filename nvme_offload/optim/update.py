"""`Updater`: steps over buckets, each by an inner optimizer on the states in the bucket's value."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import mmap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..device.staging import CPU, HostStager
from ..errors import OutOfHostMemoryError, known
from ..optimizer_states import (
    Findings,
    Layout,
    StateFormat,
    far_blocks,
    least_eps,
    looks_at,
    mark_far_blocks,
    put_in_place,
    round_near,
    wide_enough,
    widened,
)
from ..optimizer_states.adam_by_kernels import can_step_by_kernels, step_by_kernels
from ..optimizer_states.one_pass import Part, is_packed_adam, step_in_one_pass
from ..optimizer_states.packed import Look
from ..optimizer_states.traits import raw_step
from ..optimizer_states.tree import Key, drop_memory, travelling
from ..sizes import PLACES
from ..swap.tier import Tier
from ..units import format_bytes
from ..update.records import Records, Unit, nothing
from .buckets import Bucket, Form, Fragment, local
from .modes import callers_modes
from .progress import Progress

_LOADING = -1  # in place of the number of a step
MASTER = "master"  # the key of the fp32 weights in a state dict

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
Find = Callable[[Fragment, Key], torch.Tensor]  # the offloaded state of a fragment, by its key
Options = Mapping[int, Mapping[str, Any]]  # by index of the group, for all groups of a bucket


class Updater(Records):
    """Updates and stores buckets. *make* makes the inner optimizers, which are called *name*."""

    def __init__(self, tier: Tier, state_format: StateFormat, make: Make, name: str) -> None:
        super().__init__(tier, state_format, name)
        self.make = make
        self.slack_bytes = 0  # host memory that is kept for scratch
        self._widened_when: int | None = None
        self._far: torch.Tensor | None = None  # blocks of the bucket in use
        # Of the looks in a later step than the first; `_heed` widens the states in the step after it.
        self._findings = Findings()
        self._looked_in: int | None = None  # the seed of that step
        self._resident_bytes = 0  # of the process, after the last trim
        # attributes set by the program, for inner optimizers made later
        self.attributes: dict[str, Any] = {}
        self._scratch = torch.empty(0, dtype=torch.float32)
        self._streams: dict[torch.device, Any] = {}  # for buckets that visit a device
        self.notes_norms = False  # whether to set `Fragment.norm` for buckets that visit a device
        self._written: Any = None  # the event after which their gradients are in host memory

    @property
    def wide(self) -> bool:
        """Whether states are kept in 16 bits where 8 would be too few, from the next step on at the
        latest. Set it before `store`.
        """
        return self._format.wide or (self._looked_in is not None and self._findings.found())

    @wide.setter
    def wide(self, needed: bool) -> None:
        self._forget_looks()
        self._format = dataclasses.replace(
            self._format, wide=self._format.wide or (needed and self._format.eight_bit)
        )

    @staticmethod
    def at_once(buckets: Iterable[Bucket]) -> int:
        """The number of *buckets* in use together when they are updated one after another."""
        return 1 if all(bucket.device.type == "cpu" for bucket in buckets) else PLACES

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
                self._renew_beside(bucket)
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

    # Whole values, for checkpoints; on the CPU, wherever the parameters are.

    @contextlib.contextmanager
    def kept(self, bucket: Bucket, ahead: Sequence[str] = ()) -> Iterator[torch.Tensor]:
        """The bytes of a bucket's value, with the masters that the next update would begin with, valid
        in the context. *ahead*: names to prefetch.
        """
        if ahead:
            self.tier.swapper.prefetch(ahead)
        memory = self._host.fetch(bucket.name, bucket.nbytes) if bucket.nbytes else nothing(CPU)
        changed = self._follow_all(bucket, memory)
        yield memory
        self._host.give_back(changed=changed)  # after an exception, `recover` ends the use

    @contextlib.contextmanager
    def reading(self, bucket: Bucket) -> Iterator[Find]:
        """States and masters of the fragments of a bucket with a layout, by key, on the CPU."""
        layout = known(bucket.layout)
        try:
            with self.kept(bucket) as memory:
                scratch = self._scratch_of(self._format.unpacked_elements(layout))
                working = [] if self._format.in_place else bucket.with_gaps(_host_copies(bucket))
                master, states = self._format.unpack(layout, memory, working, scratch)
                yield _finder(master, states, memory[layout.nbytes :])
        finally:
            self._trim(at_most=self.slack_bytes)

    def store(
        self,
        bucket: Bucket,
        forms: Mapping[Fragment, Mapping[Key, torch.Tensor]],
        fill: Callable[[Find], None],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Re-create the bucket's value, for states of *forms*. *fill* writes them: it can get the
        place of each state, which has zeros, and of each master, which has the weights.
        """
        fits = False
        while not fits:  # a second time once 8 bits have been too few
            dtypes, rest_bytes = bucket.arrange(forms)
            layout = bucket.layout = self._layout(bucket, dtypes)
            bucket.rest_bytes = rest_bytes
            memory = self._renewed(bucket, self._host)
            # copies, since packing writes the rounded masters to them: loading states must not change
            # the parameters
            flats = _host_copies(bucket)
            working = bucket.with_gaps(flats)
            master, states = self._format.unpack(
                layout, memory, working, self._scratch_of(self._format.unpacked_elements(layout))
            )
            if master is not None:
                for fragment, flat in zip(bucket.fragments, flats, strict=True):
                    fragment.flat_within(master).copy_(flat)
            fill(_finder(master, states, memory[layout.nbytes :]))
            names = bucket.block_names("cpu") if self._format.eight_bit else None
            fits = not self._format.eight_bit or not self._widen(
                layout, states, _LOADING, [groups[index] for index in bucket.groups]
            )
            if fits:
                if self._widened_when == _LOADING:
                    round_near(layout, states, self._far, 0, names)
                self._format.pack(layout, memory, working, master, states, 0, names)
            self._host.give_back(changed=True, nbytes=bucket.nbytes)
            bucket.is_stored = True

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
            progress.begin_change()
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
            progress.begin_change()
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

    def _widen(
        self,
        layout: Layout,
        states: Mapping[str, torch.Tensor],
        when: int,
        groups: Iterable[Mapping[str, Any]],
    ) -> bool:
        """Whether *states* show for the first time, at the step *when*, that 8 bits are too few."""
        self._far = None
        if self._format.wide and self._widened_when != when:
            return False
        self._far = far_blocks(layout, states, least_eps(groups))
        if self._far is None or self._format.wide:
            return False
        self._format, self._widened_when = widened(self._format, self._name), when
        return True

    def _forget_looks(self) -> None:
        self._widened_when = self._looked_in = None
        self._findings = Findings()

    def _heed(self, seed: int) -> None:
        """Widen the states if a look in a step before the step of *seed* shows that 8 bits are too few."""
        if self._looked_in not in (None, seed):
            self._looked_in = None
            if self._findings.found() and not self._format.wide:
                self._format = widened(self._format, self._name)

    def _room_beside(
        self, bucket: Bucket, layout: Layout
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scratch memory for widened gradients, and for unpacked states that are not views."""
        if bucket.device.type != "cpu":
            return self._scratch[:0], None  # a GPU's allocator reuses freed memory
        gradients = bucket.numel if bucket.update_dtype != bucket.dtype else 0
        scratch = self._scratch_of(gradients + self._format.unpacked_elements(layout))
        return scratch[:gradients], scratch[gradients:]

    def _trim(self, at_most: int) -> None:
        """Return freed memory to the kernel if the process has grown by more than *at_most* bytes.

        glibc keeps freed memory, and ever more of it if allocations have many sizes. Source:
        malloc_trim(3), which only glibc has; proc_pid_statm(5).
        """
        if self._resident() > self._resident_bytes + at_most:
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)
            self._resident_bytes = self._resident()

    @staticmethod
    def _resident() -> int:
        try:
            return int(Path("/proc/self/statm").read_bytes().split()[1]) * mmap.PAGESIZE
        except OSError:  # without /proc
            return 0

    def _scratch_of(self, elements: int) -> torch.Tensor:
        """Scratch memory on the CPU, reused since fresh pages cost more than the computation."""
        if self._scratch.numel() < elements:
            self._scratch = self._scratch[:0].clone()  # free it before allocating the larger one
            self._scratch = torch.empty(elements, dtype=torch.float32)
        return self._scratch[:elements]

    def _follow(self, fragment: Fragment, weight: torch.Tensor, master: torch.Tensor) -> None:
        """Copy elements of the *weight* that the program has changed to the *master*."""
        if not self._format.in_place:
            return
        if not fragment.has_master:
            master.copy_(weight)
        elif not fragment.is_rounded:
            master.copy_(_followed(master, weight))

    def _follow_all(self, bucket: Bucket, memory: torch.Tensor) -> bool:
        """As `_follow`, for all masters in the value of *bucket*; whether that changed one."""
        layout, changed = known(bucket.layout), False
        if layout.master is None or not self._format.in_place:
            return False
        masters = layout.master.of(memory).view(torch.float32)
        for fragment in bucket.fragments:
            now = Form.of(fragment.weight.parameter)
            if now.shape != fragment.weight.form.shape or now.device.type == "meta":
                continue
            if not fragment.has_master or fragment.is_rounded:
                continue
            master, weight = fragment.within(masters), fragment.of_weight().cpu()
            # the next binding makes the master of a parameter that was cast
            new = _followed(master, weight) if now.dtype == bucket.dtype else weight.float()
            if not torch.equal(master, new):
                master.copy_(new)
                changed = True
        return changed

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
        find = _finder(master, places, memory[layout.nbytes :])
        put_in_place(
            [
                (find(fragment, key), leaf)
                for fragment in bucket.fragments
                for key, leaf in fragment.leaves.items()
            ],
            [memory, *places.values()],
        )
        return places

    def _renewed(self, bucket: Unit, stager: HostStager) -> torch.Tensor:
        """Reserve more host memory if the value is larger than foreseen."""
        if bucket.nbytes > bucket.room_bytes:
            self.tier.require(bucket.nbytes - bucket.room_bytes)
        try:
            return super()._renewed(bucket, stager)
        except OutOfHostMemoryError as error:
            enough = (
                max(bucket.nbytes * 8 // 7, bucket.nbytes + self.slack_bytes) + 2 * mmap.PAGESIZE
            )
            raise OutOfHostMemoryError(
                f"{self._name} keeps {format_bytes(bucket.nbytes)} of states for parameters that are updated together, which shows as it makes them, and "
                f"host_memory has no room for them: allow at least {enough} bytes ({format_bytes(enough)})"
            ) from error

    @staticmethod
    def _unbind(bucket: Bucket) -> None:
        bucket.memory = None
        for fragment in bucket.fragments:
            fragment.shadow.grad = None
            drop_memory([*fragment.leaves.values(), fragment.shadow])


def _followed(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The *master*, with each element of the *weight* that differs from the rounded master."""
    return torch.where(master.to(weight.dtype) == weight, master, weight)


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


def _finder(
    master: torch.Tensor | None, states: Mapping[Key, torch.Tensor], rest: torch.Tensor
) -> Find:
    return lambda fragment, key: (
        fragment.within(master)
        if key == MASTER and master is not None
        else fragment.state(key, states, rest)
    )


def _host_copies(bucket: Bucket) -> list[torch.Tensor]:
    return [
        fragment.in_memory_order(fragment.of_weight()).to("cpu", bucket.dtype, copy=True)
        for fragment in bucket.fragments
    ]
