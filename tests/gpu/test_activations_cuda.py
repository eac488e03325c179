"""Saved activations of a GPU on a drive: the same gradients to the bit, and less memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "activations"))
from activation_models import MODELS, Attention, Feed, gradients, made, same
from torch import nn
from torch.utils.checkpoint import checkpoint

from nvme_offload import UnsupportedError, save_on_nvme

Make = Callable[..., save_on_nvme]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same call gives the same bits."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    contexts = []

    def context(host_memory: int | str, min_bytes: int = 1 << 10) -> save_on_nvme:
        contexts.append(save_on_nvme(tmp_path, min_bytes, host_memory))
        return contexts[-1]

    yield context
    gc.collect()
    torch.cuda.synchronize()
    for offload in contexts:
        with offload:
            pass
        assert (offload.stats().alive_bytes, offload.stats().host_bytes) == (0, 0)
        offload.close()


def blocks(count: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(Attention(width), Feed(width)) for _ in range(count))).to(
        "cuda"
    )


@pytest.mark.parametrize("host_memory", ["2 MB", "auto"])
# whose gather has no deterministic gradient there
@pytest.mark.parametrize("name", [name for name in MODELS if name != "odd"])
def test_gradients_are_the_same_bits_in_every_step(name: str, host_memory: str, make: Make) -> None:
    model, x = made(name, "cuda")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    expected = [gradients(model, x, seed=seed) for seed in range(3)]
    model.load_state_dict(state)
    offload = make(host_memory)
    for seed in range(3):
        assert same(gradients(model, x, offload, seed=seed), expected[seed])
    assert offload.stats().saved_bytes > 100_000


def test_through_the_drive_while_the_host_runs_ahead(make: Make) -> None:
    model = blocks(8, 256)
    x = torch.randn(64, 64, 256, device="cuda")
    expected = gradients(model, x)
    offload = make(40 << 20)
    for _ in range(4):
        assert same(gradients(model, x, offload), expected)
    stats = offload.stats()
    assert min(stats.bytes_written, stats.bytes_read) > stats.saved_bytes // 2
    assert stats.peak_host_bytes <= 40 << 20


def test_several_graphs_and_a_backward_inside(make: Make) -> None:
    model = blocks(3, 128).eval()
    batches = torch.randn(3, 16, 64, 128, device="cuda")

    def step(context: Any) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        losses = []
        for batch in batches:
            with context:
                losses.append(model(batch).square().mean())
        losses[1].backward()
        with context:
            losses[0].backward()
        losses[2].backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = step(
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor.detach(), lambda tensor: tensor
        )
    )
    offload = make(8 << 20)
    for _ in range(3):
        assert same(step(offload), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_halves_of_a_model_on_two_gpus(make: Make) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.halves = nn.ModuleList([blocks(4, 256), blocks(4, 256).to("cuda:1")])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.halves[1](self.halves[0](x).to("cuda:1"))
            return found

    model = Halves()
    x = torch.randn(64, 64, 256, device="cuda")
    expected = gradients(model, x)
    offload = make(40 << 20)
    for _ in range(3):
        assert same(gradients(model, x, offload), expected)
    assert offload.stats().bytes_read > 10_000_000


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks(reentrant: bool, make: Make) -> None:
    model = blocks(4, 128)
    x = torch.randn(16, 64, 128, device="cuda", requires_grad=True)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x * 1.0, use_reentrant=reentrant)
            return x

    whole = Checkpointed()
    expected = gradients(whole, x)
    offload = make(2 << 20)
    for _ in range(2):
        assert same(gradients(whole, x, offload), expected)


# of streams that differ, as they do by intent
@pytest.mark.filterwarnings("ignore:.*AccumulateGrad")
def test_under_autocast_with_a_side_stream(make: Make) -> None:
    model = blocks(3, 128)
    x = torch.randn(16, 64, 128, device="cuda")
    offload = make(4 << 20)
    with torch.autocast("cuda", torch.bfloat16):
        expected = gradients(model, x)
        assert same(gradients(model, x, offload), expected)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                assert same(gradients(model, x, offload), expected)
        torch.cuda.current_stream().wait_stream(side)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:TensorFloat32",
    "ignore:.*torch.jit.script_method",
)
def test_compiled_blocks(make: Make) -> None:
    torch._dynamo.reset()
    model = blocks(3, 128).eval()
    for block in model:
        block.compile(backend="aot_eager")
    x = torch.randn(16, 64, 128, device="cuda")
    expected = gradients(model, x)
    offload = make(16 << 20)
    for _ in range(2):
        assert same(gradients(model, x, offload), expected)
    assert offload.stats().saved_bytes > 10_000_000
    torch._dynamo.reset()


def test_the_peak_of_memory_falls(make: Make) -> None:
    model = blocks(12, 512)
    x = torch.randn(128, 64, 512, device="cuda")

    def peak(context: Any) -> int:
        for _ in range(2):
            gradients(model, x, context)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(model, x, context)
        return torch.cuda.max_memory_allocated() - before

    plain = peak(None)
    offload = make("256 MiB", min_bytes=1 << 20)
    ours = peak(offload)
    saved = offload.stats().saved_bytes / 3
    assert ours < plain - 0.7 * saved
    assert ours < 0.5 * plain


def test_nothing_stays_on_the_device_after_an_exception(make: Make) -> None:
    model = blocks(4, 256)
    x = torch.randn(64, 64, 256, device="cuda")
    gradients(model, x)
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    offload = make("512 MiB", min_bytes=1 << 20)

    def broken() -> None:
        with offload:
            y = model(x)
            raise ValueError(y.shape)

    with pytest.raises(ValueError, match="64"):
        broken()
    gc.collect()
    offload.stats()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_graph_that_is_captured_is_refused(make: Make) -> None:
    model = blocks(1, 128)
    x = torch.randn(16, 64, 128, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients(model, x)  # sets up libraries at their first use
    torch.cuda.current_stream().wait_stream(side)
    offload = make("64 MiB")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UnsupportedError, match="CUDA graph"), torch.cuda.graph(graph), offload:
        model(x)
