"""`StateFormat`: the fp32 master and the optimizer's states of one bucket of parameters as one flat
buffer of bytes, and back.

Bytes for each parameter of a 16-bit model with Adam's two moments, read and written once a step:

| format    | master | each state     | Adam in all            |
| exact     | 4      | 4, as it is    | 12                     |
| split     | 2      | 4, as it is    | 10                     |
| compact   | 2      | 1 + 1/256      | 4 + 2/256              |
| compact24 | 1      | 1 + 1/256      | 3 + 2/256              |

Where the working weight has 32 bits it is its own master and none lies on the drive: 8, 8, 2 +
2/256 and 2 + 2/256. Every slot begins at a multiple of 64 bytes, which adds at most 63 bytes.

"exact" gives everything back bit for bit, and working weights as `Tensor.copy_` rounds them.
"split" gives everything back bit for bit too, with working weights rounded half away from zero (see
`split.py`), which differ from "exact"'s in ties, one master in 65536. "compact" keeps states in 8
bits (see `eight_bit.py`). "compact24" also rounds the master stochastically to 24 bits, of which
the bfloat16 weight has the upper 16: a master then moves in steps of 2**-16 of itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError, UsageError
from .eight_bit import BLOCK, decode, encode, is_signed, round_to_16, round_to_24
from .split import CHUNK, join, split

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64
_MANY = 1 << 20  # parameters beside which alignment is nothing
_MASTER_INDEX = -1  # of the master, where states are counted from 0, in what rounding draws on
_SLOWEST = 0.96  # of momenta in 8 bits: reports/compact-quality-cpu.md
_LEAST_EPS = 1e-12  # likewise
_LOOK_EVERY = 64  # steps, and at the powers of two, at how far states are apart
_REACH = 2.0**-30  # from a block's largest value without a sign to the least code
# a first moment is less than such a part of what it is divided by: steps are less than that part of
# the learning rate
_MOVED = 64.0

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place in a bucket's buffer, in bytes."""

    offset: int
    nbytes: int

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The bytes of this slot in *buffer*, as a view."""
        return buffer[self.offset : self.offset + self.nbytes]


@dataclasses.dataclass(frozen=True)
class StateSlot:
    """Where one state of the optimizer lies. exponents and signed: where it is kept in 8 bits, each
    block's exponent and whether values have signs.

    halved: it is kept in 16 bits.
    """

    dtype: torch.dtype
    values: Slot
    exponents: Slot | None = None
    signed: bool = True
    halved: bool = False

    @property
    def rounded(self) -> bool:
        """Whether it is kept in fewer bits than it has."""
        return self.halved or self.exponents is not None


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a bucket's buffer holds where; from `StateFormat.layout`. nbytes: of the buffer. master:
    None where the working weight is its own master.
    """

    numel: int
    working_dtype: torch.dtype
    master: Slot | None
    states: Mapping[str, StateSlot]
    nbytes: int


@dataclasses.dataclass(frozen=True)
class StateFormat:
    """One of `FORMATS`. master_bytes: of a 16-bit weight's fp32 master that the drive has: 4, or
    those that the weight lacks, 2, or 1 where the master is rounded to 24 bits. eight_bit: states
    in 8 bits, or where they are *wide* in 16.

    keeps_masters: 16-bit weights have fp32 masters; without, they are updated themselves.
    """

    name: str
    master_bytes: int
    eight_bit: bool
    keeps_masters: bool = True
    wide: bool = False

    def update_dtype(self, working_dtype: torch.dtype) -> torch.dtype:
        """What weights of *working_dtype* are updated in."""
        import torch

        return (
            torch.float32 if self.keeps_masters and working_dtype.itemsize == 2 else working_dtype
        )

    @property
    def splits_master(self) -> bool:
        """Whether the drive has of a master only what the working weight lacks."""
        return self.master_bytes < 4

    @property
    def in_place(self) -> bool:
        """Whether `unpack` gives views of the buffer, so that what changes them has changed the
        buffer.
        """
        return not self.splits_master

    @property
    def _low_dtype(self) -> torch.dtype:
        """Of the bits that a bfloat16 weight lacks of its master."""
        import torch

        return torch.int16 if self.master_bytes == 2 else torch.int8

    def layout(
        self,
        numel: int,
        states: Mapping[str, torch.dtype],
        working_dtype: torch.dtype,
        optimizer: str = "the optimizer",
    ) -> Layout:
        """Plan the buffer of a bucket of *numel* parameters of *working_dtype* with these states of
        one value each for a parameter, by key.

        optimizer: its name, for messages. Scalars and whatever else is not one value a parameter
        stay with the caller. Raises: UnsupportedError where this format cannot keep such weights or
        states.
        """
        import torch

        if self.splits_master and self.keeps_masters and working_dtype == torch.float16:
            raise UnsupportedError(
                f'state_format="{self.name}" needs bfloat16 or float32 weights: float16 has fewer exponents than the fp32 master, so the two '
                'do not share their bits; train in bfloat16 or use state_format="exact"'
            )
        end = 0

        def slot(nbytes: int) -> Slot:
            nonlocal end
            begin, end = end, end + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            return Slot(begin, nbytes)

        master = None
        if self.update_dtype(working_dtype) != working_dtype:
            master = slot(numel * self.master_bytes)
        slots = {}
        for key, dtype in states.items():
            if not self.eight_bit:
                slots[key] = StateSlot(dtype, slot(numel * dtype.itemsize))
                continue
            if dtype != torch.float32:
                raise UnsupportedError(
                    f'state_format="{self.name}" keeps float32 states; {optimizer} has {key!r} in {dtype}: use "exact" or "split"'
                )
            signed = is_signed(key, optimizer, self.name)
            if self.wide:
                slots[key] = StateSlot(dtype, slot(numel * 2), signed=signed, halved=True)
            else:
                slots[key] = StateSlot(dtype, slot(numel), slot(-(-numel // BLOCK)), signed)
        return Layout(numel, working_dtype, master, slots, end)

    def element_bytes(
        self,
        states: Mapping[str, torch.dtype],
        working_dtype: torch.dtype,
        optimizer: str = "the optimizer",
    ) -> float:
        """Bytes of the buffer for each parameter, where there are many. Parameters and Raises: as
        of `layout`.
        """
        return self.layout(_MANY, states, working_dtype, optimizer).nbytes / _MANY

    def unpacked_elements(self, layout: Layout) -> int:
        """The float32 elements of memory that `unpack` needs beside the buffer."""
        parts = sum(slot.rounded for slot in layout.states.values()) + (
            self.splits_master and layout.master is not None
        )
        return parts * layout.numel

    def unpack(
        self,
        layout: Layout,
        buffer: torch.Tensor,
        working: Sequence[torch.Tensor],
        memory: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """The fp32 master and the states, by key, from *buffer*: flat tensors of the bucket's
        numel, on *buffer*'s device.

        The master is None where the working weight is its own. With "exact" all of them are views
        of *buffer*; with "split" the states are, and the master is new memory; with "compact" all
        are new. A buffer of zeros means states of zero, and (but for "exact") the working weights
        as masters. Shapes: *buffer* flat, uint8, at least layout.nbytes; *working* the bucket's
        weights as `pack` left them, contiguous, in order, on that device. memory: flat, contiguous,
        float32, at least `unpacked_elements` of them, to be used again and again for what is not a
        view of *buffer*: on the CPU new memory costs more than all else here. A working weight that
        was changed since gets its master's low bits: a master within one step of bfloat16 of it.
        Raises: UsageError where shapes do not fit.
        """
        import torch

        _check(layout, buffer)
        needed = self.unpacked_elements(layout)
        if memory is None:
            memory = torch.empty(needed, dtype=torch.float32, device=buffer.device)
        elif (
            (memory.dtype, memory.dim(), memory.device) != (torch.float32, 1, buffer.device)
            or memory.numel() < needed
            or not memory.is_contiguous()
        ):
            raise UsageError(
                f"memory to unpack to must be flat, float32, contiguous, at least {needed} elements on {buffer.device}"
            )
        fresh = (
            iter(memory[:needed].view(-1, layout.numel))
            if layout.numel
            else itertools.repeat(memory[:0])
        )
        master = None
        if layout.master is not None:
            kept = layout.master.of(buffer)
            if self.splits_master:
                master = next(fresh)
                for weight, low, whole in _fragments(
                    layout, _together(layout, working), kept.view(self._low_dtype), master
                ):
                    join(weight, low, whole)
            else:
                master = kept.view(torch.float32)
        states = {}
        for key, slot in layout.states.items():
            if not slot.rounded:
                states[key] = slot.values.of(buffer).view(slot.dtype)
                continue
            states[key] = next(fresh)
            if slot.exponents is None:
                states[key].copy_(slot.values.of(buffer).view(torch.bfloat16))
            else:
                decode(
                    slot.values.of(buffer),
                    slot.exponents.of(buffer),
                    states[key],
                    signed=slot.signed,
                )
        return master, states

    def pack(
        self,
        layout: Layout,
        buffer: torch.Tensor,
        working: Sequence[torch.Tensor],
        master: torch.Tensor | None,
        states: Mapping[str, torch.Tensor],
        seed: int = 0,
        blocks: torch.Tensor | None = None,
    ) -> None:
        """Write *master* and *states* into *buffer*, and the master, rounded, into the *working*
        weights. The other way about of `unpack`.

        Tensors that are views of *buffer* in their place, as `unpack` gave them, cost nothing.
        Where there is no master the working weights stay. "compact24" rounds *master* itself, in
        place. seed, blocks: what "compact" and "compact24" round by, any int, another for every
        step and the same to repeat a run bit for bit; and an int64 for each `BLOCK` of values,
        another for each, without which they are numbered. Others ignore them. Raises: UsageError where shapes do not fit.
        """
        import torch

        _check(layout, buffer)
        _check_values(layout, buffer.device, master, states)
        if master is not None and layout.master is not None:
            kept = layout.master.of(buffer)
            if self.splits_master:
                if self.master_bytes == 1:
                    round_to_24(master, seed=(seed, _MASTER_INDEX), blocks=blocks)
                together = _together(layout, working)
                for weight, low, whole in _fragments(
                    layout, together, kept.view(self._low_dtype), master
                ):
                    split(whole, weight, low)
                if together is not working:
                    for weight, new in _fragments(layout, working, together[0]):
                        weight.copy_(new)
            else:
                for weight, whole, place in _fragments(
                    layout, working, master, kept.view(torch.float32)
                ):
                    _place(whole, place)
                    weight.copy_(whole)
        for index, (key, slot) in enumerate(layout.states.items()):
            values = slot.values.of(buffer)
            if slot.exponents is not None:
                encode(
                    states[key],
                    values,
                    slot.exponents.of(buffer),
                    signed=slot.signed,
                    seed=(seed, index),
                    blocks=blocks,
                )
            elif slot.halved:
                round_to_16(
                    states[key], values.view(torch.bfloat16), seed=(seed, index), blocks=blocks
                )
            else:
                _place(states[key], values.view(slot.dtype))


FORMATS = {
    format.name: format
    for format in (
        StateFormat("exact", master_bytes=4, eight_bit=False),
        StateFormat("split", master_bytes=2, eight_bit=False),
        StateFormat("compact", master_bytes=2, eight_bit=True),
        StateFormat("compact24", master_bytes=1, eight_bit=True),
    )
}


def wide_enough(
    format: StateFormat, optimizer: str, groups: Iterable[Mapping[str, Any]]
) -> StateFormat:
    """*format*, or its wide form where 8 bits are too few for the options of *groups*, with a line
    of the log.

    Rounding piles up in a first moment that forgets slowly; and with a small eps steps depend on
    second moments that are far below the largest of a block.
    """
    if not format.eight_bit or format.wide:
        return format
    for group in groups:
        betas = group.get("betas")
        slow = {
            "beta1": betas[0] if isinstance(betas, tuple | list) and betas else 0,
            "momentum": group.get("momentum", 0),
        }
        reasons = [
            f"{name} is {float(value):g}" for name, value in slow.items() if float(value) > _SLOWEST
        ]
        eps = group.get("eps")
        reasons += (
            [f"eps is {float(eps):g}"] if isinstance(eps, int | float) and eps < _LEAST_EPS else []
        )
        if reasons:
            _log.info(
                'state_format="%s" keeps the states of %s in 16 bits: %s, for which 8 are too few',
                format.name,
                optimizer,
                reasons[0],
            )
            return dataclasses.replace(format, wide=True)
    return format


def looks_at(format: StateFormat, step: int) -> bool:
    """Whether it is to be seen at *step*, from 1 on, how far apart states are: before they are
    rounded for the first time, and seldom after.
    """
    return format.eight_bit and (step & (step - 1) == 0 or step % _LOOK_EVERY == 0)


def far_blocks(
    layout: Layout, states: Mapping[str, torch.Tensor], eps: float
) -> torch.Tensor | None:
    """For each block whether 8 bits are too few for its second moments; None where they are enough
    for all.

    They are where more than a sixteenth of a block are below what has a code, and matter. They do
    not where *eps*, the optimizer's least, is above the root of the least code; nor where the first
    moment is much less than the root of the second and eps, so that weights hardly move in any
    case: those that have no gradients any more, or nothing but noise, as the biases of attention's
    keys.
    """
    import torch

    first = states.get("exp_avg")
    found = torch.zeros(
        -(-layout.numel // BLOCK),
        dtype=torch.bool,
        device=next(iter(states.values())).device if states else None,
    )
    for key, slot in layout.states.items():
        if not slot.rounded or slot.signed:
            continue
        size = _at_once(states[key])
        for start in range(0, layout.numel, size):
            values = _in_blocks(states[key][start : start + size])
            reach = values.amax(dim=1, keepdim=True) * _REACH
            roots = values.sqrt()
            moved = (
                roots * 8
                if first is None
                else _in_blocks(first[start : start + size]).abs() * _MOVED
            )
            matter = (
                (values > 0) & (values < reach) & (reach.sqrt() > eps / 8) & (moved >= roots + eps)
            )
            found[start // BLOCK :][: len(values)] |= matter.sum(dim=1) > BLOCK // 16
    return found if bool(found.any()) else None


def widened(format: StateFormat, optimizer: str) -> StateFormat:
    """The wide form of *format*, with a line of the log: of states in which there are
    `far_blocks`.
    """
    _log.info(
        'state_format="%s" keeps the states of %s in 16 bits: second moments of one block are more than 30 octaves apart, for which 8 are too few',
        *(format.name, optimizer),
    )
    return dataclasses.replace(format, wide=True)


def round_near(
    layout: Layout,
    states: Mapping[str, torch.Tensor],
    far: torch.Tensor | None,
    seed: int,
    blocks: torch.Tensor | None,
) -> None:
    """Round all but the *far* blocks of *states* as `StateFormat.pack` does it in 8 bits.

    So the bits do not depend on which buckets were packed when a far block was found.
    """
    import torch

    for index, (key, slot) in enumerate(layout.states.items()):
        if not slot.rounded:
            continue
        names = (
            torch.arange(-(-layout.numel // BLOCK), dtype=torch.int64, device=states[key].device)
            if blocks is None
            else blocks
        )
        size = _at_once(states[key])
        for start in range(0, layout.numel, size):
            values = states[key][start : start + size]
            of = slice(start // BLOCK, -(-(start + values.numel()) // BLOCK))
            codes = torch.empty(values.numel(), dtype=torch.uint8, device=values.device)
            exponents = torch.empty(len(names[of]), dtype=torch.uint8, device=values.device)
            kept = values.clone()
            encode(
                values, codes, exponents, signed=slot.signed, seed=(seed, index), blocks=names[of]
            )
            decode(codes, exponents, values, signed=slot.signed)
            if far is not None:
                values.copy_(
                    torch.where(far[of].repeat_interleave(BLOCK)[: values.numel()], kept, values)
                )


def _at_once(values: torch.Tensor) -> int:
    """Elements whose temporaries are small beside what a cap of host memory holds."""
    return 1 << 18 if values.is_cpu else CHUNK


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


def state_format(name: str) -> StateFormat:
    """The format of that name. Raises: UsageError where there is none."""
    try:
        return FORMATS[name]
    except (KeyError, TypeError):
        raise UsageError(
            f"state_format must be one of {', '.join(map(repr, FORMATS))}, not {name!r}"
        ) from None


def _place(tensor: torch.Tensor, place: torch.Tensor) -> None:
    """Copy *tensor* to *place*, unless it is there already."""
    if tensor.data_ptr() != place.data_ptr():
        place.copy_(tensor.reshape(-1))


def _check(layout: Layout, buffer: torch.Tensor) -> None:
    import torch

    if (
        buffer.dtype != torch.uint8
        or buffer.dim() != 1
        or not buffer.is_contiguous()
        or buffer.numel() < layout.nbytes
    ):
        raise UsageError(
            f"the buffer must be flat, uint8 and contiguous, of at least {layout.nbytes} bytes; it is {buffer.dtype} {list(buffer.shape)}"
        )


def _check_values(
    layout: Layout,
    device: torch.device,
    master: torch.Tensor | None,
    states: Mapping[str, torch.Tensor],
) -> None:
    import torch

    if (master is None) != (layout.master is None):
        raise UsageError(
            f"weights of {layout.working_dtype} {'have no' if layout.master is None else 'need a'} separate master"
        )
    if layout.states.keys() != states.keys():
        raise UsageError(
            f"the states are {sorted(states)}, the layout was made for {sorted(layout.states)}"
        )
    values = {f"state {key!r}": (state, layout.states[key].dtype) for key, state in states.items()}
    if master is not None:
        values["master"] = (master, torch.float32)
    for name, (tensor, dtype) in values.items():
        if (tensor.dtype, tensor.numel(), tensor.device) != (
            dtype,
            layout.numel,
            device,
        ) or not tensor.is_contiguous():
            raise UsageError(
                f"the {name} is {tensor.numel()} of {tensor.dtype} on {tensor.device}; it must be contiguous, {layout.numel} of {dtype} on {device}"
            )


def _together(layout: Layout, working: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """On a GPU a copy of all *working* weights as one, for there it is the number of operations
    that takes the time; else they as they are.
    """
    import torch

    if len(working) < 2 or working[0].device.type == "cpu":
        return working
    return [torch.cat([weight for (weight,) in _fragments(layout, working)])]


def _fragments(
    layout: Layout, working: Sequence[torch.Tensor], *flat: torch.Tensor
) -> list[tuple[torch.Tensor, ...]]:
    """Each of the *working* weights, flat, with its part of each of the *flat* tensors."""
    sizes = [weight.numel() for weight in working]
    devices = {tensor.device for tensor in (*working, *flat)}
    alike = all(
        weight.dtype == layout.working_dtype and weight.is_contiguous() for weight in working
    )
    if sum(sizes) != layout.numel or len(devices) > 1 or not alike:
        raise UsageError(
            f"the weights must be contiguous, of {layout.working_dtype} and {layout.numel} in all, on the buffer's device; they have {sum(sizes)}"
        )
    parts = [tensor.view(-1).split_with_sizes(sizes) for tensor in flat]
    return [
        (weight.detach().view(-1), *part) for weight, *part in zip(working, *parts, strict=True)
    ]
