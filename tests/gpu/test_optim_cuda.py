"""`NVMeOptimizer` with parameters on GPUs: the bits of the same class in memory, on one GPU and,
sharded, on two.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "optim"))
from reference import OPTIMIZERS, SHAPES, Reference, differing, parameters, smallest, train, unlike
from test_ranks import cases_of, results_of_ranks

from nvme_offload import sizes
from nvme_offload.device import staging
from nvme_offload.errors import UnsupportedError
from nvme_offload.optim import NVMeOptimizer
from nvme_offload.swap import schedule

LARGE = [(2000, 1000), (3, 5), (4000, 500), (1000,), (1500, 1000)] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_with_any_budget(tmp_path, name, dtype):
    # which divides by the number of elements
    shapes = [shape for shape in SHAPES if 0 not in shape or name != "adafactor"]
    plain, roomy, tight = (parameters(dtype, "cuda", shapes) for _ in range(3))
    reference = Reference(plain, OPTIMIZERS[name])
    train(plain, reference)
    expected = reference.optimizer.state_dict()["state"]
    if dtype != torch.float32:
        expected = {
            index: {**expected.get(index, {}), "master": master}
            for index, (_, master) in enumerate(reference.pairs)
        }
    with NVMeOptimizer(roomy, OPTIMIZERS[name], paths=tmp_path) as optimizer:
        train(roomy, optimizer)
        assert differing(roomy, plain) == []
        assert unlike_but_for_sums(name, optimizer.state_dict()["state"], expected) == []
    with smallest(
        lambda cap: NVMeOptimizer(tight, OPTIMIZERS[name], paths=tmp_path, host_memory=cap)
    ) as optimizer:
        train(tight, optimizer)
        assert differing(tight, plain) == []
        assert unlike_but_for_sums(name, optimizer.state_dict()["state"], expected) == []


def unlike_but_for_sums(name, state, expected):
    """Where they differ; Adafactor's sums over a tensor depend in the last bit on where in memory
    the tensor lies, so its masters need only be near.
    """
    places = unlike(state, expected)
    if name != "adafactor":
        return places
    near = [
        f".{index}.master"
        for index in expected
        if "master" in expected[index]
        and torch.allclose(
            state[index]["master"], expected[index]["master"].cpu(), rtol=1e-6, atol=1e-7
        )
    ]
    return [place for place in places if place not in near]


@pytest.mark.parametrize("state_format", ["exact", "split"])
@pytest.mark.parametrize("fused", [True, False])
def test_many_buckets_in_flight(tmp_path, state_format, fused):
    plain, ours = (
        parameters(torch.bfloat16, "cuda", LARGE),
        parameters(torch.bfloat16, "cuda", LARGE),
    )
    reference = Reference(plain, torch.optim.AdamW, fused=fused)
    with NVMeOptimizer(
        ours, fused=fused, paths=tmp_path, host_memory="30MB", state_format=state_format
    ) as optimizer:
        train(plain, reference, steps=5)
        train(ours, optimizer, steps=5)
        assert len(optimizer._steps.binding.buckets) > 30
        assert optimizer.stats().bytes_read > 100e6
        assert optimizer._steps.tier._pool.pinned == "cuda"
        state = optimizer.state_dict()["state"]
        assert (
            differing(
                [state[index]["master"] for index in state],
                [master for _, master in reference.pairs],
            )
            == []
        )
        if state_format == "exact":
            assert differing(ours, plain) == []


@pytest.mark.parametrize("state_format", ["exact", "split", "compact", "compact24"])
def test_states_saved_as_they_are_kept(tmp_path, state_format):
    params = parameters(torch.bfloat16, "cuda", LARGE)
    options = {"paths": tmp_path, "host_memory": "30MB", "state_format": state_format}
    with NVMeOptimizer(params, **options) as optimizer:
        train(params, optimizer)
        optimizer.save(tmp_path / "saved")
        resumed = [torch.nn.Parameter(parameter.detach().clone()) for parameter in params]
        train(params, optimizer, first=3)
        with NVMeOptimizer(resumed, **options) as again:
            again.load_state_dict(torch.load(tmp_path / "saved", mmap=True))
            train(resumed, again, first=3)
            assert differing(resumed, params) == []
            assert unlike(again.state_dict(), optimizer.state_dict()) == []


def test_compact_states_come_near(tmp_path):
    plain, ours = (
        parameters(torch.bfloat16, "cuda", LARGE),
        parameters(torch.bfloat16, "cuda", LARGE),
    )
    before = [parameter.detach().float() for parameter in plain]
    with NVMeOptimizer(
        ours, lr=0.1, paths=tmp_path, host_memory="30MB", state_format="compact"
    ) as optimizer:
        train(plain, Reference(plain, torch.optim.AdamW, lr=0.1), steps=10)
        train(ours, optimizer, steps=10)
        assert optimizer.stats().bytes_read > 30e6
    for one, other, first in zip(ours, plain, before, strict=True):
        assert (one.float() - other.float()).norm() < 0.3 * (other.float() - first).norm()


@pytest.mark.parametrize("state_format", ["exact", "split", "compact", "compact24"])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, state_format):
    options = {"paths": tmp_path, "host_memory": "20MB", "state_format": state_format}
    whole, first = (
        parameters(torch.bfloat16, "cuda", LARGE),
        parameters(torch.bfloat16, "cuda", LARGE),
    )
    with NVMeOptimizer(whole, **options) as optimizer:
        train(whole, optimizer, steps=4)
    with NVMeOptimizer(first, **options) as optimizer:
        train(first, optimizer, steps=2)
        torch.save(
            {"optimizer": optimizer.state_dict(), "parameters": first}, tmp_path / "checkpoint.pt"
        )
    saved = torch.load(tmp_path / "checkpoint.pt", mmap=True)
    second = [torch.nn.Parameter(parameter.detach().cuda()) for parameter in saved["parameters"]]
    with NVMeOptimizer(second, **options) as optimizer:
        optimizer.load_state_dict(saved["optimizer"])
        train(second, optimizer, steps=2, first=2)
    assert differing(second, whole) == []


def test_states_are_saved_after_all_was_moved_to_the_cpu(tmp_path):
    """Lightning's `save_checkpoint` after `fit`."""
    params = parameters(torch.bfloat16, "cuda")
    with NVMeOptimizer(params, paths=tmp_path) as optimizer:
        train(params, optimizer)
        expected = copy.deepcopy(optimizer.state_dict()["state"])
        for state in optimizer.state.values():
            for key, value in state.items():
                if key != "step":
                    state[key] = value.cpu()
        for parameter in params:
            parameter.data = parameter.data.cpu()
        assert unlike(optimizer.state_dict()["state"], expected) == []


def test_there_and_back_between_this_and_the_plain_optimizer(tmp_path):
    plain, ours = parameters(device="cuda"), parameters(device="cuda")
    reference = torch.optim.AdamW(plain, fused=True)
    with smallest(
        lambda cap: NVMeOptimizer(ours, fused=True, paths=tmp_path, host_memory=cap)
    ) as optimizer:
        train(plain, reference)
        train(ours, optimizer)
        crossed = reference.state_dict(), optimizer.state_dict()
        assert all(
            value.device.type == "cpu"
            for state in crossed[1]["state"].values()
            for key, value in state.items()
            if value.numel() > 1
        )
        optimizer.load_state_dict(crossed[0])
        reference.load_state_dict(crossed[1])
        train(plain, reference, first=3)
        train(ours, optimizer, first=3)
    assert differing(ours, plain) == []


def test_parameters_on_both_kinds_of_device(tmp_path):
    plain, ours = (
        [
            *parameters(torch.bfloat16, "cuda"),
            *parameters(torch.bfloat16),
            *parameters(device="cuda"),
        ]
        for _ in range(2)
    )
    train(plain, Reference(plain, torch.optim.AdamW, foreach=False))
    with smallest(
        lambda cap: NVMeOptimizer(ours, foreach=False, paths=tmp_path, host_memory=cap)
    ) as optimizer:
        train(ours, optimizer)
    assert differing(ours, plain) == []


def test_a_scaler_and_clipping(tmp_path):
    def run(params, optimizer):
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = sum((parameter * (step + 1)).sin().sum() for parameter in params) * (
                torch.inf if step == 1 else 1
            )
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 0.1)
            scaler.step(optimizer)
            scaler.update()

    plain, ours = parameters(device="cuda"), parameters(device="cuda")
    run(plain, torch.optim.AdamW(plain))
    with NVMeOptimizer(ours, paths=tmp_path, host_memory=100_000) as optimizer:
        run(ours, optimizer)
    assert differing(ours, plain) == []


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_model_in_training(tmp_path, in_backward):
    def run(make):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12))).to(
            "cuda", torch.bfloat16
        )
        optimizer = make(list(model.parameters()))
        for step in range(5):
            inputs = torch.randn(16, 512, generator=torch.Generator().manual_seed(step)).to(
                "cuda", torch.bfloat16
            )
            model.zero_grad()
            model(inputs).float().square().mean().backward()
            optimizer.step()
        return list(model.parameters())

    expected = run(lambda params: Reference(params, torch.optim.AdamW))
    assert (
        differing(
            run(
                lambda params: NVMeOptimizer(
                    params, paths=tmp_path, host_memory="8MB", step_in_backward=in_backward
                )
            ),
            expected,
        )
        == []
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"state_format": "compact"}])
def test_a_model_over_two_gpus_of_one_process_is_updated_in_backward(tmp_path, settings):
    def run(in_backward):
        torch.manual_seed(0)
        halves = [
            torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))).to(f"cuda:{index}")
            for index in range(2)
        ]
        params = [parameter for half in halves for parameter in half.parameters()]
        with NVMeOptimizer(
            params, paths=tmp_path, host_memory="4MB", step_in_backward=in_backward, **settings
        ) as optimizer:
            for step in range(3):
                halves[1](
                    halves[0](torch.ones(4, 256, device="cuda:0") * step).to("cuda:1")
                ).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return params

    assert differing(run(True), run(False)) == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("script", ["ranks.py", "ranks_in_backward.py", "ranks_overlap.py"])
def test_two_gpus(tmp_path, script):
    found = results_of_ranks(script, "cuda", tmp_path)
    assert found == {case: [] for case in cases_of(script)}


def _train_with_surprises(params, optimizer, steps=8):
    """Train, and change and read states in between, as the swapper's plan does not expect."""
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        torch.cuda._sleep(20_000_000)  # the CPU is ahead of the GPU
        used = params if step != 4 else params[::3]
        factors = [torch.randn(p.shape, generator=generator).cuda() for p in used]
        sum((p.float() * f).square().sum() for p, f in zip(used, factors, strict=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            optimizer.state[params[-1]]["exp_avg"].mul_(2)
        if step == 5:
            optimizer.load_state_dict(optimizer.state_dict())
        if step == 6:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5


@pytest.mark.parametrize("in_backward", [True, False])
@pytest.mark.parametrize("state_format", ["exact", "compact"])
def test_states_are_copied_to_the_gpu_before_their_use(
    tmp_path, monkeypatch, state_format, in_backward
):
    monkeypatch.setattr(sizes, "LARGEST_BUCKET_BYTES", 1 << 20)
    monkeypatch.setattr(sizes, "LARGEST_IN_MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(staging._Waits, "are_long", lambda _: True)
    shapes = [(600, 400)] * 96
    found = {}
    for parts in (8, 1 << 30):
        monkeypatch.setattr(schedule, "AHEAD_PARTS", parts)
        params = parameters(torch.bfloat16, "cuda", shapes)
        with NVMeOptimizer(
            params,
            paths=tmp_path,
            host_memory="800MB",
            state_format=state_format,
            step_in_backward=in_backward,
            lr=1e-2,
        ) as optimizer:
            used = _uses_of_glimpses(optimizer._steps.tier.swapper, monkeypatch)
            _train_with_surprises(params, optimizer)
            buckets = len(optimizer._steps.binding.buckets)
            (stager,) = optimizer._steps.updater._stagers.values()
            assert optimizer.stats().bytes_read == 0
            if parts == 8:
                assert buckets > 20
                assert used.count(True) > 2 * buckets  # in 8 steps, with surprises
                assert len(stager._places) > 3
            else:
                assert not any(used)
                assert len(stager._places) == 3
            found[parts] = [*params, *_tensors(optimizer.state_dict()["state"])]
    assert differing(*found.values()) == []


def _uses_of_glimpses(swapper, monkeypatch):
    """A list to which is added, for each use of a value that was copied before, whether the copy holds."""
    used, real = [], swapper.is_as_glimpsed

    def is_as_glimpsed(glimpse):
        used.append(real(glimpse))
        return used[-1]

    monkeypatch.setattr(swapper, "is_as_glimpsed", is_as_glimpsed)
    return used


def _tensors(state):
    return [
        one for each in state.values() for one in each.values() if isinstance(one, torch.Tensor)
    ]


def _captured(model, x):
    """A CUDA graph of the forward and the backward pass of *model*, which sets the gradients."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    torch.cuda.current_stream().wait_stream(side)
    del gradients
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).square().mean().backward()
    return graph


@pytest.mark.parametrize("state_format", ["exact", "split"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_after_each_replay_of_a_graph(tmp_path, state_format, fused):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))).to("cuda")
    plain = copy.deepcopy(model)
    x = torch.randn(32, 256, device="cuda")
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=fused)
    settings = {"lr": 1e-2, "fused": fused, "state_format": state_format}
    with NVMeOptimizer(
        model.parameters(), paths=tmp_path, host_memory="8MB", **settings
    ) as optimizer:
        graph = _captured(model, x)
        for _ in range(5):
            graph.replay()
            optimizer.step()
            plain(x).square().mean().backward()
            reference.step()
            reference.zero_grad()
            assert differing(list(model.parameters()), list(plain.parameters())) == []


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize(
    "settings", [{}, {"step_in_backward": True}, {"accumulate": "host"}], ids=str
)
def test_an_update_within_a_graph_is_refused(tmp_path, settings):
    model = torch.nn.Linear(256, 256, device="cuda")
    x = torch.randn(32, 256, device="cuda")
    _captured(copy.deepcopy(model), x)  # sets up libraries, which a capture cannot do
    with (
        NVMeOptimizer(model.parameters(), paths=tmp_path, **settings) as optimizer,
        pytest.raises(UnsupportedError, match="CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        model(x).sum().backward() if settings else optimizer.step()
