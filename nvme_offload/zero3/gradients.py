"""`Gradients`: the gradients that ZeRO-3 reduces in backward. The gradients of a sub-group are one
value of a tier, from the first reduction until the next backward pass after the step.

They are kept in the dtype in which they are reduced, normally 16-bit, and widened for the optimizer
one sub-group at a time. None is in use while states are in use. If updates run on a GPU, gradients
stay there if they fit: see `DeviceRoom`.

DeepSpeed's functions can read gradients until the next backward pass. After the step they read the
gradients that the optimizer used, unscaled and clipped.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..device.room import DeviceRoom
from ..device.staging import CPU
from ..errors import UsageError
from ..swap.tier import Tier
from ..update.gradients import Flat, GradientValues

_serial = itertools.count()
Slices = dict[int, int]  # parts of a sub-group: offset of the first element -> number of elements


class _Phase(enum.Enum):
    """Whether the next reduction adds to the step, or begins a new one."""

    ADDING = enum.auto()
    CLOSED = enum.auto()  # a step still uses the gradients
    SPENT = enum.auto()  # a step has used them


@dataclasses.dataclass
class _State:
    """Of a sub-group's gradient. *reduced*: the parts that were reduced in this step. *fresh*: the
    parts of the optimizer's gradient that are still in the sums. The others are zero or, if
    *is_replaced*, in the replacement. *factor*: by which the optimizer got it multiplied, if at all.
    """

    reduced: Slices = dataclasses.field(default_factory=dict)
    fresh: Slices = dataclasses.field(default_factory=dict)
    is_replaced: bool = False
    factor: Any = None


class Gradients:
    """The gradients of sub-groups of *numels* elements, in *dtype*. The optimizer gets them in
    *widened_dtype*, on *device*. *aside*: bytes that updates take on a GPU.

    Lifetime: until `abandon`, or until this object is dropped. Raises: as `TensorSwapper`, wherever
    a gradient is fetched or stored.

    Attributes: *partial*, whether micro-batches of the step are missing.
    """

    _keeps_sums = False  # whether sums outlive a step, and the optimizer gets them after `complete`

    def __init__(
        self,
        tier: Tier,
        numels: Sequence[int],
        dtype: torch.dtype,
        widened_dtype: torch.dtype,
        device: torch.device = CPU,
        aside: int = 0,
    ) -> None:
        self._device, self._tier = device, tier
        room = DeviceRoom(device, aside) if device.type != "cpu" else None
        self._values = GradientValues(tier, device=device, room=room, in_order=True)
        self._widened: torch.Tensor | None = None  # on a GPU: the last gradient that was widened
        prefix = f"gradient{next(_serial)}"
        self._sums = [Flat(f"{prefix}/{n}", numel, dtype) for n, numel in enumerate(numels)]
        self._replacements = [
            Flat(f"{sums.name}/replaced", sums.numel, widened_dtype) for sums in self._sums
        ]
        self.partial = False
        self._states: dict[int, _State] = collections.defaultdict(_State)
        self._phase = _Phase.ADDING
        self._used_up = False  # updates in the last backward pass have used some gradients
        self._scratch = f"{prefix}/widened"
        self._owned = [flat.name for flat in (*self._sums, *self._replacements)]
        if device.type == "cpu":
            self._owned.append(self._scratch)
            tier.make_scratch(self._scratch, max(numels) * widened_dtype.itemsize)
        tier.abandon_with(self, self._owned)

    def abandon(self) -> None:
        """Discard all gradients: see `Tier.abandon`. No other method may be called afterwards."""
        self._values.reset()
        self._widened = None
        self._tier.abandon(self._owned)

    def name(self, index: int) -> str:
        """The name in the tier of the sums of sub-group *index*."""
        return self._sums[index].name

    # Backward.

    def add(
        self, index: int, partitions: Sequence[tuple[int, torch.Tensor]], *, to_earlier: bool
    ) -> list[torch.Tensor]:
        """Add *partitions* of sub-group *index*, each with the offset of its first element. With
        *to_earlier* they accumulate on the gradients of the step's earlier micro-batches.

        Returns: the sums, each on its partition's device. Valid until the next call.
        """
        if self._phase is not _Phase.ADDING:
            self._begin()
        state, totals = self._states[index], []
        for offset, partition in partitions:
            total = partition.view(-1).to(self._sums[index].dtype)
            if to_earlier and (self._keeps_sums or offset in state.reduced):
                # Add on the accelerator: it is faster, and the norm is computed there next.
                total = self._values.add(self._sums[index], offset, total)
            else:
                self._values.write(self._sums[index], offset, total)
            totals.append(total)
            state.reduced[offset] = partition.numel()
            if not self._keeps_sums:
                state.fresh[offset] = partition.numel()
        return totals

    def complete(self, index: int, offsets: Collection[int]) -> None:
        """As `add` does in the base class: give the sums at *offsets* to the optimizer."""
        if self._keeps_sums:
            state = self._states[index]
            state.fresh |= {offset: state.reduced[offset] for offset in offsets}

    def reduced(self, index: int) -> Mapping[int, int]:
        """The parts reduced since the last step: number of elements, by offset."""
        return {} if self._phase is _Phase.SPENT else self._states[index].reduced

    def read(self, index: int, offset: int, into: torch.Tensor) -> None:
        """Copy the sums that `add` has stored from *offset* of sub-group *index* to *into*."""
        self._values.read(self._sums[index], offset, into)

    def pause(self) -> None:
        """Pause adding: allow the value in use to be evicted."""
        self._values.settle()

    def give_back(self) -> None:
        """Release the value in use, even if an interrupted call left it in use."""
        self._values.cancel()

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
        self._widened = None
        memory, state = self._widened_memory(index), self._states[index]
        if last and self._phase is _Phase.SPENT:
            self.pause()
            return memory.zero_()
        spans = _joined(state.fresh)
        if state.is_replaced:
            self._values.read(self._replacements[index], 0, memory)
        else:
            for start, end in _gaps(spans, memory.numel()):
                memory[start:end].zero_()
        for start, end in spans:
            self._values.read(self._sums[index], start, memory[start:end])
        self.pause()
        if state.factor is not None:
            memory.mul_(state.factor)
        return memory

    def used(self, index: int, factor: Any) -> None:
        """The optimizer gets the gradient multiplied by *factor*, too."""
        state = self._states[index]
        state.factor = factor if state.factor is None else state.factor * factor

    def use_up(self, index: int) -> None:
        """Discard the gradient of sub-group *index*, which an update in backward has used."""
        self._widened = None
        self._used_up = True
        self._states.pop(index, None)
        self._values.discard(self._sums[index], self._replacements[index])

    def replace(self, index: int, gradient: torch.Tensor | None = None) -> None:
        """Make *gradient*, or the memory of `widened`, the gradient of sub-group *index*."""
        memory = self._widened_memory(index) if gradient is None else gradient
        self._values.write(self._replacements[index], 0, memory)
        self.pause()
        state = self._states[index]
        state.fresh, state.is_replaced, state.factor = {}, True, None

    def close(self) -> None:
        """Make the next reduction begin a new step. Until then, a step still uses these gradients."""
        if self._phase is _Phase.ADDING:
            self._phase = _Phase.CLOSED

    def spend(self) -> None:
        """End the step: from now on its gradients are only read."""
        self.pause()
        self._widened = None
        if self._phase is _Phase.SPENT:
            self._forget()
        self._phase = _Phase.SPENT
        self.partial = False

    def forget_all(self) -> None:
        """Discard all gradients, because the weights were replaced."""
        self._widened = None
        self._forget()
        self._phase = _Phase.ADDING
        self._used_up = self.partial = False

    def _begin(self) -> None:
        """Begin a step at its first reduction: invalidate the gradients of the step before."""
        self._states.clear()
        self._values.expire(*self._sums, *self._replacements)
        self._phase = _Phase.ADDING
        self._used_up = False

    def _widened_memory(self, index: int) -> torch.Tensor:
        flat = self._replacements[index]
        if self._device.type == "cpu":
            return self._tier.scratch(self._scratch).view(flat.dtype)[: flat.numel]
        if self._widened is None:
            self._widened = torch.empty(flat.numel, dtype=flat.dtype, device=self._device)
        return self._widened

    def _forget(self) -> None:
        self._states.clear()
        self._values.clear()


class KeptGradients(Gradients):
    """`Gradients` on a GPU with "missing_gradients": "last". DeepSpeed without offload keeps the
    sums of all steps: a parameter without a gradient in a step gets its last sum again. The first
    micro-batch of a step that has a gradient overwrites the sum.
    """

    def widened(self, index: int, *, last: bool = False) -> torch.Tensor:
        """As in the base class. With *last*, the sum itself, without factors of earlier steps."""
        if last:
            self._states[index].factor = None
        return super().widened(index)

    def spend(self) -> None:
        """End the step, and keep all gradients as DeepSpeed does."""
        self.pause()
        self._widened = None
        self._phase = _Phase.CLOSED
        self.partial = False

    def _begin(self) -> None:
        for state in self._states.values():
            state.fresh, state.is_replaced, state.factor = dict(state.reduced), False, None
        self._values.discard(*self._replacements)
        self._phase = _Phase.ADDING


class LastGradients(Gradients):
    """`Gradients` on the CPU with "missing_gradients": "last": a parameter without a gradient in a
    step gets the gradient of its last step again.

    DeepSpeed with "device": "cpu" has two buffers for all gradients, and fills them with zeros once.
    One has the sums over a step's micro-batches: the first micro-batch overwrites them, and later
    ones add to them. The other has the fp32 gradients for the optimizer: the last micro-batch
    overwrites them. Unscaling and clipping change these in place. If a parameter has no new gradient
    in the next step, they change its old one again. Here, the replacement is the second buffer,
    except the parts that are complete in the sums.
    """

    _keeps_sums = True
    _lent: int | None = None  # the sub-group whose gradient the optimizer uses, in widened memory

    def add(
        self, index: int, partitions: Sequence[tuple[int, torch.Tensor]], *, to_earlier: bool
    ) -> list[torch.Tensor]:
        """As in the base class. With *to_earlier* they accumulate on sums of whichever step."""
        self._keep_lent()
        if any(offset in self._states[index].fresh for offset, _ in partitions):
            self.widened(index)  # no update has used these parts, as after an overflow
            self.replace(index)
        sums = self._sums[index]
        if sums not in self._values:
            self._values.write(sums, 0, torch.zeros((), dtype=sums.dtype).expand(sums.numel))
        return super().add(index, partitions, to_earlier=to_earlier)

    def require_whole(self) -> None:
        """Do nothing: before the last micro-batch, readers see the gradients of the step before."""

    def widened(self, index: int, *, last: bool = False) -> torch.Tensor:
        """As in the base class. With *last*, the optimizer's changes to it are kept."""
        self._keep_lent()
        memory = super().widened(index)
        self._lent = index if last else None
        return memory

    def used(self, index: int, factor: Any) -> None:
        """Do nothing: the kept gradient includes the optimizer's changes."""

    def close(self) -> None:
        """Do nothing: the first micro-batch of a step overwrites the sums."""

    def spend(self) -> None:
        """End the step, and keep all gradients as DeepSpeed does."""
        self._keep_lent()
        self.pause()
        for state in self._states.values():
            state.reduced.clear()

    def forget_all(self) -> None:
        """Reset all gradients to zero, as in a new process, because the weights were replaced."""
        self._lent = None
        super().forget_all()

    def _keep_lent(self) -> None:
        """Store the gradient that the optimizer has changed."""
        index, self._lent = self._lent, None
        if index is not None:
            self.replace(index)


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
