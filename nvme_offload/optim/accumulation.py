"""`GradientSums`: gradients accumulated over the micro-batches of a step. The gradients of a bucket
are one value of the swapper, which shares the budget of the states, and may spill to the drive.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..errors import UsageError, known
from ..optimizer_states.tree import dense_strides, in_a_row
from ..swap.tier import Tier
from ..update.gradients import Flat, GradientValues
from .buckets import Bucket, Weight, is_distributed
from .host_gradient import HostGradient, Sum
from .modes import fixed_modes

_UNTIGHT = 8  # values in use together, for buckets that are being copied to a GPU and back


class GradientSums:
    """Moves each gradient that backward() produces to *tier*, and leaves a `HostGradient` in its
    place; loads the gradients of a bucket for its update. Methods raise as `TensorSwapper.swap_in`.

    A sum is accumulated as autograd does it in `.grad`: the first gradient, then the others added
    to it, in their dtype, on the GPU if there is one: PCIe copies the old sum up while it copies
    the previous sum down.

    *lock*: held by every user of the tier. *release_others*: releases the other values of the tier
    that are in use. *recover*: continues after a call that an exception ended; it calls `recover`.
    *tight*: the values of several buckets in use together may not fit. *running*: a call has begun
    and not returned.
    """

    def __init__(
        self,
        tier: Tier,
        lock: Any,
        release_others: Callable[[], None],
        recover: Callable[[], None],
    ) -> None:
        self._tier = tier
        self._values = GradientValues(tier, make_room=release_others)
        self._lock = lock
        self._recover = recover
        self.running = False
        self.tight = True
        self._taken: dict[Bucket, None] = {}
        self._sums: dict[Weight, Sum] = {}  # weights whose gradient is stored here

    @staticmethod
    def check(parameter: torch.Tensor) -> None:
        """Check that gradients of *parameter* can be moved. Raises: UsageError. Source:
        _set_fsdp_flattened of torch.distributed.fsdp, which marks flat parameters and the original
        ones.
        """
        if getattr(parameter, "_fsdp_flattened", False):
            raise UsageError(
                'accumulate="host" does not take parameters of FullyShardedDataParallel, which makes views of their gradients in backward(): leave it out'
            )
        if is_distributed(parameter):
            raise UsageError(
                'accumulate="host" does not take DTensors, as of FSDP2 and tensor parallelism, whose gradients are sums over ranks: leave it out, '
                "since each rank has only its part of the gradients there"
            )

    def limit(self, buckets: Sequence[Bucket]) -> None:
        """Follow a new binding: decide from the sizes of all *buckets* whether several values in use
        may not fit, and let gradients that are used up refer to the new weights.
        """
        for weight in {fragment.weight for bucket in buckets for fragment in bucket.fragments}:
            gradient = weight.parameter.grad
            if isinstance(gradient, HostGradient) and gradient.held.owner() is self:
                gradient.held.weight = weakref.ref(weight)
                gradient.held.strides = _strides(weight, gradient)
        largest = max((max(one.room_bytes, one.gradient_bytes) for one in buckets), default=0)
        self.tight = self._tier.cap_bytes < _UNTIGHT * largest

    # Called during backward().

    @fixed_modes()
    def move(self, weight: Weight) -> None:
        """Move the gradient that backward() has produced for *weight*."""
        gradient = weight.parameter.grad
        bucket = weight.fragments[0].bucket
        # Other gradients stay where they are: one with a graph, a sparse one, one of another dtype,
        # and a HostGradient, to which autograd has added the new gradient already.
        if (
            type(gradient) is not torch.Tensor
            or gradient.requires_grad
            or gradient.layout is not torch.strided
            or (gradient.dtype, gradient.device) != (bucket.dtype, bucket.home)
        ):
            return
        one = Sum(weakref.ref(weight), weakref.ref(self), _strides(weight, gradient))
        self.store(one, gradient)
        weight.parameter.grad = HostGradient(one)

    @fixed_modes()
    def add(self, one: Sum, gradient: torch.Tensor) -> None:
        """Add *gradient* to *one*, which is lost if this raises."""
        if one.is_zero:
            # torch adds to zeros, too: 0 + -0 is 0
            whole = torch.zeros_like(gradient)
            one.changes()(whole)
            self.store(one, whole.add_(gradient))
            return
        with self._changing(one):
            change = one.changes()
            for part in _parts(one, in_a_row(gradient, one.strides)):
                self._values.add(*part, change)
            one.pending.clear()

    @fixed_modes()
    def store(self, one: Sum, gradient: torch.Tensor) -> None:
        """Replace the contents of *one* by *gradient*."""
        with self._changing(one):
            before = self._sums.get(_weight(one))
            if before is not None and before is not one:
                _lose([before], "was replaced by another")
            self._sums[_weight(one)] = one
            for part in _parts(one, in_a_row(gradient, one.strides)):
                self._values.write(*part)
            one.pending.clear()
            one.is_zero = False

    # Reading and consuming the sums.

    @fixed_modes()
    def load(self, one: Sum) -> torch.Tensor:
        """Return a copy of *one* on its parameter's device."""
        weight = _weight(one)
        bucket = weight.fragments[0].bucket
        whole = torch.empty_strided(
            weight.parameter.shape, one.strides, dtype=bucket.dtype, device=bucket.home
        )
        row = in_a_row(whole)
        if one.is_zero:
            row.zero_()
        else:
            with self._running():
                for part in _parts(one, row):
                    self._values.read(*part)
        one.changes()(row)
        return whole

    def names(self, buckets: Sequence[Bucket]) -> Iterator[str]:
        """The names of the values that an update of the *buckets* uses, in order."""
        for bucket in buckets:
            if (flat := _flat(bucket)) in self._values:
                yield flat.name
            yield bucket.name

    @fixed_modes()
    def take(self, bucket: Bucket) -> None:
        """Load the gradients of *bucket* onto the device of its parameters for an update, until
        `done`, and discard them from host memory. If it raises, nothing is changed.
        """
        stored = _flat(bucket)
        if bucket in self._taken:
            self._values.discard(stored)  # an exception may have skipped it
            return
        summed = [
            (fragment, one)
            for fragment in bucket.fragments
            if (one := self._sum_of(fragment.weight)) is not None
        ]
        if not summed:  # any stored value belongs to a gradient that the program has replaced
            self._values.discard(stored)
            return
        flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.home)
        if not all(one.is_zero for _, one in summed):
            self._values.read(stored, 0, flat)
        for fragment, one in summed:
            part = fragment.flat_within(flat)
            if one.is_zero:
                part.zero_()
            one.changes()(part)
            fragment.summed = (
                part.as_strided(fragment.shape, one.strides) if fragment.is_whole else part
            )
        self._taken[bucket] = None
        self._values.discard(stored)
        if self.tight or bucket.inner is None:  # the first update creates the bucket's value anew
            self._values.settle()

    def done(self, bucket: Bucket) -> None:
        """*bucket* was updated."""
        self._taken.pop(bucket, None)
        for fragment in bucket.fragments:
            fragment.summed = None

    def spend(self, buckets: Sequence[Bucket]) -> None:
        """The step of these *buckets* has ended: mark their gradients as used up."""
        for bucket in buckets:
            for fragment in bucket.fragments:
                one = self._sum_of(fragment.weight)
                if one is not None:
                    one.pending.clear()
                    one.is_zero, one.lost = False, "was used up by step()"

    def settle(self) -> None:
        """Return when none of the tier's values is in use here."""
        with self._lock:
            self._values.settle()

    def clear(self) -> None:
        """Free the memory of all gradients. The caller does not need them any longer."""
        with self._lock:
            self._drop()
            self._values.clear()

    def recover(self, buckets: Iterable[Bucket]) -> None:
        """Continue after an exception. The swapper has ended the uses of all values."""
        self._values.cancel()
        for bucket in buckets:
            if bucket not in self._taken:
                for fragment in bucket.fragments:
                    fragment.summed = None
        self.running = False

    def reset(self) -> None:
        """Forget all gradients without touching the swapper's values, whose state is unknown."""
        self._drop()
        self._values.reset()
        self.running = False

    def _drop(self) -> None:
        _lose(self._sums.values(), "was given up by zero_grad()")
        self._sums.clear()
        for bucket in list(self._taken):
            self.done(bucket)

    def release(self, weights: Sequence[Weight]) -> None:
        """Move the gradients of *weights* back to `.grad` before their buckets are discarded."""
        for weight in weights:
            one = self._sum_of(weight)
            if one is not None and not one.lost:
                parameter = weight.parameter
                parameter.grad = self.load(one).to(parameter.device, parameter.dtype)
                one.lost = "was replaced by another"
            self._sums.pop(weight, None)
        self.settle()
        for fragment in itertools.chain.from_iterable(weight.fragments for weight in weights):
            self._values.discard(_flat(fragment.bucket))

    def close(self, weights: Sequence[Weight]) -> None:
        """Drop the gradients of *weights*."""
        for weight in weights:
            if self._sum_of(weight) is not None:
                weight.parameter.grad = None
        self.reset()

    # Internals.

    def _sum_of(self, weight: Weight) -> Sum | None:
        """The sum that `.grad` refers to, if this object stores it as the gradient of *weight*."""
        gradient = weight.parameter.grad
        if isinstance(gradient, HostGradient):
            held = gradient.held
            if held.owner() is self and held.weight() is weight:
                return held
        return None

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        with self._lock:
            self._recover()
            self.running = True
            yield
            self.running = False

    @contextlib.contextmanager
    def _changing(self, one: Sum) -> Iterator[None]:
        with self._running():
            lost, one.lost = one.lost, "is not whole, since backward() failed as it was added to"
            yield
            one.lost = lost


def _weight(one: Sum) -> Weight:
    return known(one.weight())  # the weight lives as long as its optimizer


def _lose(sums: Iterable[Sum], reason: str) -> None:
    for one in sums:
        if not one.is_zero:
            one.lost = one.lost or reason


def _flat(bucket: Bucket) -> Flat:
    return Flat(f"{bucket.name}/gradients", bucket.numel, bucket.dtype)


def _parts(one: Sum, row: torch.Tensor) -> Iterator[tuple[Flat, int, torch.Tensor]]:
    """The parts of *row*, all elements of *one*, with their places in the values of buckets."""
    for fragment in _weight(one).fragments:
        yield _flat(fragment.bucket), fragment.place, row[fragment.start : fragment.stop]


def _strides(weight: Weight, gradient: torch.Tensor) -> tuple[int, ...]:
    """The strides of *gradient*, without gaps; of a parameter that is cut, contiguous ones."""
    if len(weight.fragments) == 1:
        return dense_strides(gradient)
    return dense_strides(torch.empty(gradient.shape, device="meta"))
