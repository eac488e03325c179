"""One rank of one variant: `python -m sweeps.optimizer.trainee JOB.json RANK`.

The first rank reports every step and the end, for all ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from .. import meter
from ..apart import teller
from .contenders import DEEPSPEED, contender

# How the figures of the ranks are combined.
_OF_RANKS: dict[str, Callable[[list[Any]], Any]] = {
    **dict.fromkeys(("seconds", "waited_seconds", "busy_seconds"), max),
    **dict.fromkeys(("cpu_seconds", "read_bytes", "written_bytes", "planning_seconds"), sum),
    **dict.fromkeys(("host_before_bytes", "host_peak_bytes"), sum),
    **dict.fromkeys(("device_before_bytes", "device_peak_bytes"), max),
    "checksum": lambda sums: float(sum(sums)).hex(),
}


def main() -> None:
    """Run the steps of the job."""
    tell = teller()
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    with _ranks(job, rank, device) as gather:

        def tell_of_all(event: str, own: dict[str, Any], **values: Any) -> None:
            every = gather(own)
            if rank == 0:
                of_all = {key: _OF_RANKS[key]([one[key] for one in every]) for key in own}
                tell(event, **values, **of_all)

        model = _model(job, device)
        parameters = list(model.parameters())
        elements = sum(parameter.numel() for parameter in parameters)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) * 1e-3
        _synchronize()
        before = meter.memory_of("self")
        device_before = torch.cuda.memory_allocated() if cuda else 0
        metered = meter.Meter(Path(job["directory"]))
        optimizer = contender(model, job)
        for number in range(job["steps"]):
            optimizer.prepare()
            _synchronize()
            gather(None)
            with metered.stretch() as took:
                optimizer.step()
                _synchronize()
            took["waited_seconds"] = optimizer.waited_seconds
            kept = {key: value for key, value in took.items() if key in _OF_RANKS}
            tell_of_all("step", kept, number=number)
        after = meter.memory_of("self")
        own = {
            "host_before_bytes": before.resident if before else 0,
            "host_peak_bytes": after.peak if after else 0,
            "device_before_bytes": device_before,
            "device_peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
            "checksum": _checksum(parameters),
        }
        tell_of_all(
            "done",
            own,
            elements=elements,
            accelerator=torch.cuda.get_device_name(0)
            if cuda
            else "none, the parameters are on the CPU",
            threads=torch.get_num_threads(),
            versions=f"torch {torch.__version__}, Python {platform.python_version()}",
        )
    if _grouped(job):
        # exit now: a thread of gloo that releases a gathered tensor aborts an interpreter at its
        # end (pytorch/pytorch#190489)
        os._exit(0)


def _grouped(job: dict[str, Any]) -> bool:
    """Whether there is a process group; DeepSpeed needs one for a single rank too."""
    return bool(job["ranks"] > 1 or job["variant"] == DEEPSPEED)


@contextlib.contextmanager
def _ranks(
    job: dict[str, Any], rank: int, device: torch.device
) -> Iterator[Callable[[Any], list[Any]]]:
    """A function that gathers a value from every rank."""
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
    """The parameters, sharded by `fully_shard` over several ranks unless DeepSpeed shards them."""
    model = nn.Module()
    for number, shape in enumerate(job["shapes"]):
        model.register_parameter(
            str(number),
            nn.Parameter(torch.randn(shape, dtype=torch.bfloat16, device=device) * 0.02),
        )
    return fully_shard(model) if job["ranks"] > 1 and job["variant"] != DEEPSPEED else model


def _checksum(parameters: Sequence[torch.Tensor]) -> float:
    """A sum over the local shards."""
    local = (
        parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for parameter in parameters
    )
    return float(sum(part.detach().double().abs().sum().item() for part in local))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
