"""A step in one pass has the bits of unpacking, the optimizer's own step and packing."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nvme_offload.optimizer_states.formats import FORMATS, Layout, StateFormat
from nvme_offload.optimizer_states.one_pass import Part, step_in_one_pass
from nvme_offload.optimizer_states.rounding import block_names

pytestmark = pytest.mark.processor

ADAM = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32)
Adam, AdamW = torch.optim.Adam, torch.optim.AdamW
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": AdamW,
    "adamw-fused": functools.partial(AdamW, fused=True),
    "adamw-foreach": functools.partial(AdamW, foreach=True),
    "adamw-maximize": functools.partial(AdamW, maximize=True, fused=True),
    "adam": functools.partial(Adam, weight_decay=0.1),
    "adam-fused": functools.partial(Adam, weight_decay=0.1, fused=True),
    "adam-betas": functools.partial(Adam, betas=(0.3, 0.9), maximize=True),
    "adam-decoupled": functools.partial(Adam, weight_decay=0.1, decoupled_weight_decay=True),
    # 1 - lr * weight_decay is 0
    "adamw-all-decay": functools.partial(AdamW, lr=0.5, weight_decay=2.0),
}
LEFT_TO_THE_OPTIMIZER: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "amsgrad": functools.partial(AdamW, amsgrad=True),
    "tensor-lr": functools.partial(AdamW, lr=torch.tensor(1e-3)),
    "tensor-lr-fused": functools.partial(AdamW, lr=torch.tensor(1e-3), fused=True),
    "differentiable": functools.partial(AdamW, differentiable=True),
    "nadam": torch.optim.NAdam,
    "subclass": type("Mine", (AdamW,), {}),
}
# one element, a vector and the elements behind it, a block and a part of one
SIZES = (1, 37, 256, 1000)


class Bucket:
    """Packed states of one parameter, and the optimizer that updates them."""

    def __init__(
        self, state_format: StateFormat, dtype: torch.dtype, numel: int, make: Callable[..., Any]
    ) -> None:
        self.format = state_format
        self.layout: Layout = state_format.layout(numel, ADAM, dtype)
        self.buffer = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
        self.shadow = torch.nn.Parameter(torch.empty(0))
        self.optimizer = make([self.shadow])
        self.state = self.optimizer.state[self.shadow]
        values = numbers(numel, 0)
        self.weight = values.to(dtype)
        first, second = numbers(numel, 1), numbers(numel, 2).square()
        self.state["step"] = torch.tensor(9.0)
        self.state.update({key: torch.empty(0) for key in ADAM})
        self.pack(None if self.layout.master is None else values, [first, second], 8)

    def pack(self, master: torch.Tensor | None, moments: list[torch.Tensor], seed: int) -> None:
        blocks = block_names(self.start, self.weight.numel())
        states = dict(zip(ADAM, moments, strict=True))
        self.format.pack(self.layout, self.buffer, [self.weight], master, states, seed, blocks)

    start = 5 * 256  # of the first element among all trained elements

    def step_by_optimizer(self, gradient: torch.Tensor, seed: int) -> None:
        master, states = self.format.unpack(self.layout, self.buffer, [self.weight])
        self.shadow.data = self.weight if master is None else master
        self.shadow.grad = gradient.to(torch.float32)
        for key, values in states.items():
            self.state[key].data = values
        self.optimizer.step()
        self.pack(master, list(states.values()), seed)

    def part(self, gradient: torch.Tensor) -> Part:
        group = self.optimizer.param_groups[0]
        return Part(self.shadow, group, self.weight, gradient, 0, self.start // 256)

    def step_in_one_pass(self, gradient: torch.Tensor, seed: int) -> bool:
        parts = [self.part(gradient)]
        return step_in_one_pass(self.optimizer, self.format, self.layout, self.buffer, parts, seed)


def numbers(numel: int, seed: int) -> torch.Tensor:
    drawn = torch.randn(2, numel, generator=torch.Generator().manual_seed(seed))
    return drawn[0] * torch.exp(2 * drawn[1])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def check(
    name: str,
    make: Callable[..., Any],
    dtype: torch.dtype,
    gradients: torch.dtype,
    numel: int,
) -> None:
    expected, found = (Bucket(FORMATS[name], dtype, numel, make) for _ in range(2))
    for step in range(9, 12):
        gradient = numbers(numel, 10 + step).to(gradients)
        expected.step_by_optimizer(gradient, step)
        if not found.step_in_one_pass(gradient, step):
            pytest.skip("the extension rounds in another way than torch on this processor")
        assert same_bits(found.weight, expected.weight)
        assert same_bits(found.buffer, expected.buffer)
    assert found.state["step"] == expected.state["step"] == 12


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", FORMATS)
def test_bits_of_every_format_and_optimizer(name: str, optimizer: str) -> None:
    for numel in SIZES:
        check(name, OPTIMIZERS[optimizer], torch.bfloat16, torch.bfloat16, numel)


@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_bits_of_every_dtype(name: str, dtype: torch.dtype, gradients: torch.dtype) -> None:
    if dtype == torch.float16 and name != "exact":
        pytest.skip("only exact has weights of float16")
    check(name, AdamW, dtype, gradients, 777)


@pytest.mark.parametrize("beta2", [0.0, 0.95, 0.999, 1 - 1e-12])
@pytest.mark.parametrize("steps", [0, 1, 500, 100_000])
def test_bits_of_every_bias_correction(steps: int, beta2: float) -> None:
    # The extension divides by the correction with multiplications.
    make = functools.partial(AdamW, betas=(0.9, beta2), fused=True)
    expected, found = (Bucket(FORMATS["exact"], torch.float32, 1 << 16, make) for _ in range(2))
    gradient = numbers(1 << 16, 3) * torch.exp2(torch.arange(1 << 16) % 120 - 60.0)
    expected.state["step"].fill_(steps)
    found.state["step"].fill_(steps)
    expected.step_by_optimizer(gradient, 9)
    assert found.step_in_one_pass(gradient, 9)
    assert same_bits(found.weight, expected.weight)
    assert same_bits(found.buffer, expected.buffer)


@pytest.mark.parametrize("name", FORMATS)
def test_bits_do_not_depend_on_threads(name: str) -> None:
    torch.set_num_threads(3)
    check(name, OPTIMIZERS["adamw-fused"], torch.bfloat16, torch.bfloat16, (1 << 17) + 301)
    check(name, AdamW, torch.bfloat16, torch.bfloat16, (1 << 17) + 301)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
def test_weights_that_become_nan_are_rounded_as_torch_does(
    optimizer: str, dtype: torch.dtype
) -> None:
    expected, found = (Bucket(FORMATS["exact"], dtype, 300, OPTIMIZERS[optimizer]) for _ in "ab")
    gradient = numbers(300, 3)
    gradient[[4, 17, 299]] = torch.tensor([math.nan, math.inf, -math.inf])
    expected.step_by_optimizer(gradient, 9)
    assert found.step_in_one_pass(gradient, 9)
    assert same_bits(found.weight, expected.weight)
    assert found.weight.isnan().sum() == 3


@pytest.mark.parametrize("optimizer", LEFT_TO_THE_OPTIMIZER)
def test_other_optimizers_are_left_alone(optimizer: str) -> None:
    bucket = Bucket(FORMATS["exact"], torch.bfloat16, 300, LEFT_TO_THE_OPTIMIZER[optimizer])
    if optimizer == "amsgrad":
        bucket.state["max_exp_avg_sq"] = torch.empty(0)
    before = bucket.weight.clone(), bucket.buffer.clone()
    assert not bucket.step_in_one_pass(numbers(300, 3), 9)
    assert same_bits(bucket.weight, before[0])
    assert same_bits(bucket.buffer, before[1])
    assert bucket.state["step"] == 9
