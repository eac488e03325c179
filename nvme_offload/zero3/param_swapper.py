"""`ParameterSwapper`: the partitions of ZeRO-3's parameters, each one value of a `TensorSwapper`,
in its own dtype.

It replaces DeepSpeed's `AsyncPartitionedParameterSwapper` and has the same methods. A partition
that is swapped in is copied to the accelerator immediately, where the all-gather needs it anyway,
so no host memory is held between two calls. Copies of partitions that stay in host memory run on
separate streams, and only the stream that gathers waits for them.

DeepSpeed passes a list of parameters to the swapper of the first one, even if others belong to
another `zero.Init` or another engine. Each method therefore uses the swapper of each parameter.

With `overlap_step`, a forward pass reads partitions while a thread updates others. The interleaving
differs from step to step, so these reads are not part of the learned order. A prefetch hint keeps
an updated partition in memory until it is read.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ..device.copies import CopyStreams
from ..device.modes import outside_of_all_modes
from ..device.staging import Returns
from ..errors import OutOfHostMemoryError, UsageError
from ..optimizer_states.fingerprint import fingerprint
from ..swap.tier import Tier
from ..units import format_bytes
from . import updates
from .agreement import all_or_none
from .replacing import replaces
from .settings import Settings, tier_of

_MANY = 1 << 30
_PAGE_BYTES = 4096  # the smallest allocation for a partition
_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


class _Value:
    """The value of one parameter in *tier*. The parameter owns it, and it is discarded with it."""

    def __init__(self, tier: Tier, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        # The fingerprint of a copy on the accelerator that the gathered parameter may share: see
        # `_has_changed`.
        self.read: torch.Tensor | None = None
        tier.require(nbytes, pin=False)  # one call for each parameter
        tier.abandon_with(self, [name], [nbytes])


class ParameterSwapper:
    """Keeps parameter partitions in *tier*, each until its parameter is dropped."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        # ds_id -> memory from `get_buffer`, until `swap_out_and_release`.
        self._filling: dict[int, torch.Tensor] = {}
        self._taken: str | None = None  # the name of the value in use, or about to be
        self._copies = CopyStreams()
        self._returns = Returns(tier)

    # When parameters are first partitioned, and when the user has changed them.

    def swappable_tensor(self, param: Any = None, numel: int | None = None) -> bool:
        """True: small partitions are offloaded like large ones."""
        return True

    @outside_of_all_modes()
    def get_buffer(self, param: Any, numel: int) -> torch.Tensor:
        """Memory for *numel* elements of *param*'s partition, to be filled."""
        updates.quiesce(self.tier)  # updates might hold the rest of the memory
        self._filling[param.ds_id] = self._create(param, numel)
        return self._filling[param.ds_id]

    @outside_of_all_modes()
    def swap_out_and_release(
        self, params: Sequence[Any], async_op: bool = False, force_buffer_release: bool = False
    ) -> None:
        """Store the present partitions of *params*. The write continues in the background."""
        for param in params:
            param.nvme_swapper._swap_out(param)

    def convert(self, param: Any, dtype: torch.dtype) -> None:
        """Keep *param*'s partition in *dtype* from now on."""
        if param.ds_tensor.dtype != dtype:
            param.ds_tensor.data = self.partition(param).to(dtype)
            self.swap_out_and_release([param])

    # Forward and backward.

    @outside_of_all_modes()
    def swap_in(
        self, params: Sequence[Any], async_op: bool = True, swap_in_buffers: Any = None
    ) -> None:
        """Copy the partitions of *params* to the accelerator; with *async_op* only prefetch them."""
        by_swapper: dict[ParameterSwapper, list[str]] = {}
        for param in params:
            by_swapper.setdefault(param.nvme_swapper, []).append(_name(param))
        for swapper, names in by_swapper.items():
            swapper.tier.swapper.prefetch(names)
        if async_op:
            return
        for param in params:
            param.nvme_swapper._swap_in(param)

    def swap_into_buffer(self, param: Any, dest_buffer: torch.Tensor) -> None:
        """Copy the partition of *param* to *dest_buffer*, on any device."""
        self._read(param, dest_buffer.device, dest_buffer)

    @outside_of_all_modes()
    def remove_partition_and_release_buffers(self, params: Sequence[Any]) -> None:
        """Drop the copies on the accelerator. DeepSpeed calls again for copies in flight."""
        for param in params:
            if param.ds_status == ZeroParamStatus.INFLIGHT:
                continue
            if _has_changed(param):
                param.nvme_swapper._swap_out(param)
            _drop_copy(param)

    def available_swap_in_buffers(self) -> int:
        """How many partitions may be prefetched: the swapper prefetches those that fit."""
        return _MANY

    def synchronize_reads(self) -> None:
        """Do nothing: `swap_in` leaves no read in flight."""

    def synchronize_writes(self) -> None:
        """Do nothing: a value that is being written is read from memory."""

    # The optimizer step.

    def swap_out_partitioned_params(
        self, dst_fp16_params: Sequence[Any], src_fp32_params: Sequence[torch.Tensor]
    ) -> None:
        """Store *src_fp32_params*, rounded, as the partitions of *dst_fp16_params*."""

        for param, source in zip(dst_fp16_params, src_fp32_params, strict=True):
            swapper = param.nvme_swapper
            swapper._used(functools.partial(swapper._store, param, source))

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """Do nothing: all partitions share one budget."""

    @contextlib.contextmanager
    def with_shape(self, param: Any) -> Iterator[None]:
        """Context in which an offloaded partition of *param* has its shape, but no memory."""
        if not self.is_offloaded(param):
            yield
            return
        param.ds_tensor.data = _placeholder(param).expand(param.ds_tensor.ds_numel)
        try:
            yield
        finally:
            param.ds_tensor.data = _placeholder(param)

    def is_offloaded(self, param: Any) -> bool:
        """Whether *param*'s partition has no copy on the accelerator."""
        return bool(param.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE)

    @outside_of_all_modes()
    def partition(self, param: Any) -> torch.Tensor:
        """A copy of *param*'s partition in host memory."""
        return self._read(param, torch.device("cpu"))

    # Internal.

    def give_back(self) -> None:
        """Release a value that an interrupted call left in use."""
        with self.tier.swapper.exclusive():
            self._returns.cancel()
            self._give_back()

    def drain(self) -> None:
        """Return when no copy to or from a GPU is in flight."""
        with self.tier.swapper.exclusive():
            self._returns.release(at_most=0)

    def _give_back(self) -> None:
        name, self._taken = self._taken, None
        if name is not None:
            self._filling.clear()
            self.tier.end_use(name, changed=True)

    def _swap_out(self, param: Any) -> None:
        updates.quiesce(self.tier)
        buffer = self._filling.pop(param.ds_id, None)
        if buffer is None:
            buffer = self._create(param, param.ds_tensor.ds_numel)
            buffer.copy_(param.ds_tensor.data.view(-1))
        zero_padding(param, buffer)
        self._release(param, changed=True)
        _drop_copy(param)

    def _swap_in(self, param: Any) -> None:
        self.tier.pin()
        param.ds_tensor.data = self._read(param, get_accelerator().current_device_name())
        if _may_be_shared(param):
            param.nvme_value.read = fingerprint(param.ds_tensor.data)
        param.ds_tensor.status = PartitionedParamStatus.AVAILABLE

    def _store(self, param: Any, source: torch.Tensor) -> None:
        target = self._create(param, source.numel())
        done = None
        if self._copies_beside(param, source.device):
            done = self._copies.take_back(target, source.to(target.dtype))
        else:
            target.copy_(source)
        if updates.is_worker():  # the forward pass needs the partition next
            self.tier.swapper.prefetch([_name(param)])
        self._release(param, changed=True, done=done)

    def _used(self, use: Callable[[], _Result]) -> _Result:
        """The result of *use*, between updates if the value does not fit in memory with theirs."""
        try:
            with self.tier.swapper.exclusive():
                return use()
        except OutOfHostMemoryError:
            if updates.is_worker():
                raise
        with updates.paused(self.tier), self.tier.swapper.exclusive():
            return use()

    def _take(self, param: Any) -> str:
        """Record that *param*'s value is about to be in use, and return its name."""
        self._give_back()
        name = _name(param)
        self._returns.release(at_most=0 if name in self._returns else len(self._returns))
        self._taken = name
        return name

    def _release(self, param: Any, changed: bool, done: Any = None) -> None:
        if done is None:
            self.tier.swapper.release(_name(param), changed=changed)
        else:
            self._returns.add(_name(param), changed=changed, done=done)
        self._taken = None

    def _copies_beside(self, param: Any, device: torch.device) -> bool:
        """Whether the value stays in host memory, so that copies of it may be asynchronous."""
        return device.type == "cuda" and self.tier.swapper.stays(_name(param))

    def _create(self, param: Any, numel: int) -> torch.Tensor:
        name, dtype = _name(param), _dtype(param)
        value: _Value | None = getattr(param, "nvme_value", None)
        if value is None or value.name != name:
            nbytes = -(-numel * dtype.itemsize // _PAGE_BYTES) * _PAGE_BYTES
            if nbytes > self.tier.cap_bytes:
                # `initialize` refuses this: it knows all parameters, and the memory of an update.
                self.tier.exceed(nbytes)
            param.nvme_value = _Value(self.tier, name, nbytes)
        return self.tier.swapper.create(self._take(param), numel * dtype.itemsize).view(dtype)

    def _read(self, param: Any, device: Any, into: torch.Tensor | None = None) -> torch.Tensor:
        dtype = _dtype(param)  # waits for an update, which `copy` must not do
        in_order = not updates.beside(self.tier)

        def copy() -> torch.Tensor:
            partition = self.tier.swapper.swap_in(self._take(param), in_order=in_order).view(dtype)
            done = None
            try:
                if self._copies_beside(param, torch.device(device)):
                    copied, done = self._copies.bring(partition, _indexed(device), into)
                # These are synchronous, so the host memory can be released.
                elif into is None:
                    copied = torch.empty_like(partition, device=device).copy_(partition)
                else:
                    copied = into.copy_(partition)
            except BaseException:
                self._give_back()
                raise
            self._release(param, changed=False, done=done)
            return copied

        return self._used(copy)


def _indexed(device: Any) -> torch.device:
    """*device* with its index."""
    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found


def _name(param: Any) -> str:
    # DeepSpeed numbers all parameters of a process, across all `zero.Init` contexts.
    return f"parameter/{param.ds_id}"


def _drop_copy(param: Any) -> None:
    # The status first: after an exception before the last line, DeepSpeed reads the partition anew.
    param.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE
    param.nvme_value.read = None
    param.ds_tensor.data = _placeholder(param)


def _may_be_shared(param: Any) -> bool:
    """Whether the gathered *param* may be the memory of its partition: on the CPU, a group of one
    rank gathers several parameters without copying, so "device": "cpu" keeps a change to them
    without modifier_rank. Source: `_no_gather_coalesced`.
    """
    return param.ds_tensor.data.device.type == "cpu" and bool(
        dist.get_world_size(group=param.ds_process_group) == 1
    )


def _has_changed(param: Any) -> bool:
    value: _Value = param.nvme_value
    return value.read is not None and not value.read.equal(fingerprint(param.ds_tensor.data))


def _dtype(param: Any) -> torch.dtype:
    # zero.Init patches torch.empty to its own dtype while it makes a model, and DeepSpeed's
    # partitions have that dtype too.
    dtype: torch.dtype = (
        torch.empty(0, dtype=param.dtype).dtype
        if param.ds_tensor is None
        else param.ds_tensor.dtype
    )
    return dtype


def _placeholder(param: Any) -> torch.Tensor:
    """The scalar in place of an offloaded partition. DeepSpeed looks at its dimensions."""
    placeholder: torch.Tensor = param.ds_tensor.new_ones((), device="cpu")
    return placeholder


def has_value(param: Any) -> bool:
    """Whether a `ParameterSwapper` keeps *param*'s partition. DeepSpeed assigns a context's swapper
    to parameters in memory, too.
    """
    return hasattr(param, "nvme_value")


def zero_padding(param: Any, partition: torch.Tensor) -> None:
    """Zero what DeepSpeed leaves undefined after the end of *param*: norms may include it."""
    start = partition.numel() * dist.get_rank(group=param.ds_process_group)
    partition[max(param.ds_numel - start, 0) :].zero_()


def value_bytes(param: Any) -> int:
    """The host memory that a partition in a `ParameterSwapper` needs while it is in use, in bytes."""
    return param.nvme_value.nbytes if has_value(param) else 0


def is_offloaded(param: Any) -> bool:
    """Whether *param*'s partition is in a `ParameterSwapper` alone."""
    return has_value(param) and bool(param.nvme_swapper.is_offloaded(param))


def open_swapper(ds_config: Mapping[str, Any], group: Any) -> ParameterSwapper | None:
    """The swapper that *ds_config* selects on the ranks of *group*; None for DeepSpeed's own."""
    tier: Tier | None = None

    def open_tier() -> None:
        nonlocal tier
        if Settings.of(ds_config).swappers == "native":
            tier = tier_of(ds_config)

    all_or_none(open_tier, group)
    if tier is None:
        return None
    found = _swappers.get(tier)
    if found is None:
        found = _swappers[tier] = ParameterSwapper(tier)
    return found


_swappers: weakref.WeakValueDictionary[Tier, ParameterSwapper] = weakref.WeakValueDictionary()


def swappers_of(module: torch.nn.Module) -> list[ParameterSwapper]:
    """The swappers of *module*'s parameters, one for each setting of their `zero.Init`s."""
    params: Iterator[Any] = module.parameters()
    return list(dict.fromkeys(param.nvme_swapper for param in params if has_value(param)))


def require_budget(module: torch.nn.Module) -> None:
    """Check that host memory can hold each partition of *module*'s parameters. Raises: UsageError."""
    params: Iterator[Any] = module.parameters()
    for param in params:
        if (nbytes := value_bytes(param)) and nbytes > (cap := param.nvme_swapper.tier.cap_bytes):
            largest = max(map(value_bytes, module.parameters()))
            raise UsageError(
                f'"host_memory" of {format_bytes(cap)} cannot hold the largest parameter: allow at least {largest} bytes'
            )


def return_to_device(module: torch.nn.Module) -> None:
    """Move whole parameters and buffers to the accelerator: Lightning leaves them on the CPU."""
    device = torch.device(get_accelerator().current_device_name())
    whole = [
        param
        for param in module.parameters()
        if getattr(param, "ds_status", None) is ZeroParamStatus.AVAILABLE
    ]
    if any(param.device != device for param in whole):
        for tensor in itertools.chain(whole, module.buffers()):
            tensor.data = tensor.data.to(device)


@replaces("deepspeed.runtime.zero.partition_parameters", "AsyncPartitionedParameterSwapper")
def _swapper(original: Callable[..., Any], ds_config: Any, model_dtype: torch.dtype) -> Any:
    # zero.Init makes the swapper, on all ranks of the group over which it partitions.
    init = sys._getframe(2).f_locals.get("self")
    swapper = open_swapper(ds_config._param_dict, getattr(init, "ds_process_group", None))
    return original(ds_config, model_dtype) if swapper is None else swapper


def move_partitions(module: torch.nn.Module, ds_config: Mapping[str, Any]) -> None:
    """Move the partitions of *module*, if any, to the device of *ds_config*'s "offload_param", before the
    engine is made: `zero.Init`, or an earlier engine of the module, may have had another. Raises: as
    `open_swapper`; UsageError if "host_memory" cannot hold a partition.
    """
    if Settings.of(ds_config).swappers != "native":
        return
    section = ds_config.get("zero_optimization", {}).get("offload_param") or {}
    device = section.get("device", OffloadDeviceEnum.none)
    _log_whole_parameters(module, device)
    param: Any
    for param in module.parameters():
        if not hasattr(param, "ds_id") or has_value(param) == (device == OffloadDeviceEnum.nvme):
            continue
        if param.ds_status == ZeroParamStatus.AVAILABLE:
            param.partition()  # an earlier engine has left it gathered
        if device == OffloadDeviceEnum.nvme:
            _move_to_drive(param, ds_config)
        else:
            _move_to_memory(param, on_host=device == OffloadDeviceEnum.cpu)


def _log_whole_parameters(module: torch.nn.Module, device: Any) -> None:
    """Log the bytes of parameters for a drive that are all in memory until they are partitioned."""
    nbytes = sum(param.nbytes for param in module.parameters() if not hasattr(param, "ds_id"))
    if device == OffloadDeviceEnum.nvme and nbytes:
        _log.info(
            "%s of parameters were made outside of zero.Init, so they stay in memory until they are partitioned: make the model under "
            "deepspeed.zero.Init(config_dict_or_path=...) to move each parameter to the drive when it is made",
            format_bytes(nbytes),
        )


def _move_to_drive(param: Any, ds_config: Mapping[str, Any]) -> None:
    # Parameters that the context partitions later, such as added layers, go to the drive too.
    context = _init_of(param)
    if context.param_swapper is None:
        context.param_swapper = open_swapper(ds_config, context.ds_process_group)
    context.remote_device = OffloadDeviceEnum.nvme
    param.nvme_swapper = context.param_swapper
    param.ds_tensor.final_location = OffloadDeviceEnum.nvme
    param.nvme_swapper.swap_out_and_release([param])


def _move_to_memory(param: Any, *, on_host: bool) -> None:
    context, partition = _init_of(param), param.nvme_swapper.partition(param)
    context.remote_device = OffloadDeviceEnum.cpu if on_host else context.local_device
    if not on_host:
        partition = partition.to(context.local_device)
    param.ds_tensor.data = partition
    param.ds_tensor.status = PartitionedParamStatus.AVAILABLE
    param.ds_tensor.final_location = None
    param.nvme_swapper = None
    del param.nvme_value  # the tier discards the value


def _init_of(param: Any) -> Any:
    """The `zero.Init` that partitioned *param*, in closures of methods that it has added."""
    return inspect.getclosurevars(param.convert_to_zero_parameters).nonlocals["self"]
