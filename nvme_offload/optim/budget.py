"""The size of buckets, and whether a cap of host memory holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import TooLittleMemoryError
from ..optimizer_states.traits import UNIT
from ..sizes import SCRATCH_PARTS, bucket_elements
from ..units import format_bytes

if TYPE_CHECKING:
    import torch

    from ..optimizer_states.formats import StateFormat
    from ..optimizer_states.traits import Traits

_LEAST_ELEMENTS = 4096
_PAGE = 4096


def beside_bytes(
    state_format: StateFormat, traits: Traits, dtype: torch.dtype, *, in_one_pass: bool
) -> int:
    """Bytes per element that an update needs next to the bucket's value: widened gradients,
    unpacked and new states and, unless states are packed *in_one_pass*, temporary tensors for
    packing.
    """
    states = sum(state.itemsize for state in traits.states.values())
    widened = 4 if state_format.update_dtype(dtype) != dtype else 0
    return (
        widened
        + (widened if state_format.splits_master else 0)
        + (3 * states if state_format.eight_bit and not in_one_pass else states)
    )


def most_elements(cap_bytes: int, value_bytes: float, beside: int, gpu_bytes: int = 0) -> int:
    """The most elements of a bucket, each of which takes *value_bytes*, and *beside* bytes of
    scratch memory. *gpu_bytes*: see `bucket_elements`.
    """
    wanted = bucket_elements(cap_bytes, value_bytes, beside, gpu_bytes)
    return max(int(wanted) // UNIT * UNIT, _LEAST_ELEMENTS)


class DividedOtherwiseError(Exception):
    """New buckets would fit if the present ones were made anew."""


class Budget:
    """Divides *cap_bytes* between values, which get *values_bytes*, and scratch memory."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.values_bytes = cap_bytes
        self._divided = False

    def forget(self) -> None:
        """Undo the division, once there are no buckets."""
        self.values_bytes, self._divided = self.cap_bytes, False

    def divide(self, values: Sequence[int], beside: Sequence[int], most: int = 0) -> int:
        """Make room for *values* of these sizes, one of which may grow to *most* bytes, and for the
        largest of *beside*, their scratch memory; return the bytes of all values. Raises:
        UsageError; DividedOtherwiseError.
        """
        largest = max((_rounded(value) for value in [*values, most]), default=0) + _PAGE
        aside = max(beside, default=0)
        kept = self.cap_bytes - self.values_bytes
        if not self._divided and beside and largest + aside <= self.cap_bytes:
            kept = max(aside, min(self.cap_bytes // SCRATCH_PARTS, self.cap_bytes - largest))
        elif (
            self._divided
            and largest + aside <= self.cap_bytes
            and (aside > kept or largest > self.values_bytes)
        ):
            raise DividedOtherwiseError
        if largest + max(aside, kept) > self.cap_bytes:
            raise TooLittleMemoryError(
                f"host_memory of {format_bytes(self.cap_bytes)} cannot hold the largest bucket of states, {format_bytes(largest)}, and "
                f"{format_bytes(max(aside, kept))} of scratch",
                largest + max(aside, kept),
            )
        self.values_bytes, self._divided = self.cap_bytes - kept, self._divided or bool(values)
        return sum(_rounded(value) for value in values) + _PAGE


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
