"""A single state in the form that a format keeps. A state that it keeps whole is a tensor. A state
that it rounds or keeps in part is a dictionary of tensors, with `MARK`:

| fields                           | of                                                          |
| "codes", "exponents", "signed"   | a state in 8 bits: "exponents" has one for each `BLOCK`     |
| "halves"                         | a state in 16 bits                                          |
| "low"                            | a master: the bits that the bfloat16 weight lacks           |

Fields have the shape and the strides of the state, except exponents, in the order of memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..errors import UsageError, known
from .eight_bit import decode
from .formats import Layout, Slot
from .rounding import BLOCK
from .split import join

MARK = "kept_by"
_OURS = "nvme_offload"


class Field(NamedTuple):
    """The place of one field of a state in a bucket's buffer: a number of *dtype* for every
    *elements*.
    """

    slot: Slot
    dtype: torch.dtype
    elements: int = 1

    def of(self, buffer: torch.Tensor, start: int, numel: int) -> torch.Tensor:
        """The numbers of *numel* elements from *start*, a multiple of *elements*, as a view of
        *buffer*.
        """
        first = start // self.elements
        return self.slot.of(buffer).view(self.dtype)[first : first - (-numel // self.elements)]


def fields(layout: Layout, key: Any) -> dict[str, Field]:
    """The places of the state *key* in *layout*, or of the masters if *key* is None, by the names
    of the fields: "" for a whole state.
    """
    if key is None:
        name = "" if layout.master_dtype == torch.float32 else "low"
        return {name: Field(known(layout.master), layout.master_dtype)}
    slot = layout.states[key]
    if slot.exponents is not None:
        return {
            "codes": Field(slot.values, torch.uint8),
            "exponents": Field(slot.exponents, torch.uint8, BLOCK),
        }
    if slot.halved:
        return {"halves": Field(slot.values, torch.bfloat16)}
    return {"": Field(slot.values, slot.dtype)}


def state_of(layout: Layout, key: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state *key*, or master, whose fields are *tensors*."""
    if "" in tensors:
        return tensors[""]
    signed = {"signed": layout.states[key].signed} if "codes" in tensors else {}
    return {MARK: _OURS, **tensors, **signed}


def is_kept(value: Any) -> bool:
    """Whether *value* is a dictionary that stands for a state or a master."""
    return isinstance(value, Mapping) and value.get(MARK) == _OURS


def whole_of(kept: Mapping[str, Any]) -> torch.Tensor:
    """The field of *kept* that has the shape of the state. Raises: UsageError for other
    dictionaries.
    """
    for name, dtypes in (
        ("codes", (torch.uint8,)),
        ("halves", (torch.bfloat16,)),
        ("low", (torch.int8, torch.int16)),
    ):
        field = kept.get(name)
        if torch.is_tensor(field) and field.dtype in dtypes:
            exponents = kept.get("exponents")
            if name != "codes" or (
                torch.is_tensor(exponents)
                and exponents.dtype == torch.uint8
                and exponents.shape == (-(-field.numel() // BLOCK),)
                and isinstance(kept.get("signed"), bool)
            ):
                return field
    raise UsageError(
        f"a state has the fields {sorted(map(str, kept))}, which is none that this release has saved"
    )


def unpacked(kept: Mapping[str, Any], start: int, stop: int) -> torch.Tensor:
    """The elements from *start* to *stop* of a state, in the order of memory, on the CPU."""
    whole = whole_of(kept)
    flat = whole.as_strided((whole.numel(),), (1,))
    if "halves" in kept:
        return flat[start:stop].float()
    block = start // BLOCK
    codes = flat[block * BLOCK : stop].contiguous()
    values = torch.empty(codes.numel(), dtype=torch.float32)
    exponents = kept["exponents"][block : -(-stop // BLOCK)].contiguous()
    decode(codes, exponents, values, signed=kept["signed"])
    return values[start - block * BLOCK :]


def joined(low: torch.Tensor, working: torch.Tensor) -> torch.Tensor:
    """The masters made of *working* and the *low* bits. Shapes: flat, contiguous, on the CPU."""
    master = torch.empty(working.numel(), dtype=torch.float32)
    join(working, low, master)
    return master
