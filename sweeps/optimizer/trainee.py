"""One rank of one variant, in a process of its own: `python -m sweeps.optimizer.trainee JOB.json
RANK`.

The first rank prints a line of JSON for every step, and one at the end, of all ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sweeps.meter import Disk, Planning
from sweeps.training import process

from .contenders import DEEPSPEED, contender


def main() -> None:
    """Make the steps that the job says."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # where DeepSpeed's own words go
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    with contextlib.suppress(OSError):  # when memory runs out, this is the process to end
        Path("/proc/self/oom_score_adj").write_text("1000")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    with _ranks(job, rank, device) as gather:
        model = _model(job, device)
        parameters = list(model.parameters())
        elements = sum(parameter.numel() for parameter in parameters)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) * 1e-3
        _synchronize()
        before = process.memory_of("self")
        device_before = torch.cuda.memory_allocated() if cuda else 0
        disk, planning = Disk(Path(job["directory"])), Planning()
        optimizer = contender(model, job)
        for number in range(job["steps"]):
            optimizer.prepare()
            _synchronize()
            gather(None)
            busy, planned = disk.read().busy_seconds, planning.seconds
            moved, cpu, began = process.traffic(), _cpu_seconds(), time.monotonic()
            optimizer.step()
            _synchronize()
            seconds, after = time.monotonic() - began, process.traffic()
            cpu, busy, planned = (
                _cpu_seconds() - cpu,
                disk.read().busy_seconds - busy,
                planning.seconds - planned,
            )
            told = gather(
                (
                    seconds,
                    optimizer.waited_seconds,
                    cpu,
                    after.read - moved.read,
                    after.written - moved.written,
                    busy,
                    planned,
                )
            )
            if rank == 0:
                times, waits, cpu_times, reads, writes, busy_times, plannings = zip(
                    *told, strict=True
                )
                _tell(
                    events,
                    "step",
                    number=number,
                    seconds=max(times),
                    waited_seconds=max(waits),
                    cpu_seconds=sum(cpu_times),
                    read_bytes=sum(reads),
                    written_bytes=sum(writes),
                    busy_seconds=max(busy_times),
                    planning_seconds=sum(plannings),
                )
        peak = process.memory_of("self")
        host = (before.resident if before else 0, peak.peak if peak else 0)
        found = gather(
            (
                *host,
                device_before,
                torch.cuda.max_memory_allocated() if cuda else 0,
                _checksum(parameters),
            )
        )
    if rank == 0:
        residents, peaks, allocated, device_peaks, checksums = zip(*found, strict=True)
        _tell(
            events,
            "done",
            elements=elements,
            host_before_bytes=sum(residents),
            host_peak_bytes=sum(peaks),
            device_before_bytes=max(allocated),
            device_peak_bytes=max(device_peaks),
            accelerator=torch.cuda.get_device_name(0)
            if cuda
            else "none, the parameters are on the CPU",
            threads=torch.get_num_threads(),
            versions=f"torch {torch.__version__}, Python {platform.python_version()}",
            checksum=float(sum(checksums)).hex(),
        )
    if _grouped(job):
        # all is told; a thread of gloo that still lets go of a gathered tensor aborts an
        # interpreter at its end (pytorch/pytorch#190489)
        os._exit(0)


def _grouped(job: dict[str, Any]) -> bool:
    """Whether there is a process group, which DeepSpeed wants of a single rank, too."""
    return bool(job["ranks"] > 1 or job["variant"] == DEEPSPEED)


@contextlib.contextmanager
def _ranks(
    job: dict[str, Any], rank: int, device: torch.device
) -> Iterator[Callable[[Any], list[Any]]]:
    """What gathers a value from every rank."""
    if not _grouped(job):
        yield lambda value: [value]
        return
    patience = datetime.timedelta(seconds=job["patience_seconds"])
    os.environ["LOCAL_RANK"] = str(rank)
    store = dist.FileStore(str(Path(job["directory"]) / "ranks"), job["ranks"])
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=job["ranks"],
        timeout=patience,
    )

    def gather(value: Any) -> list[Any]:
        gathered: list[Any] = [None] * job["ranks"]
        dist.all_gather_object(gathered, value)
        return gathered

    yield gather
    dist.destroy_process_group()


def _model(job: dict[str, Any], device: torch.device) -> nn.Module:
    """The parameters; with several ranks `fully_shard` leaves each its shards, unless DeepSpeed is
    to have shards of its own.
    """
    model = nn.Module()
    for number, shape in enumerate(job["shapes"]):
        model.register_parameter(
            str(number),
            nn.Parameter(torch.randn(shape, dtype=torch.bfloat16, device=device) * 0.02),
        )
    return fully_shard(model) if job["ranks"] > 1 and job["variant"] != DEEPSPEED else model


def _checksum(parameters: Sequence[torch.Tensor]) -> float:
    """Of what this rank has of them."""
    local = (
        parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for parameter in parameters
    )
    return float(sum(part.detach().double().abs().sum().item() for part in local))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _tell(events: TextIO, event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), file=events)


if __name__ == "__main__":
    main()
