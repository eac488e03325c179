"""Output of a plan to paste: a DeepSpeed configuration, or the lines of a training script."""

from __future__ import annotations

import json
from typing import Any

from ..ds_config.edit import aio_section
from ..errors import UsageError
from ..hardware import gpu_models
from .passes import Work
from .plan import DESCRIBED_PATH, Machine, Plan


def ds_config(plan: Plan, machine: Machine, work: Work = Work()) -> dict[str, Any]:  # noqa: B008  a tuple of numbers
    """A DeepSpeed configuration for *plan*, complete except for the learning rate, which the user edits.

    Raises: UsageError when the plan does not fit, or its door is "plain".
    """
    strategy = plan.strategy
    if strategy.door == "plain":
        raise UsageError(f"{strategy.title} takes no DeepSpeed config: add --way zero3")
    if not plan.fits:
        raise UsageError(f"{strategy.title} does not fit: it takes {'; '.join(plan.problems)}")
    zero: dict[str, Any] = {"stage": strategy.stage}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        _precision(machine): {"enabled": True},
        # required by Lightning's test and predict
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    if work.accumulation > 1:  # Lightning refuses this key; it sets it from its Trainer
        config["gradient_accumulation_steps"] = work.accumulation
    if strategy.optimizer is None:
        del config["optimizer"]
    for key, place in (
        ("offload_optimizer", strategy.optimizer),
        ("offload_param", strategy.parameters),
    ):
        if place == "host":
            zero[key] = {"device": "cpu", "pin_memory": True}
        elif place == "drive":
            zero[key] = {"device": "nvme", "nvme_path": machine.drives[0].path, "pin_memory": True}
    if strategy.parameters == "drive" and not strategy.ours:
        # otherwise DeepSpeed keeps the first billion parameters in host memory
        zero["offload_param"] |= {"max_in_cpu": 0}
    if strategy.uses_drive and machine.drives[0].profile:
        config["aio"] = aio_section(machine.drives[0].profile)
    if strategy.ours:
        section: dict[str, Any] = {"host_memory": plan.budget_bytes}
        if strategy.state_format != "exact":
            section["state_format"] = strategy.state_format
        if machine.drives[0].profile and machine.drives[0].profile.chosen.backend != "libaio":
            section["backend"] = machine.drives[0].profile.chosen.backend
        if len(machine.drives) > 1:
            section["paths"] = [drive.path for drive in machine.drives]
            if machine.speeds:
                section["weights"] = weights(machine)
        config["nvme_offload"] = section
    return config


def script(plan: Plan, machine: Machine, work: Work = Work()) -> str:  # noqa: B008  a tuple of numbers
    """The lines of a training script for *plan*; the script defines `model`, a torch.nn.Module.

    With DeepSpeed they read the configuration of `ds_config` from "ds_config.json".
    """
    strategy, lines = plan.strategy, []
    paths = [drive.path for drive in machine.drives] or [DESCRIBED_PATH]
    where = json.dumps(paths[0] if len(paths) == 1 else paths)
    if strategy.door == "plain":
        lines += ["import torch", "from nvme_offload import NVMeOptimizer", ""]
        lines += ["optimizer = NVMeOptimizer(", "    model.parameters(),", "    torch.optim.AdamW,"]
        lines += [f"    paths={where},", f"    host_memory={plan.budget_bytes},"]
        if strategy.state_format != "exact":
            lines.append(f'    state_format="{strategy.state_format}",')
        lines += {
            "after": [],
            "in forward": ["    overlap_step=True,"],
            "provisional": ['    step_in_backward="provisional",'],
            "in both": ['    step_in_backward="provisional",', "    overlap_step=True,"],
            "in backward": ["    step_in_backward=True,"],
        }[strategy.updates]
        lines += ["    lr=1e-3,", ")"]
    else:
        lines.append("import deepspeed")
        if strategy.ours:
            lines += ["import nvme_offload.zero3", "", "nvme_offload.zero3.enable()"]
        lines += ["", "engine, *_ = deepspeed.initialize("]
        lines += ['    model=model, config="ds_config.json"', ")"]
    if strategy.optimizer and work.offloads:
        lines += ["", "from nvme_offload import save_on_nvme", "", "offload = save_on_nvme("]
        lines += [f"    {where},", f"    host_memory={work.activation_host_bytes},", ")"]
        lines.append("# with offload: loss = model(...), and backward outside of it")
    return "\n".join(lines) + "\n"


def _precision(machine: Machine) -> str:
    known = gpu_models.find(machine.gpu.name) if machine.gpu else None
    return "fp16" if known and not known.bfloat16 else "bf16"


def weights(machine: Machine) -> list[float]:
    """The share of the bytes for each drive, with which all drives finish at the same time."""
    for drive in machine.drives:
        if drive.profile and {path.path for path in drive.profile.stripe} == {
            each.path for each in machine.drives
        }:
            by_path = {path.path: path.weight for path in drive.profile.stripe}
            return [round(by_path[each.path], 4) for each in machine.drives]
    if not machine.speeds:
        return [round(1 / len(machine.drives), 4)] * len(machine.drives)
    total = sum(drive.speeds["mixed"] for drive in machine.drives)
    return [round(drive.speeds["mixed"] / total, 4) for drive in machine.drives]
