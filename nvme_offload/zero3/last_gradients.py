"""`LastGradients`: gradients as DeepSpeed keeps them with its device "cpu", where a parameter
without one in a step is given that of its last again.

DeepSpeed has two buffers for all gradients, which it fills with zeros once. In one are the sums of
a step's micro-batches: the first micro-batch overwrites them, and others add to whatever is there.
In the other is what the optimizer gets, in 32 bit: the last micro-batch overwrites it, and what is
unscaled and clipped there in a step is so once more in the next, where nothing has come instead.
Here each sub-group has a value for either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .gradients import Gradients


class LastGradients(Gradients):
    """As `Gradients`, but that nothing is forgotten with a step: the values by `name` are what the
    optimizer gets, and the sums are beside them.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._existing: set[str] = set()  # the names that have a value
        # the sub-group whose gradient is where it is widened, for the optimizer to change
        self._shown: int | None = None

    def name(self, index: int) -> str:
        """What the gradient of sub-group *index* is called in the tier, as the optimizer
        gets it.
        """
        return self._replacements[index]

    def add(
        self, index: int, partitions: Sequence[tuple[int, torch.Tensor]], *, to_earlier: bool
    ) -> list[torch.Tensor]:
        """Take *partitions* of sub-group *index*, each with the offset of its first element;
        *to_earlier* ones, of whatever step, they are added.
        """
        sums = self._made(self._names[index], index, self._dtype)
        totals = []
        for offset, partition in partitions:
            place = sums.narrow(0, offset, partition.numel())
            total = partition.view(-1).to(self._dtype)
            if to_earlier:
                total = place.to(partition.device, non_blocking=True).add_(total)
            place.copy_(total, non_blocking=True)
            totals.append(total)
            self._reduced.setdefault(index, {})[offset] = partition.numel()
        return totals

    def complete(self, index: int, partitions: Sequence[tuple[int, torch.Tensor]]) -> None:
        """What *partitions* of sub-group *index* have is the gradient of the step: for the
        optimizer.
        """
        # may be of the sums, which are put away
        copies = [
            (offset, partition.to(self._widened_dtype, copy=True))
            for offset, partition in partitions
        ]
        flat = self._made(self._replacements[index], index, self._widened_dtype)
        for offset, partition in copies:
            flat.narrow(0, offset, partition.numel()).copy_(partition, non_blocking=True)

    def widened(self, index: int, *, last: bool = False) -> torch.Tensor:
        """The gradient of sub-group *index* for the optimizer; with *last* it stays as the
        optimizer leaves it.
        """
        self._keep_shown()
        self.pause()
        room = self._room(index)
        if self._replacements[index] in self._existing:
            self._fetch(
                self._replacements[index],
                self._widened_dtype,
                room,
                [(0, room.numel())],
                last=False,
            )
        else:
            room.zero_()
        self._shown = index if last else None
        return room

    def replace(self, index: int) -> None:
        """What `widened` has handed out for sub-group *index* is its gradient."""
        super().replace(index)
        self._existing.add(self._replacements[index])

    def forget(self) -> None:
        """The step is over: of it stays what DeepSpeed keeps, which is all."""
        self._keep_shown()
        self.pause()
        self._reduced.clear()

    def forget_all(self) -> None:
        """The weights are others now: gradients are zeros, as in a new process."""
        self._shown = None
        super().forget_all()
        self._existing.clear()

    def _keep_shown(self) -> None:
        """What the optimizer has left of a gradient is the gradient."""
        index, self._shown = self._shown, None
        if index is not None:
            self.replace(index)

    def _made(self, name: str, index: int, dtype: torch.dtype) -> torch.Tensor:
        """The value *name* of sub-group *index*, in use; zeros at first."""
        value = self._use(name, self._numels[index], dtype, exists=name in self._existing)
        if name not in self._existing:
            value.zero_()
            self._existing.add(name)
        return value
