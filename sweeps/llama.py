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
import contextlib
import itertools
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nvme_offload.hardware.config import AioConfig
from nvme_offload.io.engine import Engine, allocate
from nvme_offload.units import parse_bytes
from sweeps.machine import commit, facts
from sweeps.training import process

from .command import run, stop_at_sigterm
from .meter import Disk, Planning

_ROOT = Path(__file__).parents[1]
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
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # where DeepSpeed's own words go
    with contextlib.suppress(OSError):  # when memory runs out, this is the process to end
        Path("/proc/self/oom_score_adj").write_text("1000")
    cuda = torch.cuda.is_available()
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    disk, planning = Disk(Path(job["directory"])), Planning()
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
            before, cpu, used, uses, began = (
                disk.read(),
                _cpu_seconds(),
                planning.seconds,
                planning.uses,
                time.monotonic(),
            )
            part()
            synchronize()
            seconds, after = time.monotonic() - began, disk.read()
            phases[name] = {
                "seconds": seconds,
                "read_bytes": after.read - before.read,
                "written_bytes": after.written - before.written,
                "busy_seconds": after.busy_seconds - before.busy_seconds,
                "read_seconds": after.read_seconds - before.read_seconds,
                "write_seconds": after.write_seconds - before.write_seconds,
                "cpu_seconds": _cpu_seconds() - cpu,
                "planning_seconds": planning.seconds - used,
                "uses": planning.uses - uses,
            }
        waited = {"waited_seconds": job["waited"]()} if "waited" in job else {}
        event = {"event": "step", "number": number, "phases": phases, **waited}
        print(json.dumps(event), file=events)
    memory = process.memory_of("self")
    done = {
        "set_up_seconds": made,
        "elements": elements,
        "tensors": tensors,
        "host_peak_bytes": memory.peak if memory else 0,
    }
    done["gpu_peak_bytes"] = torch.cuda.max_memory_allocated() if cuda else 0
    done["accelerator"] = torch.cuda.get_device_name(0) if cuda else "none"
    print(json.dumps({"event": "done", **done}), file=events)


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


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# The command


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--model", type=click.Choice(list(_SIZES)), default="7b", show_default=True)
@click.option(
    "--width",
    type=click.IntRange(min=16),
    help="Of a model with as many tensors, a multiple of 16, instead of its own.",
)
@click.option("--ways", default=",".join(_WAYS), show_default=True, help="With commas between.")
@click.option(
    "--overlap-step",
    is_flag=True,
    help="Train with NVMeOptimizer, gradients clipped at 1.0; every other step runs under the next forward pass.",
)
@click.option("--host-memory", default="16GB", show_default=True, help="Of each way.")
@click.option("--batch", type=int, default=4, show_default=True)
@click.option("--sequence", type=int, default=2048, show_default=True)
@click.option(
    "--steps",
    type=click.IntRange(min=_SETTLING + 1),
    default=6,
    show_default=True,
    help=f"The first {_SETTLING} do not count.",
)
@click.option("--block-size", default="4MiB", show_default=True)
@click.option("--queue-depth", type=int, default=16, show_default=True)
@click.option("--thread-count", type=int, default=4, show_default=True)
@click.option("--backend", default="libaio", show_default=True)
@click.option(
    "--probe-size",
    default="2GB",
    show_default=True,
    help="Of each of the two files with which the engine's own speed is measured.",
)
@click.option(
    "--timeout",
    type=float,
    default=560,
    show_default=True,
    help="Of a process, in seconds; what it told by then is reported.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Write OUTPUT.md and OUTPUT.json, after every way.",
)
@click.option("--job", hidden=True, help="What one process is to do.")
def main(
    directory: Path,
    model: str,
    width: int | None,
    ways: str,
    output: Path | None,
    job: str | None,
    **options: Any,
) -> None:
    """Train Llama-2's shapes with offload to the drive of DIRECTORY, and print a report in
    Markdown.
    """
    if job is not None:
        _train(json.loads(job))
        return
    stop_at_sigterm()
    chosen = ways.split(",")
    if unknown := sorted(set(chosen) - set(_WAYS)):
        raise click.BadParameter(
            f"{unknown[0]!r} is none of {', '.join(_WAYS)}", param_hint="--ways"
        )
    sizes = Sizes.of(model, width)
    with torch.device("meta"):
        elements = sum(parameter.numel() for parameter in Llama(sizes).parameters())
    aio = {
        "block_size": parse_bytes(options["block_size"]),
        **{key: options[key] for key in ("queue_depth", "thread_count", "backend")},
    }
    described = facts(directory, "sweeps.llama") | {
        "versions": f"{commit()}, torch {torch.__version__}"
    }
    described["model"] = (
        f"Llama-2 {model}{'' if width is None else f', width {width}'}: {elements / 1e6:,.0f} million parameters"
    )
    found: list[dict[str, Any]] = []
    speeds = [
        mixed_speed(directory, AioConfig(**aio, direct="auto"), parse_bytes(options["probe_size"]))
    ]
    for way in chosen:
        cap = parse_bytes(options["host_memory"])
        with tempfile.TemporaryDirectory(prefix="sweeps-llama-", dir=directory) as place:
            asked = {
                "way": way,
                "directory": place,
                "sizes": sizes,
                "narrow": width is not None,
                "host_memory": cap,
                "aio": {**aio, "direct": "auto"},
            }
            told, error = _run(
                directory,
                {
                    **asked,
                    **{key: options[key] for key in ("batch", "sequence", "steps", "overlap_step")},
                },
                options["timeout"],
            )
        speeds.append(
            mixed_speed(
                directory, AioConfig(**aio, direct="auto"), parse_bytes(options["probe_size"])
            )
        )
        done = next((event for event in told if event["event"] == "done"), {})
        settled = [
            event for event in told if event["event"] == "step" and event["number"] >= _SETTLING
        ]
        rows = {way: settled}
        if way == "optimizer" and options["overlap_step"]:
            rows = {
                name: [event for event in settled if event["number"] % 2 == odd]
                for odd, name in enumerate(("at once", "overlapped"))
            }
        found += [
            {
                "way": name,
                "error": error,
                "done": done,
                "steps": [event["phases"] for event in steps],
                "waited": [event["waited_seconds"] for event in steps if "waited_seconds" in event],
                "mixed": statistics.fmean(speeds[-2:]),
                "host_memory": cap,
            }
            for name, steps in rows.items()
        ]
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.with_name(output.name + ".md").write_text(render(described, found))
            output.with_name(output.name + ".json").write_text(
                json.dumps({"facts": described, "ways": found, "told": told}, indent=1)
            )
    click.echo(render(described, found))


def _run(
    directory: Path, job: dict[str, Any], timeout: float
) -> tuple[list[dict[str, Any]], str | None]:
    """What the process of *job* told, and why it did not come to its end, if so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    environment = {
        **os.environ,
        **ranks,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    command = [sys.executable, "-m", "sweeps.llama", str(directory), "--job", json.dumps(job)]
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryFile("w+") as told:
        error = None
        try:
            status = subprocess.run(
                command,
                cwd=_ROOT,
                env=environment,
                stdout=told,
                stderr=log,
                stdin=subprocess.DEVNULL,
                timeout=timeout,
            ).returncode
        except subprocess.TimeoutExpired:
            status, error = 1, f"not done after {timeout:g} s"
        log.seek(0)
        told.seek(0)
        if status != 0:
            text = log.read()
            sys.stderr.write(text[-6000:])
            error = error or (text.strip().splitlines() or ["it said nothing"])[-1]
        return list(_events(told.read())), error


def _events(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # cut short by the end of the process
            yield json.loads(line)


def render(described: dict[str, str], found: list[dict[str, Any]]) -> str:
    """The report in Markdown."""
    parts = [
        "# Llama-2's shapes on one GPU",
        "\n".join(f"- {name}: {value}" for name, value in described.items()),
    ]
    head = (
        "",
        "phase",
        "s",
        "GB read + written",
        "drive busy",
        "reads + writes in flight",
        "GB/s",
        "floor / time",
        "CPU s",
        "planning CPU s",
        "us a use",
        "uses",
    )
    lines = [head, ("---",) * len(head)]
    notes = []
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
            lines.append(
                (
                    title,
                    name,
                    *_cells(
                        [_sum(step, names if name == "step" else [name]) for step in one["steps"]],
                        one["mixed"],
                    ),
                )
            )
    parts += [
        "\n".join(notes),
        "Medians over the steps past the first ones.",
        "\n".join(f"| {' | '.join(line)} |" for line in lines),
    ]
    return "\n\n".join(parts) + "\n"


def _sum(step: dict[str, dict[str, float]], names: list[str]) -> dict[str, float]:
    return {key: sum(step[name][key] for name in names) for key in step[names[0]]}


def _cells(steps: list[dict[str, float]], mixed: float) -> tuple[str, ...]:
    middle = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
    moved, seconds = middle["read_bytes"] + middle["written_bytes"], middle["seconds"]
    return (
        f"{seconds:.2f}",
        f"{middle['read_bytes'] / 1e9:.2f} + {middle['written_bytes'] / 1e9:.2f}",
        f"{min(middle['busy_seconds'] / seconds, 1):.2f}",
        f"{middle['read_seconds'] / seconds:.1f} + {middle['write_seconds'] / seconds:.1f}",
        f"{moved / seconds / 1e9:.2f}",
        f"{moved / mixed / seconds:.2f}",
        f"{middle['cpu_seconds']:.2f}",
        f"{middle['planning_seconds']:.3f}",
        f"{middle['planning_seconds'] / middle['uses'] * 1e6:.0f}" if middle["uses"] else "",
        f"{middle['uses']:.0f}",
    )


if __name__ == "__main__":
    run(main, "sweeps.llama")
