"""ZeRO-3 with optimizer states on the drive, at its fastest settings. It takes gradients from a
backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from nvme_offload.hardware.config import AioConfig
from nvme_offload.optim import NVMeOptimizer

DEEPSPEED = "deepspeed"
MEMORY = "memory"
_OPTIONS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
_SUB_GROUPS = 12  # sub-groups of DeepSpeed, which passes them through its buffers


class Contender(Protocol):
    """Makes steps of AdamW. waited_seconds: of the last step, for the drive; 0 if unknown."""

    waited_seconds: float

    def prepare(self) -> None:
        """Prepare a step, outside of the timed part."""

    def step(self) -> None:
        """One step."""


def contender(model: nn.Module, job: dict[str, Any]) -> Contender:
    """Make the side of *job* for the parameters of *model* and their gradients."""
    if job["variant"] == MEMORY:
        return _InMemory(list(model.parameters()))
    if job["variant"] == DEEPSPEED:
        return _DeepSpeed(model, job)
    return _OnNVMe(list(model.parameters()), job)


class _InMemory:
    """`torch.optim.AdamW` over fp32 copies of the parameters, which are cast back."""

    waited_seconds = 0.0

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._masters = [parameter.detach().float() for parameter in parameters]
        self._optimizer = torch.optim.AdamW(self._masters, fused=True, **_OPTIONS)

    def prepare(self) -> None:
        pass

    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self._optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.copy_(master)
                master.grad = None


class _OnNVMe:
    """`NVMeOptimizer` with the state format of the variant's name."""

    def __init__(self, parameters: Sequence[torch.Tensor], job: dict[str, Any]) -> None:
        self.waited_seconds = 0.0
        self._optimizer = NVMeOptimizer(
            parameters,
            paths=job["directory"],
            host_memory=job["host_memory"],
            state_format=job["variant"],
            aio=AioConfig(**job["aio"]),
            fused=True,
            **_OPTIONS,
        )

    def prepare(self) -> None:
        pass

    def step(self) -> None:
        self._optimizer.step()
        self.waited_seconds = self._optimizer.stats().waited_seconds


class _DeepSpeed:
    """ZeRO-3 with optimizer states on the drive, at the settings with which it is fastest. It wants
    its gradients from a backward pass.
    """

    waited_seconds = 0.0

    def __init__(self, model: nn.Module, job: dict[str, Any]) -> None:
        import deepspeed

        parameters = list(model.parameters())
        gradients = [parameter.grad for parameter in parameters]
        elements = sum(parameter.numel() for parameter in parameters)
        model.zero_grad(set_to_none=True)

        def forward() -> torch.Tensor:
            return torch.stack(
                [
                    (parameter * gradient).sum()
                    for parameter, gradient in zip(parameters, gradients, strict=True)
                ]
            ).sum()

        model.forward = forward
        self._engine, *_ = deepspeed.initialize(
            model=model, config=_deepspeed_config(job, elements), dist_init_required=False
        )

    def prepare(self) -> None:
        self._engine.backward(self._engine())

    def step(self) -> None:
        self._engine.step()


def _deepspeed_config(job: dict[str, Any], elements: int) -> dict[str, Any]:
    aio = job["aio"]
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 1000,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": _OPTIONS},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": elements // _SUB_GROUPS,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": job["directory"],
                "buffer_count": 14,
                "pipeline_read": True,
                "pipeline_write": True,
                "pin_memory": True,
            },
        },
        "aio": {
            "block_size": aio["block_size"],
            "queue_depth": aio["queue_depth"],
            "intra_op_parallelism": aio["thread_count"],
            "single_submit": False,
            "overlap_events": True,
        },
    }
