"""Blocks that torch.compile compiles stream like others, with the bits of the compiled model in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nvme_offload import NVMeOptimizer, Offload, UnsupportedError

# dynamo asks each tensor for its gradient, and hides torch's warning, but not if it is an error
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor", "ignore:.torch.jit.*is deprecated"
)
Make = Callable[..., Offload]
# of six slots; a block has parameters in three buckets
_GPU_BYTES = 6 * 10_240


class _Block(nn.Module):
    """With its own parameter, and a break of the graph if *breaks*."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(24, 48), nn.Linear(48, 24)
        self.scale = nn.Parameter(torch.ones(24, 24))
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.wide(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.narrow(hidden) @ self.scale


class _Model(nn.Module):
    """With a tied weight."""

    def __init__(self, breaks: bool = False, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(50, 24), nn.Linear(24, 50, bias=False)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(_Block(breaks) for _ in range(4))
        self.is_checkpointed = is_checkpointed

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.first(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.last(x)


def _in_place(model: _Model, backend: str) -> None:
    for block in model.blocks:
        block.compile(backend=backend)


def _wrapped(model: _Model, backend: str) -> None:
    for number, block in enumerate(model.blocks):
        wrapped: Any = torch.compile(block, backend=backend)
        model.blocks[number] = wrapped


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Forget what other tests have compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("model", "compiles", "backend"),
    [
        (_Model(), _in_place, "eager"),
        (_Model(), _wrapped, "aot_eager"),
        (_Model(is_checkpointed=True), _in_place, "aot_eager"),
        (_Model(breaks=True), _in_place, "aot_eager"),
        pytest.param(_Model(), _in_place, "inductor", marks=pytest.mark.slow),
        pytest.param(_Model(is_checkpointed=True), _wrapped, "inductor", marks=pytest.mark.slow),
    ],
    ids=["eager", "wrapped", "checkpointed", "breaks", "inductor", "inductor, checkpointed"],
)
def test_compiled_blocks_train_as_in_memory(
    make: Make,
    tmp_path: Any,
    caplog: pytest.LogCaptureFixture,
    model: _Model,
    compiles: Callable[[_Model, str], None],
    backend: str,
) -> None:
    mine, in_memory = copy.deepcopy(model), copy.deepcopy(model)
    for one in (mine, in_memory):
        compiles(one, backend)
    offload = make(400_000)
    offload.parameters(mine, "cpu", gpu_memory=_GPU_BYTES)
    own = offload.optimizer(mine.parameters(), lr=1e-2, step_in_backward=True)
    with NVMeOptimizer(
        in_memory.parameters(), paths=tmp_path, lr=1e-2, step_in_backward=True, host_memory="64MB"
    ) as other:
        for step in range(4):
            words = torch.randint(50, (3, 7), generator=torch.Generator().manual_seed(step))
            found = []
            for one, optimizer in ((mine, own), (in_memory, other)):
                loss = one(words).log_softmax(-1)[..., 0].mean()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    found.append((loss.detach(), one(words)))
            for ours, expected in zip(*found, strict=True):
                assert torch.equal(ours, expected)
    state = in_memory.state_dict()
    assert all(torch.equal(values, state[name]) for name, values in mine.state_dict().items())
    assert "more is taken" not in caplog.text


@pytest.mark.parametrize("breaks", [False, True])
def test_what_is_compiled_is_the_same_as_in_memory(make: Make, breaks: bool) -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(str(graph.code))
        return graph.forward

    model = _Model(breaks)
    # before torch 2.15, dynamo skips torch's code
    model.blocks.append(nn.Sequential(nn.Linear(24, 24), nn.Tanh()))
    in_memory = copy.deepcopy(model)
    for block in (*in_memory.blocks, *model.blocks):
        block.compile(backend=backend)
    for _ in range(3):
        in_memory(torch.arange(7)).sum().backward()
    expected, graphs = graphs, []
    assert len(expected) in ((2, 3) if breaks else (1, 2))
    torch._dynamo.reset()
    make().parameters(model, "cpu", gpu_memory=_GPU_BYTES)
    for _ in range(3):  # one graph serves all blocks
        model(torch.arange(7)).sum().backward()
    assert graphs == expected


def test_an_exception_in_a_compiled_block_ends_its_uses(make: Make) -> None:
    def backend(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            if fails:
                raise KeyError
            return graph(*args)

        return run

    fails = False
    model = _Model()
    expected = copy.deepcopy(model)(torch.arange(7))
    model.blocks[1].compile(backend=backend)
    make().parameters(model, "cpu", gpu_memory=_GPU_BYTES)
    assert torch.equal(model(torch.arange(7)), expected)
    fails = True
    with pytest.raises(KeyError):
        model(torch.arange(7))
    fails = False
    assert torch.equal(model(torch.arange(7)), expected)


def test_a_compiled_model_and_frozen_parameters_are_refused(make: Make) -> None:
    whole = _Model()
    whole.compile(backend="eager")
    for model in (whole, torch.compile(_Model(), backend="eager")):
        with pytest.raises(UnsupportedError, match="compile the blocks of the model"):
            make().parameters(model, "cpu")
    model = _Model()
    _in_place(model, "eager")
    make().parameters(model, "cpu")
    from torch._inductor import config

    untyped: Any = config
    with (
        untyped.patch(freezing=True),
        torch.no_grad(),
        pytest.raises(UnsupportedError, match="freezing makes parameters"),
    ):
        model(torch.arange(7))
    assert not untyped.freezing
