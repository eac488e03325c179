"""Gradients are the bits that they are without, whatever a model saves and however little memory
there is.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from activation_models import MODELS, gradients, made, same
from offloading import Make, left


@pytest.mark.parametrize("host_memory", ["smallest", "more", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_bits_in_every_step(name: str, host_memory: str, make: Make) -> None:
    model, x = made(name)
    model.train()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    expected = [gradients(model, x, seed=seed) for seed in range(3)]
    model.load_state_dict(state)
    largest = 0

    def look(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, tensor.untyped_storage().nbytes())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        model(x)
    model.load_state_dict(state)
    offload = make(
        host_memory={"smallest": largest, "more": 3 * largest, "auto": "auto"}[host_memory]
    )
    for seed in range(3):
        assert same(gradients(model, x, offload, seed=seed), expected[seed])
        assert left(offload) == (0, 0, [])
    stats = offload.stats()
    assert stats.saved_bytes > 100_000
    if host_memory == "smallest":
        assert min(stats.bytes_written, stats.bytes_read) > stats.saved_bytes // 2
        assert stats.peak_host_bytes <= -(-largest // 4096) * 4096
    if host_memory == "auto":
        assert stats.bytes_written == stats.bytes_read == 0


def test_under_autocast(make: Make) -> None:
    model, x = made("transformer")
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(model, x)
        assert same(gradients(model, x, make(host_memory=200_000)), expected)


def test_the_gates_of_a_recurrent_layer_which_share_memory_but_not_the_count_of_modifications(
    make: Make,
) -> None:
    torch.manual_seed(3)
    model, x = torch.nn.GRU(16, 32, num_layers=2), torch.randn(20, 8, 16)

    def step(context: contextlib.AbstractContextManager[object]) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        with context:
            loss = model(x)[0].sin().sum()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = step(contextlib.nullcontext())
    for host_memory in (96 << 10, 8 << 20):
        assert same(step(make(host_memory=host_memory)), expected)


def test_weights_stay_where_they_are_frozen_or_not(make: Make) -> None:
    model, x = made("layers")
    frozen, trained = model[:2].requires_grad_(False), model[2:]
    whole = torch.nn.Sequential(frozen, trained).eval()
    expected = gradients(trained, frozen(x))
    offload = make()
    torch.manual_seed(1)
    trained.zero_grad()
    with offload:
        loss = whole(x).float().square().mean()
    # weights would be as many each
    assert (
        offload.stats().saved_bytes
        == offload.stats().alive_bytes
        == storages_saved(whole, x) * 64 * 64 * 4
    )
    loss.backward()
    del loss
    assert same([parameter.grad.clone() for parameter in trained.parameters()], expected)


def storages_saved(model: torch.nn.Module, x: torch.Tensor) -> int:
    """How many storages the graph of *model* saves that are no parameter's, and of 1 KiB at
    least.
    """
    saved: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        loss = model(x).square().mean()
    del loss
    storages = {
        tensor.untyped_storage().data_ptr()
        for tensor in saved
        if tensor.untyped_storage().nbytes() >= 1024
    }
    return len(
        storages - {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    )
