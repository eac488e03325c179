"""`stream`: divides a model into buckets, and makes its `Streamer`."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch

from ..device.stayed import is_plain, require_hooks
from ..errors import TooLittleMemoryError, UnsupportedError, UsageError
from ..hardware.machine import anonymous_bytes
from ..sizes import STREAMED_IN_MEMORY, STREAMED_SLOTS
from ..swap.tier import STEP_BYTES, Tier
from ..units import format_bytes
from . import idle
from .buckets import Bucket, Division, divide, has_other_strides
from .compiled import check_not_whole, compiled_blocks
from .slots import Slots
from .streamer import Streamer, put_data
from .weights import SavedWeights

# Tests set both: small buckets, and `Streamer`'s *poison*.
DIVISION = Division()
POISON = False

_HALVINGS = 24  # of the size of a bucket, from 256 MB to a few bytes
_serials = itertools.count()


@torch.inference_mode(False)  # the caller's mode would make tensors that cannot be trained
@torch.no_grad()
def stream(
    model: torch.nn.Module,
    tier: Tier,
    device: torch.device,
    gpu_memory: int | None,
    saved: SavedWeights | None,
) -> Streamer:
    """Stream the parameters of *model* from *tier* to *device*. *gpu_memory*: the most that may be
    used there for parameters; None for the memory that forward and backward passes leave free.
    *saved*: the values to use in place of the model's. Call `check` first. Raises: UsageError,
    UnsupportedError, NoSpaceError; the model is not changed then.
    """
    sources = {} if saved is None else saved.sources_of(model)

    def values_of(tensor: torch.Tensor) -> torch.Tensor:
        if saved is None:
            return tensor.detach()
        values = saved.read(sources[tensor])
        if not has_other_strides(tensor):
            return values
        # channels_last and other strides stay, as in load_state_dict
        return torch.empty_like(tensor, device="cpu", dtype=values.dtype).copy_(values)

    def load(targets: Mapping[torch.Tensor, torch.Tensor]) -> None:
        if saved is not None:
            saved.read_into({sources[one]: target for one, target in targets.items()})
            return
        for one, target in targets.items():
            target.copy_(one.detach())

    division = _divide(model, tier.cap_bytes, gpu_memory)
    tier.require_memory(division.nbytes, freed_bytes=freed_bytes(model) if saved is None else 0)
    tier.require_space(max(division.nbytes - tier.cap_bytes, 0))
    idle.refuse_in_transforms()
    grows = gpu_memory is None and device.type == "cuda"
    slots = Slots(device, division.slot_count(gpu_memory), division.largest)
    streamer = Streamer(
        model,
        tier,
        device,
        division.buckets,
        slots,
        load,
        step=STEP_BYTES if saved is None else division.nbytes,
        grows=grows,
        poison=POISON,
    )
    if device.type == "cuda" and any(isinstance(one, torch.nn.RNNBase) for one in model.modules()):
        # The user cannot follow the advice: cuDNN copies weights that stream at every call.
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous")
    for parameter in division.stays:
        put_data(parameter, values_of(parameter).to(device, parameter.dtype))
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if buffer not in moved:
                    values = values_of(buffer) if buffer in sources else buffer
                    moved[buffer] = values.to(device, buffer.dtype)
                module._buffers[name] = moved[buffer]
    return streamer


def freed_bytes(model: torch.nn.Module) -> int:
    """The host memory that streaming the parameters of *model* frees. Memory that maps a file is
    available before.
    """
    sizes = (one.nbytes for one in model.parameters() if one.device.type == "cpu")
    return min(sum(sizes), anonymous_bytes())


class _Divided:
    """The *buckets* of a model, and the parameters that stay on the device. *together*: parameters
    that are used together, of each compiled block.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        stays: list[torch.nn.Parameter],
        together: Sequence[Sequence[torch.nn.Parameter]],
    ) -> None:
        self.buckets = buckets
        self.stays = stays
        self.largest = max((bucket.nbytes for bucket in buckets), default=0)
        self.nbytes = sum(bucket.tier_nbytes for bucket in buckets)
        self.stays_bytes = sum(one.numel() * one.element_size() for one in stays)
        bucket_of = {place.parameter: one for one in buckets for place in one.places}
        at_once = [len({bucket_of[one] for one in used if one in bucket_of}) for used in together]
        self._slots = max([STREAMED_SLOTS, *(count + 1 for count in at_once)])
        fewest = min(self._slots, len(buckets))
        self.least_device_bytes = self.stays_bytes + fewest * self.largest

    def is_comfortable(self, host_memory: int, gpu_memory: int | None) -> bool:
        """Whether most of either memory is left for buckets that stay there, unless all do."""
        return (
            self.nbytes <= host_memory or STREAMED_IN_MEMORY * self.largest <= host_memory
        ) and (
            gpu_memory is None
            or self.stays_bytes + min(2 * self._slots, len(self.buckets)) * self.largest
            <= gpu_memory
        )

    def slot_count(self, gpu_memory: int | None) -> int:
        """The number of slots in *gpu_memory*."""
        count = self._slots
        if gpu_memory is not None and self.largest:
            count = (gpu_memory - self.stays_bytes) // self.largest
        return min(count, len(self.buckets))


def _divide(model: torch.nn.Module, host_memory: int, gpu_memory: int | None) -> _Divided:
    """Divide *model* into the largest buckets of which both memories hold several, or at least the
    buckets in use. Raises: UsageError, which names the bytes that suffice.
    """
    prefix = f"parameters{next(_serials)}"
    together = [block.parameters for block in compiled_blocks(model)]
    tried: list[_Divided] = []
    for halvings in range(_HALVINGS):
        size = DIVISION.bucket_bytes >> halvings
        division = dataclasses.replace(DIVISION, bucket_bytes=size)
        tried.append(_Divided(*divide(model, division, prefix), together))
        if tried[-1].is_comfortable(host_memory, gpu_memory):
            return tried[-1]
    held = [one for one in tried if one.largest <= host_memory]
    if not held:
        raise TooLittleMemoryError(
            f"host_memory of {format_bytes(host_memory)} cannot hold the largest parameter",
            min(one.largest for one in tried),
        )
    fitting = [one for one in held if gpu_memory is None or one.least_device_bytes <= gpu_memory]
    if not fitting:
        enough = min(one.least_device_bytes for one in held)
        raise UsageError(
            f"gpu_memory of {format_bytes(gpu_memory or 0)} is too little for the parameters in use: allow at least {enough} bytes ({format_bytes(enough)})"
        )
    return min(fitting, key=lambda one: one.largest)


def check(model: torch.nn.Module, *, has_values: bool) -> bool:
    """Check that *model* can stream; return whether it has trainable parameters. *has_values*: it
    must have values. Raises: UsageError, UnsupportedError.
    """
    require_hooks("offload.parameters")
    check_not_whole(model)
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise UnsupportedError(
            "offload.parameters is for one process: on several GPUs use FSDP2 with CPUOffloadPolicy and NVMeOptimizer, "
            "or DeepSpeed ZeRO-3 with nvme_offload.zero3"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise UsageError(
                f"{name} has no shape yet: call the model once before offload.parameters"
            )
    for name, parameter in model.named_parameters():
        if idle.streamer_of(parameter) is not None:
            raise UsageError(
                f"parameter {name} streams already: call offload.parameters once, of models that share parameters with a ModuleList of them, "
                "and make the model anew for another Offload"
            )
        if parameter.is_meta and has_values:
            raise UsageError(
                f"parameter {name} is on the meta device and has no values: give weights, or load the model first"
            )
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise UsageError(
                f"buffer {name} is on the meta device and has no values: make the model with its buffers in memory, as in init_empty_weights() of accelerate"
            )
    divide(model, DIVISION, "")
    _check_memory(model)  # after `divide`, which refuses parameters of classes without an address
    return any(one.requires_grad for one in model.parameters())


def _check_memory(model: torch.nn.Module) -> None:
    """Check that parameters share no memory with others or with buffers: each gets its own."""
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
    for name, buffer in model.named_buffers():
        if not is_plain(buffer) or not buffer.numel():
            continue
        start = buffer.data_ptr()
        steps = sum((n - 1) * step for n, step in zip(buffer.shape, buffer.stride(), strict=True))
        place = bisect_right(ranges, start + steps * buffer.itemsize, key=lambda one: one[0]) - 1
        if place >= 0 and start < ranges[place][1]:
            raise UnsupportedError(
                f"buffer {name} shares memory with parameter {ranges[place][2]}: register a clone() as the buffer, or take the view in forward()"
            )
