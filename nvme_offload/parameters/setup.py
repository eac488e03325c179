"""`stream`: divides a model into buckets, and makes its `Streamer`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from ..errors import UnsupportedError, UsageError
from ..sizes import STREAMED_SLOTS
from ..swap.tier import Tier
from ..units import format_bytes
from . import idle
from .buckets import Bucket, Division, divide
from .slots import Slots
from .streamer import Streamer, put_data
from .weights import SavedWeights

# Tests set both: small buckets, and `Streamer`'s *poison*.
DIVISION = Division()
POISON = False

_PAGE_BYTES = 4096
_serials = itertools.count()


def stream(
    model: torch.nn.Module,
    tier: Tier,
    device: torch.device,
    gpu_memory: int | None,
    saved: SavedWeights | None,
) -> Streamer:
    """Stream the parameters of *model* from *tier* to *device*. *gpu_memory*: the most that may be
    used there for parameters; None for the memory that forward and backward passes leave free.
    *saved*: the values to use in place of the model's. Call `streamed_bytes` first. Raises: UsageError, UnsupportedError,
    NoSpaceError; the model is not changed then.
    """
    names = {} if saved is None else saved.names_of(model)

    def values_of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach() if saved is None else saved.read(names[tensor])

    division = _division(model, tier, gpu_memory)
    buckets, stays = divide(model, division, f"parameters{next(_serials)}")
    each = max((bucket.nbytes for bucket in buckets), default=0)
    stays_bytes = sum(one.numel() * one.element_size() for one in stays)
    count = min(_slot_count(gpu_memory, stays_bytes, each), len(buckets))
    _make_room(tier, buckets, each)
    idle.refuse_in_transforms()
    grows = gpu_memory is None and device.type == "cuda"
    slots = Slots(device, count, each)
    streamer = Streamer(model, tier, device, buckets, slots, values_of, grows=grows, poison=POISON)
    for parameter in stays:
        put_data(parameter, values_of(parameter).to(device, parameter.dtype))
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if buffer not in moved:
                    values = values_of(buffer) if buffer in names else buffer
                    moved[buffer] = values.to(device, buffer.dtype)
                module._buffers[name] = moved[buffer]
    return streamer


def _division(model: torch.nn.Module, tier: Tier, gpu_memory: int | None) -> Division:
    """`DIVISION`, with buckets so small that a few of them fit in *gpu_memory*, and in *tier*'s host
    memory if that does not hold the whole model.
    """
    limits = [DIVISION.bucket_bytes]
    if sum(one.nbytes for one in model.parameters()) > tier.cap_bytes:
        limits.append(tier.cap_bytes // STREAMED_SLOTS)
    if gpu_memory is not None:
        limits.append(gpu_memory // (2 * STREAMED_SLOTS))  # half is for those that stay
    return dataclasses.replace(DIVISION, bucket_bytes=min(limits))


def streamed_bytes(model: torch.nn.Module, *, has_values: bool) -> tuple[int, bool]:
    """The bytes in host memory of the parameters of *model* that would stream, and whether it has
    trainable parameters. Raises: UsageError, UnsupportedError. *has_values*: it must have values.
    """
    _check_model(model, has_values=has_values)
    buckets, _ = divide(model, DIVISION, "")
    # a page more for each, since the pool is divided in pages
    nbytes = sum(bucket.nbytes + 2 * _PAGE_BYTES for bucket in buckets)
    return nbytes, any(one.requires_grad for one in model.parameters())


def _check_model(model: torch.nn.Module, *, has_values: bool) -> None:
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise UnsupportedError(
            "offload.parameters is for one process: on several GPUs use FSDP2 with CPUOffloadPolicy and NVMeOptimizer, "
            "or DeepSpeed ZeRO-3 with nvme_offload.zero3"
        )
    for name, parameter in model.named_parameters():
        if idle.streamer_of(parameter) is not None:
            raise UsageError(f"parameter {name} streams already: call offload.parameters once")
        if parameter.is_meta and has_values:
            raise UsageError(
                f"parameter {name} is on the meta device and has no values: give weights, or load the model first"
            )
    _check_memory(model)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise UsageError(
                f"buffer {name} is on the meta device and has no values: make the model with its buffers in memory"
            )


def _check_memory(model: torch.nn.Module) -> None:
    """Check that no two parameters share memory: each gets its own."""
    ranges = sorted(
        (one.data_ptr(), one.data_ptr() + one.nbytes, name)
        for name, one in model.named_parameters()
        if one.numel() and not one.is_meta
    )
    for (_, stop, one), (start, _, other) in itertools.pairwise(ranges):
        if start < stop:
            raise UnsupportedError(
                f"parameters {one} and {other} share memory: assign one Parameter to both modules, which ties them"
            )


def _slot_count(gpu_memory: int | None, stays_bytes: int, each: int) -> int:
    if gpu_memory is None:
        return STREAMED_SLOTS
    count = (gpu_memory - stays_bytes) // each if each else 0
    if count < STREAMED_SLOTS and each:
        raise UsageError(
            f"gpu_memory of {format_bytes(gpu_memory)} is too little for the parameters in use: allow at least {stays_bytes + STREAMED_SLOTS * each} bytes"
        )
    return count


def _make_room(tier: Tier, buckets: Sequence[Bucket], largest: int) -> None:
    total = sum(bucket.nbytes for bucket in buckets)
    if largest > tier.cap_bytes:
        raise UsageError(
            f"host_memory of {format_bytes(tier.cap_bytes)} cannot hold the largest parameter: allow at least {largest} bytes, "
            "by the argument host_memory of offload.parameters"
        )
    tier.require_memory(total)
    tier.require_space(max(total - tier.cap_bytes, 0))
    tier.require(total)
