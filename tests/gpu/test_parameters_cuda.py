"""Parameters that stream to a GPU: the bits of the model in GPU memory, and less of that memory."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "parameters"))
from modules import KINDS, WAYS, WIDTH, Stack
from torch import nn

from nvme_offload import NVMeOptimizer, Offload
from nvme_offload.errors import UnsupportedError, UsageError
from nvme_offload.parameters import setup
from nvme_offload.parameters.buckets import Division
from nvme_offload.sizes import MARGIN_PARTS

DEVICE = "cuda"

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

Make = Callable[..., Offload]
WIDE = 512
_AHEAD = 100_000


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same call gives the same bits; unused slots have NaN; buckets have two of `_blocks`."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(setup, "POISON", True)
    monkeypatch.setattr(setup, "DIVISION", Division(2200 << 10, small_bytes=0, trainable_share=0))
    torch.use_deterministic_algorithms(True)
    # Autograd runs the nodes with the highest sequence numbers first, and adds gradients in that order. Each
    # thread has separate numbers, and both make nodes in second-order backward passes through
    # checkpoints: with this thread far ahead, the order does not depend on earlier tests.
    one = torch.ones(1, requires_grad=True)
    while torch._C._autograd._get_sequence_nr() < _AHEAD:
        one * 1
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Offload] = []

    def offload(host_memory: int | str) -> Offload:
        made.append(Offload(tmp_path, host_memory))
        return made[-1]

    yield offload
    for one in made:
        one.close()


def _blocks(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(24))).to(
        dtype
    )


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, *, clips: bool
) -> list[float]:
    losses = []
    for step in range(4):
        x = torch.randn(64, WIDE, generator=torch.Generator().manual_seed(step))
        loss = model(x.to(DEVICE, dtype)).float().square().mean()
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("checkpointing", ["", "other", "reentrant"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_train_gives_the_bits_of_the_model_on_the_gpu(
    make: Make, monkeypatch: pytest.MonkeyPatch, kind: str, checkpointing: str
) -> None:
    monkeypatch.setattr(setup, "DIVISION", Division(3 << 10, small_bytes=0, trainable_share=0))
    offload = make("1MB")
    for way in WAYS:
        torch.manual_seed(0)
        x = torch.randn(3, 8, WIDTH).to(DEVICE).requires_grad_()
        y = torch.randint(0, 7, (24,)).to(DEVICE)
        model = Stack(KINDS[kind], checkpointing)
        on_gpu = copy.deepcopy(model).to(DEVICE)
        try:
            expected = [way(on_gpu, x, y) for _ in range(2)]
        except RuntimeError:
            continue  # torch refuses it
        offload.parameters(model, DEVICE)
        losses = [way(model, x, y) for _ in range(2)]
        assert all(map(_same, losses, expected)), way
        for one, other in zip(model.parameters(), on_gpu.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), way
            assert one.grad is None or _same(one.grad, other.grad), way


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("host_memory", ["200MB", "30MB"])
@pytest.mark.parametrize("settings", [{}, {"step_in_backward": True}, {"state_format": "compact"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_optimizer_gives_the_weights_of_the_model_on_the_gpu(
    make: Make, tmp_path: Path, settings: dict[str, Any], dtype: torch.dtype, host_memory: str
) -> None:
    """With all values in host memory, and with most on the drive."""
    model = _blocks(dtype)
    on_gpu = copy.deepcopy(model).to(DEVICE)
    offload = make(host_memory)
    offload.parameters(model, DEVICE, gpu_memory="10MB")
    own = offload.optimizer(model.parameters(), lr=1e-2, **settings)
    clips = not settings.get("step_in_backward")
    losses = _train(model, own, dtype, clips=clips)
    with NVMeOptimizer(
        on_gpu.parameters(), paths=tmp_path, host_memory="200MB", lr=1e-2, **settings
    ) as other:
        assert _train(on_gpu, other, dtype, clips=clips) == losses
    for one, same in zip(model.parameters(), on_gpu.parameters(), strict=True):
        assert torch.equal(one, same)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"step_in_backward": True}, {"step_in_backward": True, "state_format": "compact"}],
)
def test_halves_of_a_model_stream_to_two_gpus(
    make: Make, tmp_path: Path, settings: dict[str, Any], fused: bool
) -> None:
    """The second is not the current device."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.halves = nn.ModuleList([_blocks(torch.bfloat16), _blocks(torch.bfloat16)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.halves[1](self.halves[0](x).to("cuda:1"))
            return found

    model = Halves()
    in_memory = copy.deepcopy(model)
    offload = make("60MB")
    for index in range(2):
        in_memory.halves[index].to(f"cuda:{index}")
        offload.parameters(model.halves[index], f"cuda:{index}", gpu_memory="10MB")
    settings = {"lr": 1e-2, "fused": fused, **settings}
    own = offload.optimizer(model.parameters(), **settings)
    losses = _train(model, own, torch.bfloat16, clips=False)
    with NVMeOptimizer(
        in_memory.parameters(), paths=tmp_path, host_memory="200MB", **settings
    ) as other:
        assert _train(in_memory, other, torch.bfloat16, clips=False) == losses
    for one, same in zip(model.parameters(), in_memory.parameters(), strict=True):
        assert torch.equal(one, same)


def test_auto_takes_no_more_than_the_process_may(make: Make) -> None:
    """100 MB of weights, where the process may take 64 MB more than 256 MB. A tenth of the limit is kept
    free, which has to cover the 20 MB of one allocation of PyTorch.
    """
    model = nn.Sequential(*(_blocks() for _ in range(4)))
    torch.cuda.empty_cache()
    kept = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    most = torch.cuda.memory_reserved() + (64 << 20)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(most / total)
    try:
        make("400MB").parameters(model, DEVICE)
        with torch.inference_mode():
            for _ in range(4):
                model(torch.ones(2, WIDE, device=DEVICE))
        assert torch.cuda.max_memory_reserved() <= most
        assert kept.is_cuda
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_longer_sequences_get_the_memory_of_weights(make: Make) -> None:
    """Weights of 100 MB are all on the GPU, until activations of 200 MB need some of 250 MB."""
    model = nn.Sequential(*(_blocks() for _ in range(4))).requires_grad_(False)
    on_gpu = copy.deepcopy(model).to(DEVICE)
    inputs = [torch.randn(size, WIDE, device=DEVICE) for size in (64, 64, 64, 1024, 1024, 64)]

    def gradient(of: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(of(x.requires_grad_()).square().mean(), x)[0]

    expected = [gradient(on_gpu, x) for x in inputs]
    gc.collect()  # tensors of earlier tests, which would be freed between two looks at the memory
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    # `DeviceRoom` leaves a tenth of the limit free, which includes tensors of other tests
    most = (torch.cuda.memory_allocated() + (252 << 20)) * MARGIN_PARTS // (MARGIN_PARTS - 1)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(most / total)
    before = torch.cuda.memory_allocated()
    held = []
    try:
        make("400MB").parameters(model, DEVICE)
        for x, same in zip(inputs, expected, strict=True):
            assert torch.equal(gradient(model, x), same)
            held.append(torch.cuda.memory_allocated() - before)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert held[2] > 100e6
    assert max(held[3:]) < 80e6


@pytest.mark.parametrize("gpu_memory", ["10MB", "16MB", "40MB", "auto"])
def test_every_share_of_the_model_on_the_gpu_gives_the_same_bits(
    make: Make, gpu_memory: str
) -> None:
    model = _blocks()
    on_gpu = copy.deepcopy(model).to(DEVICE)
    make("200MB").parameters(model, DEVICE, gpu_memory=gpu_memory)
    for step in range(4):
        x = torch.randn(64, WIDE, device=DEVICE)
        for each in (model, on_gpu):
            each(x).square().mean().backward()
        with torch.no_grad():
            assert torch.equal(model(x), on_gpu(x)), step
    for one, other in zip(model.parameters(), on_gpu.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def _peak(model: nn.Module, x: torch.Tensor) -> int:
    """The peak of GPU memory in inference, in bytes, less the memory that was in use before. Both as
    requested: PyTorch's allocator rounds up by as much as 1 MiB, depending on earlier tests.
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        for _ in range(3):
            model(x)
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def test_inference_takes_the_memory_that_was_asked_for(make: Make) -> None:
    model = _blocks()
    x = torch.randn(8, WIDE, device=DEVICE)
    beside = _peak(copy.deepcopy(model).to(DEVICE), x)  # activations, and workspaces of cuBLAS
    whole = sum(one.nbytes for one in model.parameters())
    make("200MB").parameters(model, DEVICE, gpu_memory="10MB")
    assert _peak(model, x) <= 10_000_000 + beside < whole / 2 + beside


def test_the_address_of_an_idle_parameter_is_refused(make: Make) -> None:
    model = _blocks()
    make("200MB").parameters(model, DEVICE, gpu_memory="10MB")
    idle = next(one for one in model.parameters() if one.ndim > 1)
    with pytest.raises(UsageError, match="__cuda_array_interface__ needs the address"):
        _ = idle.__cuda_array_interface__
    assert idle.detach().clone().__cuda_array_interface__["shape"] == tuple(idle.shape)


def test_kernels_that_run_late_read_the_values_of_their_time(make: Make) -> None:
    """The CPU is far ahead of the GPU, and slots are filled again while kernels wait."""
    model = _blocks()
    on_gpu = copy.deepcopy(model).to(DEVICE)
    make("200MB").parameters(model, DEVICE, gpu_memory="10MB")
    x = torch.randn(64, WIDE, device=DEVICE)
    with torch.inference_mode():
        expected = on_gpu(x)
        for _ in range(3):
            torch.cuda._sleep(200_000_000)
            assert torch.equal(model(x), expected)


def test_a_pass_on_another_stream_has_its_values(make: Make) -> None:
    model = _blocks()
    on_gpu = copy.deepcopy(model).to(DEVICE)
    make("200MB").parameters(model, DEVICE, gpu_memory="10MB")
    x = torch.randn(64, WIDE, device=DEVICE)
    stream = torch.cuda.Stream()
    with torch.inference_mode():
        expected = on_gpu(x)
        stream.wait_stream(torch.cuda.current_stream())
        for _ in range(3):
            with torch.cuda.stream(stream):
                found = model(x)
            assert torch.equal(model(x), expected)
            torch.cuda.current_stream().wait_stream(stream)
            assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_graph_that_is_captured_is_refused(make: Make) -> None:
    model = _blocks()
    x = torch.randn(64, WIDE, device=DEVICE)
    make("200MB").parameters(model, DEVICE)
    with torch.inference_mode():
        expected = model(x)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(UnsupportedError, match="CUDA graph"), torch.cuda.graph(graph):
            model(x)
        assert torch.equal(model(x), expected)


@pytest.mark.filterwarnings("ignore")  # of the compiler's parts
def test_graphs_of_the_compiler_have_the_values_of_their_replay(make: Make, tmp_path: Path) -> None:
    mine = _blocks()[:8]
    in_memory = copy.deepcopy(mine).to(DEVICE)
    for model in (mine, in_memory):
        for block in model:
            block.compile(mode="reduce-overhead")
    offload = make("200MB")
    offload.parameters(mine, DEVICE, gpu_memory="10MB")
    settings: dict[str, Any] = {"lr": 1e-3, "fused": True, "step_in_backward": True}
    own = offload.optimizer(mine.parameters(), **settings)
    x = torch.randn(64, WIDE, device=DEVICE)
    with NVMeOptimizer(
        in_memory.parameters(), paths=tmp_path, host_memory="200MB", **settings
    ) as other:
        for step in range(6):
            losses = []
            for model, optimizer in ((mine, own), (in_memory, other)):
                torch.compiler.cudagraph_mark_step_begin()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            assert losses[0] == losses[1], step
    for one, same in zip(mine.parameters(), in_memory.parameters(), strict=True):
        assert torch.equal(one, same)
