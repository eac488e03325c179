"""`update_device`: parameters in host memory that are updated on a GPU get the bits of parameters
that are there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "optim"))
from reference import OPTIMIZERS, Reference, differing, parameters, smallest, train, unlike

from nvme_offload.errors import UsageError
from nvme_offload.optim import NVMeOptimizer

LARGE = [(2000, 1000), (3, 5), (4000, 500), (1000,), (1500, 1000)] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "sgd", "sgd-momentum", "lion"])
def test_any_optimizer_with_the_least_budget(tmp_path, name, dtype):
    there, ours = parameters(dtype, "cuda"), parameters(dtype, "cpu")
    reference = Reference(there, OPTIMIZERS[name])
    train(there, reference)
    with smallest(
        lambda cap: NVMeOptimizer(
            ours, OPTIMIZERS[name], paths=tmp_path, host_memory=cap, update_device="gpu"
        )
    ) as optimizer:
        train(ours, optimizer)
        assert differing(ours, there) == []
        expected = reference.optimizer.state_dict()["state"]
        for index, state in optimizer.state_dict()["state"].items():
            state.pop("master", None)
            assert unlike(state, expected.get(index, {})) == []


@pytest.mark.parametrize("state_format", ["exact", "split", "compact", "compact24"])
@pytest.mark.parametrize("pinned", [True, False])
def test_many_buckets_in_flight(tmp_path, state_format, pinned):
    there, ours = (parameters(torch.bfloat16, device, LARGE) for device in ("cuda", "cpu"))
    if pinned:
        for parameter in ours:
            parameter.data = parameter.data.pin_memory()
    optimizers = [
        NVMeOptimizer(
            params,
            torch.optim.AdamW,
            paths=tmp_path,
            host_memory="48MB",
            state_format=state_format,
            update_device=device,
            fused=True,
            lr=1e-2,
        )
        for params, device in ((there, "auto"), (ours, "gpu"))
    ]
    for params, optimizer in zip((there, ours), optimizers, strict=True):
        train(params, optimizer, steps=4)
    assert differing(ours, there) == []
    saved = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert unlike(*saved) == []
    assert all(optimizer.stats().bytes_read > 0 for optimizer in optimizers)
    for optimizer in optimizers:
        optimizer.close()


class _Rows(torch.nn.Module):
    """Layers in sequence that compute on the GPU, wherever their parameters are."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [torch.nn.Linear(300, 300, dtype=torch.bfloat16) for _ in range(6)]
        self.layers = torch.nn.ModuleList(layers).to(device)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The output of the last layer."""
        for layer in self.layers:
            weight, bias = layer.weight.to("cuda"), layer.bias.to("cuda")
            inputs = torch.nn.functional.linear(inputs, weight, bias).tanh()
        return inputs


MODES = [
    {},
    {"step_in_backward": True},
    {"step_in_backward": "provisional"},
    {"overlap_step": True},
    {"overlap_step": True, "step_in_backward": True},
    {"accumulate": "host"},
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_modes(tmp_path, mode):
    runs = []
    for device, options in (("cuda", {}), ("cpu", {"update_device": "gpu", **mode})):
        model = _Rows(device)
        optimizer = NVMeOptimizer(
            model.parameters(), paths=tmp_path, host_memory="4MB", lr=1e-2, **options
        )
        losses, norms = [], []
        for step in range(6):
            generator = torch.Generator("cuda").manual_seed(step)
            inputs = torch.randn(16, 300, device="cuda", dtype=torch.bfloat16, generator=generator)
            loss = model(inputs).float().square().mean()
            loss.backward()
            losses.append(loss.item())
            if mode.get("step_in_backward") is True:
                gradients = [parameter.grad for parameter in model.parameters()]
                norms.append(torch.nn.utils.get_total_norm(gradients).item())
            if options.get("step_in_backward") is True and "overlap_step" not in options:
                # backward() has returned: the new values are in host memory
                now = [parameter.detach().clone() for parameter in model.parameters()]
                torch.cuda.synchronize()
                assert differing(now, list(model.parameters())) == []
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        runs.append((losses, [one.detach().cpu() for one in model.parameters()], norms))
        assert all(
            value.device.type == device
            for state in optimizer.state.values()
            for value in state.values()
            if value.dim()
        )
        optimizer.close()
    assert runs[0][0] == runs[1][0]
    assert differing(runs[0][1], runs[1][1]) == []
    assert runs[0][2] == pytest.approx(runs[1][2], rel=1e-2)  # each gradient's norm is bfloat16


def test_strided_parameters(tmp_path):
    there, ours = [], []
    for params, device in ((there, "cuda"), (ours, "cpu")):
        generator = torch.Generator().manual_seed(0)
        wide, tall = (torch.randn(40, 60, generator=generator).to(device) for _ in range(2))
        params += [torch.nn.Parameter(wide[:, ::2]), torch.nn.Parameter(tall.t())]
    reference = torch.optim.AdamW(there, lr=1e-2)
    with NVMeOptimizer(ours, lr=1e-2, paths=tmp_path, update_device="gpu") as optimizer:
        for one, params in ((reference, there), (optimizer, ours)):
            train(params, one)
        assert differing(ours, there) == []


def test_what_has_no_effect_is_refused(tmp_path):
    with pytest.raises(UsageError, match="host memory, and a parameter is on cuda"):
        NVMeOptimizer(parameters(device="cuda"), paths=tmp_path, update_device="cpu")


def test_parameters_on_the_cpu_stay_there_by_default(tmp_path):
    plain, ours = parameters(), parameters()
    train(plain, torch.optim.AdamW(plain))
    with NVMeOptimizer(ours, paths=tmp_path) as optimizer:
        train(ours, optimizer)
    assert differing(ours, plain) == []
