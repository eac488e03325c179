"""A model of billions of parameters trained by this package and by other systems, one after
another: `python3 -m sweeps.systems DIR --model 7b`, from the root of the repository.

Each system is a separate process, or one per GPU, that runs a few steps of the model of
`examples/big_models/train.py`, with the same batches and the settings that its documentation
recommends. Host memory is the drop of the machine's available memory while a system trains, since a
process's own counters lack memory that a GPU's driver pins. All systems need transformers; some
need deepspeed, flashoptim, torchao, bitsandbytes or megatrain (whose package is called `infinity`), and
the report names missing ones.

Source: the READMEs of DeepSpeed, FlashOptim, MegaTrain, torchao and bitsandbytes;
torch.distributed.fsdp.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
import os
import runpy
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import pandas as pd
import torch
import torch.distributed as dist

from nvme_offload.errors import UsageError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.hardware.machine import available_bytes
from nvme_offload.parameters.weights import save
from nvme_offload.swap.tier import engine_config

from . import apart, command, turns
from .command import COUNT, Names, Size, option, say
from .floor import Beside, Speeds, described, floor, floor_seconds
from .machine import facts
from .meter import Meter
from .report import Medians, columns, document, escaped, listed, write

_EXAMPLE = apart.ROOT / "examples" / "big_models" / "train.py"
_SETTLING = 2  # steps: the first creates states, after the second the order is learned
_ADAMW = {"lr": 1e-4, "weight_decay": 0.1}
_SUB_GROUP = 200_000_000  # parameters; the size of DeepSpeed's float32 buffers

Step = Callable[[torch.Tensor], float]


@dataclasses.dataclass
class Results:
    """facts: machine and command, by name. options: of the command. parameters: of the model.
    speeds: fio's measurements, with the settings *aio*. systems: the runs, in order.
    """

    facts: dict[str, str]
    options: dict[str, Any]
    parameters: int
    systems: list[dict[str, Any]]
    notes: list[str]
    aio: AioConfig = dataclasses.field(default_factory=AioConfig)
    speeds: list[Speeds] = dataclasses.field(default_factory=list)


class System(NamedTuple):
    """A system: its title, and the factory of its step. The step takes tokens and returns the loss
    after the update. *loads*: from files that are on the drive before it starts.
    """

    title: str
    make: Callable[[dict[str, Any]], Step]
    loads: bool = False


@functools.cache
def example() -> dict[str, Any]:
    """The definitions of examples/big_models/train.py."""
    return runpy.run_path(str(_EXAMPLE))


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _model(job: dict[str, Any], gpus: int = 1, device: torch.device | None = None) -> Any:
    """The model, sharded over *gpus* by FSDP2."""
    return example()["make_model"](job["model"], device or _device(), gpus)


def _plain(
    model: Callable[..., Any], optimizer: Any, clip: Callable[[], Any] | None = None
) -> Step:
    """A plain training step."""

    def step(tokens: torch.Tensor) -> float:
        loss = model(tokens)
        found = float(loss)  # after backward, it would wait for copies of states from the GPU
        loss.backward()
        if clip is not None:
            clip()
        optimizer.step()
        optimizer.zero_grad()
        return found

    return step


_IN_BACKWARD = {"step_in_backward": True, **_ADAMW, "fused": True}


def _ours(
    state_format: str, job: dict[str, Any], model: Any = None, clips: bool = False, **when: Any
) -> Step:
    """*model*, by default on the GPUs, with packed states in host memory and on the drive. *when*:
    options of `NVMeOptimizer`; updates run in backward by default. *clips*: to a norm that no
    gradient reaches.
    """
    from nvme_offload import NVMeOptimizer

    model = _model(job, job["gpus"]) if model is None else model
    optimizer = NVMeOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        paths=job["directory"],
        host_memory=job["host_memory"],
        state_format=state_format,
        **{**_IN_BACKWARD, **when},
    )
    return _plain(model, optimizer, _clipping(optimizer) if clips else None)


def _clipping(optimizer: Any) -> Callable[[], Any]:
    return lambda: optimizer.clip_grad_norm_(1000.0)


def write_weights(llama: Any, directory: Path) -> None:
    """Write random weights for *llama*, which is on the meta device, as safetensors."""
    noise = example()["Noise"](llama.config.initializer_range, 0, torch.device("cpu"))
    save(llama, directory, lambda weight: noise.fill(torch.empty_like(weight, device="cpu")))


def _streamed(state_format: str, job: dict[str, Any], clips: bool = False, **when: Any) -> Step:
    """Parameters and states in host memory, and on the drive beyond that. *when*, *clips*: as `_ours`."""
    from nvme_offload import Offload

    if job["gpus"] > 1:
        raise UsageError("Offload.parameters is for one process: leave out --gpus")
    llama, weights = example()["empty_llama"](job["model"]), Path(job["directory"], "weights")
    offload = Offload(job["directory"], host_memory=job["host_memory"])
    offload.parameters(llama, _device(), weights=weights, gpu_memory=job["gpu_memory"] or "auto")
    shutil.rmtree(weights)  # a drive may not hold them and the states
    model = example()["WithLoss"](llama).train()
    optimizer = offload.optimizer(
        model.parameters(),
        torch.optim.AdamW,
        state_format=state_format,
        **{**_IN_BACKWARD, **when},
    )
    return _plain(model, optimizer, _clipping(optimizer) if clips else None)


def _zero3(
    job: dict[str, Any],
    optimizer: dict[str, Any],
    parameters: dict[str, Any] | None = None,
    **sections: Any,
) -> Step:
    """DeepSpeed ZeRO-3 in bfloat16, with these sections for the offload of the optimizer and the
    parameters, which are on the GPU without one.
    """
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": job["batch"],
        "steps_per_print": 1000,
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": _ADAMW,
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": optimizer,
            **({"offload_param": parameters} if parameters else {}),
            "sub_group_size": _SUB_GROUP,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 8,
            "intra_op_parallelism": 4,
            "single_submit": False,
            "overlap_events": True,
        },
        **sections,
    }
    model = _model(job, device=torch.device("cpu") if parameters else None)
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=list(model.parameters())
    )

    def step(tokens: torch.Tensor) -> float:
        loss = engine(tokens)
        found = float(loss)
        engine.backward(loss)
        engine.step()
        return found

    return step


def _stock(device: str, job: dict[str, Any]) -> Step:
    """States, and DeepSpeed's copy of the gradients, on *device*, "nvme" or "cpu"."""
    offload: dict[str, Any] = {"device": device, "pin_memory": True}
    if device == "nvme":
        offload |= {
            "nvme_path": job["directory"],
            "buffer_count": 14,  # an assertion fails with fewer
            "pipeline_read": True,
            "pipeline_write": True,
        }
    return _zero3(job, offload)


def _ours_in_zero3(job: dict[str, Any], both: bool = False, **settings: Any) -> Step:
    from nvme_offload import zero3

    zero3.enable()
    ours = {"host_memory": job["host_memory"], "state_format": "compact", **settings}
    # DeepSpeed's default is 1.0.
    clipping = {"gradient_clipping": 0.0} if settings.get("step_in_backward") else {}
    offload = {"device": "nvme", "nvme_path": job["directory"]}
    return _zero3(job, offload, offload if both else None, nvme_offload=ours, **clipping)


def _in_host_memory(model: Any) -> Any:
    """*model* with its parameters in host memory; the GPU computes in bfloat16."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    shard = functools.partial(
        fully_shard,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        offload_policy=CPUOffloadPolicy(pin_memory=_device().type == "cuda"),
    )
    for layer in model.model.layers:
        shard(layer)
    return shard(model)


def _cpu_offload_policy_and_ours(job: dict[str, Any]) -> Step:
    """Parameters in bfloat16 and packed states in host memory."""
    return _ours("compact", job, _in_host_memory(_model(job)))


def _cpu_offload_policy(job: dict[str, Any]) -> Step:
    """Parameters, gradients and states in float32 in host memory."""
    model = _in_host_memory(_model(job).float())
    optimizer = torch.optim.AdamW(model.parameters(), **_ADAMW, fused=True)
    return _plain(model, optimizer)


def _flashoptim(job: dict[str, Any]) -> Step:
    """Everything in the GPU's memory: 24-bit masters and 8-bit moments, gradients released."""
    from flashoptim import FlashAdamW, enable_gradient_release

    model = _model(job, job["gpus"])
    optimizer = FlashAdamW(model.parameters(), **_ADAMW)
    enable_gradient_release(model, optimizer)
    return _plain(model, optimizer)


def _torchao(job: dict[str, Any]) -> Step:
    """Parameters, gradients and states in bfloat16 in host memory, without fp32 masters."""
    from torchao.optim import CPUOffloadOptimizer

    model = _model(job)
    settings = {"offload_gradients": True, "fused": True, **_ADAMW}
    return _plain(model, CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, **settings))


def _bitsandbytes(name: str, job: dict[str, Any]) -> Step:
    """States in CUDA's managed memory, without fp32 masters."""
    import bitsandbytes

    model = _model(job)
    return _plain(model, getattr(bitsandbytes.optim, name)(model.parameters(), **_ADAMW))


def _megatrain(job: dict[str, Any]) -> Step:
    """Parameters and gradients in bfloat16 and moments in float32, in host memory; layers are
    streamed through the GPU.
    """
    if job["gpus"] > 1:
        raise UsageError("megatrain has one process for all GPUs: leave out --gpus")
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from infinity import CPUMasterConfig, CPUMasterModel
    from transformers import AutoModelForCausalLM

    made = _model(job).cpu()
    made.model.gradient_checkpointing_disable()  # MegaTrain recomputes layers
    with torch.device("meta"):
        llama = AutoModelForCausalLM.from_config(made.model.config, dtype=torch.bfloat16)
    llama.model, llama.lm_head = made.model, made.loss.head
    torch.cuda.empty_cache()
    settings = CPUMasterConfig(
        dataset_name="none",
        attn_implementation="sdpa",
        max_seq_len=job["sequence"],
        batch_size=job["batch"],
        enable_timing=False,
    )
    model = CPUMasterModel(llama, settings)
    optimizer = DeepSpeedCPUAdam(model.get_parameters(), **_ADAMW, adamw_mode=True)

    # only with flash-attn does it combine a padding mask with a causal one
    causal = torch.ones(1, 1, job["sequence"], job["sequence"], dtype=torch.bool).tril()

    def step(tokens: torch.Tensor) -> float:
        loss, *_ = model.forward_and_backward(tokens.cpu(), causal, tokens.cpu())
        optimizer.step()
        model._sync_params_to_gpu()
        model.zero_grad()
        optimizer.zero_grad()
        return float(loss)

    return step


SYSTEMS = {
    "compact": System('NVMeOptimizer, "compact", in backward', functools.partial(_ours, "compact")),
    "compact24": System(
        'NVMeOptimizer, "compact24", in backward', functools.partial(_ours, "compact24")
    ),
    "compact-after": System(
        'NVMeOptimizer, "compact", after backward',
        functools.partial(_ours, "compact", step_in_backward=False),
    ),
    "compact-provisional": System(
        'NVMeOptimizer, "compact", provisional, clipping',
        functools.partial(_ours, "compact", clips=True, step_in_backward="provisional"),
    ),
    "compact-overlap": System(
        'NVMeOptimizer, "compact", provisional, `overlap_step`, clipping',
        functools.partial(
            _ours, "compact", clips=True, step_in_backward="provisional", overlap_step=True
        ),
    ),
    "zero3": System('ZeRO-3 with nvme_offload, "compact"', _ours_in_zero3),
    "zero3-exact": System(
        'ZeRO-3 with nvme_offload, "exact"',
        functools.partial(_ours_in_zero3, state_format="exact"),
    ),
    "zero3-exact-backward": System(
        'ZeRO-3 with nvme_offload, "exact", `step_in_backward`',
        functools.partial(_ours_in_zero3, state_format="exact", step_in_backward=True),
    ),
    "zero3-backward": System(
        'ZeRO-3 with nvme_offload, "compact", `step_in_backward`',
        functools.partial(_ours_in_zero3, step_in_backward=True),
    ),
    "zero3-cpu": System(
        'ZeRO-3 with nvme_offload, "compact", updates on the CPU',
        functools.partial(_ours_in_zero3, update_device="cpu"),
    ),
    "zero3-overlap": System(
        'ZeRO-3 with nvme_offload, "compact", `overlap_step`',
        functools.partial(_ours_in_zero3, overlap_step=True),
    ),
    "zero3-both": System(
        'ZeRO-3 with nvme_offload, "compact", parameters on the drive too',
        functools.partial(_ours_in_zero3, both=True),
    ),
    "exact": System('NVMeOptimizer, "exact", in backward', functools.partial(_ours, "exact")),
    "offload-compact": System(
        'Offload: streamed parameters, "compact", in backward',
        functools.partial(_streamed, "compact"),
        loads=True,
    ),
    "offload-provisional": System(
        'Offload: streamed parameters, "compact", provisional, clipping',
        functools.partial(_streamed, "compact", clips=True, step_in_backward="provisional"),
        loads=True,
    ),
    "offload-after": System(
        'Offload: streamed parameters, "compact", after backward, clipping',
        functools.partial(_streamed, "compact", clips=True, step_in_backward=False),
        loads=True,
    ),
    "offload-compact24": System(
        'Offload: streamed parameters, "compact24", in backward',
        functools.partial(_streamed, "compact24"),
        loads=True,
    ),
    "offload-exact": System(
        'Offload: streamed parameters, "exact", in backward',
        functools.partial(_streamed, "exact"),
        loads=True,
    ),
    "cpu-offload-policy-compact": System(
        'FSDP2 with CPUOffloadPolicy and NVMeOptimizer, "compact", in backward',
        _cpu_offload_policy_and_ours,
    ),
    "zero-infinity": System(
        "DeepSpeed ZeRO-3, states on the drive", functools.partial(_stock, "nvme")
    ),
    "zero-offload": System(
        "DeepSpeed ZeRO-3, states in host memory", functools.partial(_stock, "cpu")
    ),
    "cpu-offload-policy": System("FSDP2 with CPUOffloadPolicy", _cpu_offload_policy),
    "megatrain": System("MegaTrain", _megatrain),
    "torchao": System("torchao, `CPUOffloadOptimizer`, gradients offloaded, too", _torchao),
    "bitsandbytes": System(
        "bitsandbytes, `PagedAdamW8bit`", functools.partial(_bitsandbytes, "PagedAdamW8bit")
    ),
    "bitsandbytes-32bit": System(
        "bitsandbytes, `PagedAdamW32bit`", functools.partial(_bitsandbytes, "PagedAdamW32bit")
    ),
    "flashoptim": System("FlashOptim, in the GPU's memory", _flashoptim),
}


def _train(job: dict[str, Any]) -> None:
    """Run one system in this process; the first rank reports every step."""
    send = apart.event_sender()
    rank, cuda = int(os.environ["RANK"]), torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    meter, tokens = Meter(Path(job["directory"])), torch.Generator().manual_seed(1 + rank)
    system = SYSTEMS[job["system"]]
    if system.loads:
        write_weights(example()["empty_llama"](job["model"]), Path(job["directory"], "weights"))
        send("written")
    began = time.monotonic()
    step = system.make(job)
    send("made", seconds=time.monotonic() - began)
    words = example()["SHAPES"][job["model"]][5]
    for number in range(job["steps"]):
        shape = (job["batch"], job["sequence"])
        batch = torch.randint(words, shape, generator=tokens).to(_device())
        dist.barrier()
        with meter.stretch() as taken:
            loss = step(batch)
            # Copies to host memory may run during the next forward pass.
            if cuda and number == job["steps"] - 1:
                torch.cuda.synchronize()
            dist.barrier()
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        send("step", number=number, loss=loss, gpu_bytes=peak, taken=taken)
    del step
    gc.collect()  # FSDP2's reference cycles keep gloo's threads alive past interpreter exit
    dist.destroy_process_group()


@click.command()
@command.directory
@option("--model", default="7b", help="A model of examples/big_models/train.py.")
@option("--systems", type=Names(SYSTEMS), default=",".join(SYSTEMS), help="With commas between.")
@option("--gpus", type=COUNT, default=1, help="With a process for each.")
@option("--host-memory", type=Size(), default="8GB", help="Of this package, in each process.")
@option(
    "--gpu-memory", type=Size(), default=None, help="Of Offload for parameters; else what is free."
)
@option("--batch", type=COUNT, default=4, help="Sequences for each GPU.")
@option("--sequence", type=COUNT, default=2048)
@option(
    "--steps",
    type=click.IntRange(min=_SETTLING + 1),
    default=5,
    help=f"The first {_SETTLING} do not count.",
)
@option("--timeout", type=float, default=560, help="Of a system, in seconds.")
@option("--rounds", type=COUNT, default=1, help="Each runs every system once.")
@command.seconds()
@command.fio_bytes
@command.output("Write OUTPUT.md and OUTPUT.json, after every system.")
@command.note
def main(
    directory: Path,
    systems: list[str],
    timeout: float,
    rounds: int,
    seconds: float | None,
    fio_bytes: int,
    output: Path | None,
    notes: tuple[str, ...],
    **options: Any,
) -> None:
    """Train a model of billions of parameters by each system, with the drive of DIRECTORY, and
    print a report in Markdown. Ratios are to the first system of --systems.
    """
    command.stop_at_sigterm()
    about = facts(directory, "sweeps.systems")
    about["training"] = (
        f"{options['model']} on {options['gpus']} GPU, {options['batch']} x {options['sequence']} tokens each"
    )
    aio = engine_config(str(directory))
    results = Results(about, options, _elements(options["model"]), [], list(notes), aio)
    with (
        turns.interruptible(about, results.notes),
        floor(directory, aio, fio_bytes, about, results.notes) as drive,
    ):
        beside = Beside(drive, results.speeds)
        for number in turns.rounds(rounds, seconds, results.notes):
            beside.begin()
            for name in turns.there_and_back(systems, number):
                run = _run(name, number, directory, timeout, options)
                run["drive"] = beside.end()
                results.systems.append(run)
                write(output, render(results), dataclasses.asdict(results))
    write(output, text := render(results), dataclasses.asdict(results))
    click.echo(text)


def _run(
    name: str, number: int, directory: Path, timeout: float, options: dict[str, Any]
) -> dict[str, Any]:
    """Train by the system *name* in round *number*."""
    before = lowest = available_bytes()

    def poll(_process: int) -> None:
        nonlocal lowest
        lowest = min(lowest, available_bytes())

    with apart.place("systems", directory) as work:
        events, error = apart.run(
            "sweeps.systems",
            {"system": name, "directory": str(work), **options},
            work,
            timeout,
            ranks=options["gpus"],
            environment=apart.launched(options["gpus"]),
            on_event=lambda event: say(json.dumps(event)),
            poll=poll,
        )
    taken = before - lowest
    return {"system": name, "round": number, "error": error, "host_bytes": taken, "events": events}


def _figures(one: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run, medians over its settled steps; "count" is 0 if it had none."""
    steps = apart.of(one["events"], "step")
    settled = [step["taken"] for step in steps if step["number"] >= _SETTLING]
    figures = {"name": one["system"], "round": one["round"], "count": len(settled)}
    if not settled:
        return figures
    taken = pd.DataFrame(settled).median()
    moved = taken["disk_read_bytes"], taken["disk_written_bytes"]
    least = floor_seconds(*moved, one["drive"]) if one["drive"] and any(moved) else math.nan
    return {
        **figures,
        "made": apart.of(one["events"], "made")[0]["seconds"],
        "seconds": taken["seconds"],
        "cpu": taken["cpu_seconds"],
        "read": moved[0] / 1e9,
        "written": moved[1] / 1e9,
        "floor": least / taken["seconds"],
        "host": one["host_bytes"] / 1e9,
        "gpu": steps[-1]["gpu_bytes"] / 1e9,
        "first": steps[0]["loss"],
        "last": steps[-1]["loss"],
    }


def render(results: Results) -> str:
    """The report in Markdown."""
    options, billions = results.options, results.parameters / 1e9
    medians = Medians(map(_figures, results.systems))
    known, names = medians.cell, medians.names
    tokens = options["gpus"] * options["batch"] * options["sequence"]
    cells: dict[str, Callable[[str], str]] = {
        "": lambda name: SYSTEMS[name].title,
        "steps that count": lambda name: str(medians.count(name)),
        "s a step": known(lambda run: f"{run.seconds:.2f}"),
        f"over {names[0] if names else 'the first'}": medians.ratio,
        "tokens a second": known(lambda run: f"{tokens / run.seconds:,.0f}"),
        "CPU s a step, of a rank": known(lambda run: f"{run.cpu:.1f}"),
        "host memory, GB": known(lambda run: f"{run.host:.1f}"),
        "GB a billion": known(lambda run: f"{run.host / billions:.2f}"),
        "GPU, GB": known(lambda run: f"{run.gpu:.1f}"),
        "drive, GB read + written": known(lambda run: f"{run.read:.1f} + {run.written:.1f}"),
        "floor / time": known(lambda run: "" if math.isnan(run.floor) else f"{run.floor:.2f}"),
        "s to start": known(lambda run: f"{run.made:.1f}"),
        "loss of the first step, of the last": known(
            lambda run: f"{run['first']:.4f}, {run['last']:.4f}"
        ),
    }
    stopped = [
        f"- {SYSTEMS[one['system']].title}: {escaped(one['error'])}"
        for one in results.systems
        if one["error"]
    ]
    return document(
        f"# {options['model']} by each system",
        listed(results.facts),
        f"{billions:.2f} billion parameters. Each figure is the median over the rounds of the median over a run's steps past the first {_SETTLING}; "
        "each ratio is the median over the rounds of the ratio in one round. Host memory and bytes of the drive are the whole machine's.",
        columns(names, cells),
        described(results.speeds, results.aio),
        "\n".join(stopped),
        *results.notes,
    )


def _elements(model: str) -> int:
    """The number of its parameters, without memory for them."""
    with torch.device("meta"):
        made = example()["make_model"](model, torch.device("meta"), 1)
    return sum(parameter.numel() for parameter in made.parameters())


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].endswith("job.json"):  # the process of a system
        _train(json.loads(Path(sys.argv[1]).read_text()))
    else:
        command.run(main, "sweeps.systems")
