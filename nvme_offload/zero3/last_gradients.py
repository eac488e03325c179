"""`LastGradients`: gradients as DeepSpeed keeps them with "device": "cpu": a parameter without a
gradient in a step gets that of its last step again.

DeepSpeed has two buffers for all gradients, filled with zeros once. One has the sums over a step's
micro-batches: the first micro-batch overwrites them, later ones add to what is there. The other has
the fp32 gradients for the optimizer: the last micro-batch overwrites them. Unscaling and clipping
change them in place, and change them again in the next step where no new gradient came. Here each
sub-group has a value for each of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .gradients import Gradients


class LastGradients(Gradients):
    """As `Gradients`, but nothing is forgotten with a step. The values called `name` are the
    optimizer's gradients; the sums are separate values.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._existing: set[str] = set()  # names that have a value
        # the sub-group whose gradient the optimizer has, in the widened memory
        self._lent: int | None = None

    def name(self, index: int) -> str:
        """The name in the tier of the gradient of sub-group *index* for the optimizer."""
        return self._replacements[index]

    def add(
        self, index: int, partitions: Sequence[tuple[int, torch.Tensor]], *, to_earlier: bool
    ) -> list[torch.Tensor]:
        """Add *partitions* of sub-group *index*, each with the offset of its first element;
        *to_earlier* says whether they accumulate on what is there, of whatever step.
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

    def sums(self, index: int) -> torch.Tensor:
        """What `add` has stored for sub-group *index*, of whatever step."""
        return self._made(self._names[index], index, self._dtype)

    def complete(self, index: int, partitions: Sequence[tuple[int, torch.Tensor]]) -> None:
        """*partitions* of sub-group *index* are the complete gradient of the step, for the
        optimizer.
        """
        # copies: they may be views of the sums, which are released
        copies = [
            (offset, partition.to(self._widened_dtype, copy=True))
            for offset, partition in partitions
        ]
        flat = self._made(self._replacements[index], index, self._widened_dtype)
        for offset, partition in copies:
            flat.narrow(0, offset, partition.numel()).copy_(partition, non_blocking=True)

    def require_whole(self) -> None:
        """Do nothing: before the last micro-batch, readers see the gradients of the step before."""

    def widened(self, index: int, *, last: bool = False) -> torch.Tensor:
        """The gradient of sub-group *index* for the optimizer. With *last* it is kept as the
        optimizer leaves it.
        """
        self._keep_lent()
        self.pause()
        memory = self._widened_memory(index)
        if self._replacements[index] in self._existing:
            self._fetch(
                self._replacements[index],
                self._widened_dtype,
                memory,
                [(0, memory.numel())],
            )
        else:
            memory.zero_()
        self._lent = index if last else None
        return memory

    def used(self, index: int, factor: Any) -> None:
        """Do nothing: the gradient is kept as the optimizer leaves it."""

    def replace(self, index: int, gradient: torch.Tensor | None = None) -> None:
        """Make *gradient*, by default the memory that `widened` returned, the gradient of sub-group
        *index*.
        """
        super().replace(index, gradient)
        self._existing.add(self._replacements[index])

    def close(self) -> None:
        """Do nothing: the first micro-batch of a step overwrites the sums."""

    def spend(self) -> None:
        """The step is over. DeepSpeed keeps all gradients, and so does this."""
        self._keep_lent()
        self.pause()
        self._reduced.clear()

    def forget_all(self) -> None:
        """The weights were replaced: gradients are zeros, as in a new process."""
        self._lent = None
        super().forget_all()
        self._existing.clear()

    def _keep_lent(self) -> None:
        """Keep the gradient that the optimizer has changed."""
        index, self._lent = self._lent, None
        if index is not None:
            self.replace(index)

    def _made(self, name: str, index: int, dtype: torch.dtype) -> torch.Tensor:
        """The value *name* of sub-group *index*, in use; zeros at first."""
        value = self._use(name, self._numels[index], dtype, exists=name in self._existing)
        if name not in self._existing:
            value.zero_()
            self._existing.add(name)
        return value
