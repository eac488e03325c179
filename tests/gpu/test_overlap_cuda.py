"""`overlap_step` with parameters on a GPU: the same bits as without and as in memory, whichever
stream uses a parameter first.
"""

from __future__ import annotations

import copy
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "optim"))
from reference import Reference, differing

from nvme_offload.optim import NVMeOptimizer
from nvme_offload.optim.awaited import AwaitedParameter

pytestmark = pytest.mark.usefixtures("nothing_is_compiled")

WIDTH, LAYERS, STEPS = 512, 12, 6


def model(dtype):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(
        "cuda", dtype
    )


def batch(step, dtype):
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).to("cuda", dtype)


def backward(net, step):
    net.zero_grad()
    loss = net(batch(step, net[0].weight.dtype)).float().square().mean()
    loss.backward()
    return loss.detach()


def train(net, optimizer, *, clipped):
    """The observations of a run."""
    seen = []
    for step in range(STEPS):
        seen.append(backward(net, step))
        if clipped:
            seen.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01))
        optimizer.step()
        if step == 3:
            with torch.no_grad():
                seen.append(net(batch(99, net[0].weight.dtype)))
    return seen


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_as_in_memory(tmp_path, dtype, clipped, fused):
    plain, ours = model(dtype), model(dtype)
    reference = Reference(list(plain.parameters()), torch.optim.AdamW, fused=fused)
    expected = train(plain, reference, clipped=clipped)
    with NVMeOptimizer(
        ours.parameters(), fused=fused, paths=tmp_path, host_memory="8MB", overlap_step=True
    ) as optimizer:
        seen = train(ours, optimizer, clipped=clipped)
        assert all(type(parameter) is AwaitedParameter for parameter in ours.parameters())
        assert optimizer.stats().bytes_read > 0
    assert differing(seen, expected) == []
    assert differing(list(ours.parameters()), list(plain.parameters())) == []


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("state_format", ["exact", "split", "compact"])
def test_the_same_bits_as_without(tmp_path, state_format, in_backward):
    nets = []
    for overlap in (False, True):
        nets.append(model(torch.bfloat16))
        with NVMeOptimizer(
            nets[-1].parameters(),
            paths=tmp_path,
            host_memory="8MB",
            state_format=state_format,
            step_in_backward=in_backward,
            overlap_step=overlap,
        ) as optimizer:
            train(nets[-1], optimizer, clipped=not in_backward)
    assert differing(*(list(net.parameters()) for net in nets)) == []


def test_a_scaler_that_overflows(tmp_path):
    def run(net, optimizer):
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = net(batch(step, torch.float32)).float().square().mean()
            scaler.scale(loss * (torch.inf if step == 2 else 1)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()

    plain, ours = model(torch.float32), model(torch.float32)
    run(plain, torch.optim.AdamW(plain.parameters()))
    with NVMeOptimizer(
        ours.parameters(), paths=tmp_path, host_memory="8MB", overlap_step=True
    ) as optimizer:
        run(ours, optimizer)
        assert optimizer.stats().step == STEPS - 1
    assert differing(list(ours.parameters()), list(plain.parameters())) == []


def test_the_first_layers_run_while_the_last_update_is_held(tmp_path, monkeypatch):
    plain, ours = model(torch.float32), model(torch.float32)
    reference = torch.optim.AdamW(plain.parameters())
    with NVMeOptimizer(
        [{"params": layer.parameters()} for layer in ours], paths=tmp_path, overlap_step=True
    ) as optimizer:
        for step in range(3):
            backward(plain, step)
            reference.step()
            backward(ours, step)
            optimizer.step()
        optimizer.synchronize()
        opened, opening = threading.Event(), optimizer._steps.updater.open

        def open_bucket(bucket):
            if bucket is optimizer._steps.binding.buckets[-1]:
                opened.wait()
            return opening(bucket)

        monkeypatch.setattr(optimizer._steps.updater, "open", open_bucket)
        backward(plain, 3)
        reference.step()
        backward(ours, 3)
        optimizer.step()
        hidden = ours[:-1](batch(4, torch.float32))
        torch.cuda.current_stream().synchronize()
        assert not opened.is_set()
        assert torch.equal(hidden, plain[:-1](batch(4, torch.float32)))
        opened.set()
        assert torch.equal(ours[-1](hidden), plain(batch(4, torch.float32)))


def test_a_first_use_on_another_stream(tmp_path):
    plain, ours = model(torch.bfloat16), model(torch.bfloat16)
    reference = Reference(list(plain.parameters()), torch.optim.AdamW)
    side = torch.cuda.Stream()
    with NVMeOptimizer(
        ours.parameters(), paths=tmp_path, host_memory="8MB", overlap_step=True
    ) as optimizer:
        for step in range(STEPS):
            backward(plain, step)
            reference.step()
            backward(ours, step)
            optimizer.step()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                copies = [parameter.detach().clone() for parameter in ours.parameters()]
            # used by both streams from here on
            assert differing(list(ours.parameters()), list(plain.parameters())) == []
            torch.cuda.current_stream().wait_stream(side)
            assert differing(copies, list(plain.parameters())) == []


def test_gradients_are_kept_until_their_updates(tmp_path):
    plain, ours = model(torch.bfloat16), model(torch.bfloat16)
    reference = Reference(list(plain.parameters()), torch.optim.AdamW)
    with NVMeOptimizer(
        ours.parameters(), paths=tmp_path, host_memory="8MB", overlap_step=True
    ) as optimizer:
        for step in range(STEPS):
            backward(plain, step)
            reference.step()
            backward(ours, step)
            optimizer.step()
            optimizer.zero_grad()
            # what the allocator would give their memory to
            for parameter in list(ours.parameters()):
                torch.empty(parameter.shape, dtype=torch.bfloat16, device="cuda").fill_(7)
        kept = copy.deepcopy(ours)
    assert differing(list(kept.parameters()), list(plain.parameters())) == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_a_model_over_two_gpus_of_one_process(tmp_path):
    def run(overlap):
        halves = [model(torch.float32)[:6].to(f"cuda:{index}") for index in range(2)]
        params = [parameter for half in halves for parameter in half.parameters()]
        with NVMeOptimizer(
            params, paths=tmp_path, host_memory="8MB", overlap_step=overlap
        ) as optimizer:
            for step in range(3):
                rows = batch(step, torch.float32)
                halves[1](halves[0](rows).to("cuda:1")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return params

    assert differing(run(True), run(False)) == []
