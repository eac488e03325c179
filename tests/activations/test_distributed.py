"""Sharded models: FSDP's gathered weights stay where they are, tensor parallelism's activations go
to the drive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from activation_models import Attention, Feed, Residual, same
from offloading import Make
from torch import nn

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"
)


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def gradients(
    model: nn.Module, x: torch.Tensor, context: contextlib.AbstractContextManager[object]
) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with context:
        loss = model(x).square().mean()
    loss.backward()
    found: list[Any] = [
        parameter.grad for parameter in model.parameters() if parameter.grad is not None
    ]
    return [gradient.to_local().clone() for gradient in found]


def test_fully_sharded(mesh: Any, make: Make) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Attention(), Feed()) for _ in range(3)))
    model[1].requires_grad_(False)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(4, 64, 64)
    expected = gradients(model, x, contextlib.nullcontext())
    offload = make(host_memory=600_000)
    for _ in range(3):
        assert same(gradients(model, x, offload), expected)
    assert offload.stats().bytes_read > 1_000_000


def parallel(mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            Residual(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
            for _ in range(4)
        )
    )
    for block in model:
        parallelize_module(block.inner, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def test_tensor_parallel(mesh: Any, make: Make) -> None:
    model = parallel(mesh)
    x = torch.randn(1024, 64)
    expected = gradients(model, x, contextlib.nullcontext())
    offload = make(host_memory=2 << 20)
    for number in range(1, 4):
        assert same(gradients(model, x, offload), expected)
        # Of each block what goes in, before and after the GELU; weights not, and x only once, since
        # it outlives the step.
        assert offload.stats().saved_bytes == number * (4 * (64 + 256 + 256) * 1024 * 4) + x.nbytes
    assert offload.stats().bytes_read > offload.stats().saved_bytes // 2


@pytest.mark.parametrize("held", [True, False])
def test_a_distributed_tensor_that_was_changed_since_is_an_error_as_without_hooks(
    held: bool, mesh: Any, make: Make
) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    def step() -> torch.Tensor:
        x = distribute_tensor(torch.randn(4096), mesh, [Shard(0)]).requires_grad_()
        y = x * 1.0
        z = y.sin()
        y.mul_(2)
        if held:
            keep.append(y)
        return z.sum().to_local()

    keep: list[torch.Tensor] = []
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step().backward()
    with make(host_memory=1 << 20):
        loss = step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
