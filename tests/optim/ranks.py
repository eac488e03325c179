"""`python ranks.py DEVICE DIRECTORY`, of which two run at once: train in every sharded way, with `NVMeOptimizer` and in memory, and tell what differs.

Rank 0 prints one line of JSON: by case, a list of what is not the same on any rank; it should be empty.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from reference import Reference, differing, unlike
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from nvme_offload.errors import UnsupportedError
from nvme_offload.optim import NVMeOptimizer

DEVICE, DIRECTORY = sys.argv[1:3]
RANK = int(os.environ["RANK"])

CASES: dict[str, Callable[[], list[Any]]] = {}


def case(function: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    CASES[function.__name__] = function
    return function


def ours(params: Any, optimizer_class: Any = torch.optim.AdamW, **kwargs: Any) -> NVMeOptimizer:
    params = list(params)
    # Little more than what is not refused: on the CPU there is more beside a bundle.
    caps = {("cpu", False): 70_000, ("cpu", True): 100_000, ("cuda", False): 45_000, ("cuda", True): 60_000}
    cap = caps[local(params[0]).device.type, params[0].dtype == torch.bfloat16]
    return NVMeOptimizer(params, optimizer_class, paths=DIRECTORY, host_memory=cap, lr=0.01, **kwargs)


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 64), nn.ReLU(), nn.Linear(64, 150), nn.ReLU(), nn.Linear(150, 7)).to(DEVICE, dtype)  # divides by nothing


def train(net: nn.Module, optimizer: Any, steps: int = 3, first: int = 0, everywhere_the_same: bool = False) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 * step + (0 if everywhere_the_same else RANK))
        inputs = torch.randn(8, 33, generator=generator).to(DEVICE, next(net.parameters()).dtype)
        net.zero_grad()
        net(inputs).float().square().mean().backward()
        if not everywhere_the_same:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        optimizer.step()


def whole(net: nn.Module) -> list[torch.Tensor]:
    return [getattr(parameter, "full_tensor", lambda parameter=parameter: parameter.detach())() for parameter in net.parameters()]


def streamed(optimizer: NVMeOptimizer) -> list[str]:
    return [] if optimizer.stats().bytes_read > 0 or RANK > 0 else [f"all was in memory: {optimizer.stats()}"]


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
        train(DistributedDataParallel(net), optimizer := ZeroRedundancyOptimizer(net.parameters(), kind, lr=0.01, **options))
        optimizer.consolidate_state_dict(to=0)
        box = [optimizer.state_dict() if RANK == 0 else None]
        dist.broadcast_object_list(box)
        resumed = copy.deepcopy(net)
        again = ZeroRedundancyOptimizer(resumed.parameters(), kind, lr=0.01, **options)
        again.load_state_dict(copy.deepcopy(box[0]))  # whose tensors may be those of the optimizer that it comes from
        for one, stepped in ((net, optimizer), (resumed, again)):
            train(DistributedDataParallel(one), stepped, first=3)
        nets += [net, resumed]
    return [f"{number}: {place}" for number, net in enumerate(nets) for place in differing(whole(nets[0]), whole(net))]


def sharded(dtype: torch.dtype = torch.float32, optimizer_class: Any = torch.optim.AdamW, **policies: Any) -> list[Any]:
    nets, optimizers = [], []
    for make in (functools.partial(Reference, optimizer_class=optimizer_class, lr=0.01), functools.partial(ours, optimizer_class=optimizer_class)):
        net = model(dtype)
        for layer in (net[0], net[2], net[4], net):
            fully_shard(layer, **policies)
        train(net, optimizer := make(list(net.parameters())))
        nets.append(net)
        optimizers.append(optimizer)
    found = differing([parameter.to_local() for parameter in nets[0].parameters()], [parameter.to_local() for parameter in nets[1].parameters()])
    reference, optimizer = optimizers
    states = [one.state_dict()["state"] for one in (reference.optimizer, optimizer)]
    for state in states[1].values():
        if any(hasattr(value, "placements") != (key != "step") for key, value in state.items()):
            found.append("what is sharded is no DTensor")
        state.pop("master", None)
    found += unlike(*[{index: {key: local(value) for key, value in state.items()} for index, state in one.items()} for one in states])
    if dtype == torch.float32:
        crossed = reference.optimizer.state_dict(), optimizer.state_dict()
        reference.optimizer.load_state_dict(crossed[1])
        optimizer.load_state_dict(crossed[0])
        for net, one in zip(nets, optimizers, strict=True):
            train(net, one, first=3)
        found += differing([parameter.to_local() for parameter in nets[0].parameters()], [parameter.to_local() for parameter in nets[1].parameters()])
    return found + (streamed(optimizer) if optimizer_class is torch.optim.AdamW else [])


def local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "placements") else value


@case
def fsdp2() -> list[Any]:
    return sharded()


@case
def fsdp2_mixed_precision() -> list[Any]:
    return sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


@case
def fsdp2_bfloat16() -> list[Any]:
    return sharded(torch.bfloat16)


@case
def fsdp2_sgd() -> list[Any]:
    return sharded(optimizer_class=functools.partial(torch.optim.SGD, momentum=0.9))


@case
def fsdp2_with_parameters_on_the_cpu() -> list[Any]:
    return sharded(offload_policy=CPUOffloadPolicy()) if DEVICE == "cuda" else []


@case
def distributed_checkpoint() -> list[Any]:
    net = model()
    fully_shard(net)
    train(net, optimizer := ours(net.parameters()))
    resumed = []
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
        saved = get_optimizer_state_dict(net, optimizer, options=options)
        again = model()
        fully_shard(again)
        again.load_state_dict(net.state_dict())
        set_optimizer_state_dict(again, loaded := ours(again.parameters()), saved, options=options)
        resumed.append((again, loaded))
    for one, stepped in ((net, optimizer), *resumed):
        train(one, stepped, first=3)
    return [place for again, _ in resumed for place in differing(whole(net), whole(again))]


@case
def tensor_parallel() -> list[Any]:
    nets = []
    mesh = init_device_mesh(DEVICE, (2,))
    for make in (functools.partial(torch.optim.AdamW, lr=0.01, foreach=False), functools.partial(ours, foreach=False)):  # for all, plain ones among them
        net = model()
        parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        train(net, make(net.parameters()), everywhere_the_same=True)
        nets.append(net)
    return differing(whole(nets[0]), whole(nets[1]))


@case
def refusals() -> list[Any]:
    net = model()
    found = []
    for said, refused in (
        ("single process", lambda: ours(net.parameters(), step_in_backward=True)),
        ("looks at whole parameters", lambda: ours((fully_shard(nn.Linear(8, 8, bias=False, device=DEVICE)).weight,), torch.optim.Muon)),
    ):
        try:
            refused()
        except UnsupportedError as error:
            if said in str(error):
                continue
            found.append(str(error))
        found.append(f"not refused: {said}")
    return found


def main() -> None:
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(RANK)
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    told: dict[str, Any] = {}
    for name, function in CASES.items():
        try:
            found = function()
        except Exception as error:
            traceback.print_exc()
            found = [f"{type(error).__name__}: {error}"]
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, [str(item) for item in found])
        told[name] = [f"rank {rank}: {item}" for rank, items in enumerate(everyone) for item in items]
    if os.listdir(DIRECTORY):  # noqa: PTH208
        told["files"] = os.listdir(DIRECTORY)  # noqa: PTH208
    if RANK == 0:
        print(json.dumps(told), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
