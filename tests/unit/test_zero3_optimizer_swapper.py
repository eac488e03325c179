"""`OptimizerSwapper`: "compact" tells of second moments that are too far apart for it, and of no
others.
"""

from __future__ import annotations

import logging

import pytest
import torch

from nvme_offload.hardware.config import AioConfig
from nvme_offload.optimizer_states import FORMATS
from nvme_offload.swap.tier import Tier
from nvme_offload.zero3.optimizer_swapper import OptimizerSwapper, Working


@pytest.mark.parametrize("decades", [8, 3])
def test_states_that_are_far_apart_are_told_of_once(tmp_path, caplog, decades):
    working = torch.randn(1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    parameter = torch.nn.Parameter(torch.empty(0))
    optimizer = torch.optim.AdamW([parameter])
    tier = Tier([str(tmp_path)], AioConfig(backend="posix", direct="auto"), host_memory=1 << 20)
    tier.require(1 << 19)
    states = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    swapper = OptimizerSwapper(
        tier,
        lambda: optimizer,
        FORMATS["compact"],
        states,
        1024,
        Working(
            torch.bfloat16,
            lambda _, place: place.copy_(working),
            lambda _, changed: working.copy_(changed),
        ),
        lambda begins: None,
    )
    with caplog.at_level(logging.WARNING, logger="nvme_offload"):
        swapper.initialize_parameters([parameter], [working])
        for step in range(4):
            swapper.swap_in_optimizer_state(parameter)
            noise = torch.randn(1024, generator=torch.Generator().manual_seed(step)) + 3
            parameter.grad = noise * torch.logspace(0, -decades, 256).repeat(4)
            optimizer.step()
            swapper.swap_out_optimizer_state(parameter)
    swapper.abandon()
    tier.close()
    assert caplog.text.count(
        "has too few bits for second moments of one block that are more than 30 octaves apart"
    ) == (decades == 8)
