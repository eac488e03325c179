"""`Gradients`: the gradients that ZeRO-3 reduces in backward. Each sub-group's are one value of a
tier, from the first reduction until the optimizer has used them.

They share the host memory budget with parameters and states, and go to the drive where they do not
fit. They are kept in the dtype in which they are reduced, normally 16-bit, and widened for the
optimizer one sub-group at a time. At most one is in use, and none while states are.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

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
        self._reduced: dict[int, Slices] = {}  # by sub-group: what was reduced since the last step
        # By sub-group that was replaced: what was reduced since.
        self._replaced: dict[int, Slices] = {}
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
        """What was reduced of sub-group *index* since the last step: number of elements, by offset."""
        return self._reduced.get(index, {})

    def partition(self, index: int, offset: int) -> torch.Tensor:
        """What was reduced at *offset* of sub-group *index*, in host memory. Valid until the next
        call.
        """
        return self._opened(index).narrow(0, offset, self._reduced[index][offset])

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

    def widened(self, index: int, *, last: bool = False) -> torch.Tensor:
        """The gradient of sub-group *index* for the optimizer, zeros where nothing was reduced.
        With *last* it is forgotten.

        Lifetime: all sub-groups share this memory. A change to it is kept only by `replace`.
        """
        self.pause()
        memory = self._widened_memory(index)
        spans = _joined(self._replaced.get(index, self._reduced.get(index, {})))
        if index in self._replaced:
            self._fetch(
                self._replacements[index], self._widened_dtype, memory, [(0, memory.numel())], last
            )
        else:
            for start, end in _gaps(spans, memory.numel()):
                memory[start:end].zero_()
        if spans:
            self._fetch(self._names[index], self._dtype, memory, spans, last)
        if last:
            self._forget([index])
        return memory

    def replace(self, index: int) -> None:
        """What `widened` returned for sub-group *index* is its gradient now, in full precision."""
        name, memory = self._replacements[index], self._widened_memory(index)
        self.pause()
        self._taken = name
        self._tier.swapper.create(name, memory.nbytes).view(self._widened_dtype).copy_(memory)
        self.give_back()
        self._replaced[index] = {}

    def forget(self) -> None:
        """The step is over: forget what was reduced in it."""
        self.pause()
        self._forget([*self._reduced.keys() | self._replaced.keys()])

    def forget_all(self) -> None:
        """The weights were replaced: forget all gradients."""
        self.pause()
        self._forget(range(len(self._names)))

    def _widened_memory(self, index: int) -> torch.Tensor:
        """The memory in which the gradient of sub-group *index* is widened."""
        return (
            self._tier.scratch(self._scratch)
            .view(self._widened_dtype)
            .narrow(0, 0, self._numels[index])
        )

    def _opened(self, index: int) -> torch.Tensor:
        """The gradient of sub-group *index*, in use. The one in use before is released."""
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
        last: bool,
    ) -> None:
        swapper = self._tier.swapper
        self._taken = name
        value = swapper.swap_in(name).view(dtype)
        for start, end in spans:
            into[start:end].copy_(value[start:end])
        if last:
            swapper.discard(name)  # not released first: it might be written back
        else:
            swapper.release(name, changed=False)
        self._taken = None

    def _forget(self, indexes: Sequence[int]) -> None:
        for index in indexes:
            self._reduced.pop(index, None)
            self._replaced.pop(index, None)
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
