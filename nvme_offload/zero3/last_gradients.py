"""`LastGradients` keeps gradients as DeepSpeed does with "device": "cpu": a parameter without a
gradient in a step gets the gradient of its last step again.

DeepSpeed has two buffers for all gradients, and fills them with zeros once. One has the sums over a
step's micro-batches: the first micro-batch overwrites them, and later ones add to them. The other
has the fp32 gradients for the optimizer: the last micro-batch overwrites them. Unscaling and
clipping change these in place. If a parameter has no new gradient in the next step, they change its
old one again. Here, each sub-group has one value for each of the two buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .gradients import Gradients


class LastGradients(Gradients):
    """`Gradients` that persist across steps. The values called `name` are the optimizer's
    gradients; the sums are separate values.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._existing: set[str] = set()  # names that have a value
        # The sub-group whose gradient the optimizer is using, in the widened memory.
        self._lent: int | None = None

    def name(self, index: int) -> str:
        """The name in the tier of the gradient of sub-group *index* for the optimizer."""
        return self._replacements[index]

    def add(
        self, index: int, partitions: Sequence[tuple[int, torch.Tensor]], *, to_earlier: bool
    ) -> list[torch.Tensor]:
        """Add *partitions* of sub-group *index*, each with the offset of its first element. With
        *to_earlier* they accumulate on the stored sums, of whichever step; otherwise they overwrite
        the sums.
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
        """The sums that `add` has stored for sub-group *index*, in whichever step."""
        return self._made(self._names[index], index, self._dtype)

    def complete(self, index: int, partitions: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Store *partitions* of sub-group *index* as the complete gradient of the step, for the
        optimizer.
        """
        # Copy them: they may be views of the sums, which are released.
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
        """The gradient of sub-group *index* for the optimizer. With *last*, the optimizer's changes
        to it are kept.
        """
        self._keep_lent()
        self.pause()
        memory = self._widened_memory(index)
        if self._replacements[index] in self._existing:
            self._values.fetch(
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
        """Do nothing: the kept gradient includes the optimizer's changes."""

    def replace(self, index: int, gradient: torch.Tensor | None = None) -> None:
        """Make *gradient*, by default the memory that `widened` returned, the gradient of sub-group
        *index*.
        """
        super().replace(index, gradient)
        self._existing.add(self._replacements[index])

    def close(self) -> None:
        """Do nothing: the first micro-batch of a step overwrites the sums."""

    def spend(self) -> None:
        """End the step, and keep all gradients as DeepSpeed does."""
        self._keep_lent()
        self.pause()
        self._reduced.clear()

    def forget_all(self) -> None:
        """Reset all gradients to zero, as in a new process, because the weights were replaced."""
        self._lent = None
        super().forget_all()
        self._existing.clear()

    def _keep_lent(self) -> None:
        """Store the gradient that the optimizer has changed."""
        index, self._lent = self._lent, None
        if index is not None:
            self.replace(index)

    def _made(self, name: str, index: int, dtype: torch.dtype) -> torch.Tensor:
        """The value *name* of sub-group *index*, in use. A new value has zeros."""
        value = self._values.use(name, self._numels[index], dtype, exists=name in self._existing)
        if name not in self._existing:
            value.zero_()
            self._existing.add(name)
        return value
