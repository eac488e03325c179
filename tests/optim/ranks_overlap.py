"""`python ranks_overlap.py DEVICE DIRECTORY`, of which two run at once: train with `overlap_step`
and in memory, and tell what differs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from reference import differing
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from two_ranks import DEVICE, DIRECTORY, RANK, case, inputs, main, model, ours

from nvme_offload.errors import UnsupportedError
from nvme_offload.optim import NVMeOptimizer
from nvme_offload.optim.awaited import AwaitedParameter

overlapped = functools.partial(ours, overlap_step=True)


def trained(make: Any, *, unused: bool = False, accumulate: bool = False, **options: Any) -> Any:
    """The parameters after some steps, and the optimizer."""
    net = model()
    if unused:
        net.register_parameter("unused", nn.Parameter(torch.ones(9, device=DEVICE)))
    forward = DistributedDataParallel(net, **options)
    optimizer = make(net.parameters())
    waited = 0
    for step in range(5):
        if accumulate:
            with forward.no_sync():
                forward(inputs(50 + step)).square().mean().backward()
        forward(inputs(step)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        waited += sum(type(parameter) is AwaitedParameter for parameter in net.parameters())
        optimizer.zero_grad()
    if make is overlapped and not waited:
        return [torch.zeros(1)] * len(list(net.parameters()))
    return [parameter.detach() for parameter in net.parameters()]


def compared(**options: Any) -> list[Any]:
    plain = trained(functools.partial(torch.optim.AdamW, lr=0.01), **options)
    return differing(plain, trained(overlapped, **options))


@case
def ddp() -> list[Any]:
    return compared()


@case
def ddp_with_gradients_in_its_buckets() -> list[Any]:
    return compared(gradient_as_bucket_view=True)


@case
def ddp_with_unused_parameters() -> list[Any]:
    return compared(unused=True, find_unused_parameters=True, gradient_as_bucket_view=True)


@case
def ddp_accumulation() -> list[Any]:
    return compared(accumulate=True, gradient_as_bucket_view=True)


@case
def zero_redundancy() -> list[Any]:
    nets = []
    for kind, options in (
        (torch.optim.AdamW, {}),
        (NVMeOptimizer, {"paths": DIRECTORY, "overlap_step": True}),
    ):
        net = model()
        nets.append(net)
        wrapped = DistributedDataParallel(net)
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), optimizer_class=kind, lr=0.01, **options
        )
        for step in range(4):
            optimizer.zero_grad()
            wrapped(inputs(step)).square().mean().backward()
            optimizer.step()
    return differing(*(list(net.parameters()) for net in nets))


@case
def fsdp2_is_refused() -> list[Any]:
    net = fully_shard(model())
    try:
        overlapped(net.parameters())
    except UnsupportedError as error:
        return [] if "DTensor" in str(error) else [error]
    return [f"rank {RANK} was not refused"]


if __name__ == "__main__":
    main()
