"""`python ranks_overlap.py DEVICE DIRECTORY`, run as two ranks: train with `overlap_step` and in
memory, and report the differences.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from reference import Reference, differing
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel
from two_ranks import (
    DEVICE,
    DIRECTORY,
    case,
    inputs,
    local,
    main,
    model,
    ours,
    over_tensors,
    sharded,
    trained_by_ddp,
)

sys.path.append(str(Path(__file__).parents[1]))
import late

from nvme_offload.optim import NVMeOptimizer
from nvme_offload.optim.awaited import AwaitedParameter
from nvme_offload.optim.awaited_dtensor import AwaitedDTensor

overlapped = functools.partial(ours, overlap_step=True)


def compared(**options: Any) -> list[Any]:
    plain, _ = trained_by_ddp(functools.partial(torch.optim.AdamW, lr=0.01), **options)
    found, waited = trained_by_ddp(overlapped, lambda one: type(one) is AwaitedParameter, **options)
    return differing(plain, found) + ([] if waited else ["no update was awaited"])


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
    return compared(micro_batches=2, gradient_as_bucket_view=True)


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


# of a model, before its forward pass; and of a model and its optimizer, after a step
Before = Callable[[Any], object]
After = Callable[[Any, Any], object]


def nothing(*_: Any) -> None:
    pass


def compared_over_ranks(
    make: Callable[[], nn.Module],
    *,
    before: Before = nothing,
    after: After = nothing,
    keep: bool = False,
    limits: tuple[float, ...] = (),
    in_memory: Callable[[], nn.Module] | None = None,
    **options: Any,
) -> list[Any]:
    """What differs between *make*'s model trained in memory and on the drive, whose updates are made
    when a caller waits for them, and not before. With *keep* a step adds to the gradients of the
    one before; *limits* are the norm limits of the steps, one after the other. *in_memory* makes
    another model to train in memory.
    """
    nets: list[Any] = []
    parameters = awaited = 0
    for overlapping in (False, True):
        net = make() if overlapping or in_memory is None else in_memory()
        params = list(net.parameters())
        dtype = params[0].dtype
        context: Any = late.only_when_awaited() if overlapping else contextlib.nullcontext()
        optimizer = (
            overlapped(params, **options)
            if overlapping
            else Reference(params, torch.optim.AdamW, lr=0.01)
        )
        with context:
            for step in range(6):
                before(net)
                net(inputs(step, dtype)).float().square().mean().backward()
                if limits:
                    nn.utils.clip_grad_norm_(params, limits[step % len(limits)])
                optimizer.step()
                if overlapping:
                    parameters += len(params)
                    awaited += sum(type(one) is AwaitedDTensor for one in params)
                after(net, optimizer)
                if not keep:
                    net.zero_grad(set_to_none=step % 2 == 0)
            nets.append([local(one).clone() for one in params])
    # the first steps find out what an update changes, and are not queued
    return differing(*nets) + ([] if parameters // 2 <= awaited else [f"{awaited} of {parameters}"])


def in_blocks(dtype: torch.dtype = torch.float32, **policies: Any) -> nn.Sequential:
    """FSDP2 gathers parameters of modules within, which have not begun their own forward pass."""
    net = model(dtype)
    return sharded(net=nn.Sequential(net[:2], net[2:4], net[4:]), **policies)


@case
def fsdp2() -> list[Any]:
    return [
        item
        for make in (sharded, in_blocks)
        for dtype in (torch.float32, torch.bfloat16)
        for item in compared_over_ranks(functools.partial(make, dtype))
    ]


@case
def fsdp2_policies() -> list[Any]:
    """Other ways in which FSDP2 gathers: without its copies, converted, kept, over one rank."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = compared_over_ranks(functools.partial(in_blocks, mp_policy=mixed))
    for kept in (True, False):
        found += compared_over_ranks(functools.partial(in_blocks, reshard_after_forward=kept))
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard"))
        found += compared_over_ranks(functools.partial(in_blocks, mesh=mesh))
    if DEVICE == "cuda":
        offloaded = functools.partial(in_blocks, offload_policy=CPUOffloadPolicy())
        found += compared_over_ranks(offloaded, update_device="cpu")
        # updated on the GPU: the bits of parameters that are there
        found += compared_over_ranks(offloaded, in_memory=in_blocks)
    return found


@case
def fsdp2_gathered_before_it_is_used() -> list[Any]:
    def ahead() -> nn.Module:
        net: Any = in_blocks()
        net.set_modules_to_forward_prefetch([net[1], net[2]])
        net[0].set_modules_to_forward_prefetch([net[2]])
        return net

    def unshard(net: Any) -> None:
        for layer in (net[2], net[0]):
            handle = layer.unshard(async_op=True)
            handle.wait()

    return compared_over_ranks(ahead) + compared_over_ranks(in_blocks, before=unshard)


@case
def fsdp2_gradients() -> list[Any]:
    """Gradients of an earlier step are added to, and clipped, with a norm above and below the
    limit.
    """
    return (
        compared_over_ranks(sharded, keep=True)
        + compared_over_ranks(sharded, limits=(1e-3, 1e9, 0.5))
        + compared_over_ranks(functools.partial(sharded, torch.bfloat16), limits=(1e9, 1e-3))
    )


@case
def fsdp2_updates_in_both_passes() -> list[Any]:
    found = []
    for limits in ((1e9,), (1e-3, 1e9, 1e9), (1e-3,)):
        found += compared_over_ranks(sharded, limits=limits, step_in_backward="provisional")
    return found + compared_over_ranks(sharded, step_in_backward=True)


@case
def fsdp2_looked_at() -> list[Any]:
    """After a step, every way of DTensors and FSDP2 to read a parameter gives its new value."""
    ways: dict[str, Callable[[Any, torch.Tensor], Any]] = {
        "to_local": lambda net, weight: weight.to_local(),  # type: ignore[attr-defined]
        "_local_tensor": lambda net, weight: weight._local_tensor,  # type: ignore[attr-defined]
        "full_tensor": lambda net, weight: weight.full_tensor(),  # type: ignore[attr-defined]
        "redistribute": lambda net, weight: weight.redistribute(  # type: ignore[attr-defined]
            placements=[Replicate()]
        ).to_local(),
        "detach": lambda net, weight: local(weight.detach()),
        "state_dict": lambda net, weight: local(net.state_dict()["4.weight"]),
        "get_model_state_dict": lambda net, weight: local(get_model_state_dict(net)["4.weight"]),
        "deepcopy": lambda net, weight: local(copy.deepcopy(weight)),
        "a sum": lambda net, weight: weight.sum().full_tensor(),  # type: ignore[attr-defined]
        "foreach": lambda net, weight: local(torch._foreach_mul([weight], 2.0)[0]),
        "evaluation": lambda net, weight: evaluated(net),
        "to": lambda net, weight: local(net.to(DEVICE)[4].weight),
    }

    def evaluated(net: Any) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = net(inputs(99))
        return out

    found: list[Any] = []
    for name, way in ways.items():
        seen: list[list[torch.Tensor]] = []

        def look(
            net: Any,
            _: Any,
            way: Callable[[Any, torch.Tensor], Any] = way,
            seen: list[list[torch.Tensor]] = seen,
        ) -> None:
            seen[-1].append(way(net, net[4].weight).detach().clone())

        def make(seen: list[list[torch.Tensor]] = seen) -> nn.Module:
            seen.append([])
            return sharded()

        found += [f"{name}: {item}" for item in compared_over_ranks(make, after=look)]
        found += [f"{name} saw {item}" for item in differing(*seen)]
    return found


@case
def tensor_parallel() -> list[Any]:
    return compared_over_ranks(over_tensors)


if __name__ == "__main__":
    main()
