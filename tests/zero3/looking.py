"""What a program does between steps that looks at weights and states, or changes them: `Case.loop`."""

from __future__ import annotations

import contextlib
import itertools
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


def thaw(engine: Any, kept: dict[str, Any]) -> list[torch.Tensor]:
    """Freeze a parameter for every second step, and thaw it after that step."""
    first = next(iter(engine.module.parameters()))
    first.requires_grad_(engine.global_steps % 2 == 0)
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
    if scaler is not None and scaler.get_growth_interval() != 2:
        scaler.set_growth_interval(2)
        # The first step overflows, and only some releases lower the scale after that.
        scaler.update(64.0)
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


def resume(engine: Any, kept: dict[str, Any]) -> list[torch.Tensor]:
    """Save a checkpoint of stage 1 or 2, and load it again: in the second step with states, in the
    third with master weights from the 16-bit ones.
    """
    engine.save_checkpoint("kept", tag="tag")
    if engine.global_steps == 2:
        with torch.no_grad():
            for param in engine.module.parameters():
                param.zero_()
        engine.load_checkpoint("kept", tag="tag")
    elif engine.global_steps == 3:
        engine.load_checkpoint("kept", tag="tag", load_optimizer_states=False)
    elif engine.global_steps == 4:
        engine.load_checkpoint("kept", tag="tag", load_module_only=True)
    return [param.detach().clone() for param in engine.module.parameters()]


def interrupt(engine: Any, kept: dict[str, Any]) -> list[torch.Tensor]:
    """Save a checkpoint, end a step of stage 1 or 2 in its midst, and go on from the checkpoint."""
    engine.save_checkpoint("kept", tag="tag")
    if hasattr(engine.optimizer, "optimizer_swapper"):
        from nvme_offload import OffloadError

        optimizer, calls = engine.optimizer.optimizer, itertools.count()

        def step() -> None:
            if next(calls):
                raise KeyboardInterrupt
            type(optimizer).step(optimizer)

        optimizer.step = step
        inputs = engine.module.inputs(torch.Generator()).to(torch.bfloat16)
        engine.backward(engine(inputs).float().square().mean())
        for error in (KeyboardInterrupt, OffloadError):
            try:
                engine.step()
            except error:
                continue
            raise AssertionError(f"no {error.__name__}")
        del optimizer.step
    engine.load_checkpoint("kept", tag="tag")
    return [param.detach().clone() for param in engine.module.parameters()]


def fragments(engine: Any, kept: dict[str, Any]) -> list[torch.Tensor]:
    """Read and change master weights, states and gradients of stage 1 or 2."""
    from deepspeed import utils

    # DeepSpeed looks for states before all groups have some.
    engine.optimizer._hp_optimizer_states_linked = False
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    seen = []
    params = [param for param in engine.module.parameters() if param.requires_grad]
    for param in params:
        seen += [
            utils.safe_get_full_grad(param),
            utils.safe_get_full_fp32_param(param),
            utils.safe_get_full_optimizer_state(param, "exp_avg"),
        ]
    for param in params[::2]:
        utils.safe_set_full_fp32_param(param, utils.safe_get_full_fp32_param(param) * 1.25)
        moment = utils.safe_get_full_optimizer_state(param, "exp_avg_sq")
        utils.safe_set_full_optimizer_state(param, moment * 0.5, "exp_avg_sq")
    with contextlib.suppress(ValueError):  # UsageError is one, too; then training goes on
        utils.safe_set_full_optimizer_state(params[0], params[0].detach().float(), "foreign")
    return seen


def clip(engine: Any, kept: dict[str, Any]) -> list[torch.Tensor]:
    """Change gradients between the backward pass and the step, which comes next."""
    from deepspeed import utils

    for micro in range(2):
        generator = torch.Generator().manual_seed(100 * engine.global_steps + micro)
        inputs = engine.module.inputs(generator).to(torch.bfloat16)
        engine.backward(engine(inputs).float().square().mean())
        if micro == 0:
            engine.step()
    params = [param for param in engine.module.parameters() if param.requires_grad]
    utils.safe_set_full_grad(params[0], utils.safe_get_full_grad(params[0]) / 3)
    utils.safe_update_full_grad_vectorized(params[1:], lambda gradient, _: gradient + 1e-3)
    seen = [utils.safe_get_full_grad(param) for param in params]
    engine.step()
    return seen


def infer(engine: Any, kept: dict[str, Any]) -> list[torch.Tensor]:
    """Do everything but a backward pass in inference mode, and a step."""
    from deepspeed import utils

    params = [param for param in engine.module.parameters() if param.requires_grad]
    generator = torch.Generator().manual_seed(engine.global_steps)
    inputs = engine.module.inputs(generator).to(engine.device, torch.bfloat16)
    with torch.inference_mode():
        if engine.global_steps == 2:
            engine.load_checkpoint("kept", tag="tag")
        seen = gather(engine, kept)
        engine(inputs)
    engine.backward(engine(inputs).float().sum())
    with torch.inference_mode():
        seen.append(utils.safe_get_full_grad(params[0]))
        engine.step()
        for param in params[:3]:
            seen.append(utils.safe_get_full_fp32_param(param))
            moment = utils.safe_get_full_optimizer_state(param, "exp_avg_sq")
            utils.safe_set_full_optimizer_state(param, moment * 0.5, "exp_avg_sq")
        utils.safe_set_full_fp32_param(params[0], seen[-1].new_full(params[0].ds_shape, 0.25))
        engine.save_checkpoint("kept", tag="tag")
    return [one.clone() for one in seen]


def backward_twice(engine: Any, kept: dict[str, Any]) -> list[torch.Tensor]:
    """Two backward passes of a step that has one micro-batch."""
    for _ in range(2):
        inputs = engine.module.inputs(torch.Generator().manual_seed(0)).to(engine.device)
        engine.backward(engine(inputs.to(engine.module.layers[0].weight.dtype)).float().sum())
    return []


LOOPS = {
    "backward twice": backward_twice,
    "infer": infer,
    "resume": resume,
    "interrupt": interrupt,
    "fragments": fragments,
    "clip": clip,
    "hook": hook,
    "gather": gather,
    "save": save,
    "schedule": schedule,
    "thaw": thaw,
    "enter": enter,
    "count": count,
    "count and save": count_and_save,
}
