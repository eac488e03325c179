"""The DeepSpeed configuration of a plan, to paste."""

from __future__ import annotations

from typing import Any

from ..ds_config.edit import aio_section
from ..hardware import gpu_models
from .advice import Question
from .plan import Machine, Plan, measured_together

# Usual ones for training all weights of a pretrained model, and for adapters next to frozen weights.
_LEARNING_RATE, _ADAPTER_LEARNING_RATE = 1e-5, 1e-4
CLIP_NORM = 1.0


def ds_config(plan: Plan, question: Question) -> dict[str, Any]:
    """A DeepSpeed configuration for *plan*, complete except for the learning rate, which the user edits.

    The plan fits, and its door is not "plain".
    """
    strategy, machine, work = plan.strategy, question.machine, question.work
    known = gpu_models.find(machine.gpu.name) if machine.gpu else None
    precision = "fp16" if known and not known.bfloat16 else "bf16"
    zero: dict[str, Any] = {"stage": strategy.stage}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        precision: {"enabled": True},
        # required by Lightning's test and predict
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": learning_rate(question)}},
        "gradient_clipping": CLIP_NORM,
        "zero_optimization": zero,
    }
    if work.accumulation > 1:  # Lightning refuses this key; it sets it from its Trainer
        config["gradient_accumulation_steps"] = work.accumulation
    if strategy.optimizer is None:
        del config["optimizer"], config["gradient_clipping"]
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
    profile = machine.drives[0].profile if strategy.uses_drive else None
    if profile:
        config["aio"] = aio_section(profile)
    if strategy.ours:
        section: dict[str, Any] = {"host_memory": plan.budget_bytes}
        if strategy.state_format != "exact":
            section["state_format"] = strategy.state_format
        if profile and profile.chosen.backend != "libaio":
            section["backend"] = profile.chosen.backend
        if len(machine.drives) > 1:
            section["paths"] = [drive.path for drive in machine.drives]
            if machine.speeds:
                section["weights"] = weights(machine)
        config["nvme_offload"] = section
    return config


def learning_rate(question: Question) -> float:
    """A usual one for the trained parameters."""
    return _LEARNING_RATE if question.model.trainable is None else _ADAPTER_LEARNING_RATE


def weights(machine: Machine) -> list[float]:
    """The share of the bytes for each drive, with which all drives finish at the same time."""
    drives = machine.drives
    if together := measured_together(drives):
        by_path = {path.path: path.weight for path in together.stripe}
        return [round(by_path[each.path], 4) for each in drives]
    mixed = [drive.speeds["mixed"] if machine.speeds else 1.0 for drive in drives]
    return [round(each / sum(mixed), 4) for each in mixed]
