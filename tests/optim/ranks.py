"""`python ranks.py DEVICE DIRECTORY`, run as two ranks: train in every sharded way, with
`NVMeOptimizer` and in memory, and report the differences.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reference import Reference, differing, unlike
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from two_ranks import DEVICE, DIRECTORY, RANK, case, inputs, local, main, model, ours

from nvme_offload.errors import UnsupportedError
from nvme_offload.optim import NVMeOptimizer


def train(
    net: nn.Module,
    optimizer: Any,
    steps: int = 3,
    first: int = 0,
    everywhere_the_same: bool = False,
    clipped: bool = True,
) -> None:
    for step in range(first, first + steps):
        net.zero_grad()
        net(
            inputs(step, next(net.parameters()).dtype, 0 if everywhere_the_same else RANK)
        ).float().square().mean().backward()
        if clipped and not everywhere_the_same:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        optimizer.step()


def whole(net: nn.Module) -> list[torch.Tensor]:
    return [
        getattr(parameter, "full_tensor", lambda parameter=parameter: parameter.detach())()
        for parameter in net.parameters()
    ]


def streamed(optimizer: NVMeOptimizer) -> list[str]:
    return (
        []
        if optimizer.stats().bytes_read > 0 or RANK > 0
        else [f"all was in memory: {optimizer.stats()}"]
    )


@case
def ddp() -> list[Any]:
    nets = []
    for make in (functools.partial(torch.optim.AdamW, lr=0.01), ours):
        nets.append(model())
        wrapped = DistributedDataParallel(nets[-1])
        train(wrapped, optimizer := make(nets[-1].parameters()))
    return differing(whole(nets[0]), whole(nets[1])) + streamed(optimizer)


@case
def zero_redundancy() -> list[Any]:
    nets = []
    for kind, options in (
        (torch.optim.AdamW, {}),
        (NVMeOptimizer, {"paths": DIRECTORY}),
        (functools.partial(NVMeOptimizer, optimizer_class=torch.optim.AdamW), {"paths": DIRECTORY}),
    ):
        net = model()
        train(
            DistributedDataParallel(net),
            optimizer := ZeroRedundancyOptimizer(net.parameters(), kind, lr=0.01, **options),
        )
        optimizer.consolidate_state_dict(to=0)
        box = [optimizer.state_dict() if RANK == 0 else None]
        dist.broadcast_object_list(box)
        resumed = copy.deepcopy(net)
        again = ZeroRedundancyOptimizer(resumed.parameters(), kind, lr=0.01, **options)
        # its tensors may be shared with the optimizer that it comes from
        again.load_state_dict(copy.deepcopy(box[0]))
        for one, stepped in ((net, optimizer), (resumed, again)):
            train(DistributedDataParallel(one), stepped, first=3)
        nets += [net, resumed]
    return [
        f"{number}: {place}"
        for number, net in enumerate(nets)
        for place in differing(whole(nets[0]), whole(net))
    ]


def sharded(
    dtype: torch.dtype = torch.float32,
    optimizer_class: Any = torch.optim.AdamW,
    in_memory: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **policies: Any,
) -> list[Any]:
    """What differs under *policies* of `fully_shard`. The optimizer in memory has the policies
    *in_memory* if given; `NVMeOptimizer` gets *options*.
    """
    nets, optimizers = [], []
    for make, used in (
        (
            functools.partial(Reference, optimizer_class=optimizer_class, lr=0.01),
            policies if in_memory is None else in_memory,
        ),
        (functools.partial(ours, optimizer_class=optimizer_class, **(options or {})), policies),
    ):
        net = model(dtype)
        for layer in (net[0], net[2], net[4], net):
            fully_shard(layer, **used)
        train(net, optimizer := make(list(net.parameters())))
        nets.append(net)
        optimizers.append(optimizer)
    found = differing(
        [parameter.to_local() for parameter in nets[0].parameters()],
        [parameter.to_local() for parameter in nets[1].parameters()],
    )
    reference, optimizer = optimizers
    states = [one.state_dict()["state"] for one in (reference.optimizer, optimizer)]
    for state in states[1].values():
        if any(hasattr(value, "placements") != (key != "step") for key, value in state.items()):
            found.append("a sharded state is no DTensor")
        state.pop("master", None)
    found += unlike(
        *[
            {
                index: {key: local(value) for key, value in state.items()}
                for index, state in one.items()
            }
            for one in states
        ]
    )
    if dtype == torch.float32:
        crossed = reference.optimizer.state_dict(), optimizer.state_dict()
        reference.optimizer.load_state_dict(crossed[1])
        optimizer.load_state_dict(crossed[0])
        for net, one in zip(nets, optimizers, strict=True):
            train(net, one, first=3)
        found += differing(
            [parameter.to_local() for parameter in nets[0].parameters()],
            [parameter.to_local() for parameter in nets[1].parameters()],
        )
    return found + (streamed(optimizer) if optimizer_class is torch.optim.AdamW else [])


@case
def fsdp2() -> list[Any]:
    return sharded()


@case
def fsdp2_mixed_precision() -> list[Any]:
    return sharded(
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )


@case
def fsdp2_bfloat16() -> list[Any]:
    return sharded(torch.bfloat16)


@case
def fsdp2_sgd() -> list[Any]:
    return sharded(optimizer_class=functools.partial(torch.optim.SGD, momentum=0.9))


@case
def fsdp2_with_parameters_on_the_cpu() -> list[Any]:
    if DEVICE != "cuda":
        return []
    offloaded: Any = functools.partial(sharded, offload_policy=CPUOffloadPolicy())
    return [
        f"{dtype}: {item}"
        for dtype in (torch.float32, torch.bfloat16)
        for item in offloaded(dtype, options={"update_device": "cpu"})
        + offloaded(dtype, in_memory={})  # updated on the GPU: the bits of parameters there
    ]


class Wrapped(torch.Tensor):
    """A tensor that wraps another one, as for FSDP2's gathering in another format."""

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass
        return made(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls(function(*(getattr(one, "inner", one) for one in args), **(kwargs or {})))


@case
def parts_of_another_class_are_refused() -> list[Any]:
    part = Wrapped(torch.ones(16, 16, device=DEVICE))
    whole = DTensor.from_local(part, init_device_mesh(DEVICE, (2,)), [Shard(0)], run_check=False)
    try:
        ours([nn.Parameter(whole)])
    except UnsupportedError as error:
        return [] if "not Wrapped" in str(error) else [error]
    return ["not refused"]


@case
def distributed_checkpoint() -> list[Any]:
    found = []
    for dtype, optimizer_class, in_backward in (
        (torch.float32, torch.optim.AdamW, False),
        # all of whose states are on the drive
        (torch.float32, functools.partial(torch.optim.SGD, momentum=0.9), True),
        (torch.bfloat16, torch.optim.AdamW, True),
    ):

        def made(dtype: torch.dtype = dtype) -> nn.Module:
            return fully_shard(model(dtype))

        make = functools.partial(
            ours, optimizer_class=optimizer_class, step_in_backward=in_backward
        )
        undisturbed, net = made(), made()
        reference, optimizer = (
            Reference(list(undisturbed.parameters()), optimizer_class, lr=0.01),
            make(net.parameters()),
        )
        train(undisturbed, reference, steps=6, clipped=not in_backward)
        train(net, optimizer, clipped=not in_backward)
        nets = [net]
        resumed = []
        for options in (
            StateDictOptions(),
            StateDictOptions(full_state_dict=True),
            StateDictOptions(flatten_optimizer_state_dict=True),
        ):
            saved = get_optimizer_state_dict(net, optimizer, options=options)
            again = made()
            again.load_state_dict(net.state_dict())
            set_optimizer_state_dict(
                again, loaded := make(again.parameters()), saved, options=options
            )
            resumed.append((again, loaded))
        for one, stepped in ((net, optimizer), *resumed):
            train(one, stepped, first=3, clipped=not in_backward)
        nets += [again for again, _ in resumed]
        found += [
            f"{dtype}, {number}: {place}"
            for number, one in enumerate(nets)
            for place in differing(whole(undisturbed), whole(one))
        ]
    return found


@case
def saved_by_each_rank() -> list[Any]:
    found = []
    for dtype, state_format in (
        (torch.float32, "exact"),
        (torch.bfloat16, "exact"),
        (torch.bfloat16, "compact24"),
    ):
        nets = [fully_shard(model(dtype)) for _ in range(2)]
        one, again = (ours(net.parameters(), state_format=state_format) for net in nets)
        train(nets[0], one)
        path = Path(DIRECTORY, f"rank{RANK}.pt")
        one.save(path)
        nets[1].load_state_dict(nets[0].state_dict())
        again.load_state_dict(torch.load(path, mmap=True))
        for net, optimizer in zip(nets, (one, again), strict=True):
            train(net, optimizer, first=3)
        found += [
            f"{state_format}: {place}" for place in differing(*(whole(net) for net in nets))
        ] + (streamed(again) if state_format == "exact" else [])
        one.close()
        again.close()
        path.unlink()
    return found


@case
def tensor_parallel() -> list[Any]:
    nets = []
    mesh = init_device_mesh(DEVICE, (2,))
    # for all, plain ones among them
    for make in (
        functools.partial(torch.optim.AdamW, lr=0.01, foreach=False),
        functools.partial(ours, foreach=False),
    ):
        net = model()
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        train(net, make(net.parameters()), everywhere_the_same=True)
        nets.append(net)
    return differing(whole(nets[0]), whole(nets[1]))


@case
def what_looks_at_whole_parameters_is_refused() -> list[Any]:
    try:
        ours((fully_shard(nn.Linear(8, 8, bias=False, device=DEVICE)).weight,), torch.optim.Muon)
    except UnsupportedError as error:
        return [] if "needs whole parameters" in str(error) else [str(error)]
    return ["not refused"]


if __name__ == "__main__":
    main()
