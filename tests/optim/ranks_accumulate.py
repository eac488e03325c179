"""`python ranks_accumulate.py DEVICE DIRECTORY`, run as two ranks: train with
`accumulate="host"` and in memory, and report the differences.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.distributed as dist
from reference import differing
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from two_ranks import DEVICE, RANK, case, inputs, main, model, ours

from nvme_offload.errors import UsageError
from nvme_offload.optim.host_gradient import HostGradient

accumulating = functools.partial(ours, accumulate="host")


def trained(make: Any, *, synchronised: bool = False, unused: bool = False, **options: Any) -> Any:
    """The parameters after some steps of three micro-batches, of which DDP reduces the last, or
    each.
    """
    net = model()
    if unused:
        net.register_parameter("unused", nn.Parameter(torch.ones(9, device=DEVICE)))
    forward = DistributedDataParallel(net, **options)
    optimizer = make(net.parameters())
    moved = 0
    for step in range(4):
        for micro_batch in range(3):
            forward.require_backward_grad_sync = synchronised or micro_batch == 2
            forward(inputs(10 * step + micro_batch)).square().mean().backward()
            moved += sum(isinstance(one.grad, HostGradient) for one in net.parameters())
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    # where DDP reduces each into its buckets, it has put views of these into .grad by then
    in_buckets = synchronised and options.get("gradient_as_bucket_view")
    if make is accumulating and not moved and not in_buckets:
        return [torch.zeros(1)] * len(list(net.parameters()))
    return [parameter.detach() for parameter in net.parameters()]


def compared(**options: Any) -> list[Any]:
    plain = trained(functools.partial(torch.optim.AdamW, lr=0.01), **options)
    return differing(plain, trained(accumulating, **options))


@case
def ddp() -> list[Any]:
    return compared()


@case
def ddp_that_reduces_each() -> list[Any]:
    return compared(synchronised=True)


@case
def ddp_with_gradients_in_its_buckets() -> list[Any]:
    return compared(gradient_as_bucket_view=True)


@case
def ddp_that_reduces_each_in_its_buckets() -> list[Any]:
    return compared(synchronised=True, gradient_as_bucket_view=True)


@case
def ddp_with_unused_parameters() -> list[Any]:
    return compared(unused=True, find_unused_parameters=True)


@case
def ddp_with_a_static_graph() -> list[Any]:
    return compared(static_graph=True, synchronised=True)


@case
def reduced_by_hand() -> list[Any]:
    """What comes of a collective is there after it has returned: it takes a copy."""
    nets = []
    for make in (functools.partial(torch.optim.AdamW, lr=0.01), accumulating):
        net = model()
        optimizer = make(net.parameters())
        for step in range(3):
            for micro_batch in range(2):
                net(inputs(10 * step + micro_batch)).square().mean().backward()
            for parameter in net.parameters():
                with contextlib.suppress(UsageError):
                    dist.all_reduce(parameter.grad)
                    continue
                total = parameter.grad.clone()
                dist.all_reduce(total)
                parameter.grad = total
            optimizer.step()
            optimizer.zero_grad()
        nets.append(list(net.parameters()))
    return differing(*nets)


@case
def fsdp2_is_refused() -> list[Any]:
    net = fully_shard(model())
    try:
        accumulating(net.parameters())
    except UsageError as error:
        return [] if "DTensor" in str(error) else [error]
    return [f"rank {RANK} was not refused"]


if __name__ == "__main__":
    main()
