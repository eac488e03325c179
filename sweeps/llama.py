"""Llama-2's real shapes on one GPU: `python3 -m sweeps.llama DIR`, from the root of the repository.
Wants no network, no transformers and no fio.

ZeRO-3 with parameters and states on the drive of DIR, with states alone, and `NVMeOptimizer`: each
a process of its own that makes a few steps. For every phase the report has the drive's busy share
and speed (/proc/diskstats), the CPU that the swapper's calls took, and the time beside the floor:
what the engine by itself needs to move the same bytes, both ways at once, before and after. On a
machine without a GPU, `--width 64` is the same model with all of its tensors, narrow enough for two
cores.

On a GPU machine without a network: an interpreter with torch and CUDA, and DeepSpeed's wheel with
what it needs unpacked to /tmp/site:

    export PYTHONPATH=/tmp/site && python3 setup.py build_ext --inplace
    python3 -c "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
    python3 -m sweeps.llama /local_nvme --ways both,states --output $OUT/llama-7b
"""

from __future__ import annotations

import collections
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import pandas as pd
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine, allocate

from . import apart, command
from .command import Names, Size, option
from .machine import commit, facts
from .meter import Meter, memory_of
from .report import columns, document, listed, write

_WAYS = {
    "both": "ZeRO-3, parameters and states on the drive",
    "states": "ZeRO-3, states on the drive",
    "optimizer": 'NVMeOptimizer, "compact"',
}
# Of --overlap-step: the rows that it makes of the way "optimizer".
_TITLES = {
    **_WAYS,
    "at once": f"{_WAYS['optimizer']}, step at once",
    "overlapped": f"{_WAYS['optimizer']}, step under the next forward pass",
}
# width, of the MLP, layers, heads
_SIZES = {"7b": (4096, 11008, 32, 32), "13b": (5120, 13824, 40, 40)}
_VOCABULARY = 32000
_SETTLING = 4  # steps: by these the order is learned, and those are in memory that stay there
_PROBE_SECONDS = 10
_PHASES = ("forward", "backward", "update")


class Sizes(NamedTuple):
    """Of the model."""

    width: int
    inner: int
    layers: int
    heads: int
    vocabulary: int

    @classmethod
    def of(cls, name: str, width: int | None) -> Sizes:
        """Of the model called *name*, or of its form with that *width*, which has as many layers
        and tensors.
        """
        whole, inner, layers, heads = _SIZES[name]
        if width is None:
            return cls(whole, inner, layers, heads, _VOCABULARY)
        return cls(
            width,
            inner * width // whole // 8 * 8,
            layers,
            max(width // 16, 1),
            max(_VOCABULARY * width // whole, 64),
        )


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(
            x.dtype
        )


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class _Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            _linear(sizes.width, sizes.width) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            one(x).view(batch, tokens, self.heads, -1).transpose(1, 2)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        half = width // self.heads // 2
        angles = torch.arange(tokens, device=x.device)[:, None] * 1e4 ** (
            -torch.arange(half, device=x.device) / half
        )
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

        def turned(one: torch.Tensor) -> torch.Tensor:
            first, second = one[..., :half], one[..., half:]
            return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)

        mixed = functional.scaled_dot_product_attention(
            turned(query), turned(key), value, is_causal=True
        )
        attended: torch.Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return attended


class _MLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (
            _linear(sizes.width, sizes.inner),
            _linear(sizes.width, sizes.inner),
        )
        self.down_proj = _linear(sizes.inner, sizes.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return made


class _Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(sizes), _MLP(sizes)
        self.input_layernorm, self.post_attention_layernorm = _Norm(sizes.width), _Norm(sizes.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        y: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Llama(nn.Module):
    """Every tensor of Llama-2, by its own name but for the prefix. Returns the loss of predicting
    each token from those before it.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList([_Layer(sizes) for _ in range(sizes.layers)])
        self.norm = _Norm(sizes.width)
        self.lm_head = _linear(sizes.width, sizes.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss over *tokens*, a row of them for each of the batch."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits = self.lm_head(self.norm(x))[:, :-1]
        return functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(), tokens[:, 1:].reshape(-1)
        )


# What is measured


def mixed_speed(directory: Path, config: AioConfig, nbytes: int) -> float:
    """Bytes a second that the engine reads and writes at once, in files of *nbytes* each, through
    as much memory, with nothing else to do.

    Over and over for `_PROBE_SECONDS`: what a virtual drive gives for the first seconds it does not
    give for a step.
    """
    piece = max(config.block_size, 16 << 20)
    nbytes = max(nbytes // piece, 1) * piece
    memory = [allocate(nbytes) for _ in range(2)]
    with (
        Engine(config) as engine,
        engine.open_anonymous(directory, nbytes) as source,
        engine.open_anonymous(directory, nbytes) as target,
    ):
        for buffer in memory:
            buffer[::4096] = b"\1" * len(buffer[::4096])  # every page is there
        for file in (source, target):
            engine.write(memory[0], file).wait()
        began, moved = time.perf_counter(), 0
        tickets: collections.deque[Any] = collections.deque()
        for start in itertools.cycle(range(0, nbytes, piece)):
            if time.perf_counter() > began + _PROBE_SECONDS:
                break
            tickets.append(engine.read(memory[0][start : start + piece], source, start))
            tickets.append(engine.write(memory[1][start : start + piece], target, start))
            moved += 2 * piece
            while len(tickets) > 64:
                tickets.popleft().wait()
        for ticket in tickets:
            ticket.wait()
        return moved / (time.perf_counter() - began)


def _train(job: dict[str, Any]) -> None:
    """One way, in this process; prints a line of JSON for every step and one at the end."""
    tell = apart.teller()
    cuda = torch.cuda.is_available()
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    meter = Meter(Path(job["directory"]))
    torch.manual_seed(0)
    began = time.monotonic()
    make = (
        _zero3
        if job["way"] != "optimizer"
        else _overlapping
        if job["overlap_step"]
        else _nvme_optimizer
    )
    parts, elements, tensors = make(job, "cuda" if cuda else "cpu")
    synchronize()
    made = time.monotonic() - began
    for number in range(job["steps"]):
        phases = {}
        for name, part in parts.items():
            with meter.stretch() as phases[name]:
                part()
                synchronize()
        waited = {"waited_seconds": job["waited"]()} if "waited" in job else {}
        tell("step", number=number, phases=phases, **waited)
    memory = memory_of("self")
    tell(
        "done",
        set_up_seconds=made,
        elements=elements,
        tensors=tensors,
        host_peak_bytes=memory.peak if memory else 0,
        gpu_peak_bytes=torch.cuda.max_memory_allocated() if cuda else 0,
        accelerator=torch.cuda.get_device_name(0) if cuda else "none",
    )


def _zero3(job: dict[str, Any], device: str) -> tuple[dict[str, Callable[[], object]], int, int]:
    import deepspeed

    from nvme_offload import zero3

    zero3.enable()
    if device == "cpu":  # nothing is compiled for a try; one rank has nobody to share memory with
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    nvme = {"device": "nvme", "nvme_path": job["directory"]}
    aio = job["aio"]
    config = {
        "train_micro_batch_size_per_gpu": job["batch"],
        "gradient_clipping": 1.0,
        "steps_per_print": 1000,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": device == "cpu"}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": nvme,
            **({"offload_param": nvme} if job["way"] == "both" else {}),
        },
        "aio": {
            "block_size": aio["block_size"],
            "queue_depth": aio["queue_depth"],
            "intra_op_parallelism": aio["thread_count"],
        },
        "nvme_offload": {
            "host_memory": job["host_memory"],
            "state_format": "compact",
            "backend": aio["backend"],
        },
    }
    if job["narrow"]:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # type: ignore[index]
    sizes = Sizes(*job["sizes"])
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Llama(sizes)
    parameters = list(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=parameters)
    tokens = torch.randint(0, sizes.vocabulary, (job["batch"], job["sequence"]), device=device)
    held: list[torch.Tensor] = []

    parts: dict[str, Callable[[], object]] = {
        "forward": lambda: held.append(engine(tokens)),
        "backward": lambda: engine.backward(held.pop()),
        "update": engine.step,
    }
    return parts, sum(parameter.ds_numel for parameter in parameters), len(parameters)


def _nvme_optimizer(
    job: dict[str, Any], device: str
) -> tuple[dict[str, Callable[[], object]], int, int]:
    from nvme_offload.optim import NVMeOptimizer

    with torch.device("meta"):
        shapes = [parameter.shape for parameter in Llama(Sizes(*job["sizes"])).parameters()]
    parameters = [
        nn.Parameter(torch.randn(shape, dtype=torch.bfloat16, device=device) * 0.02)
        for shape in shapes
    ]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    options: dict[str, Any] = {"lr": 1e-4, "fused": True}
    aio = AioConfig(**job["aio"])
    optimizer = NVMeOptimizer(
        parameters,
        paths=job["directory"],
        host_memory=job["host_memory"],
        state_format="compact",
        aio=aio,
        **options,
    )
    return (
        {"update": optimizer.step},
        sum(parameter.numel() for parameter in parameters),
        len(parameters),
    )


def _overlapping(
    job: dict[str, Any], device: str
) -> tuple[dict[str, Callable[[], object]], int, int]:
    """A training whose gradients are clipped; every other step waits for its updates at once. A
    step ends with the forward pass that its updates may run under.
    """
    from nvme_offload.optim import NVMeOptimizer

    sizes = Sizes(*job["sizes"])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Llama(sizes)
    torch.set_default_dtype(before)
    parameters = list(model.parameters())
    optimizer = NVMeOptimizer(
        parameters,
        paths=job["directory"],
        host_memory=job["host_memory"],
        state_format="compact",
        aio=AioConfig(**job["aio"]),
        overlap_step=True,
        lr=1e-4,
        fused=True,
    )
    tokens = torch.randint(0, sizes.vocabulary, (job["batch"], job["sequence"]), device=device)
    held = [model(tokens)]
    steps = itertools.count()

    def update() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if next(steps) % 2 == 0:
            optimizer.synchronize()

    job["waited"] = lambda: optimizer.stats().update_wait_seconds
    parts: dict[str, Callable[[], object]] = {
        "backward": lambda: held.pop().backward(),
        "update": update,
        "forward": lambda: held.append(model(tokens)),
    }
    return parts, sum(parameter.numel() for parameter in parameters), len(parameters)


# The command


@click.command()
@command.directory
@option("--model", type=click.Choice(list(_SIZES)), default="7b")
@option(
    "--width",
    type=click.IntRange(min=16),
    help="Of a model with as many tensors, a multiple of 16, instead of its own.",
)
@option("--ways", type=Names(_WAYS), default=",".join(_WAYS), help="With commas between.")
@option(
    "--overlap-step",
    is_flag=True,
    help="Train with NVMeOptimizer, gradients clipped at 1.0; every other step runs under the next forward pass.",
)
@option("--host-memory", type=Size(), default="16GB", help="Of each way.")
@option("--batch", type=int, default=4)
@option("--sequence", type=int, default=2048)
@option(
    "--steps",
    type=click.IntRange(min=_SETTLING + 1),
    default=6,
    help=f"The first {_SETTLING} do not count.",
)
@option("--block-size", type=Size(), default="4MiB")
@option("--queue-depth", type=int, default=16)
@option("--thread-count", type=int, default=4)
@option("--backend", default="libaio")
@option(
    "--probe-size",
    type=Size(),
    default="2GB",
    help="Of each of the two files with which the engine's own speed is measured.",
)
@option(
    "--timeout",
    type=float,
    default=560,
    help="Of a process, in seconds; what it told by then is reported.",
)
@command.output("Write OUTPUT.md and OUTPUT.json, after every way.")
def main(
    directory: Path,
    model: str,
    width: int | None,
    ways: list[str],
    probe_size: int,
    timeout: float,
    output: Path | None,
    **options: Any,
) -> None:
    """Train Llama-2's shapes with offload to the drive of DIRECTORY, and print a report in
    Markdown.
    """
    command.stop_at_sigterm()
    sizes = Sizes.of(model, width)
    with torch.device("meta"):
        elements = sum(parameter.numel() for parameter in Llama(sizes).parameters())
    names = ("block_size", "queue_depth", "thread_count", "backend")
    aio = {**{key: options.pop(key) for key in names}, "direct": "auto"}
    described = facts(directory, "sweeps.llama")
    described["versions"] = f"{commit()}, torch {torch.__version__}"
    shape = f"Llama-2 {model}{'' if width is None else f', width {width}'}"
    described["model"] = f"{shape}: {elements / 1e6:,.0f} million parameters"
    found: list[dict[str, Any]] = []
    speeds = [mixed_speed(directory, AioConfig(**aio), probe_size)]
    for way in ways:
        with apart.place("llama", directory) as work:
            job = {"way": way, "directory": str(work), "sizes": sizes, "aio": aio, **options}
            job["narrow"] = width is not None
            environment = apart.launched()
            told, error = apart.run("sweeps.llama", job, work, timeout, environment=environment)
        speeds.append(mixed_speed(directory, AioConfig(**aio), probe_size))
        settled = [one for one in apart.of(told, "step") if one["number"] >= _SETTLING]
        rows = {way: settled}
        if way == "optimizer" and options["overlap_step"]:
            rows = {
                name: [one for one in settled if one["number"] % 2 == odd]
                for odd, name in enumerate(("at once", "overlapped"))
            }
        found += [
            {
                "way": name,
                "error": error,
                "done": next(iter(apart.of(told, "done")), {}),
                "steps": [one["phases"] for one in steps],
                "waited": [one["waited_seconds"] for one in steps if "waited_seconds" in one],
                "mixed": statistics.fmean(speeds[-2:]),
                "host_memory": options["host_memory"],
            }
            for name, steps in rows.items()
        ]
        write(output, render(described, found), {"facts": described, "ways": found, "told": told})
    click.echo(render(described, found))


def render(described: dict[str, str], found: list[dict[str, Any]]) -> str:
    """The report in Markdown."""
    notes = []
    rows: list[tuple[str, str, pd.Series]] = []
    for one in found:
        title, done = _TITLES[one["way"]], one["done"]
        if one["error"] is not None:
            notes.append(f"- {title}: failed: {one['error']}")
        if done:
            notes.append(
                f"- {title}: made in {done['set_up_seconds']:.1f} s; {done['tensors']} tensors; at most {done['host_peak_bytes'] / 1e9:.2f} GB of host memory, "
                f"of which {one['host_memory'] / 1e9:.3g} GB for the swapper, and {done['gpu_peak_bytes'] / 1e9:.2f} GB of the GPU ({done['accelerator']}); "
                f"the engine alone: {one['mixed'] / 1e9:.2f} GB/s both ways at once"
            )
        if one["waited"]:
            waits = ", ".join(f"{seconds:.2f}" for seconds in one["waited"])
            notes.append(f"- {title}: s that the program waited for the updates of a step: {waits}")
        names = [name for name in _PHASES if one["steps"] and name in one["steps"][0]]
        for name in [*names, *(["step"] if len(names) > 1 else [])]:
            summed = names if name == "step" else [name]
            steps = pd.DataFrame(pd.DataFrame(step)[summed].sum(axis=1) for step in one["steps"])
            rows.append(
                (title, name, pd.concat([steps.median(), pd.Series({"mixed": one["mixed"]})]))
            )
    return document(
        "# Llama-2's shapes on one GPU",
        listed(described),
        "\n".join(notes),
        "Medians over the steps past the first ones.",
        columns(rows, _CELLS),
    )


def _cell(shown: Callable[[pd.Series], str]) -> Callable[[tuple[str, str, pd.Series]], str]:
    return lambda row: shown(row[2])


def _moved(one: pd.Series) -> float:
    return float(one.disk_read_bytes + one.disk_written_bytes)


_CELLS: dict[str, Callable[[tuple[str, str, pd.Series]], str]] = {
    "": lambda row: row[0],
    "phase": lambda row: row[1],
    "s": _cell(lambda one: f"{one.seconds:.2f}"),
    "GB read + written": _cell(
        lambda one: f"{one.disk_read_bytes / 1e9:.2f} + {one.disk_written_bytes / 1e9:.2f}"
    ),
    "drive busy": _cell(lambda one: f"{min(one.busy_seconds / one.seconds, 1):.2f}"),
    "reads + writes in flight": _cell(
        lambda one: f"{one.read_seconds / one.seconds:.1f} + {one.write_seconds / one.seconds:.1f}"
    ),
    "GB/s": _cell(lambda one: f"{_moved(one) / one.seconds / 1e9:.2f}"),
    "floor / time": _cell(lambda one: f"{_moved(one) / one.mixed / one.seconds:.2f}"),
    "CPU s": _cell(lambda one: f"{one.cpu_seconds:.2f}"),
    "planning CPU s": _cell(lambda one: f"{one.planning_seconds:.3f}"),
    "us a use": _cell(
        lambda one: f"{one.planning_seconds / one.uses * 1e6:.0f}" if one.uses else ""
    ),
    "uses": _cell(lambda one: f"{one.uses:.0f}"),
}


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].endswith("job.json"):  # a way's own process
        _train(json.loads(Path(sys.argv[1]).read_text()))
    else:
        command.run(main, "sweeps.llama")
