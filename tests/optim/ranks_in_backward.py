"""`python ranks_in_backward.py DEVICE DIRECTORY`, run as two ranks: `step_in_backward` compared
with the same optimizer in memory, which steps afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from reference import Reference, differing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from two_ranks import (
    DEVICE,
    DIRECTORY,
    RANK,
    case,
    inputs,
    local,
    main,
    model,
    ours,
    over_tensors,
    sharded,
)

import nvme_offload.store.store
from nvme_offload._aio import FaultKind
from nvme_offload.errors import IOFailure, UnsupportedError, UsageError
from nvme_offload.io.engine import Engine
from nvme_offload.optim import NVMeOptimizer
from nvme_offload.optim.placeholders import SpentGradient

STEPS, PARTS = 3, 3

# From a model, an optimizer, and whether it is the last backward() of a step: the context to run
# backward() in
During = Callable[[Any, Any, bool], Any]


def at_once(net: Any, optimizer: Any, last: bool) -> Any:
    return contextlib.nullcontext()


def summed_by_the_optimizer(net: Any, optimizer: Any, last: bool) -> Any:
    return (
        contextlib.nullcontext()
        if last or isinstance(optimizer, Reference)
        else optimizer.no_sync()
    )


def summed_by_the_model(net: Any, optimizer: Any, last: bool) -> Any:
    net.set_requires_gradient_sync(last)
    net.set_is_last_backward(last)
    net.set_reshard_after_backward(last)
    return contextlib.nullcontext()


def summed_before_the_replicas_are(net: Any, optimizer: Any, last: bool) -> Any:
    net.set_requires_all_reduce(last)
    return contextlib.nullcontext()


def loss_of(net: nn.Module, number: int, dtype: torch.dtype) -> torch.Tensor:
    return net(inputs(number, dtype)).float().square().mean()


def compared(
    make: Callable[[], nn.Module],
    during: During = at_once,
    loss: Callable[[nn.Module, int, torch.dtype], torch.Tensor] = loss_of,
    settings: bool | str = True,
    in_memory: Callable[[], nn.Module] | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """The names that differ, or still have a gradient after backward(). *in_memory* makes another
    model for the optimizer in memory; `NVMeOptimizer` gets *options*.
    """
    nets, found = [], []
    parts = 1 if during is at_once else PARTS
    for in_backward in (False, True):
        net = make() if in_backward or in_memory is None else in_memory()
        params = list(net.parameters())
        dtype = params[0].dtype
        optimizer = (
            ours(params, step_in_backward=settings, **(options or {}), **kwargs)
            if in_backward
            else Reference(params, torch.optim.AdamW, lr=0.01, **kwargs)
        )
        for step in range(STEPS):
            for part in range(parts):
                with during(net, optimizer, part == parts - 1):
                    loss(net, step * parts + part, dtype).backward()
            if in_backward:
                kept = [
                    name
                    for name, one in net.named_parameters()
                    if one.grad is not None and not isinstance(local(one.grad), SpentGradient)
                ]
                found += [f"not updated in backward: {name}" for name in kept]
            optimizer.step()
            net.zero_grad()
        nets.append(net)
    assert optimizer.stats().step == STEPS
    return found + differing(
        *([local(parameter) for parameter in net.parameters()] for net in nets)
    )


@case
def fsdp2() -> list[Any]:
    return compared(sharded)


@case
def fsdp2_bfloat16() -> list[Any]:
    return compared(functools.partial(sharded, torch.bfloat16))


@case
def fsdp2_mixed_precision() -> list[Any]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return compared(functools.partial(sharded, mp_policy=policy), summed_by_the_model)


@case
def fsdp2_accumulation() -> list[Any]:
    return [
        f"{during.__name__}: {item}"
        for during in (summed_by_the_optimizer, summed_by_the_model)
        for item in compared(sharded, during)
    ]


@case
def fsdp2_with_parameters_on_the_cpu() -> list[Any]:
    if DEVICE != "cuda":
        return []
    make = functools.partial(sharded, offload_policy=CPUOffloadPolicy())
    found = []
    for during in (at_once, summed_by_the_optimizer, summed_by_the_model):
        found += compared(make, during, options={"update_device": "cpu"})
        # updated on the GPU: the bits of parameters that are there
        found += compared(make, during, in_memory=sharded)
    return found


@case
def fsdp2_replicas() -> list[Any]:
    found = []
    for shape in ((2, 1), (1, 2)):  # replicated, as by DistributedDataParallel; and sharded
        make = functools.partial(
            sharded, mesh=init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard"))
        )
        for during in (
            at_once,
            summed_by_the_optimizer,
            summed_by_the_model,
            summed_before_the_replicas_are,
        ):
            found += [f"{shape}, {during.__name__}: {item}" for item in compared(make, during)]
    return found


@case
def fsdp2_frozen_and_unused() -> list[Any]:
    """A frozen parameter, two parameters of which each rank uses another, and an unused one."""

    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(torch.ones(7, device=DEVICE) for _ in range(3))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return batch * self.scales[RANK]

    def make() -> nn.Module:
        net = model()
        net[2].weight.requires_grad_(False)
        net = sharded(net=net.append(Choice()))
        net.set_reduce_scatter_unused_params(True)
        return net

    # ranks that use other parameters hang older ones
    return compared(make) if hasattr(FSDPModule, "set_reduce_scatter_unused_params") else []


@case
def fsdp2_a_layer_twice() -> list[Any]:
    class Twice(nn.Sequential):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            for layer in (*self, self[0], self[1]):
                batch = checkpoint(layer, batch, use_reentrant=False)
            return batch

    def make() -> nn.Module:
        torch.manual_seed(0)
        return sharded(net=Twice(nn.Linear(33, 33), nn.Linear(33, 33, bias=False)).to(DEVICE))

    found = compared(make) + compared(make, summed_by_the_optimizer)
    try:  # FSDP2 reduces once for each use then
        found += [*compared(make, summed_by_the_model), "not refused"]
    except UsageError as error:
        found += [] if "used up" in str(error) else [error]
    return found


@case
def tensor_parallel() -> list[Any]:
    return compared(over_tensors, foreach=False) + compared(
        over_tensors, summed_by_the_optimizer, foreach=False
    )


class Part(nn.Module):
    """A layer of which each rank has its own part; rank 1 never uses its second part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(RANK)
        self.first, self.second = (nn.Linear(33, 100 + 10 * RANK, device=DEVICE) for _ in range(2))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.first(batch) if RANK == 1 else self.first(batch) + self.second(batch)


@case
def layers_sharded_by_hand() -> list[Any]:
    return compared(Part, settings="local") + compared(
        Part, summed_by_the_optimizer, settings="local"
    )


@case
def a_drive_that_fails_on_one_rank() -> list[Any]:
    """backward() continues on every rank, and step() raises."""
    nets: list[nn.Module] = []
    reported: list[str] = []
    logging.getLogger("nvme_offload.optim.backward").addFilter(
        lambda record: reported.append(record.getMessage())
    )
    for in_backward in (False, True):
        net = sharded()
        if in_backward and RANK == 0:
            nvme_offload.store.store.Engine = functools.partial(
                Engine, _faults=[(at, 6, FaultKind.FAIL, 5) for at in (8, 30, 60)]
            )
        try:
            optimizer = (
                ours(net.parameters(), step_in_backward=True)
                if in_backward
                else Reference(list(net.parameters()), torch.optim.AdamW, lr=0.01)
            )
        finally:
            nvme_offload.store.store.Engine = Engine
        for step in range(6):
            loss_of(net, step, torch.float32).backward()
            while True:
                with contextlib.suppress(IOFailure):
                    optimizer.step()
                    break
            net.zero_grad()
        nets.append(net)
    left = any("is left to step()" in message for message in reported)
    return ([] if left == (RANK == 0) else [reported]) + differing(
        *([local(parameter) for parameter in net.parameters()] for net in nets)
    )


@case
def fsdp2_clipping() -> list[Any]:
    """Norms over both ranks, which clip some of the steps that were made provisionally."""
    found: list[Any] = []
    for dtype in (torch.float32, torch.bfloat16):
        nets, made, undone = [], 0, 0
        for in_backward in (False, True):
            net = sharded(dtype)
            params = list(net.parameters())
            optimizer: Any = (
                ours(params, step_in_backward="provisional")
                if in_backward
                else Reference(params, torch.optim.AdamW, lr=0.01)
            )
            for step in range(8):
                loss_of(net, step, dtype).backward()
                torch.nn.utils.clip_grad_norm_(params, 1e-3 if step in (3, 6) else 1e9)
                optimizer.step()
                net.zero_grad()
                if in_backward:
                    made += optimizer.stats().updated_in_backward
                    undone += optimizer.stats().rolled_back
            nets.append(net)
        found += differing(*([local(parameter) for parameter in net.parameters()] for net in nets))
        found += [] if 0 < undone < made else [f"{undone} of {made} undone"]
    return found


@case
def what_cannot_be_known_is_refused() -> list[Any]:
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("data", "tensor"))
    part = parallelize_module(
        model(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    found = []
    for net in (model(), DistributedDataParallel(model()), part[0]):
        for option in (True, "provisional"):
            try:
                ours(net.parameters(), step_in_backward=option).step()
            except UnsupportedError as error:
                # which does not clip
                advises = 'step_in_backward="local"' in str(error)
                if f"step_in_backward={option!r}" not in str(error) or advises != (option is True):
                    found.append(str(error))
            else:
                found.append(f"{option!r} is not refused")
    frozen = model().requires_grad_(False)
    both = [*sharded().parameters(), *frozen.parameters()]
    ours(both, step_in_backward=True, foreach=False).step()
    return found


@case
def what_looks_at_gradients_afterwards_is_an_error() -> list[Any]:
    """On every rank, even where the program declared something untrue."""

    def of(net: Any, settings: bool | str, then: Callable[[Any], Any]) -> None:
        with ours(net.parameters(), step_in_backward=settings):
            net(inputs(0)).square().mean().backward()
            then(net)

    def zero_redundancy() -> None:
        net = DistributedDataParallel(model())
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), NVMeOptimizer, paths=DIRECTORY, step_in_backward="local"
        )
        with optimizer.optim:
            net(inputs(0)).square().mean().backward()

    def reduce(net: Any) -> None:
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)

    found = []
    for name, wrong in {
        "clipping": lambda: of(
            sharded(), True, lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1e-9)
        ),
        "a second backward": lambda: of(
            sharded(), True, lambda net: net(inputs(1)).square().mean().backward()
        ),
        "all_reduce": lambda: of(model(), "local", reduce),
        "DDP": lambda: of(DistributedDataParallel(model()), "local", lambda net: None),
        "DDP with views": lambda: of(
            DistributedDataParallel(model(), gradient_as_bucket_view=True),
            "local",
            lambda net: None,
        ),
        "DDP, static": lambda: of(
            DistributedDataParallel(model(), static_graph=True), "local", lambda net: None
        ),
        "ZeroRedundancyOptimizer": zero_redundancy,
    }.items():
        try:
            wrong()
        except UsageError as error:
            if "step_in_backward" not in str(error):
                found.append(f"{name}: {error}")
        else:
            found.append(f"{name}: silence")
    return found


if __name__ == "__main__":
    main()
