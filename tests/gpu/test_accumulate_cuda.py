"""`accumulate="host"` with parameters on a GPU: the bits of accumulation there, and memory for no
more than the gradients that are on their way.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "optim"))
from reference import Reference, differing
from test_ranks import cases_of, results_of_ranks

from nvme_offload.optim import NVMeOptimizer
from nvme_offload.optim.host_gradient import HostGradient
from nvme_offload.update import gradients

WIDTH, LAYERS, STEPS, MICRO_BATCHES = 512, 12, 4, 3


def model(dtype, width=WIDTH, layers=LAYERS):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to(
        "cuda", dtype
    )


def backward(net, number):
    weight = net[0].weight
    inputs = torch.randn(16, weight.shape[1], generator=torch.Generator().manual_seed(number))
    net(inputs.to("cuda", weight.dtype)).float().square().mean().backward()


def train(net, optimizer, *, clipped):
    """The norms of the gradients."""
    norms = []
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            backward(net, 10 * step + micro_batch)
        if clipped:
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01))
        optimizer.step()
        net.zero_grad()
    return norms


@pytest.mark.parametrize("host_memory", ["auto", "8MB", "1MB"])
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_same_bits_as_in_memory(tmp_path, dtype, clipped, host_memory):
    plain, ours = model(dtype), model(dtype)
    reference = Reference(list(plain.parameters()), torch.optim.AdamW)
    expected = train(plain, reference, clipped=clipped)
    with NVMeOptimizer(
        ours.parameters(), paths=tmp_path, host_memory=host_memory, accumulate="host"
    ) as optimizer:
        seen = train(ours, optimizer, clipped=clipped)
        assert (optimizer.stats().bytes_read > 0) == (host_memory != "auto")
    assert differing(seen, expected) == []
    assert differing(list(ours.parameters()), list(plain.parameters())) == []


def test_grad_scaler(tmp_path):
    results = []
    for ours in (False, True):
        net = model(torch.float32)
        optimizer = (
            NVMeOptimizer(net.parameters(), paths=tmp_path, host_memory="8MB", accumulate="host")
            if ours
            else torch.optim.AdamW(net.parameters())
        )
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=2)
        for step in range(12):
            for micro_batch in range(2):
                inputs = torch.randn(
                    16, WIDTH, generator=torch.Generator().manual_seed(2 * step + micro_batch)
                )
                with torch.autocast("cuda", torch.float16):
                    loss = net(inputs.cuda()).float().square().mean()
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append([*net.parameters(), torch.tensor(scaler.get_scale())])
        if ours:
            optimizer.close()
    assert differing(*results) == []


def test_a_stream_of_ones_own(tmp_path):
    plain, ours = model(torch.bfloat16), model(torch.bfloat16)
    train(plain, Reference(list(plain.parameters()), torch.optim.AdamW), clipped=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with (
        torch.cuda.stream(stream),
        NVMeOptimizer(
            ours.parameters(), paths=tmp_path, host_memory="8MB", accumulate="host"
        ) as optimizer,
    ):
        train(ours, optimizer, clipped=True)
    torch.cuda.synchronize()
    assert differing(list(ours.parameters()), list(plain.parameters())) == []


def test_memory(tmp_path, monkeypatch):
    """The GPU holds parameters and copies in flight, not the gradients of 24 layers of 32 MiB."""
    monkeypatch.setattr(gradients, "_IN_FLIGHT_BYTES", 64 << 20)
    net = model(torch.bfloat16, 4096, 24)
    nbytes = sum(parameter.numel() * 2 for parameter in net.parameters())
    with NVMeOptimizer(
        net.parameters(), torch.optim.SGD, momentum=0.9, paths=tmp_path, accumulate="host"
    ) as optimizer:
        backward(net, 0)  # cuBLAS takes its workspace
        optimizer.zero_grad()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for micro_batch in range(3):
            backward(net, micro_batch)
            assert all(isinstance(parameter.grad, HostGradient) for parameter in net.parameters())
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < nbytes / 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks(tmp_path):
    reported = results_of_ranks("ranks_accumulate.py", "cuda", tmp_path)
    assert reported == {case: [] for case in cases_of("ranks_accumulate.py")}
