"""`step_in_backward="provisional"` over models that others have written, transformers' own by their
configurations, in steps that are clipped, accumulated and interrupted by evaluation.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from covering import covering
from reference import differing, unlike

from nvme_offload.optim import NVMeOptimizer

sys.path.append(str(Path(__file__).parents[1] / "zero3"))
import outside

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]
# of host memory, so that most states of most models are on the drive
MEMORY = {"exact": 160_000, "split": 200_000, "compact": 260_000, "compact24": 260_000}
FORMATS = {"exact": torch.float32} | dict.fromkeys(
    ("split", "compact", "compact24"), torch.bfloat16
)


def trained(monkeypatch, name, dtype, make):
    """The parameters of a model after seven steps, its optimizer, and the buckets that were updated
    in backward and rolled back.
    """
    torch.manual_seed(0)
    for sizes in (outside.SIZES, outside.FEWER_HEADS):  # of several buckets
        monkeypatch.setitem(sizes, "hidden_size", 128)
        monkeypatch.setitem(sizes, "intermediate_size", 256)
    net = outside.MODELS[name]().to(dtype).train()
    optimizer = make([one for one in net.parameters() if one.requires_grad])
    ours = isinstance(optimizer, NVMeOptimizer)
    numbers, made, undone = torch.Generator().manual_seed(1), 0, 0

    def loss():
        x = net.inputs(numbers)
        return net(x.to(dtype) if x.is_floating_point() else x).float().square().mean()

    for step in range(7):
        optimizer.zero_grad()
        torch.manual_seed(step)
        if step % 3 == 2 and ours:
            with optimizer.no_sync():
                loss().backward()
        elif step % 3 == 2:
            loss().backward()
        loss().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3 if step in (3, 5) else 1e9)
        if step == 4:  # parameters and states are looked at between backward() and step()
            net.eval()
            with torch.no_grad():
                loss()
            net.train()
            optimizer.state_dict()
        optimizer.step()
        if ours:
            made += optimizer.stats().updated_in_backward
            undone += optimizer.stats().rolled_back
    return list(net.parameters()), optimizer, made, undone


@covering(
    pairs=False,
    kept=[*((one, False) for one in FORMATS), ("exact", True)],
    name=[name for name in outside.MODELS if name != "lora"],
)
def test_the_same_bits(tmp_path, monkeypatch, name, kept):
    state_format, overlap = kept
    dtype = FORMATS[state_format]

    def offloaded(in_backward):
        return lambda params: NVMeOptimizer(
            params,
            torch.optim.AdamW,
            lr=1e-2,
            paths=tmp_path,
            host_memory=MEMORY[state_format],
            state_format=state_format,
            step_in_backward=in_backward,
            overlap_step=overlap,
        )

    after, one, made, undone = trained(monkeypatch, name, dtype, offloaded(False))
    assert made == undone == 0
    ours, other, made, undone = trained(monkeypatch, name, dtype, offloaded("provisional"))
    with one, other:
        assert differing(ours, after) == []
        assert unlike(other.state_dict()["state"], one.state_dict()["state"]) == []
    if name != "mamba":  # most of whose states fit in host memory
        assert made > undone > 0
    if state_format == "exact" and not overlap:
        plain, *_ = trained(
            monkeypatch, name, dtype, lambda params: torch.optim.AdamW(params, lr=1e-2)
        )
        assert differing(ours, plain) == []
