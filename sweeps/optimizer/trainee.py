"""One variant, in a process of its own: `python -m sweeps.optimizer.trainee JOB.json`. Prints a line of JSON for every step, and one at the end."""

from __future__ import annotations

import contextlib
import json
import platform
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nvme_offload.config import AioConfig
from nvme_offload.optim import NVMeOptimizer
from sweeps.training import process

from .shapes import gpt_shapes

_OPTIONS = {"lr": 1e-4, "weight_decay": 0.1}


class InMemory:
    """`torch.optim.AdamW` over fp32 copies of the parameters, which follow by a cast."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._masters = [parameter.detach().float() for parameter in parameters]
        self._optimizer = torch.optim.AdamW(self._masters, fused=True, **_OPTIONS)  # type: ignore[arg-type]

    def step(self) -> None:
        """One step; the widened gradients are of a parameter at a time only where the optimizer does not want them all."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self._optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.copy_(master)
                master.grad = None


def main() -> None:
    """Make the steps that the job says."""
    job = json.loads(Path(sys.argv[1]).read_text())
    with contextlib.suppress(OSError):  # when memory runs out, this is the process to end
        Path("/proc/self/oom_score_adj").write_text("1000")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, dtype=torch.bfloat16, device=device) * 0.02) for shape in gpt_shapes(job["parameters"])]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    _synchronize()
    before = process.memory_of("self")
    device_before = torch.cuda.memory_allocated() if cuda else 0
    optimizer: Any
    if job["variant"] == "memory":
        optimizer = InMemory(parameters)
    else:
        optimizer = NVMeOptimizer(
            parameters,
            paths=job["directory"],
            host_memory=job["host_memory"],
            state_format=job["variant"],
            aio=AioConfig(**job["aio"]),
            fused=True,
            **_OPTIONS,
        )
    for number in range(job["steps"]):
        moved, cpu, began = process.traffic(), _cpu_seconds(), time.monotonic()
        optimizer.step()
        _synchronize()
        seconds, after = time.monotonic() - began, process.traffic()
        stats = optimizer.stats() if isinstance(optimizer, NVMeOptimizer) else None
        _tell(
            "step",
            number=number,
            seconds=seconds,
            cpu_seconds=_cpu_seconds() - cpu,
            read_bytes=after.read - moved.read,
            written_bytes=after.written - moved.written,
            waited_seconds=stats.waited_seconds if stats else 0.0,
        )
    peak = process.memory_of("self")
    _tell(
        "done",
        elements=sum(parameter.numel() for parameter in parameters),
        host_before_bytes=before.resident if before else 0,
        host_peak_bytes=peak.peak if peak else 0,
        device_before_bytes=device_before,
        device_peak_bytes=torch.cuda.max_memory_allocated() if cuda else 0,
        accelerator=torch.cuda.get_device_name(0) if cuda else "none, the parameters are on the CPU",
        threads=torch.get_num_threads(),
        versions=f"torch {torch.__version__}, Python {platform.python_version()}",
        checksum=float(sum(parameter.detach().double().abs().sum().item() for parameter in parameters)).hex(),
    )


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _tell(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


if __name__ == "__main__":
    main()
