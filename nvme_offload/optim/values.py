"""`Values`: the packed states of buckets as whole values on the CPU, wherever the parameters are; when
they need 16 bits; and the masters in them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..device.staging import CPU, HostStager
from ..errors import OutOfHostMemoryError, known
from ..hardware.machine import release_heap, resident_bytes
from ..optimizer_states.formats import Layout, StateFormat
from ..optimizer_states.tree import Key
from ..optimizer_states.widening import Findings, far_blocks, least_eps, round_near, widened
from ..swap.tier import Tier
from ..units import format_bytes
from ..update.records import Records, Unit, nothing
from .buckets import Bucket, Form, Fragment

_LOADING = -1  # in place of the number of a step
MASTER = "master"  # the key of the fp32 weights in a state dict

Find = Callable[[Fragment, Key], torch.Tensor]  # the offloaded state of a fragment, by its key


class Values(Records):
    """The values of buckets of an optimizer of the class *name*.

    *slack_bytes*: host memory that is kept for scratch.
    """

    def __init__(self, tier: Tier, state_format: StateFormat, name: str) -> None:
        super().__init__(tier, state_format, name)
        self.slack_bytes = 0
        self._widened_when: int | None = None
        self._far: torch.Tensor | None = None  # blocks of the bucket in use
        # Of the looks in a later step than the first; `_heed` widens the states in the step after it.
        self._findings = Findings()
        self._looked_in: int | None = None  # the seed of that step
        self._resident_bytes = 0  # of the process, after the last trim
        self._scratch = torch.empty(0, dtype=torch.float32)

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
                yield finder(master, states, memory[layout.nbytes :])
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
            fill(finder(master, states, memory[layout.nbytes :]))
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

    def _scratch_of(self, elements: int) -> torch.Tensor:
        """Scratch memory on the CPU, reused since fresh pages cost more than the computation."""
        if self._scratch.numel() < elements:
            self._scratch = self._scratch[:0].clone()  # free it before allocating the larger one
            self._scratch = torch.empty(elements, dtype=torch.float32)
        return self._scratch[:elements]

    def _trim(self, at_most: int) -> None:
        """Return freed memory to the kernel if the process has grown by more than *at_most* bytes."""
        if resident_bytes() > self._resident_bytes + at_most:
            release_heap()
            self._resident_bytes = resident_bytes()

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


def _followed(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The *master*, with each element of the *weight* that differs from the rounded master."""
    return torch.where(master.to(weight.dtype) == weight, master, weight)


def finder(
    master: torch.Tensor | None, states: Mapping[Key, torch.Tensor], rest: torch.Tensor
) -> Find:
    """A function that finds states, and masters, in the parts of an unpacked value."""
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
