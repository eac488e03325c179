"""`Gradients`: what ZeRO-3 reduces in backward, each sub-group's one value of a tier from its first
reduction until the optimizer has used it.

They share the budget of host memory with parameters and states, and go to the drive where they do
not fit, like those. They are in the type that they are reduced in, as a rule of 16 bit, and widened
for the optimizer a sub-group at a time. At most one of them is in use, and none while states are.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ..errors import UsageError
from ..swap.tier import Tier

_serial = itertools.count()
Slices = dict[int, int]  # of a sub-group: elements, by the first of them


class Gradients:
    """The gradients of sub-groups of *numels* elements, in *dtype*; the optimizer gets them in
    *widened_dtype*.

    *settle* returns when no copy to or from an accelerator that was started here is under way any
    more.

    Lifetime: forgotten by `close`, or when this is dropped. Raises: as `TensorSwapper`'s methods,
    wherever a gradient is brought or stored.
    """

    def __init__(
        self,
        tier: Tier,
        numels: Sequence[int],
        dtype: torch.dtype,
        widened_dtype: torch.dtype,
        settle: Callable[[], None],
    ) -> None:
        self._tier = tier
        self._numels = numels
        self._dtype = dtype
        self._widened_dtype = widened_dtype
        self._settle = settle
        prefix = f"gradient{next(_serial)}"
        self._names = [f"{prefix}/{index}" for index in range(len(numels))]
        self._replacements = [f"{name}/replaced" for name in self._names]
        self._reduced: dict[int, Slices] = {}  # by sub-group: what was reduced since the last step
        # likewise: what was reduced since all of it was replaced
        self._replaced: dict[int, Slices] = {}
        # the value that is added to, by its name
        self._open: tuple[str, torch.Tensor] | None = None
        self._taken: str | None = None  # the value that is in use, or was to be
        self._scratch = f"{prefix}/widened"
        tier.make_scratch(self._scratch, max(numels) * widened_dtype.itemsize)
        tier.abandon_with(self, [*self._names, *self._replacements])

    def close(self) -> None:
        """Forget everything; nothing else may be called afterwards."""
        self.forget_all()
        self._tier.drop_scratch(self._scratch)

    def name(self, index: int) -> str:
        """What the gradient of sub-group *index* is called in the tier."""
        return self._names[index]

    # Backward.

    def add(
        self, index: int, partitions: Sequence[tuple[int, torch.Tensor]], *, to_earlier: bool
    ) -> list[torch.Tensor]:
        """Take *partitions* of sub-group *index*, each with the offset of its first element;
        *to_earlier* ones of this step they are added.

        Returns: the sums, each on its partition's device, until something else is done here.
        """
        slices = self._reduced.get(index, {})
        flat = self._opened(index)
        totals = []
        for offset, partition in partitions:
            place = flat.narrow(0, offset, partition.numel())
            total = partition.view(-1).to(self._dtype)
            if to_earlier and offset in slices:
                # there: an accelerator adds faster, and makes a norm of it next
                total = place.to(partition.device, non_blocking=True).add_(total)
            place.copy_(total, non_blocking=True)
            totals.append(total)
            slices[offset] = partition.numel()
            if index in self._replaced:
                self._replaced[index][offset] = partition.numel()
        self._reduced[index] = slices
        return totals

    def complete(self, index: int, partitions: Sequence[tuple[int, torch.Tensor]]) -> None:
        """What *partitions* of sub-group *index* have is the gradient of the step: of no interest
        here.
        """

    def reduced(self, index: int) -> Mapping[int, int]:
        """What was reduced of sub-group *index* since the last step: numbers of elements, by the
        offset of the first.
        """
        return self._reduced.get(index, {})

    def partition(self, index: int, offset: int) -> torch.Tensor:
        """What was reduced at *offset* of sub-group *index*, in host memory, until something else
        is done here.
        """
        return self._opened(index).narrow(0, offset, self._reduced[index][offset])

    def pause(self) -> None:
        """Nothing more is added for now: what is in use can leave the memory."""
        if self._open is not None:
            self._settle()
        self.give_back()

    def give_back(self) -> None:
        """Nothing is in use any more, also what a call that was cut short by an exception
        has left.
        """
        name, self._open, self._taken = self._taken, None, None
        if name is not None:
            with contextlib.suppress(UsageError):  # it was not taken yet, or has been given back
                self._tier.swapper.release(name, changed=True)

    # The optimizer, and fragments.

    def widened(self, index: int, *, last: bool = False) -> torch.Tensor:
        """The gradient of sub-group *index* for the optimizer, zeros where nothing was reduced;
        with *last* nobody needs it afterwards.

        Lifetime: the memory is the same for all; what is changed there stays only by `replace`.
        """
        self.pause()
        room = self._room(index)
        slices = self._reduced.get(index, {})
        if index in self._replaced:
            slices = self._replaced[index]
            self._fetch(
                self._replacements[index], self._widened_dtype, room, [(0, room.numel())], last
            )
        else:
            for start, end in _gaps(slices, room.numel()):
                room[start:end].zero_()
        if slices:
            self._fetch(self._names[index], self._dtype, room, _joined(slices), last)
        if last:
            self._forget([index])
        return room

    def replace(self, index: int) -> None:
        """What `widened` has handed out for sub-group *index* is its gradient, with all its
        bits.
        """
        name, room = self._replacements[index], self._room(index)
        self.pause()
        self._taken = name
        self._tier.swapper.create(name, room.nbytes).view(self._widened_dtype).copy_(room)
        self.give_back()
        self._replaced[index] = {}

    def forget(self) -> None:
        """Nothing was reduced in this step, as far as the next one is concerned."""
        self.pause()
        self._forget([*self._reduced.keys() | self._replaced.keys()])

    def forget_all(self) -> None:
        """The weights are others now: what was reduced of these is of no use."""
        self.pause()
        self._forget(range(len(self._names)))

    def _room(self, index: int) -> torch.Tensor:
        """Where the gradient of sub-group *index* is widened."""
        return (
            self._tier.scratch(self._scratch)
            .view(self._widened_dtype)
            .narrow(0, 0, self._numels[index])
        )

    def _opened(self, index: int) -> torch.Tensor:
        """The gradient of sub-group *index*, in use; that of another one no longer is."""
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
            swapper.discard(name)  # at once: what is let go might be written first
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
    """*slices* by their first and last elements, neighbours as one."""
    spans: list[tuple[int, int]] = []
    for start, numel in sorted(slices.items()):
        first = spans.pop()[0] if spans and spans[-1][1] == start else start
        spans.append((first, start + numel))
    return spans


def _gaps(slices: Slices, numel: int) -> Iterator[tuple[int, int]]:
    """What *slices* leave of *numel* elements."""
    edges = [0, *itertools.chain.from_iterable(_joined(slices)), numel]
    return ((start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end)
