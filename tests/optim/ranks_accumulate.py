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
from torch.distributed.fsdp import fully_shard
from two_ranks import RANK, case, inputs, main, model, ours, trained_by_ddp

from nvme_offload.errors import UsageError
from nvme_offload.optim.host_gradient import HostGradient

accumulating = functools.partial(ours, accumulate="host")


def compared(**options: Any) -> list[Any]:
    plain, _ = trained_by_ddp(
        functools.partial(torch.optim.AdamW, lr=0.01), micro_batches=3, **options
    )
    found, moved = trained_by_ddp(
        accumulating, lambda one: isinstance(one.grad, HostGradient), micro_batches=3, **options
    )
    # where DDP reduces each into its buckets, it has put views of these into .grad by then
    in_buckets = options.get("synchronised") and options.get("gradient_as_bucket_view")
    return differing(plain, found) + ([] if moved or in_buckets else ["no gradient was moved"])


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
