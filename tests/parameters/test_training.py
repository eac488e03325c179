"""Training with streamed parameters: `Offload.optimizer` and `Offload.activations` give the weights of
the same run with parameters in memory.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from covering import covering
from modules import Blocks
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from nvme_offload import NVMeOptimizer, Offload, UnsupportedError, UsageError, sizes
from nvme_offload.optim import provisional
from nvme_offload.parameters import setup
from nvme_offload.parameters.buckets import Division
from nvme_offload.parameters.home import Home

Make = Callable[..., Offload]
WIDTH = 48  # of `Blocks`


def _batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def _evaluate_average(model: nn.Module, average: list[torch.Tensor]) -> torch.Tensor:
    """The outputs of *model* with the *average* of its weights in their place for a while."""
    trained = []
    for one, mean in zip(model.parameters(), average, strict=True):
        mean.lerp_(one.data, 0.1)
        trained.append(one.data)
        one.data = mean
    with torch.no_grad():
        output: torch.Tensor = model(_batch(99, average[0].dtype))
    for one, values in zip(model.parameters(), trained, strict=True):
        one.data = values
    return output


def _penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output.square().mean() + (gradient.norm(dim=1) - 1).square().mean()


def _without_gradient(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A product with a view of a weight, and none with the weight itself, outside of modules."""
    output = model(x @ cast(Any, model).blocks[-1].weight.detach())
    return (output @ cast(Any, model).blocks[0].weight.detach()).square().mean()


def _checkpointed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = cast(Any, model).blocks[-1].weight.detach()
    return model(checkpoint(torch.matmul, x, weight, use_reentrant=False)).square().mean()


@pytest.mark.parametrize("loss", [_penalty, _without_gradient, _checkpointed])
def test_views_of_weights_that_are_saved_outside_of_modules_keep_their_values(
    make: Make, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> None:
    model = Blocks(count=20)
    in_memory, offload = copy.deepcopy(model), make("2MB")
    offload.parameters(model, "cpu", gpu_memory=64 << 10)
    activations = offload.activations(min_bytes=64)
    x, other_x = (_batch(0, torch.float32).requires_grad_() for _ in range(2))
    for _ in range(2):
        with activations:
            value = loss(model, x)
        expected = loss(in_memory, other_x)
        value.backward()
        expected.backward()
        assert torch.equal(value, expected)
    pairs = zip((x, *model.parameters()), (other_x, *in_memory.parameters()), strict=True)
    for one, other in pairs:
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_a_model_that_streams_since_inference_mode_can_be_trained(make: Make) -> None:
    model = Blocks(count=20)
    in_memory, offload = copy.deepcopy(model), make("2MB")
    with torch.inference_mode():
        offload.parameters(model, "cpu")
    optimizers = (
        offload.optimizer(model.parameters(), lr=1e-2),
        torch.optim.AdamW(in_memory.parameters(), lr=1e-2, foreach=False),
    )
    assert _train(model, optimizers[0]) == _train(in_memory, optimizers[1])


@pytest.mark.parametrize("in_backward", [False, True, "provisional"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_same_after_others_took_their_place_for_a_while(
    make: Make, tmp_path: Path, dtype: torch.dtype, in_backward: Any
) -> None:
    model = Blocks(dtype=dtype, count=20)
    in_memory, offload = copy.deepcopy(model), make("2MB")
    offload.parameters(model, "cpu")
    options: dict[str, Any] = {"step_in_backward": in_backward, "lr": 1e-2}
    optimizers = (
        offload.optimizer(model.parameters(), **options),
        NVMeOptimizer(in_memory.parameters(), paths=tmp_path, host_memory="1MB", **options),
    )
    averages = [[one.data.clone() for one in in_memory.parameters()] for _ in range(2)]
    for step in range(4):
        outputs = []
        for each, optimizer, average in zip((model, in_memory), optimizers, averages, strict=True):
            _train(each, optimizer, dtype, steps=range(step, step + 1))
            outputs.append(_evaluate_average(each, average))
        assert torch.equal(*outputs)
    optimizers[1].close()
    for one, other in zip(model.parameters(), in_memory.parameters(), strict=True):
        assert torch.equal(one, other)


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dtype: torch.dtype = torch.float32,
    *,
    steps: range = range(4),
    clips: bool = False,
    accumulates: int = 1,
) -> list[float]:
    losses = []
    for step in steps:
        for part in range(accumulates):
            loss = model(_batch(10 * step + part, dtype)).float().square().mean()
            loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _assert_equal(model: nn.Module, in_memory: nn.Module) -> None:
    for one, other in zip(model.parameters(), in_memory.parameters(), strict=True):
        assert torch.equal(one, other)


MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "after backward": ({}, {"clips": True}),
    "in backward": ({"step_in_backward": True}, {}),
    "provisional": ({"step_in_backward": "provisional"}, {"clips": True}),
    "split": ({"state_format": "split"}, {"accumulates": 2}),
    "compact": ({"state_format": "compact", "step_in_backward": True}, {}),
    "accumulated in host memory": ({"accumulate": "host"}, {"accumulates": 2}),
    "without masters": ({"masters": False}, {}),
}


@covering(mode=list(MODES), dtype=[torch.float32, torch.bfloat16])
def test_the_optimizer_gives_the_weights_of_the_run_in_memory(
    make: Make, tmp_path: Path, mode: str, dtype: torch.dtype
) -> None:
    settings, training = MODES[mode]
    model = Blocks(dtype=dtype, count=20)
    in_memory = copy.deepcopy(model)
    offload = make("3MB")
    offload.parameters(model, "cpu", host_memory="64KB")
    optimizer = offload.optimizer(model.parameters(), lr=1e-2, **settings)
    losses = _train(model, optimizer, dtype, **training)
    with NVMeOptimizer(
        in_memory.parameters(), paths=tmp_path, host_memory="500KB", lr=1e-2, **settings
    ) as other:
        assert _train(in_memory, other, dtype, **training) == losses
    _assert_equal(model, in_memory)


def test_adamw_of_torch_in_memory_gives_the_same_weights(make: Make) -> None:
    model = Blocks(count=20)
    in_memory = copy.deepcopy(model)
    offload = make("3MB")
    offload.parameters(model, "cpu")
    losses = _train(model, offload.optimizer(model.parameters(), lr=1e-2))
    other = torch.optim.AdamW(in_memory.parameters(), lr=1e-2, foreach=False)
    assert _train(in_memory, other) == losses
    _assert_equal(model, in_memory)


@pytest.mark.parametrize(("slots", "most"), [(8, 40), (20, 40), (38, 6), (40, 0)])
def test_weights_that_stay_on_the_device_are_not_copied_back(
    make: Make, monkeypatch: pytest.MonkeyPatch, slots: int, most: int
) -> None:
    """*most*: the copies of a settled step, in which all of 40 buckets change."""
    model = Blocks()
    in_memory = copy.deepcopy(model)
    offload = make("3MB")
    of_bucket = sum(one.nbytes for one in model.blocks[0].parameters())
    division = Division(bucket_bytes=of_bucket, small_bytes=0, trainable_share=0)
    monkeypatch.setattr(setup, "DIVISION", division)
    offload.parameters(model, "cpu", gpu_memory=slots * (of_bucket + 320))
    optimizer = offload.optimizer(model.parameters(), lr=1e-2, step_in_backward=True)
    _train(model, optimizer)
    stored = []
    store = Home.store
    monkeypatch.setattr(Home, "store", lambda *args: (stored.append(args), store(*args)))
    _train(model, optimizer, steps=range(4, 8))
    assert len(stored) <= 4 * most
    assert (len(stored) > 0) == (most > 0)
    other = torch.optim.AdamW(in_memory.parameters(), lr=1e-2, foreach=False)
    _train(in_memory, other, steps=range(8))
    _assert_equal(model, in_memory)


@pytest.fixture
def provisional_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[Blocks, NVMeOptimizer]:
    """A model whose optimizer updates it provisionally, with states in memory, in the next step."""
    monkeypatch.setattr(provisional, "BESIDE_ON", {"cpu"})
    return _after_some_steps(make, "100KB")


def _after_some_steps(make: Make, gpu_memory: str) -> tuple[Blocks, NVMeOptimizer]:
    model = Blocks()
    offload = make("6MB")
    offload.parameters(model, "cpu", gpu_memory=gpu_memory)
    optimizer = offload.optimizer(model.parameters(), lr=1e-2, step_in_backward="provisional")
    _train(model, optimizer, clips=False)
    return model, optimizer


def _backward(model: Blocks) -> None:
    model(_batch(0, torch.float32)).square().mean().backward()


@pytest.mark.parametrize("several", [False, True])
def test_the_end_of_a_provisional_step_brings_no_weights_back(
    make: Make, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    """Also where *several* buckets of the optimizer have the weights of a streamed one."""
    monkeypatch.setattr(provisional, "BESIDE_ON", {"cpu"})
    if several:
        monkeypatch.setattr(sizes, "LARGEST_BUCKET_BYTES", 50 << 10)
        division = Division(24 << 10, small_bytes=0, trainable_share=0)
        monkeypatch.setattr(setup, "DIVISION", division)
    model, optimizer = _after_some_steps(make, "330KB" if several else "100KB")
    _backward(model)
    filled, compared = [], []
    fill, compare = Home.fill, provisional._fingerprint_of_weight
    monkeypatch.setattr(Home, "fill", lambda *args: (filled.append(args), fill(*args)))
    monkeypatch.setattr(
        provisional, "_fingerprint_of_weight", lambda one: (compared.append(one), compare(one))[1]
    )
    optimizer.step()
    stats = optimizer.stats()
    assert stats.buckets > 15 * several
    assert stats.updated_in_backward >= 0.9 * stats.buckets
    assert not compared
    assert several or not filled


@pytest.mark.parametrize("kept", ["not", "before the step", "in the forward pass"])
def test_a_weight_that_changes_after_its_provisional_update_is_noticed(
    provisional_step: tuple[Blocks, NVMeOptimizer], kept: str
) -> None:
    model, optimizer = provisional_step
    block: Any = model.blocks[3]
    weight = next(block.parameters())
    views = [weight.data] if kept == "before the step" else []
    if kept == "in the forward pass":
        block.register_forward_hook(lambda *_: views.append(weight.data))
    _backward(model)
    (views or [weight.data])[0].add_(0.25)
    del views[:]
    with pytest.raises(UsageError, match="changed between backward"):
        optimizer.step()


def test_a_weight_that_is_looked_at_after_its_provisional_update_keeps_it(
    provisional_step: tuple[Blocks, NVMeOptimizer],
) -> None:
    model, optimizer = provisional_step
    _backward(model)
    norms = [one.data.norm() for one in model.parameters()]
    optimizer.step()
    assert [one.data.norm() for one in model.parameters()] == norms


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_offloaded_with_streamed_parameters(
    make: Make, checkpointing: bool
) -> None:
    model = Blocks(checkpointing, count=20)
    in_memory = copy.deepcopy(model)
    offload = make("4MB")
    offload.parameters(model, "cpu")
    optimizer = offload.optimizer(model.parameters(), lr=1e-2)
    context = offload.activations(min_bytes=256)
    other = torch.optim.AdamW(in_memory.parameters(), lr=1e-2, foreach=False)
    for step in range(3):
        for one, update in ((model, optimizer), (in_memory, other)):
            with context:
                loss = one(_batch(step, torch.float32)).square().mean()
            loss.backward()
            update.step()
            update.zero_grad()
    assert context.stats().saved_bytes > 0
    _assert_equal(model, in_memory)


def test_adapters_train_on_the_device_over_a_frozen_base(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Parameter(torch.randn(WIDTH, 1) / 10)
            self.up = nn.Parameter(torch.zeros(1, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + x @ self.down @ self.up

    monkeypatch.setattr(setup, "DIVISION", Division(20 << 10, small_bytes=0))
    model = Blocks(checkpointing=True, count=20)
    model.blocks = nn.ModuleList(map(Adapted, model.blocks))
    in_memory = copy.deepcopy(model)
    make("1MB").parameters(model, "cpu")
    trained = [
        [one for one in each.parameters() if one.requires_grad] for each in (model, in_memory)
    ]
    assert all(type(one) is nn.Parameter for one in trained[0])
    for each, parameters in zip((model, in_memory), trained, strict=True):
        _train(each, torch.optim.AdamW(parameters, lr=0.1))
    _assert_equal(model, in_memory)


def test_a_training_resumes_from_a_state_dict_and_the_saved_states(
    make: Make, tmp_path: Path
) -> None:
    model = Blocks(dtype=torch.bfloat16, count=20)
    offload = make("3MB")
    offload.parameters(model, "cpu")
    optimizer = offload.optimizer(model.parameters(), lr=1e-2, state_format="split")
    _train(model, optimizer, torch.bfloat16, steps=range(2))
    state = model.state_dict()
    optimizer.save(tmp_path / "states")
    expected = _train(model, optimizer, torch.bfloat16, steps=range(2, 4))

    resumed = Blocks(dtype=torch.bfloat16, count=20)
    other = make("3MB")
    other.parameters(resumed, "cpu")
    resumed.load_state_dict(state)
    again = other.optimizer(resumed.parameters(), lr=1e-2, state_format="split")
    again.load(tmp_path / "states")
    assert _train(resumed, again, torch.bfloat16, steps=range(2, 4)) == expected
    _assert_equal(resumed, model)


def test_a_change_by_the_program_between_steps_reaches_the_masters(
    make: Make, tmp_path: Path
) -> None:
    model = Blocks(dtype=torch.bfloat16, count=20)
    in_memory = copy.deepcopy(model)
    offload = make("3MB")
    offload.parameters(model, "cpu")
    own = offload.optimizer(model.parameters(), lr=1e-2)
    with NVMeOptimizer(
        in_memory.parameters(), paths=tmp_path, host_memory="500KB", lr=1e-2
    ) as other:
        for step in range(3):
            for each, optimizer in ((model, own), (in_memory, other)):
                _train(each, optimizer, torch.bfloat16, steps=range(step, step + 1))
                with torch.no_grad():
                    for one in each.parameters():
                        one.data = one.detach() * 0.9
    _assert_equal(model, in_memory)


def test_updates_under_the_next_forward_pass_are_refused(make: Make) -> None:
    model = Blocks()
    offload = make("3MB")
    offload.parameters(model, "cpu")
    with pytest.raises(UnsupportedError, match="step_in_backward"):
        offload.optimizer(model.parameters(), overlap_step=True)


def test_the_parts_share_one_budget(make: Make) -> None:
    offload = make("3MB")
    model = Blocks()
    with pytest.raises(UsageError, match="that Offload has left"):
        offload.parameters(model, "cpu", host_memory="4MB")
    offload.parameters(model, "cpu", host_memory="2MB")
    with pytest.raises(UsageError, match="that Offload has left"):
        offload.optimizer(model.parameters(), host_memory="2MB")
    offload.optimizer(model.parameters(), host_memory="1MB")


@pytest.mark.parametrize("respects", [None, True])
@pytest.mark.parametrize("kept", ["products", "every result"])
def test_selective_checkpoints(make: Make, kept: str, respects: bool | None) -> None:
    """Their modes count operations, of which streaming is none."""

    def policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        saves = kept == "every result" or "mm" in operator.name()
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    settings: dict[str, Any] = {"use_reentrant": False}
    settings["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    if respects is not None:
        if "respect_saved_tensors_hooks" not in inspect.signature(checkpoint).parameters:
            pytest.skip("torch is older than 2.14")
        settings["respect_saved_tensors_hooks"] = respects

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
                for _ in range(12)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + checkpoint(block, x, **settings)
            return x

    model = Checkpointed()
    in_memory = copy.deepcopy(model)
    offload = make("400KB")
    offload.parameters(model, "cpu", gpu_memory=6 * 4 * WIDTH * WIDTH)
    own = offload.optimizer(model.parameters(), lr=1e-2, step_in_backward=True)
    losses = _train(model, own)
    assert losses == _train(in_memory, torch.optim.AdamW(in_memory.parameters(), lr=1e-2))
    _assert_equal(model, in_memory)
