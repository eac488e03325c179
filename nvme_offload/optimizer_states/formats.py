"""`StateFormat` packs the fp32 master and the optimizer states of one bucket of parameters into a
flat buffer of bytes, and unpacks them.

Bytes for each parameter of a 16-bit model with Adam's two moments, read and written once a step:

| format    | master | each state     | Adam in all            |
| exact     | 4      | 4, as it is    | 12                     |
| split     | 2      | 4, as it is    | 10                     |
| compact   | 2      | 1 + 1/256      | 4 + 2/256              |
| compact24 | 1      | 1 + 1/256      | 3 + 2/256              |

A 32-bit working weight is its own master, and the drive holds no master. Every slot starts at a
multiple of 64 bytes.

"exact" and "split" restore everything bit for bit. "split" rounds working weights half away from
zero (`split.py`), so they differ from the weights of "exact" in ties: one master in 65536.
"compact" keeps states in 8 bits (`eight_bit.py`), or in 16 if 8 are too few (`widening.py`).
"compact24" also rounds the master stochastically to 24 bits, of which the bfloat16 weight has the
upper 16.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..errors import UnsupportedError, UsageError, check
from .eight_bit import decode, encode, is_signed, round_to_16, round_to_24
from .packed import MASTER_INDEX
from .rounding import BLOCK
from .split import join, split

_ALIGNMENT = 64
_UNFIT = "tensors do not fit the layout of packed states"
_MANY = 1 << 20  # so many parameters that the bytes for alignment are negligible


@dataclasses.dataclass(frozen=True)
class Slot:
    """A range of a bucket's buffer, in bytes."""

    offset: int
    nbytes: int

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The bytes of this slot in *buffer*, as a view."""
        return buffer[self.offset : self.offset + self.nbytes]


@dataclasses.dataclass(frozen=True)
class StateSlot:
    """The place of one optimizer state."""

    dtype: torch.dtype  # of the state in the optimizer
    values: Slot  # its values, or their codes
    exponents: Slot | None = None  # of a state in 8 bits: one byte for each block
    signed: bool = True  # of a rounded state: whether its values are signed
    halved: bool = False  # whether the state is kept in 16 bits

    @property
    def rounded(self) -> bool:
        """Whether the format keeps fewer bits than the state has."""
        return self.halved or self.exponents is not None


@dataclasses.dataclass(frozen=True)
class Layout:
    """The contents of a bucket's buffer, and their places. `StateFormat.layout` makes it."""

    numel: int  # parameters in the bucket
    working_dtype: torch.dtype  # of the working weights
    # The fp32 masters, or the bits that the working weights lack; None if the working weight is its
    # own master.
    master: Slot | None
    master_dtype: torch.dtype  # of the contents of *master*
    states: Mapping[str, StateSlot]  # by key
    nbytes: int  # of the buffer


@dataclasses.dataclass(frozen=True)
class StateFormat:
    """How master weights and optimizer states are packed: one of `FORMATS`, or made from one by
    `dataclasses.replace`. It computes on tensors and transfers no data.

    *master_bytes*: of a 16-bit weight's fp32 master; 4 for the whole master, 2 for the bits that
    the weight lacks, 1 if the master is rounded to 24 bits. *eight_bit*: states are packed in 8
    bits, or in 16 if *wide*. *keeps_masters*: 16-bit weights have fp32 masters; otherwise the
    weights themselves are updated.
    """

    name: str
    master_bytes: int
    eight_bit: bool
    keeps_masters: bool = True
    wide: bool = False

    def update_dtype(self, working_dtype: torch.dtype) -> torch.dtype:
        """The dtype in which weights of *working_dtype* are updated."""
        return (
            torch.float32 if self.keeps_masters and working_dtype.itemsize == 2 else working_dtype
        )

    @property
    def splits_master(self) -> bool:
        """Whether only the bits of the master that the working weight lacks are packed."""
        return self.master_bytes < 4

    @property
    def in_place(self) -> bool:
        """Whether `unpack` returns only views of the buffer, so that changes to them change the
        buffer.
        """
        return not self.splits_master

    def layout(
        self,
        numel: int,
        states: Mapping[str, torch.dtype],
        working_dtype: torch.dtype,
        optimizer: str = "the optimizer",
    ) -> Layout:
        """Plan the buffer of a bucket of *numel* parameters with elementwise *states* of these
        dtypes. Raises: UnsupportedError, which names the *optimizer*, if this format cannot hold
        them.
        """
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
        master_dtype = {4: torch.float32, 2: torch.int16, 1: torch.int8}[self.master_bytes]
        return Layout(numel, working_dtype, master, master_dtype, slots, end)

    def element_bytes(
        self,
        states: Mapping[str, torch.dtype],
        working_dtype: torch.dtype,
        optimizer: str = "the optimizer",
    ) -> float:
        """Bytes of the buffer for each parameter of a large bucket; see `layout`."""
        return self.layout(_MANY, states, working_dtype, optimizer).nbytes / _MANY

    def unpacked_elements(self, layout: Layout) -> int:
        """The float32 elements of memory that `unpack` needs in addition to the buffer."""
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
        """The fp32 master, None if the working weight is its own, and the states in *buffer*, by
        key: flat, with ``layout.numel`` elements. Raises: InvariantError for a wrong shape, dtype or
        device.

        Shapes: *buffer* flat, uint8, at least ``layout.nbytes``; *working*: the bucket's weights as
        `pack` left them, contiguous, in order; *memory* flat, float32, at least
        `unpacked_elements`, for results that are not views of *buffer*. Reuse it on the CPU, where
        fresh pages cost more than the rest of this call; None allocates. The results are valid as
        long as the buffer and the memory are.

        A buffer of zeros holds states of zero, and masters equal to the working weights (except in
        "exact"). A working weight that was changed since `pack` gets the low bits of its old
        master: the result is within one bfloat16 step of the changed weight.
        """
        needed = self.unpacked_elements(layout)
        if memory is None:
            memory = torch.empty(needed, dtype=torch.float32, device=buffer.device)
        is_place = _is_flat(memory, torch.float32, needed) and memory.device == buffer.device
        check(is_place and _is_flat(buffer, torch.uint8, layout.nbytes), _UNFIT)
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
                    layout, _together(layout, working), kept.view(layout.master_dtype), master
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
        """Write *master* and *states* into *buffer*, and the rounded master into the *working*
        weights: the inverse of `unpack`. Raises: InvariantError for a wrong shape, dtype, device or
        key.

        *master* is None if the working weight is its own, which then does not change; "compact24"
        rounds it in place. A state may be a view of *buffer*, even of another state's slot. *seed*,
        for stochastic rounding, differs for each step, and is the same to repeat a run bit for bit.
        *blocks*: int64, a distinct name for each `BLOCK` of values; by default blocks are numbered.
        """
        _check(layout, buffer, master, states)
        if master is not None and layout.master is not None:
            kept = layout.master.of(buffer)
            if self.splits_master:
                if self.master_bytes == 1:
                    round_to_24(master, seed=(seed, MASTER_INDEX), blocks=blocks)
                together = _together(layout, working)
                for weight, low, whole in _fragments(
                    layout, together, kept.view(layout.master_dtype), master
                ):
                    split(whole, weight, low)
                if together is not working:
                    for weight, new in _fragments(layout, working, together[0]):
                        weight.copy_(new)
            else:
                for weight, whole, place in _fragments(
                    layout, working, master, kept.view(torch.float32)
                ):
                    put_in_place([(place, whole)], [])
                    weight.copy_(whole)
        put_in_place(
            [
                (slot.values.of(buffer).view(slot.dtype), states[key].view(-1))
                for key, slot in layout.states.items()
                if not slot.rounded
            ],
            [buffer],
        )
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


FORMATS = {
    format.name: format
    for format in (
        StateFormat("exact", master_bytes=4, eight_bit=False),
        StateFormat("split", master_bytes=2, eight_bit=False),
        StateFormat("compact", master_bytes=2, eight_bit=True),
        StateFormat("compact24", master_bytes=1, eight_bit=True),
    )
}


def state_format(name: str) -> StateFormat:
    """The format called *name*. Raises: UsageError if there is none."""
    try:
        return FORMATS[name]
    except (KeyError, TypeError):
        raise UsageError(
            f"state_format must be one of {', '.join(map(repr, FORMATS))}, not {name!r}"
        ) from None


def put_in_place(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], buffers: Iterable[torch.Tensor]
) -> None:
    """For each pair (place, tensor), copy the tensor to its place unless it is there already. A
    tensor in the storage of one of *buffers* is cloned first: another tensor's place may overlap
    it.
    """
    moves = [(place, tensor) for place, tensor in pairs if place.data_ptr() != tensor.data_ptr()]
    storages = {buffer.untyped_storage().data_ptr() for buffer in buffers} if moves else set()
    for place, tensor in [
        (place, tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor)
        for place, tensor in moves
    ]:
        place.copy_(tensor)


def _check(
    layout: Layout,
    buffer: torch.Tensor,
    master: torch.Tensor | None,
    states: Mapping[str, torch.Tensor],
) -> None:
    """Check the tensors, whose addresses the extension gets. Raises: InvariantError."""
    dtypes: dict[Any, torch.dtype] = {key: slot.dtype for key, slot in layout.states.items()}
    values: dict[Any, torch.Tensor] = dict(states)
    if layout.master is not None:
        dtypes[None] = torch.float32
    if master is not None:
        values[None] = master
    check(
        _is_flat(buffer, torch.uint8, layout.nbytes)
        and dtypes.keys() == values.keys()
        and all(
            (one.dtype, one.numel(), one.device) == (dtypes[key], layout.numel, buffer.device)
            and one.is_contiguous()
            for key, one in values.items()
        ),
        _UNFIT,
    )


def _is_flat(tensor: torch.Tensor, dtype: torch.dtype, least: int) -> bool:
    """Whether *tensor* has one dimension of at least *least* elements of *dtype*."""
    is_kind = tensor.dtype == dtype and tensor.dim() == 1
    return is_kind and tensor.is_contiguous() and tensor.numel() >= least


def _together(layout: Layout, working: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """All *working* weights as one copy on a GPU, where kernel launches take the time; elsewhere
    unchanged.
    """
    if len(working) < 2 or working[0].device.type == "cpu":
        return working
    return [torch.cat([weight for (weight,) in _fragments(layout, working)])]


def _fragments(
    layout: Layout, working: Sequence[torch.Tensor], *flat: torch.Tensor
) -> list[tuple[torch.Tensor, ...]]:
    """Each of the *working* weights, flat, with its part of each *flat* tensor."""
    sizes = [weight.numel() for weight in working]
    devices = {tensor.device for tensor in (*working, *flat)}
    alike = all(
        weight.dtype == layout.working_dtype and weight.is_contiguous() for weight in working
    )
    check(sum(sizes) == layout.numel and len(devices) <= 1 and alike, _UNFIT)
    parts = [tensor.view(-1).split_with_sizes(sizes) for tensor in flat]
    return [
        (weight.detach().view(-1), *part) for weight, *part in zip(working, *parts, strict=True)
    ]
