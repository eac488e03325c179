"""`Gradients`: the gradients that ZeRO-3 reduces in backward. Each sub-group's are one value of a
tier, from the first reduction until the next backward pass after the step.

They share the host memory budget with parameters and states, and go to the drive where they do not
fit. They are kept in the dtype in which they are reduced, normally 16-bit, and widened for the
optimizer one sub-group at a time. At most one is in use, and none while states are.

DeepSpeed's functions read them until the next backward pass: after the step as the optimizer had
them, unscaled and clipped.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import UsageError
from ..swap.tier import Tier

_serial = itertools.count()
Slices = dict[int, int]  # of a sub-group: number of elements, by the offset of the first


class Gradients:
    """The gradients of sub-groups of *numels* elements, in *dtype*; the optimizer gets them in
    *widened_dtype*.

    *wait_for_copies* returns when no copy to or from the accelerator that was started here is in
    flight.

    Lifetime: forgotten after `abandon`, or when this is dropped. Raises: as `TensorSwapper`, wherever a
    gradient is brought or stored.

    Attributes: *partial*, whether micro-batches of the step are missing.
    """

    def __init__(
        self,
        tier: Tier,
        numels: Sequence[int],
        dtype: torch.dtype,
        widened_dtype: torch.dtype,
        wait_for_copies: Callable[[], None],
    ) -> None:
        self._tier = tier
        self._numels = numels
        self._dtype = dtype
        self._widened_dtype = widened_dtype
        self._wait_for_copies = wait_for_copies
        prefix = f"gradient{next(_serial)}"
        self._names = [f"{prefix}/{index}" for index in range(len(numels))]
        self._replacements = [f"{name}/replaced" for name in self._names]
        self.partial = False
        # By sub-group: the parts that were reduced since the last step.
        self._reduced: dict[int, Slices] = {}
        # By sub-group that was replaced: the parts that were reduced since then.
        self._replaced: dict[int, Slices] = {}
        # By sub-group: the optimizer had the gradient multiplied by this.
        self._factors: dict[int, Any] = {}
        self._spent = False  # a step has used them
        self._closed = False  # the next reduction begins another step
        self._outdated: set[int] = set()  # sub-groups with values of an earlier step
        # The value that is being added to, and its name.
        self._open: tuple[str, torch.Tensor] | None = None
        self._taken: str | None = None  # the value that is in use, or is about to be
        self._scratch = f"{prefix}/widened"
        tier.make_scratch(self._scratch, max(numels) * widened_dtype.itemsize)
        self._owned = [*self._names, *self._replacements, self._scratch]
        tier.abandon_with(self, self._owned)

    def abandon(self) -> None:
        """Forget everything: see `Tier.abandon`. Nothing else may be called afterwards."""
        if self._open is not None:
            self._wait_for_copies()
        self._tier.abandon(self._owned)

    def name(self, index: int) -> str:
        """The name in the tier of the gradient of sub-group *index*."""
        return self._names[index]

    # Backward.

    def add(
        self, index: int, partitions: Sequence[tuple[int, torch.Tensor]], *, to_earlier: bool
    ) -> list[torch.Tensor]:
        """Add *partitions* of sub-group *index*, each with the offset of its first element;
        *to_earlier* says whether they accumulate on those of earlier micro-batches of the step.

        Returns: the sums, each on its partition's device. Valid until the next call.
        """
        if self._closed:
            self._begin()
        slices = self._reduced.get(index, {})
        flat = self._opened(index)
        totals = []
        for offset, partition in partitions:
            place = flat.narrow(0, offset, partition.numel())
            total = partition.view(-1).to(self._dtype)
            if to_earlier and offset in slices:
                # Added on the accelerator: that is faster, and the norm is computed there next.
                total = place.to(partition.device, non_blocking=True).add_(total)
            place.copy_(total, non_blocking=True)
            totals.append(total)
            slices[offset] = partition.numel()
            if index in self._replaced:
                self._replaced[index][offset] = partition.numel()
        self._reduced[index] = slices
        return totals

    def complete(self, index: int, partitions: Sequence[tuple[int, torch.Tensor]]) -> None:
        """*partitions* of sub-group *index* are the complete gradient of the step. Not needed here."""

    def reduced(self, index: int) -> Mapping[int, int]:
        """The parts of sub-group *index* that were reduced since the last step: number of elements,
        by offset.
        """
        return {} if self._spent else self._reduced.get(index, {})

    def partition(self, index: int, offset: int) -> torch.Tensor:
        """What was reduced at *offset* of sub-group *index*, in host memory. Valid until the next
        call.
        """
        return self._opened(index).narrow(0, offset, self._reduced[index][offset])

    def sums(self, index: int) -> torch.Tensor:
        """What `add` has stored for sub-group *index*, in host memory. Valid until the next call."""
        return self._opened(index)

    def pause(self) -> None:
        """Nothing more is added for now: the value in use may be evicted."""
        if self._open is not None:
            self._wait_for_copies()
        self.give_back()

    def give_back(self) -> None:
        """Release the value in use, also one that an interrupted call left in use."""
        name, self._open, self._taken = self._taken, None, None
        if name is not None:
            with contextlib.suppress(UsageError):  # not swapped in yet, or released already
                self._tier.swapper.release(name, changed=True)

    # The optimizer, and access to fragments.

    def require_whole(self) -> None:
        """Check that no micro-batch of the step is missing. Raises: UsageError."""
        if self.partial:
            raise UsageError(
                "safe_get_full_grad, safe_update_full_grad_vectorized and the like need the gradients of a whole step, and micro-batches are missing: "
                "call them after the last backward pass of the step, or after step(); with "
                '"missing_gradients": "last" they see the gradients of the step before, as with "device": "cpu"'
            )

    def widened(self, index: int, *, last: bool = False) -> torch.Tensor:
        """The gradient of sub-group *index*, zeros where nothing was reduced. With *last* it is for
        the optimizer, which gets zeros after a step has used the gradients.

        Lifetime: all sub-groups share this memory. A change to it is kept only by `replace`.
        """
        self.pause()
        memory = self._widened_memory(index)
        if last and self._spent:
            return memory.zero_()
        spans = _joined(self._replaced.get(index, self._reduced.get(index, {})))
        if index in self._replaced:
            self._fetch(
                self._replacements[index], self._widened_dtype, memory, [(0, memory.numel())]
            )
        else:
            for start, end in _gaps(spans, memory.numel()):
                memory[start:end].zero_()
        if spans:
            self._fetch(self._names[index], self._dtype, memory, spans)
        if index in self._factors:
            memory.mul_(self._factors[index])
        return memory

    def used(self, index: int, factor: Any) -> None:
        """The optimizer has the gradient of sub-group *index* multiplied by *factor*, too."""
        self._factors[index] = self._factors.get(index, 1.0) * factor

    def replace(self, index: int, gradient: torch.Tensor | None = None) -> None:
        """Make *gradient*, by default the memory that `widened` returned, the gradient of sub-group
        *index*, in full precision.
        """
        name = self._replacements[index]
        memory = self._widened_memory(index) if gradient is None else gradient
        self.pause()
        self._factors.pop(index, None)
        self._taken = name
        self._tier.swapper.create(name, memory.nbytes).view(self._widened_dtype).copy_(memory)
        self.give_back()
        self._replaced[index] = {}

    def close(self) -> None:
        """The next reduction begins another step. Until then a step still uses these gradients."""
        self._closed = True

    def spend(self) -> None:
        """The step is over: its gradients are only read from now on."""
        self.pause()
        used = self._reduced.keys() | self._replaced.keys() if self._spent else set()
        self._forget(self._outdated | used)
        self._spent = self._closed = True
        self.partial = False

    def forget_all(self) -> None:
        """The weights were replaced: forget all gradients."""
        self.pause()
        self._forget(range(len(self._names)))
        self._spent = self._closed = self.partial = False

    def _begin(self) -> None:
        """The first reduction of a step: the gradients of the one before are void."""
        self._outdated |= self._reduced.keys() | self._replaced.keys()
        self._reduced.clear()
        self._replaced.clear()
        self._factors.clear()
        self._spent = self._closed = False

    def _widened_memory(self, index: int) -> torch.Tensor:
        """The memory in which the gradient of sub-group *index* is widened."""
        return (
            self._tier.scratch(self._scratch)
            .view(self._widened_dtype)
            .narrow(0, 0, self._numels[index])
        )

    def _opened(self, index: int) -> torch.Tensor:
        """The gradient of sub-group *index*, in use. The one in use before is released."""
        if index in self._outdated:
            self._outdated.remove(index)
            self._tier.forget([self._replacements[index]])
        return self._use(
            self._names[index], self._numels[index], self._dtype, exists=index in self._reduced
        )

    def _use(self, name: str, numel: int, dtype: torch.dtype, *, exists: bool) -> torch.Tensor:
        if self._open is None or self._open[0] != name:
            self.pause()
            self._taken = name
            value = (
                self._tier.swapper.swap_in(name)
                if exists
                else self._tier.swapper.create(name, numel * dtype.itemsize)
            )
            self._open = name, value.view(dtype)
        return self._open[1]

    def _fetch(
        self,
        name: str,
        dtype: torch.dtype,
        into: torch.Tensor,
        spans: Sequence[tuple[int, int]],
    ) -> None:
        swapper = self._tier.swapper
        self._taken = name
        value = swapper.swap_in(name).view(dtype)
        for start, end in spans:
            into[start:end].copy_(value[start:end])
        swapper.release(name, changed=False)
        self._taken = None

    def _forget(self, indexes: Collection[int]) -> None:
        for index in indexes:
            self._reduced.pop(index, None)
            self._replaced.pop(index, None)
            self._factors.pop(index, None)
        self._outdated.difference_update(indexes)
        self._tier.forget(
            [name for index in indexes for name in (self._names[index], self._replacements[index])]
        )


def _joined(slices: Slices) -> list[tuple[int, int]]:
    """The ranges (first element, end) of *slices*, sorted, adjacent ones merged."""
    spans: list[tuple[int, int]] = []
    for start, numel in sorted(slices.items()):
        first = spans.pop()[0] if spans and spans[-1][1] == start else start
        spans.append((first, start + numel))
    return spans


def _gaps(spans: Sequence[tuple[int, int]], numel: int) -> Iterator[tuple[int, int]]:
    """The ranges of *numel* elements that *spans* leave out."""
    edges = [0, *itertools.chain.from_iterable(spans), numel]
    return ((start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end)
