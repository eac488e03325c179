"""What a program does between steps that looks at weights and states, or changes them: `Case.loop`."""

from __future__ import annotations

from typing import Any

import torch


def gather(engine: Any, kept: dict[str, Any]) -> list[torch.Tensor]:
    """Read some weights, and have rank 0 change some."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    params = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    with GatheredParameters(params[1:3]):
        seen = [parameter.detach().clone() for parameter in params[1:3]]
    with torch.no_grad(), GatheredParameters([params[-1], params[0]], modifier_rank=0):
        if engine.global_rank == 0:
            params[-1].mul_(0.5)
            params[0].add_(0.25)
    return seen


def save(engine: Any, kept: dict[str, Any]) -> list[torch.Tensor]:
    """Save a checkpoint, and go on from it in every third step; collect the weights."""
    engine.save_checkpoint("kept", tag="tag")
    if engine.global_steps % 3 == 0:
        engine.load_checkpoint("kept", tag="tag")
    weights = engine._zero3_consolidated_16bit_state_dict()
    return list(weights.values()) if weights else []


def schedule(engine: Any, kept: dict[str, Any]) -> list[torch.Tensor]:
    """Change the options of the groups for the next step, and forget gradients once more."""
    for group in engine.optimizer.param_groups:
        group["lr"] *= 0.5
        group["betas"] = (group["betas"][0] * 0.99, 0.99)
    engine.optimizer.clip_grad *= 0.9
    if engine.fp16_enabled():
        engine.optimizer.loss_scale = engine.optimizer.loss_scale / 2
    engine.zero_grad()
    return []


def enter(engine: Any, kept: dict[str, Any]) -> list[torch.Tensor]:
    """Make another model under zero.Init."""
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=engine.config):
        other = torch.nn.Linear(8, 8)
    return [torch.tensor(list(other.weight.ds_shape))]


def count(engine: Any, kept: dict[str, Any]) -> list[torch.Tensor]:
    """Read what the optimizer counts, and the scale of the scaler of torch_autocast, which grows
    every second step.
    """
    scaler = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    if scaler is not None and scaler.get_scale() == 65536.0:
        scaler.set_growth_interval(2)
        scaler.update(64.0)  # the first step overflows, and DeepSpeed does not lower the scale
    optimizer = engine.optimizer.optimizer
    counts = [group.get("k", 0) for group in optimizer.param_groups]
    scale = 1.0 if scaler is None else scaler.get_scale()
    return [torch.tensor([*counts, getattr(optimizer, "steps", 0), scale])]


def count_and_save(engine: Any, kept: dict[str, Any]) -> list[torch.Tensor]:
    """As `count`, then save and load."""
    return [*count(engine, kept), *save(engine, kept)]


def hook(engine: Any, kept: dict[str, Any]) -> list[torch.Tensor]:
    """Have a function called before each step of the optimizer."""
    kept["hook"] = engine.optimizer.optimizer.register_step_pre_hook(lambda *_: None)
    return []


LOOPS = {
    "hook": hook,
    "gather": gather,
    "save": save,
    "schedule": schedule,
    "enter": enter,
    "count": count,
    "count and save": count_and_save,
}
