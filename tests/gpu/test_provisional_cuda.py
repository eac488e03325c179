"""`step_in_backward="provisional"` with parameters on a GPU: the bits of updates after backward(),
whether or not clipping undoes them, and a fingerprint that detects a change of any bit there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "optim"))
from reference import Reference, differing

from nvme_offload.optim import NVMeOptimizer
from nvme_offload.optimizer_states.fingerprint import fingerprint

pytestmark = pytest.mark.usefixtures("nothing_is_compiled")

WIDTH, LAYERS, STEPS = 512, 12, 9


def model(dtype):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(
        "cuda", dtype
    )


def train(net, optimizer, clipping):
    """The norms, and of each step how many buckets were updated in backward() and again."""
    norms, counts = [], []
    for step in range(STEPS):
        net.zero_grad()
        inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
        net(inputs.to("cuda", net[0].weight.dtype)).float().square().mean().backward()
        limit = {"never": 1e9, "always": 1e-6, "sometimes": 1e-6 if step in (3, 6) else 1e9}
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), limit[clipping]))
        optimizer.step()
        if isinstance(optimizer, NVMeOptimizer):
            stats = optimizer.stats()
            counts.append((stats.updated_in_backward, stats.rolled_back))
    return norms, counts


# The second holds two versions of all states.
@pytest.mark.parametrize("host_memory", ["8MB", "100MB"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clipping", ["never", "sometimes", "always"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_as_in_memory(tmp_path, dtype, clipping, fused, host_memory):
    plain, ours = model(dtype), model(dtype)
    reference = Reference(list(plain.parameters()), torch.optim.AdamW, fused=fused)
    expected, _ = train(plain, reference, clipping)
    with NVMeOptimizer(
        ours.parameters(),
        fused=fused,
        paths=tmp_path,
        host_memory=host_memory,
        step_in_backward="provisional",
    ) as optimizer:
        norms, counts = train(ours, optimizer, clipping)
    assert differing(norms, expected) == []
    assert differing(list(ours.parameters()), list(plain.parameters())) == []
    made, undone = (sum(each) for each in zip(*counts, strict=True))
    assert (made > 0) == (clipping != "always")
    assert (undone > 0) == (clipping == "sometimes")


@pytest.mark.parametrize("host_memory", ["4MB", "80MB"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("clipping", ["never", "sometimes"])
@pytest.mark.parametrize("state_format", ["split", "compact", "compact24"])
def test_the_same_bits_as_without(tmp_path, state_format, clipping, overlap, host_memory):
    trained = []
    for more in ({}, {"step_in_backward": "provisional", "overlap_step": overlap}):
        net = model(torch.bfloat16)
        options = {
            "paths": tmp_path,
            "host_memory": host_memory,
            "state_format": state_format,
            **more,
        }
        with NVMeOptimizer(net.parameters(), **options) as optimizer:
            _, counts = train(net, optimizer, clipping)
            states = optimizer.state_dict()["state"]
        trained.append(
            [*net.parameters(), *(value for state in states.values() for value in state.values())]
        )
    assert differing(*trained) == []
    made, undone = (sum(each) for each in zip(*counts, strict=True))
    assert made > undone
    assert (undone > 0) == (clipping == "sometimes")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_fingerprint_tells_any_bit(dtype):
    values = torch.randn(3, 77, device="cuda").to(dtype)[:, 1:]
    before = fingerprint(values)
    for place in range(0, values.numel() * values.element_size() * 8, 31):
        other = values.clone()
        other.view(-1).view(torch.uint8)[place // 8] ^= 1 << place % 8
        assert not torch.equal(fingerprint(other), before), place
    assert not torch.equal(fingerprint(-values), before)
