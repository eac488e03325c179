"""Modules of all kinds compute the same bits with streamed parameters as in memory."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from covering import covering
from modules import KINDS, WAYS, WIDTH, Blocks, Stack
from patience import PATIENCE

from nvme_offload import Offload, UsageError


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@covering(kind=list(KINDS), way=WAYS, checkpointing=["", "other", "reentrant"])
def test_every_way_to_train_gives_the_bits_of_the_run_in_memory(
    make: Callable[..., Offload], kind: str, way: Callable[..., torch.Tensor], checkpointing: str
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 8, WIDTH, requires_grad=True), torch.randint(0, 7, (24,))
    model = Stack(KINDS[kind], checkpointing)
    in_memory = copy.deepcopy(model)
    try:
        expected = [way(in_memory, x, y) for _ in range(2)]
    except RuntimeError as error:
        pytest.skip(f"torch refuses it in memory, too: {error}")
    make("1MB").parameters(model, "cpu")
    losses = [way(model, x, y) for _ in range(2)]
    assert all(map(_same, losses, expected))
    for (name, one), other in zip(model.named_parameters(), in_memory.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or _same(one.grad, other.grad), name


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


class _InGenerator(torch.nn.Module):
    """Its forward pass ends while a generator has hooks on saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        suspended = self._hooks()
        next(suspended)
        self.inner(x)
        raise ValueError("of the model")

    def _hooks(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
            yield


@pytest.mark.parametrize("outer", [False, True])
def test_no_hooks_on_saved_tensors_are_left_after_an_exception(
    offload: Offload, outer: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), _InGenerator())
    offload.parameters(model, "cpu")
    with (
        torch.autograd.graph.save_on_cpu() if outer else contextlib.nullcontext(),
        contextlib.suppress(ValueError),
    ):
        model(torch.randn(2, WIDTH))
    autograd: Any = torch._C._autograd
    assert autograd._top_saved_tensors_default_hooks(True) is None


def test_convolutions_with_channels_last_give_the_bits_of_the_run_in_memory(
    make: Callable[..., Offload],
) -> None:
    torch.manual_seed(0)
    layers = (torch.nn.Conv2d(WIDTH, WIDTH, size) for size in (3, 1, 1, 3, 1))
    model = torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)
    model.append(torch.nn.GroupNorm(2, WIDTH))
    in_memory, x = copy.deepcopy(model), torch.randn(2, WIDTH, 9, 9)
    make("1MB").parameters(model, "cpu")
    outputs = [one(x) for one in (model, in_memory)]
    assert torch.equal(*outputs)
    assert outputs[0].stride() == outputs[1].stride()
    for output in outputs:
        output.square().sum().backward()
    for one, other in zip(model.parameters(), in_memory.parameters(), strict=True):
        assert _same(one.grad, other.grad)
        assert (one.stride(), one.grad.stride()) == (other.stride(), other.grad.stride())


def test_a_parameter_that_changes_before_backward_is_detected(offload: Offload) -> None:
    model = Stack(KINDS["tied"])
    offload.parameters(model, "cpu")
    loss = model(torch.randn(3, 8, WIDTH)).sum()
    with torch.no_grad():
        model.blocks[2].first.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_model_streams_once(offload: Offload) -> None:
    model = Stack(KINDS["tied"])
    offload.parameters(model, "cpu")
    with pytest.raises(UsageError, match="streams already"):
        offload.parameters(model, "cpu")


@pytest.mark.parametrize("derives", [False, True], ids=["inference", "gradients of inputs"])
def test_threads_that_use_a_model_concurrently_get_its_bits(
    make: Callable[..., Offload], derives: bool
) -> None:
    """The threads of a server do so."""
    model = Blocks().requires_grad_(False)
    inputs = [torch.randn(2 + place, 48) for place in range(6)]

    def work(x: torch.Tensor) -> torch.Tensor:
        torch.set_num_threads(1)
        if derives:
            x = x.clone().requires_grad_()
            return torch.autograd.grad(model(x).square().sum(), x)[0]
        with torch.inference_mode():
            result: torch.Tensor = model(x)
        return result

    threads = torch.get_num_threads()
    try:
        expected = [work(x) for x in inputs]
    finally:
        torch.set_num_threads(threads)
    make().parameters(model, "cpu")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(4):
                results = list(pool.map(work, inputs, timeout=PATIENCE))
                assert all(map(torch.equal, results, expected))
    finally:
        sys.setswitchinterval(interval)
