"""`Bucket`: parameters of consecutive modules that move together, and how a model is divided."""

from __future__ import annotations

import dataclasses
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedError
from ..sizes import STREAMED_BUCKET_BYTES

_PAGE_BYTES = 4096
_ALIGNED_BYTES = 512  # the alignment of PyTorch's CUDA allocator


@dataclasses.dataclass(frozen=True)
class Division:
    """How a model is divided into buckets."""

    bucket_bytes: int = STREAMED_BUCKET_BYTES  # most of a bucket, unless one parameter is larger
    small_bytes: int = 64 << 10  # parameters of up to this size stay on the device
    # Trainable parameters stay on the device if they are at most this share of the model's bytes,
    # such as LoRA adapters.
    trainable_share: float = 1 / 16


class Place(NamedTuple):
    """Where a parameter is in its bucket: the *offset* of its first byte."""

    parameter: torch.nn.Parameter
    offset: int
    nbytes: int
    shape: torch.Size
    dtype: torch.dtype

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """The parameter's values in *memory*, the bytes of the bucket."""
        flat = memory[self.offset : self.offset + self.nbytes]
        return flat.view(self.dtype).view(self.shape)


class _Hold:
    """The result of `Bucket.hold_places`."""

    __slots__ = ("__weakref__",)


class Bucket:
    """Parameters that are one value of a tier."""

    def __init__(self, name: str, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.name = name
        self.places: list[Place] = []
        self.nbytes = 0
        for parameter in parameters:
            nbytes = parameter.numel() * parameter.element_size()
            place = Place(parameter, self.nbytes, nbytes, parameter.shape, parameter.dtype)
            self.places.append(place)
            self.nbytes += -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self.slot: Any = None  # has the values on the device; None if only the tier has them
        self.users = 0  # uses that have not ended
        self.shown: list[Any] = []  # the parameters in use
        # The parameters with separate memory, which the program has assigned to `data`, and the
        # numbers of these memories. *numbers*: of the memories whose values are in the places.
        self.apart: dict[torch.nn.Parameter, int] = {}
        self.numbers: dict[torch.nn.Parameter, int] = {}
        self._hold: weakref.ref[_Hold] | None = None
        self.written = False  # the slot may have changes that the versions do not show
        # How often a caller got a tensor through which the values may change while the versions stay,
        # and how often when the last such tensor was gone.
        self.exposed = self.exposed_until = 0
        self.versions: list[int] = []  # of the parameters when slot and tier were last equal
        # The position of the next use in the order; without a known order, later the longer its
        # last use is ago. Of the buckets in slots, the one with the largest *leaves* leaves first.
        self.next_use = 0.0
        self.leaves = 0.0, 0.0
        self._offsets = [place.offset for place in self.places]

    @property
    def tier_nbytes(self) -> int:
        """The bytes that it takes in a tier: whole pages."""
        return -(-self.nbytes // _PAGE_BYTES) * _PAGE_BYTES

    def at(self, offset: int) -> Place:
        """The place that has the byte at *offset*."""
        return self.places[bisect_right(self._offsets, offset) - 1]

    def hold_places(self) -> object:
        """An object. As long as it lives, the places of `apart` parameters keep their old values."""
        hold = None if self._hold is None else self._hold()
        if hold is None:
            hold = _Hold()
            self._hold = weakref.ref(hold)
        return hold

    @property
    def is_held(self) -> bool:
        """Whether a result of `hold_places` lives."""
        return self._hold is not None and self._hold() is not None

    def place_of(self, parameter: torch.Tensor) -> Place:
        """The place of *parameter*."""
        return next(place for place in self.places if place.parameter is parameter)

    def __repr__(self) -> str:
        return f"<Bucket {self.name} of {len(self.places)} parameters>"


def has_other_strides(tensor: torch.Tensor) -> bool:
    """Whether *tensor* has other strides than a new tensor of its shape. `is_contiguous` ignores the
    strides of dimensions of one element, from which convolutions infer channels_last.
    """
    return tensor.stride() != torch.empty(tensor.shape, device="meta").stride()


def divide(
    model: torch.nn.Module, division: Division, prefix: str
) -> tuple[list[Bucket], list[torch.nn.Parameter]]:
    """The buckets of *model*, whose names begin with *prefix*, and the parameters that stay on the
    device: small ones, and those without which the buckets would differ much in size. Raises:
    UnsupportedError.
    """
    parameters = _distinct(model)
    total = sum(map(_nbytes, parameters))
    trainable = sum(_nbytes(one) for one in parameters if one.requires_grad)
    stays = [
        one
        for one in parameters
        if _nbytes(one) <= division.small_bytes
        or has_other_strides(one)
        or (one.requires_grad and trainable <= division.trainable_share * total)
    ]
    staying = set(stays)
    groups: list[list[torch.nn.Parameter]] = []
    # A frozen parameter never moves back, so it does not share a bucket with trainable ones.
    for needs_gradient in (False, True):
        size = division.bucket_bytes
        for one in parameters:
            if one not in staying and one.requires_grad == needs_gradient:
                if size + _nbytes(one) > division.bucket_bytes:
                    groups.append([])
                    size = 0
                groups[-1].append(one)
                size += _nbytes(one)
    limit = 2 * max(_typical([sum(map(_nbytes, group)) for group in groups]), division.bucket_bytes)
    buckets: list[Bucket] = []
    for group in groups:
        # All slots have the size of the largest bucket, so a huge embedding stays instead.
        if sum(map(_nbytes, group)) > limit:
            stays += group
        else:
            buckets.append(Bucket(f"{prefix}/{len(buckets)}", group))
    return buckets, stays


def _distinct(model: torch.nn.Module) -> Sequence[torch.nn.Parameter]:
    """The parameters of *model*, each once, in the order of its modules. Raises: UnsupportedError."""
    found: dict[torch.nn.Parameter, str] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, f"{prefix}.{name}".lstrip("."))
    for parameter, name in found.items():
        if type(parameter) is not torch.nn.Parameter:
            raise UnsupportedError(
                f"parameter {name} is a {type(parameter).__name__}, and offload.parameters streams only plain torch.nn.Parameter: for FSDP2 use "
                "CPUOffloadPolicy with NVMeOptimizer in its place; of other kinds, make a plain Parameter"
            )
        if parameter.layout is not torch.strided:
            raise UnsupportedError(
                f"parameter {name} has the layout {parameter.layout}, and offload.parameters streams only dense parameters"
            )
    return list(found)


def _nbytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _typical(sizes: Sequence[int]) -> int:
    """The size of the bucket in the middle, by bytes; 0 without buckets."""
    half, seen = sum(sizes) / 2, 0
    for size in sorted(sizes):
        seen += size
        if seen >= half:
            return size
    return 0
