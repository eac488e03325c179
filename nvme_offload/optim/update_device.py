"""`UpdateDevice`: on which device a parameter is updated."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..errors import UsageError
from .buckets import is_distributed, local

# Free memory of a GPU below which parameters in host memory are updated on the CPU: three buckets
# in flight, each with 128 MiB of packed states, and the temporary tensors of one update.
_LEAST_FREE_BYTES = 1 << 30

_log = logging.getLogger(__name__)


class UpdateDevice:
    """Chooses the device on which each parameter is updated, by the user's *choice*.

    A parameter on a GPU is updated there. For a parameter in host memory "gpu" chooses the current
    CUDA device, and "auto" does so where FSDP2 computes with the parameter on a GPU
    (CPUOffloadPolicy); otherwise the parameter is updated on the CPU.

    Raises: UsageError where *choice* has no effect on this machine.
    """

    def __init__(self, choice: str) -> None:
        if choice not in ("auto", "gpu", "cpu"):
            raise UsageError(f'update_device must be "auto", "gpu" or "cpu", not {choice!r}')
        if choice == "gpu" and not torch.cuda.is_available():
            raise UsageError(
                'update_device="gpu" needs a CUDA device, and torch finds none: leave it out'
            )
        self._choice = choice
        self._logged = False
        self._has_memory: bool | None = None

    def of(self, parameter: torch.Tensor) -> torch.device:
        """The device on which *parameter* is updated. Raises: UsageError."""
        home = local(parameter).device
        if home.type == "meta":  # it will be somewhere else
            return home
        if home.type != "cpu":
            if self._choice == "cpu":
                raise UsageError(
                    f'update_device="cpu" is for parameters in host memory, and a parameter is on {home}: leave it out'
                )
            return home
        if self._choice == "cpu" or (self._choice == "auto" and not self._prefers_gpu(parameter)):
            return home
        device = torch.device("cuda", torch.cuda.current_device())
        if not self._logged:
            self._logged = True
            _log.info(
                'parameters in host memory are updated on %s; update_device="cpu" updates them on the CPU',
                device,
            )
        return device

    def _prefers_gpu(self, parameter: torch.Tensor) -> bool:
        mesh: Any = getattr(parameter, "device_mesh", None)
        if not is_distributed(parameter) or mesh.device_type != "cuda":
            return False
        if self._has_memory is None:
            free, _ = torch.cuda.mem_get_info()
            self._has_memory = free >= _LEAST_FREE_BYTES
            if not self._has_memory:
                _log.info(
                    "parameters in host memory are updated on the CPU: the GPU has %d MiB free",
                    free >> 20,
                )
        return self._has_memory
