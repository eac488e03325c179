"""One variant: `python -m sweeps.training.trainee JOB.json`. Reports events as lines of JSON.

The key "event" is "phase" for a part of the run ("import", "init", then "forward", "backward" and
"optimizer" of each step), "step" after each step, and "done" at the end. Times are of the monotonic
clock, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import meter
from ..apart import teller
from ..models import build, tensors
from .runs import Phase


def main() -> None:
    """Train the job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    _train(job, _Teller(Path(job["directory"])))


class _Teller:
    """Reports events, and measures phases."""

    def __init__(self, directory: Path) -> None:
        self.tell = teller()
        self._meter = meter.Meter(directory)

    @contextlib.contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        meter.restart_peak()
        with self._meter.stretch() as took:
            yield
        memory = meter.memory_of("self")
        took["peak_bytes"] = memory.peak if memory else 0
        took["after_bytes"] = memory.resident if memory else 0
        fields = {key: value for key, value in took.items() if key in Phase._fields}
        self.tell("phase", name=name, step=step, **fields)


def _train(job: dict[str, Any], teller: _Teller) -> None:
    with teller.phase("import"):
        import deepspeed
        import torch

        if job["ours"]:
            from nvme_offload import zero3

            zero3.enable()
    from deepspeed.accelerator import get_accelerator

    synchronize = get_accelerator().synchronize
    with teller.phase("init"):
        if job["model"] is not None:
            # transformers imports modules lazily, which fails under zero.Init, where torch.empty
            # and similar functions are replaced: import them now
            tensors(job["model"])
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path=job["ds_config"]):
            model = (
                _stack(job["hidden"], job["blocks"])
                if job["model"] is None
                else build(job["model"])
            )
        engine, *_ = deepspeed.initialize(
            model=model, config=job["ds_config"], model_parameters=model.parameters()
        )
        if job["model"] is None:
            given = {
                "x": torch.randn(1, job["tokens"], job["hidden"], dtype=torch.bfloat16).to(
                    engine.device
                )
            }
        else:
            tokens = torch.randint(0, job["model"]["vocab_size"], (job["batch"], job["tokens"])).to(
                engine.device
            )
            given = {"input_ids": tokens, "labels": tokens}
        synchronize()
    for step in range(job["steps"]):
        with teller.phase("forward", step):
            out = engine(**given)
            loss = out if job["model"] is None else out.loss
            del out
            synchronize()
        with teller.phase("backward", step):
            engine.backward(loss)
            synchronize()
        with teller.phase("optimizer", step):
            engine.step()
            synchronize()
        teller.tell(
            "step",
            number=step,
            loss=loss.item().hex(),
            ended=time.monotonic(),
            stats=_stats(engine) if job["ours"] else None,
        )
        del loss  # otherwise the graph of a step outlives it, and so do gathered parameters
    teller.tell(
        "done",
        versions=[
            f"deepspeed {deepspeed.__version__}",
            f"torch {torch.__version__}",
            f"Python {platform.python_version()}",
        ],
        accelerator=f"{get_accelerator().device_name()} {get_accelerator().device_name(0)}"
        if get_accelerator().device_name() != "cuda"
        else torch.cuda.get_device_name(0),
        optimizer=type(engine.optimizer.optimizer).__name__,
        threads=torch.get_num_threads(),
    )
    teller.tell("weights", digest=_digest(engine))


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


def _stats(engine: Any) -> dict[str, Any] | None:
    """The package's statistics of the last step; None where DeepSpeed's swappers are used."""
    from nvme_offload import zero3
    from nvme_offload.errors import UsageError

    try:
        return dataclasses.asdict(zero3.stats(engine))
    except UsageError:
        return None


def _digest(engine: Any) -> str:
    """A digest of all weights, gathered one parameter at a time."""
    import deepspeed
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
