"""`GradientSums`: gradients accumulated over the micro-batches of a step, in the host memory of a
tier.

The gradients of a bucket are one value of the swapper. They share its budget with the states, and
spill to the drive where they do not fit.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import OutOfHostMemoryError, UsageError, known
from ..optimizer_states.tree import dense_strides
from ..swap.tier import Tier
from .buckets import Bucket, Fragment, Weight, is_distributed
from .gradient_copies import GradientCopies
from .host_gradient import HostGradient, Sum
from .modes import fixed_modes

# copies in flight between a GPU and the host; beyond this number, backward() waits
_IN_FLIGHT = 64
_UNTIGHT = 8  # values in use together, for buckets that are being copied to a GPU and back
_IN_FLIGHT_BYTES = 128 << 20


class _Copy(NamedTuple):
    """A copy between host memory and a GPU: of *bucket*'s value, or of *fragment*'s part of it. It
    ends with the event *done*; *kept* holds the tensors alive until then.
    """

    bucket: Bucket
    fragment: Fragment | None
    done: Any  # torch.cuda.Event
    nbytes: int
    kept: Any


class GradientSums:
    """Moves each gradient that backward() produces to *tier*, and leaves a `HostGradient` in its
    place; loads the gradients of a bucket for its update.

    A sum is accumulated as autograd does it in `.grad`: the first gradient, then the others added
    to it, in their dtype. On a GPU the addition runs there: the old sum is copied up while the
    previous sum is copied down, so PCIe moves both ways concurrently. An addition on the CPU would
    read and write the sum in host memory, at a fraction of that speed, and the thread of backward()
    would wait for the copy before it. Gradients of parameters on the CPU are added in place.

    backward() reaches the parameters of a bucket one after another, so a bucket's value is in use
    from its first gradient until a gradient of another bucket arrives, or until `settle`. Only the
    elements of a gradient are copied, so the bytes do not depend on the layout of the buckets.

    *lock*: held by every user of the tier. *release_others*: releases the other values of the tier
    that are in use. *recover*: continues after a call that an exception ended; it calls `recover`.
    Attributes: *tight*, whether the values of several buckets in use together may not fit;
    *running*, whether a call has begun and not returned.
    """

    def __init__(
        self,
        tier: Tier,
        lock: Any,
        release_others: Callable[[], None],
        recover: Callable[[], None],
    ) -> None:
        self._tier = tier
        self._lock = lock
        self._release_others = release_others
        self._recover = recover
        self.running = False
        self.tight = True
        self._copies: deque[_Copy] = deque()
        self._under_way_bytes = 0
        self._devices: dict[torch.device, GradientCopies] = {}
        self._in_use: dict[Bucket, torch.Tensor] = {}
        self._changed: set[Bucket] = set()  # buckets in use whose value changed
        self._current: Bucket | None = None  # bucket whose next gradient may follow
        self._to_discard: set[Bucket] = set()  # buckets to discard once their use ends
        self._stored: set[Bucket] = set()  # buckets that have a value
        self._taken: dict[Bucket, None] = {}
        self._sums: dict[Weight, Sum] = {}  # weights whose gradient is stored here

    @staticmethod
    def check(parameter: torch.Tensor) -> None:
        """Check that gradients of *parameter* can be moved. Raises: UsageError.

        Source: _set_fsdp_flattened of torch.distributed.fsdp, which marks flat parameters and the
        original ones.
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
        """Decide from the sizes of all *buckets* whether several values in use may not fit."""
        largest = max((max(one.room_bytes, one.gradient_bytes) for one in buckets), default=0)
        self.tight = self._tier.cap_bytes < _UNTIGHT * largest

    # Called during backward().

    @fixed_modes()
    def move(self, weight: Weight) -> None:
        """Move the gradient that backward() has produced for *weight*. Raises: as `add`."""
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
        """Add *gradient* to *one*. Raises: as `TensorSwapper.swap_in`, after which *one* is
        lost.
        """
        if one.is_zero:
            # torch adds to zeros, too: 0 + -0 is 0
            whole = torch.zeros_like(gradient)
            one.changes()(whole)
            self.store(one, whole.add_(gradient))
            return
        with self._lock, self._changing(one):
            row = _row(gradient, one.strides)
            for fragment in _weight(one).fragments:
                part = row[fragment.start : fragment.stop]
                place = self._place(fragment, changed=True)
                copies = self._copies_of(fragment.bucket)
                if copies is None:
                    one.changes()(place)
                    place.add_(part)
                else:
                    self._await(fragment.bucket, fragment)
                    change = one.changes()
                    done, total = copies.add(place, part, change)
                    self._note(fragment.bucket, fragment, done, total, part, change)
            one.pending.clear()

    @fixed_modes()
    def store(self, one: Sum, gradient: torch.Tensor) -> None:
        """Replace the contents of *one* by *gradient*. Raises: as `add`."""
        with self._lock, self._changing(one):
            self._keep(one)
            row = _row(gradient, one.strides)
            for fragment in _weight(one).fragments:
                part = row[fragment.start : fragment.stop]
                place = self._place(fragment, changed=True)
                copies = self._copies_of(fragment.bucket)
                if copies is None:
                    place.copy_(part)
                else:
                    self._await(fragment.bucket, fragment)
                    self._note(fragment.bucket, fragment, copies.send(place, part), part)
            one.pending.clear()
            one.is_zero = False

    # Reading and consuming the sums.

    @fixed_modes()
    def load(self, one: Sum) -> torch.Tensor:
        """Return a copy of *one* on its parameter's device. Raises: as `TensorSwapper.swap_in`."""
        weight = _weight(one)
        bucket = weight.fragments[0].bucket
        whole = torch.empty_strided(
            weight.parameter.shape, one.strides, dtype=bucket.dtype, device=bucket.home
        )
        row = _row(whole, one.strides)
        if one.is_zero:
            row.zero_()
        else:
            with self._lock:
                self._begin()
                for fragment in weight.fragments:
                    part = row[fragment.start : fragment.stop]
                    self._bring(fragment.bucket, fragment, part, self._place(fragment))
                self.running = False
        one.changes()(row)
        return whole

    def names(self, buckets: Sequence[Bucket]) -> Iterator[str]:
        """The names of the values that an update of the *buckets* uses, in order."""
        for bucket in buckets:
            if bucket in self._stored:
                yield _name(bucket)
            yield bucket.name

    @fixed_modes()
    def take(self, bucket: Bucket) -> None:
        """Load the gradients of *bucket* onto the device of its parameters for an update, until
        `done`, and discard them from host memory. Raises: as `TensorSwapper.swap_in`; nothing is
        changed then.
        """
        if bucket in self._taken:
            self._discard(bucket)  # an exception may have skipped it
            return
        summed = [
            (fragment, one)
            for fragment in bucket.fragments
            if (one := self._sum_of(fragment.weight)) is not None
        ]
        if not summed:  # any stored value belongs to a gradient that the program has replaced
            self._discard(bucket)
            return
        flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.home)
        if not all(one.is_zero for _, one in summed):
            self._bring(bucket, None, flat, self._use(bucket))
        for fragment, one in summed:
            part = fragment.flat_within(flat)
            if one.is_zero:
                part.zero_()
            one.changes()(part)
            fragment.summed = (
                part.as_strided(fragment.shape, one.strides) if fragment.is_whole else part
            )
        self._taken[bucket] = None
        self._discard(bucket)
        if self.tight or bucket.inner is None:  # the first update creates the bucket's value anew
            self._finish_all()

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
            self._leave()
            self._finish_all()

    def clear(self) -> None:
        """Free the memory of all gradients. The caller does not need them any longer."""
        with self._lock:
            for one in self._sums.values():
                if not one.is_zero:
                    one.lost = one.lost or "was given up by zero_grad()"
            self._sums.clear()
            for bucket in list(self._stored):
                self._discard(bucket)
            self._leave()
            self._finish_all()
            for bucket in list(self._taken):
                self.done(bucket)

    def recover(self, buckets: Iterable[Bucket]) -> None:
        """Continue after an exception. The swapper has ended the uses of all values."""
        self._finish_copies()
        self._in_use.clear()
        self._changed.clear()
        self._current = None
        for bucket in list(self._to_discard):
            self._to_discard.discard(bucket)
            self._discard(bucket)
        for bucket in buckets:
            if bucket not in self._taken:
                for fragment in bucket.fragments:
                    fragment.summed = None
        self.running = False

    def reset(self) -> None:
        """Forget all gradients without touching the swapper's values, whose state is unknown."""
        self._finish_copies()
        for one in self._sums.values():
            one.lost = one.lost or "was given up by zero_grad()"
        for bucket in list(self._taken):
            self.done(bucket)
        self._sums.clear()
        self._in_use.clear()
        self._changed.clear()
        self._to_discard.clear()
        self._stored.clear()
        self._current = None
        self.running = False

    def _finish_copies(self) -> None:
        """Wait for the copies in flight. Their values are no longer used."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        self._copies.clear()
        self._under_way_bytes = 0

    def release(self, weights: Sequence[Weight]) -> None:
        """Move the gradients of *weights* back to `.grad` before their buckets are discarded.
        Raises: as `TensorSwapper.swap_in`.
        """
        for weight in weights:
            one = self._sum_of(weight)
            if one is not None and not one.lost:
                parameter = weight.parameter
                parameter.grad = self.load(one).to(parameter.device, parameter.dtype)
                one.lost = "was replaced by another"
            self._sums.pop(weight, None)
        self.settle()
        for bucket in {fragment.bucket for weight in weights for fragment in weight.fragments}:
            self._discard(bucket)

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

    def _keep(self, one: Sum) -> None:
        """Record *one* as the gradient of its parameter; mark the one before as lost."""
        before = self._sums.get(_weight(one))
        if before is not None and before is not one and not before.is_zero:
            before.lost = before.lost or "was replaced by another"
        self._sums[_weight(one)] = one

    def _begin(self) -> None:
        self._recover()
        self.running = True

    @contextlib.contextmanager
    def _changing(self, one: Sum) -> Iterator[None]:
        self._begin()
        lost, one.lost = one.lost, "is not whole, since backward() failed as it was added to"
        yield
        one.lost = lost
        self.running = False

    def _place(self, fragment: Fragment, *, changed: bool = False) -> torch.Tensor:
        """The part of *fragment* in host memory. Set *changed* if it is written, so that it is
        written back.
        """
        value = self._use(fragment.bucket)
        if changed:
            self._changed.add(fragment.bucket)
        return fragment.flat_within(value)

    def _use(self, bucket: Bucket) -> torch.Tensor:
        """The value of *bucket*, which stays in use for the gradients that follow."""
        if bucket is not self._current:
            self._leave()
            if bucket not in self._in_use:
                self._in_use[bucket] = self._obtain(bucket).view(bucket.dtype)
            self._current = bucket
            self._to_discard.discard(bucket)
        return self._in_use[bucket]

    def _obtain(self, bucket: Bucket) -> torch.Tensor:
        swapper, name = self._tier.swapper, _name(bucket)
        if not bucket.gradient_bytes:
            return torch.empty(0, dtype=torch.uint8)

        def ask() -> torch.Tensor:
            if bucket in self._stored:
                return swapper.swap_in(name)
            made = swapper.create(name, bucket.gradient_bytes)
            self._stored.add(bucket)
            self._changed.add(bucket)
            return made

        try:
            return ask()
        except OutOfHostMemoryError:  # values whose copies have not ended take the room
            self._finish_all()
            self._release_others()
            return ask()

    def _leave(self) -> None:
        bucket, self._current = self._current, None
        if bucket is not None:
            self._let_go(bucket)

    def _let_go(self, bucket: Bucket) -> None:
        """End the use of *bucket*, unless it is current or one of its copies is in flight."""
        if bucket is self._current or any(copy.bucket is bucket for copy in self._copies):
            return
        if self._in_use.pop(bucket, None) is None or bucket not in self._stored:
            return
        changed = bucket in self._changed
        self._changed.discard(bucket)
        if bucket in self._to_discard:
            self._to_discard.remove(bucket)
            self._stored.remove(bucket)
            self._tier.swapper.discard(_name(bucket))
        else:
            self._tier.swapper.release(_name(bucket), changed=changed)

    def _discard(self, bucket: Bucket) -> None:
        """Discard the value of *bucket*, once its use has ended."""
        if bucket in self._in_use:
            self._to_discard.add(bucket)
            if bucket is self._current:
                self._leave()
        elif bucket in self._stored:
            self._stored.remove(bucket)
            self._tier.swapper.discard(_name(bucket))

    # On a GPU.

    def _bring(
        self, bucket: Bucket, fragment: Fragment | None, there: torch.Tensor, source: torch.Tensor
    ) -> None:
        """Copy *source*, a part of *bucket*'s value, to *there*. On a GPU, work that the current
        stream receives next comes after the copy.
        """
        copies = self._copies_of(bucket)
        if copies is None:
            there.copy_(source)
            return
        self._await(bucket, fragment)
        self._note(bucket, fragment, copies.bring(there, source), there)

    def _copies_of(self, bucket: Bucket) -> GradientCopies | None:
        """None where the parameters are in host memory, so that no copy is needed."""
        if bucket.home.type == "cpu":
            return None
        if bucket.home not in self._devices:
            self._devices[bucket.home] = GradientCopies(bucket.home)
        return self._devices[bucket.home]

    def _note(
        self,
        bucket: Bucket,
        fragment: Fragment | None,
        done: Any,
        there: torch.Tensor,
        *kept: Any,
    ) -> None:
        nbytes = there.numel() * there.itemsize
        self._copies.append(_Copy(bucket, fragment, done, nbytes, (there, kept)))
        self._under_way_bytes += nbytes
        while (
            len(self._copies) > _IN_FLIGHT
            or self._under_way_bytes > _IN_FLIGHT_BYTES
            or (self._copies and self._copies[0].done.query())
        ):
            self._finish_first()

    def _await(self, bucket: Bucket, fragment: Fragment | None) -> None:
        """Wait until no copy of *fragment*, or with None of any part of *bucket*, is in flight: the
        streams of the two directions are not ordered after each other.
        """
        for copy in self._copies:
            if copy.bucket is bucket and (fragment is None or copy.fragment in (None, fragment)):
                copy.done.synchronize()

    def _finish_all(self) -> None:
        while self._copies:
            self._finish_first()

    def _finish_first(self) -> None:
        copy = self._copies.popleft()
        copy.done.synchronize()
        self._under_way_bytes -= copy.nbytes
        self._let_go(copy.bucket)


def _weight(one: Sum) -> Weight:
    return known(one.weight())  # the weight lives as long as its optimizer


def _name(bucket: Bucket) -> str:
    return f"{bucket.name}/gradients"


def _strides(weight: Weight, gradient: torch.Tensor) -> tuple[int, ...]:
    """The strides of *gradient*, without gaps. A parameter that is cut is contiguous: for it, the
    strides in the order of its parts.
    """
    if len(weight.fragments) == 1:
        return dense_strides(gradient)
    return dense_strides(torch.empty(gradient.shape, device="meta"))


def _row(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The elements of *tensor*, in the order that they have in memory with these *strides*: a view
    if *tensor* has these strides, else a copy.
    """
    if tensor.stride() != strides:
        tensor = torch.empty_strided(
            tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
