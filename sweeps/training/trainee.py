"""One rank of a variant: `python -m sweeps.training.trainee JOB.json RANK`. The first rank reports
events as lines of JSON.

The key "event" is "phase" for a part of the run ("import", "init", then "forward", "backward" and
"optimizer" of each step), "step" after each step, and "done" at the end. Times are of the monotonic
clock, which all processes of a machine share. CPU time, bytes and memory are sums over the ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .. import meter
from ..apart import event_sender
from .runs import Phase

_SUMMED = ("cpu_seconds", "read_bytes", "written_bytes", "peak_bytes")


class Trainer(NamedTuple):
    """The parts of a step, and the results of the run."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]
    step: Callable[[], Any]
    weights: Callable[[], Iterator[Any]]
    optimizer: str
    versions: list[str]


def main() -> None:
    """Train the job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    reporter = _Reporter(Path(job["directory"]))
    _train(job, reporter)
    if job["ranks"] > 1:
        # exit now: a thread of gloo that releases a gathered tensor aborts an interpreter at its
        # end (pytorch/pytorch#190489)
        os._exit(0)


class _Reporter:
    """Reports events of the first rank, and measures phases."""

    def __init__(self, directory: Path) -> None:
        self.send = event_sender()
        self._meter = meter.Meter(directory)

    @contextlib.contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        meter.restart_peak()
        with self._meter.stretch() as took:
            yield
        took["peak_bytes"] = meter.status()["VmHWM"]
        every = gathered({key: took[key] for key in _SUMMED})
        took |= {key: sum(one[key] for one in every) for key in _SUMMED}
        fields = {key: value for key, value in took.items() if key in Phase._fields}
        self.send("phase", name=name, step=step, **fields)


def gathered(own: Any) -> list[Any]:
    """The values of all ranks, once there is a process group."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [own]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def _train(job: dict[str, Any], reporter: _Reporter) -> None:
    plain = job["plain"] is not None
    with reporter.phase("import"):
        import torch

        if plain:
            import nvme_offload  # noqa: F401
        else:
            import deepspeed  # noqa: F401

            if job["ours"]:
                from nvme_offload import zero3

                zero3.enable()
    with reporter.phase("init"):
        torch.manual_seed(0)
        trainer = (_plain if plain else _deepspeed)(job)
        synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        synchronize()
    for step in range(job["steps"]):
        with reporter.phase("forward", step):
            loss = trainer.forward()
            synchronize()
        with reporter.phase("backward", step):
            trainer.backward(loss)
            synchronize()
        with reporter.phase("optimizer", step):
            trainer.step()
            synchronize()
        reporter.send("step", number=step, loss=loss.item().hex(), ended=time.monotonic())
        del loss  # otherwise the graph of a step outlives it, and so do gathered parameters
    cuda = torch.cuda.is_available()
    reporter.send(
        "done",
        versions=[
            *trainer.versions,
            f"torch {torch.__version__}",
            f"Python {platform.python_version()}",
        ],
        accelerator=torch.cuda.get_device_name(0) if cuda else "cpu",
        gpu_peak_bytes=max(gathered(torch.cuda.max_memory_allocated())) if cuda else 0,
        optimizer=trainer.optimizer,
        threads=torch.get_num_threads(),
    )
    digest = _digest(trainer.weights())
    reporter.send("weights", digest=_digest_of_ranks(digest) if plain else digest)


def _input(job: dict[str, Any], device: Any) -> Any:
    import torch

    return torch.randn(1, job["tokens"], job["hidden"], dtype=torch.bfloat16).to(device)


def _deepspeed(job: dict[str, Any]) -> Trainer:
    """DeepSpeed's engine with the variant's configuration."""
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=job["ds_config"]):
        model = _stack(job["hidden"], job["blocks"])
    engine, *_ = deepspeed.initialize(
        model=model, config=job["ds_config"], model_parameters=model.parameters()
    )
    given = _input(job, engine.device)

    def weights() -> Iterator[Any]:
        for parameter in engine.module.parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                yield parameter

    return Trainer(
        lambda: engine(given),
        engine.backward,
        engine.step,
        weights,
        type(engine.optimizer.optimizer).__name__,
        [f"deepspeed {deepspeed.__version__}"],
    )


def _plain(job: dict[str, Any]) -> Trainer:
    """Plain PyTorch, sharded by FSDP2 over several ranks: `NVMeOptimizer` with AdamW, or AdamW over
    fp32 copies in memory.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from nvme_offload import AioConfig, NVMeOptimizer, __version__

    rank, cuda = int(sys.argv[2]), torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    model = _stack(job["hidden"], job["blocks"]).to(device, torch.bfloat16)
    if job["ranks"] > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        for layer in model.blocks:
            fully_shard(layer)
        fully_shard(model)
    parameters = list(model.parameters())
    options = {**job["ds_config"]["optimizer"]["params"], "fused": True}
    if "state_format" in job["plain"]:
        optimizer: Any = NVMeOptimizer(
            parameters,
            torch.optim.AdamW,
            paths=job["offload"],
            aio=AioConfig(**job["aio"]),
            **job["plain"],
            **options,
        )
    else:
        optimizer = _InMemory(parameters, options)
    given = _input(job, device)

    def step() -> None:
        optimizer.step()
        model.zero_grad()

    return Trainer(
        lambda: model(given),
        lambda loss: loss.backward(),
        step,
        lambda: (getattr(one, "_local_tensor", one) for one in parameters),
        f"{type(optimizer).__name__.strip('_')} with AdamW",
        [f"nvme-offload {__version__}"],
    )


class _InMemory:
    """AdamW over fp32 copies of bfloat16 parameters."""

    def __init__(self, parameters: list[Any], options: dict[str, Any]) -> None:
        import torch

        self._parameters = parameters
        self._masters = [parameter.detach().float() for parameter in parameters]
        self._adamw = torch.optim.AdamW(self._masters, **options)

    def step(self) -> None:
        import torch

        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
            self._adamw.step()
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.copy_(master)
                master.grad = None


def _stack(hidden: int, blocks: int) -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = (
                nn.LayerNorm(hidden),
                nn.Linear(hidden, 4 * hidden),
                nn.Linear(4 * hidden, hidden),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
            return y

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.float().pow(2).mean()

    return Stack()


def _digest(weights: Iterable[Any]) -> str:
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for weight in weights:
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _digest_of_ranks(own: str) -> str:
    """The digest of all ranks' shards."""
    every = gathered(own)
    return own if len(every) == 1 else hashlib.blake2b("".join(every).encode()).hexdigest()[:32]


if __name__ == "__main__":
    main()
