"""Code that `ranks.py`, `ranks_in_backward.py` and similar scripts share: cases whose differences
two ranks report, and the models that they train.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from nvme_offload.optim import NVMeOptimizer

DEVICE, DIRECTORY = sys.argv[1:3]
RANK = int(os.environ["RANK"])

CASES: dict[str, Callable[[], list[Any]]] = {}


def case(function: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    """Have *function*, which returns what differs, called on both ranks."""
    CASES[function.__name__] = function
    return function


def ours(params: Any, optimizer_class: Any = torch.optim.AdamW, **kwargs: Any) -> NVMeOptimizer:
    """With little more host memory than is refused: on the CPU a bucket needs other memory as
    well.
    """
    params = list(params)
    caps = {
        ("cpu", False): 70_000,
        ("cpu", True): 100_000,
        ("cuda", False): 45_000,
        ("cuda", True): 60_000,
    }
    home = local(params[0]).device.type
    # under CPUOffloadPolicy updates run on the GPU
    place = DEVICE if kwargs.get("update_device", "auto") == "auto" else home
    cap = caps[place, params[0].dtype == torch.bfloat16]
    if kwargs.get("state_format", "exact") != "exact":
        cap = cap * 3 // 2
    return NVMeOptimizer(
        params, optimizer_class, paths=DIRECTORY, host_memory=cap, lr=0.01, **kwargs
    )


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The same one at each call; its sizes are divided by nothing."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(33, 64), nn.ReLU(), nn.Linear(64, 150), nn.ReLU(), nn.Linear(150, 7)
    ).to(DEVICE, dtype)


def sharded(
    dtype: torch.dtype = torch.float32, net: nn.Module | None = None, **policies: Any
) -> nn.Sequential:
    """Shard each layer of *net* with FSDP2."""
    made: Any = net or model(dtype)
    for layer in made:
        if list(layer.parameters()):
            fully_shard(layer, **policies)
    fully_shard(made, **policies)
    return made


def over_tensors() -> nn.Module:
    """By tensor parallelism; of the normalisation's gradients each rank has a part of the sum."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(33), nn.Linear(33, 64), nn.ReLU(), nn.Linear(64, 150)).to(
        DEVICE
    )
    plan = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "3": RowwiseParallel(),
    }
    return parallelize_module(net, init_device_mesh(DEVICE, (2,)), plan)


def inputs(number: int, dtype: torch.dtype = torch.float32, rank: int = RANK) -> torch.Tensor:
    """What *rank* is to train on."""
    return torch.randn(8, 33, generator=torch.Generator().manual_seed(100 * number + rank)).to(
        DEVICE, dtype
    )


def trained_by_ddp(
    make: Any,
    sees: Callable[[Any], bool] = lambda _: False,
    *,
    micro_batches: int = 1,
    synchronised: bool = False,
    unused: bool = False,
    **options: Any,
) -> tuple[list[torch.Tensor], int]:
    """The parameters after some steps of micro-batches, of which DDP reduces the last, or each; and
    how often *sees* was true of a parameter.
    """
    net = model()
    if unused:
        net.register_parameter("unused", nn.Parameter(torch.ones(9, device=DEVICE)))
    forward = DistributedDataParallel(net, **options)
    optimizer = make(net.parameters())
    seen = 0
    for step in range(5):
        for number in range(micro_batches):
            forward.require_backward_grad_sync = synchronised or number == micro_batches - 1
            forward(inputs(10 * step + number)).square().mean().backward()
            seen += sum(map(sees, net.parameters()))
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        seen += sum(map(sees, net.parameters()))
        optimizer.zero_grad()
    return [parameter.detach() for parameter in net.parameters()], seen


def local(value: Any) -> Any:
    """The local part of a distributed tensor."""
    with torch.no_grad():
        return value.to_local() if hasattr(value, "placements") else value


def main() -> None:
    """Rank 0 prints one line of JSON: by case, a list of the differences on any rank; it
    should be empty.
    """
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(RANK)
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    reported: dict[str, Any] = {}
    for name, function in CASES.items():
        try:
            found = function()
        except Exception as error:
            traceback.print_exc()
            found = [f"{type(error).__name__}: {error}"]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [str(item) for item in found])
        reported[name] = [
            f"rank {rank}: {item}" for rank, items in enumerate(everyone) for item in items
        ]
    if os.listdir(DIRECTORY):  # noqa: PTH208
        reported["files"] = os.listdir(DIRECTORY)  # noqa: PTH208
    if RANK == 0:
        print(json.dumps(reported), flush=True)
    dist.destroy_process_group()
    # a thread of gloo that still releases a gathered tensor aborts an interpreter at its end
    # (pytorch/pytorch#190489)
    os._exit(0)
