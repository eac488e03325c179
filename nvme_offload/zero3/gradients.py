"""`Gradients`: the gradients that ZeRO-3 reduces in backward. The gradients of a sub-group are one
value of a tier, from the first reduction until the next backward pass after the step.

They share the host memory budget with parameters and states; gradients that do not fit go to the
drive. They are kept in the dtype in which they are reduced, normally 16-bit, and widened for the
optimizer one sub-group at a time. At most one value is in use, and none while states are in use. If
updates run on a GPU, gradients stay there if they fit: see `DeviceRoom`.

DeepSpeed's functions can read gradients until the next backward pass. After the step they read the
gradients that the optimizer used, unscaled and clipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..device.staging import CPU
from ..errors import UsageError
from ..swap.tier import Tier
from .gradient_values import GradientValues

_serial = itertools.count()
Slices = dict[int, int]  # parts of a sub-group: offset of the first element -> number of elements


class Gradients:
    """The gradients of sub-groups of *numels* elements, in *dtype*. The optimizer gets them in
    *widened_dtype*, on *device*.

    *wait_for_copies* returns when every copy to or from the accelerator that was started here has
    ended. *aside*: bytes that updates take on a GPU.

    Lifetime: until `abandon`, or until this object is dropped. Raises: as `TensorSwapper`, wherever
    a gradient is fetched or stored.

    Attributes: *partial*, whether micro-batches of the step are missing. The other attributes are
    many because the state of a step decides which value of a sub-group is current: they are the
    names and sizes of values, and this state.
    """

    def __init__(
        self,
        tier: Tier,
        numels: Sequence[int],
        dtype: torch.dtype,
        widened_dtype: torch.dtype,
        wait_for_copies: Callable[[], None],
        device: torch.device = CPU,
        aside: int = 0,
    ) -> None:
        self._device = device
        self._values = GradientValues(tier, wait_for_copies, device, aside)
        self._widened: torch.Tensor | None = None  # on a GPU: the last gradient that was widened
        self._tier = tier
        self._numels = numels
        self._dtype = dtype
        self._widened_dtype = widened_dtype
        prefix = f"gradient{next(_serial)}"
        self._names = [f"{prefix}/{index}" for index in range(len(numels))]
        self._replacements = [f"{name}/replaced" for name in self._names]
        self.partial = False
        # Sub-group -> the parts reduced since the last step.
        self._reduced: dict[int, Slices] = {}
        # Sub-group with a replaced gradient -> the parts reduced since the replacement.
        self._replaced: dict[int, Slices] = {}
        # Sub-group -> the factor by which the gradient was multiplied for the optimizer.
        self._factors: dict[int, Any] = {}
        self._spent = False  # a step has used the gradients
        self._used_up = False  # updates in the last backward pass have used some gradients
        self._closed = False  # the next reduction begins a new step
        self._outdated: set[int] = set()  # sub-groups with values of an earlier step
        self._scratch = f"{prefix}/widened"
        self._owned = [*self._names, *self._replacements]
        if device.type == "cpu":
            self._owned.append(self._scratch)
            tier.make_scratch(self._scratch, max(numels) * widened_dtype.itemsize)
        tier.abandon_with(self, self._owned)

    def abandon(self) -> None:
        """Discard all gradients: see `Tier.abandon`. No other method may be called afterwards."""
        self._values.abandon()
        self._widened = None
        self._tier.abandon(self._owned)

    def name(self, index: int) -> str:
        """The name in the tier of the gradient of sub-group *index*."""
        return self._names[index]

    # Backward.

    def add(
        self, index: int, partitions: Sequence[tuple[int, torch.Tensor]], *, to_earlier: bool
    ) -> list[torch.Tensor]:
        """Add *partitions* of sub-group *index*, each with the offset of its first element. With
        *to_earlier* they accumulate on the gradients of the step's earlier micro-batches.

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
                # Add on the accelerator: it is faster, and the norm is computed there next.
                total = place.to(partition.device, non_blocking=True).add_(total)
            place.copy_(total, non_blocking=True)
            totals.append(total)
            slices[offset] = partition.numel()
            if index in self._replaced:
                self._replaced[index][offset] = partition.numel()
        self._reduced[index] = slices
        return totals

    def complete(self, index: int, partitions: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Accept *partitions* of sub-group *index* as the complete gradient of the step. This class
        does nothing: it has the sums.
        """

    def reduced(self, index: int) -> Mapping[int, int]:
        """The parts of sub-group *index* that were reduced since the last step: number of elements,
        by offset.
        """
        return {} if self._spent else self._reduced.get(index, {})

    def padded(self, index: int, offset: int, numel: int, total: torch.Tensor) -> torch.Tensor:
        """*total*, which `add` returned for *offset* of sub-group *index*, padded with zeros at the
        end to *numel* elements.
        """
        flat = self._values.on_device(self._names[index])
        if flat is not None:
            return flat.narrow(0, offset, numel)
        return torch.nn.functional.pad(total, (0, numel - total.numel()))

    def partition(self, index: int, offset: int) -> torch.Tensor:
        """The reduced gradient at *offset* of sub-group *index*. Valid until the next call."""
        return self._opened(index).narrow(0, offset, self._reduced[index][offset])

    def sums(self, index: int) -> torch.Tensor:
        """The sums that `add` has stored for sub-group *index*. Valid until the next call."""
        return self._opened(index)

    def pause(self) -> None:
        """Pause adding: allow the value in use to be evicted."""
        self._values.pause()

    def give_back(self) -> None:
        """Release the value in use, even if an interrupted call left it in use."""
        self._values.give_back()

    # The optimizer, and access to fragments.

    def require_whole(self) -> None:
        """Check that no micro-batch of the step is missing, and that no update in backward has
        consumed gradients. Raises: UsageError.
        """
        if self._used_up:
            raise UsageError(
                'safe_get_full_grad and the like need gradients, which "step_in_backward" uses up in backward: leave it out to read or change them'
            )
        if self.partial:
            raise UsageError(
                "safe_get_full_grad, safe_update_full_grad_vectorized and the like need the gradients of a whole step, and micro-batches are missing: "
                "call them after the last backward pass of the step, or after step(); with "
                '"missing_gradients": "last" they see the gradients of the step before, as with "device": "cpu"'
            )

    def widened(self, index: int, *, last: bool = False) -> torch.Tensor:
        """The gradient of sub-group *index*, with zeros for parts that were not reduced. With
        *last* it is for the optimizer, which gets zeros after a step has used the gradients.

        Lifetime: all sub-groups share this memory. Only `replace` keeps a change to it.
        """
        self.pause()
        self._widened = None
        memory = self._widened_memory(index)
        if last and self._spent:
            return memory.zero_()
        spans = _joined(self._replaced.get(index, self._reduced.get(index, {})))
        if index in self._replaced:
            self._values.fetch(
                self._replacements[index], self._widened_dtype, memory, [(0, memory.numel())]
            )
        else:
            for start, end in _gaps(spans, memory.numel()):
                memory[start:end].zero_()
        if spans:
            self._values.fetch(self._names[index], self._dtype, memory, spans)
        if index in self._factors:
            memory.mul_(self._factors[index])
        return memory

    def used(self, index: int, factor: Any) -> None:
        """Record that the optimizer gets the gradient of sub-group *index* multiplied by *factor*,
        in addition to earlier factors.
        """
        self._factors[index] = self._factors.get(index, 1.0) * factor

    def use_up(self, index: int) -> None:
        """Discard the gradient of sub-group *index*, which an update in backward has used."""
        self._widened = None
        self._used_up = True
        self._forget([index])

    def replace(self, index: int, gradient: torch.Tensor | None = None) -> None:
        """Make *gradient*, by default the memory that `widened` returned, the gradient of sub-group
        *index*, in full precision.
        """
        name = self._replacements[index]
        memory = self._widened_memory(index) if gradient is None else gradient
        self.pause()
        self._factors.pop(index, None)
        value = self._values.use(name, memory.numel(), self._widened_dtype, exists=False)
        value.copy_(memory)
        self.pause()
        self._replaced[index] = {}

    def close(self) -> None:
        """Make the next reduction begin a new step. Until then, a step still uses these gradients."""
        self._closed = True

    def spend(self) -> None:
        """End the step: from now on its gradients are only read."""
        self.pause()
        self._widened = None
        used = self._reduced.keys() | self._replaced.keys() if self._spent else set()
        self._forget(self._outdated | used)
        self._spent = self._closed = True
        self.partial = False

    def forget_all(self) -> None:
        """Discard all gradients, because the weights were replaced."""
        self.pause()
        self._widened = None
        self._forget(range(len(self._names)))
        self._spent = self._closed = self._used_up = self.partial = False

    def _begin(self) -> None:
        """Begin a step at its first reduction: invalidate the gradients of the step before."""
        self._outdated |= self._reduced.keys() | self._replaced.keys()
        self._reduced.clear()
        self._replaced.clear()
        self._factors.clear()
        self._spent = self._closed = self._used_up = False
        self._values.make_room()

    def _widened_memory(self, index: int) -> torch.Tensor:
        """The memory in which the gradient of sub-group *index* is widened."""
        if self._device.type != "cpu":
            if self._widened is None:
                self._widened = torch.empty(
                    self._numels[index], dtype=self._widened_dtype, device=self._device
                )
            return self._widened
        return (
            self._tier.scratch(self._scratch)
            .view(self._widened_dtype)
            .narrow(0, 0, self._numels[index])
        )

    def _opened(self, index: int) -> torch.Tensor:
        """The gradient of sub-group *index*, in use. The value in use before is released."""
        if index in self._outdated:
            self._outdated.remove(index)
            self._values.discard([self._replacements[index]])
        return self._values.use(
            self._names[index], self._numels[index], self._dtype, exists=index in self._reduced
        )

    def _forget(self, indexes: Collection[int]) -> None:
        for index in indexes:
            self._reduced.pop(index, None)
            self._replaced.pop(index, None)
            self._factors.pop(index, None)
        self._outdated.difference_update(indexes)
        self._values.discard(
            [name for index in indexes for name in (self._names[index], self._replacements[index])]
        )


class KeptGradients(Gradients):
    """`Gradients` on a GPU with "missing_gradients": "last". DeepSpeed without offload keeps the
    sums of all steps: a parameter without a gradient in a step gets its last sum again. The first
    micro-batch of a step that has a gradient overwrites the sum.
    """

    def widened(self, index: int, *, last: bool = False) -> torch.Tensor:
        """As in the base class. With *last*, the sum itself, without factors of earlier steps."""
        if last:
            self._factors.pop(index, None)
        return super().widened(index)

    def reduced(self, index: int) -> Mapping[int, int]:
        """The parts of sub-group *index* that were ever reduced."""
        return self._reduced.get(index, {})

    def spend(self) -> None:
        """End the step, and keep all gradients as DeepSpeed does."""
        self.pause()
        self._widened = None
        self._closed = True
        self.partial = False

    def _begin(self) -> None:
        self._replaced.clear()
        self._factors.clear()
        self._closed = False


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
