"""State formats give the same bits on a GPU as on the CPU: a bucket that was packed on
one can be unpacked on the other.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "optim"))
from reference import differing, parameters, train, unlike

from nvme_offload.optim import NVMeOptimizer, update
from nvme_offload.optimizer_states.formats import FORMATS, state_format

STATES = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}


def bucket(numel: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Masters of any bit pattern, and moments over many decades."""
    generator = torch.Generator().manual_seed(numel)
    bits = torch.randint(-(1 << 31), 1 << 31, (numel,), dtype=torch.int64, generator=generator).to(
        torch.int32
    )
    scale = torch.exp(6 * torch.randn(numel, generator=generator))
    return bits.view(torch.float32), {
        "exp_avg": torch.randn(numel, generator=generator) * scale,
        "exp_avg_sq": scale**2,
    }


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("numel", [1, 257, 70_001, (1 << 24) + 300])
def test_both_devices_write_the_same_bytes_and_read_them_alike(name, numel):
    format = state_format(name)
    layout = format.layout(numel, STATES, torch.bfloat16)
    master, states = bucket(numel)
    number = ~master.isnan()  # which NaN torch rounds a NaN to depends on the device
    found = {}
    for device in ("cpu", "cuda"):
        buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        working = [
            torch.empty(size, dtype=torch.bfloat16, device=device)
            for size in (numel // 2, numel - numel // 2)
        ]
        format.pack(
            layout,
            buffer,
            working,
            master.to(device),
            {key: state.to(device) for key, state in states.items()},
            seed=5,
        )
        back, states_back = format.unpack(layout, buffer, working)
        assert all(tensor.device.type == device for tensor in (back, *states_back.values()))
        values = [state.cpu() for state in states_back.values()]
        # each device makes another one of a block that is not finite
        same_nan = [torch.where(state.isnan(), torch.nan, state) for state in values]
        bits = [tensor.view(torch.int32) for tensor in (back.cpu(), *same_nan)]
        found[device] = [buffer.cpu(), torch.cat(working).cpu()[number], *bits]
    assert all(
        torch.equal(on_cpu, on_gpu)
        for on_cpu, on_gpu in zip(found["cpu"], found["cuda"], strict=True)
    )


def test_a_nan_on_a_gpu_takes_its_block_along():
    format = state_format("compact")
    layout = format.layout(1024, STATES, torch.bfloat16)
    _, states = bucket(1024)
    states["exp_avg"][300] = torch.nan
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device="cuda")
    working = [torch.ones(1024, dtype=torch.bfloat16, device="cuda")]
    format.pack(
        layout,
        buffer,
        working,
        working[0].float(),
        {key: state.cuda() for key, state in states.items()},
    )
    _, back = format.unpack(layout, buffer, working)
    assert back["exp_avg"].isnan().cpu().view(4, 256).sum(dim=1).tolist() == [0, 256, 0, 0]
    assert back["exp_avg_sq"].isfinite().all()


@pytest.mark.parametrize("home", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("state_format", ["exact", "split", "compact", "compact24"])
def test_one_kernel_gives_the_bits_of_the_optimizer_itself(
    tmp_path, monkeypatch, state_format, dtype, home
):
    """Adam is also updated by unpacking, its own step and packing, as other optimizers are."""
    found, used = [], []
    for by_kernels in (True, False):
        params = parameters(dtype, home)
        with monkeypatch.context() as patch:
            step = update.step_by_kernels
            patch.setattr(
                update, "step_by_kernels", lambda *args, step=step: (used.append(1), step(*args))
            )
            if not by_kernels:
                patch.setattr(update, "is_packed_adam", lambda *_: False)
                used.clear()
            with NVMeOptimizer(
                params,
                torch.optim.AdamW,
                paths=tmp_path,
                host_memory="2MB",
                state_format=state_format,
                update_device="gpu" if home == "cpu" else "auto",
                lr=1e-2,
                fused=True,
            ) as optimizer:
                train(params, optimizer, steps=7)
                assert bool(used) == by_kernels
                found.append(([one.detach().cpu() for one in params], optimizer.state_dict()))
    assert differing(found[0][0], found[1][0]) == []
    assert unlike(found[0][1]["state"], found[1][1]["state"]) == []
