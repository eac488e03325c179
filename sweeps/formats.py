"""How state formats affect training: `python -m sweeps.formats DIR`.

A character-level transformer of bfloat16 weights is trained by `NVMeOptimizer` in each format with
several seeds. One seed has the same first weights and the same order of the text in every format.
The text is the source of the interpreter's standard library, so nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import pandas as pd
import torch
from torch import nn
from torch.nn import functional

from nvme_offload import NVMeOptimizer
from nvme_offload.optimizer_states.formats import FORMATS

from . import apart, command
from .blocks import Block
from .command import COUNT, option, say
from .machine import facts
from .report import columns, document, listed, write

_LETTERS = 256
_HELD_OUT = 0.05  # share of the text
_HELD_OUT_BATCHES = 40
_HOST_MEMORY = "1GB"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to train. layers, width, heads: of the transformer. context: bytes that it sees. beta2 is
    AdamW's default: the slower the second moment, the harder for few bits.
    """

    layers: int = 6
    width: int = 384
    heads: int = 6
    context: int = 256
    batch: int = 64
    steps: int = 1000
    learning_rate: float = 1e-3
    warm_up: int = 100
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.1
    clip: float = 1.0

    def rate(self, step: int) -> float:
        """The learning rate of *step*: up from zero, then half a cosine down to a tenth."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


class Transformer(nn.Module):
    """Predicts the next byte, with tied embeddings."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.letters = nn.Embedding(_LETTERS, recipe.width)
        self.places = nn.Embedding(recipe.context, recipe.width)
        self.blocks = nn.Sequential(
            *(Block(recipe.width, recipe.heads) for _ in range(recipe.layers))
        )
        self.last = nn.LayerNorm(recipe.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                into_stream = name.endswith(("attended.weight", "narrow.weight"))
                depth = (2 * recipe.layers) ** 0.5 if into_stream else 1
                nn.init.normal_(parameter, std=0.02 / depth)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)

    def forward(self, letters: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy in nats a byte. Shapes: batch x context, int64, both."""
        x = self.letters(letters) + self.places.weight[: letters.shape[1]]
        logits = functional.linear(self.last(self.blocks(x)), self.letters.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), following.flatten())


def read_text(most_bytes: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Bytes for training and, from other files, bytes for validation, as flat uint8 tensors; and a
    description.

    Files are in the order of a hash of their names, so that both parts are mixed, and equal in
    every process of one interpreter.
    """
    root = Path(sysconfig.get_path("stdlib"))
    without = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    names = {path.relative_to(root) for path in root.rglob("*.py") if not without & {*path.parts}}
    pieces, size = list[bytes](), 0
    for name in sorted(names, key=lambda name: (_mixed(name), name)):
        if size < most_bytes:
            pieces.append((root / name).read_bytes())
            size += len(pieces[-1])
    first, held = 0, 0
    while held < _HELD_OUT * size:
        held += len(pieces[first])
        first += 1
    described = (
        f"{size / 1e6:.1f} MB of the sources of Python {platform.python_version()}'s standard library, {len(pieces)} files; "
        f"{held / 1e6:.2f} MB of them, {first} files, held out"
    )
    parts = [bytearray(b"".join(part)) for part in (pieces[first:], pieces[:first])]
    training, validation = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return training, validation, described


def _mixed(name: Path) -> int:
    """A hash of *name*, the same in every process and version."""
    step = lambda number, letter: (number * 1_000_003 + letter) % 999_999_937  # noqa: E731
    return functools.reduce(step, name.as_posix().encode(), 0)


def _batches(
    text: torch.Tensor, recipe: Recipe, count: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """*count* batches of pieces of *text*, by *seed*, with the bytes that follow theirs."""
    generator = torch.Generator().manual_seed(seed)
    limit = text.numel() - recipe.context
    for _ in range(count):
        starts = torch.randint(limit, (recipe.batch, 1), generator=generator).to(text.device)
        piece = text[starts + torch.arange(recipe.context + 1, device=text.device)].long()
        yield piece[:, :-1], piece[:, 1:]


def train(
    directory: Path,
    recipe: Recipe,
    state_format: str,
    seed: int,
    text_bytes: int,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train a new transformer with its states on the drive of *directory*; losses of every step,
    and at the end of the held-out text.
    """
    torch.manual_seed(seed)
    text, held_out = (part.to(device) for part in read_text(text_bytes)[:2])
    model = Transformer(recipe).to(device, torch.bfloat16)
    weights = list(model.parameters())
    losses = []
    with NVMeOptimizer(
        weights,
        torch.optim.AdamW,
        paths=directory,
        host_memory=_HOST_MEMORY,
        state_format=state_format,
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
    ) as optimizer:
        for step, batch in enumerate(_batches(text, recipe, recipe.steps, seed)):
            optimizer.param_groups[0]["lr"] = recipe.rate(step)
            loss = model(*batch)
            loss.backward()
            nn.utils.clip_grad_norm_(weights, recipe.clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    with torch.no_grad():
        held = [model(*batch) for batch in _batches(held_out, recipe, _HELD_OUT_BATCHES, 0)]
    return {
        "parameters": sum(weight.numel() for weight in weights),
        "losses": [round(loss, 5) for loss in torch.stack(losses).tolist()],
        "validation": torch.stack(held).mean().item(),
    }


@click.command()
@command.directory
@option("--layers", type=COUNT, default=Recipe.layers)
@option("--width", type=click.IntRange(min=8), default=Recipe.width)
@option("--heads", type=COUNT, default=Recipe.heads)
@option("--context", type=click.IntRange(min=2), default=Recipe.context, help="Bytes.")
@option("--batch", type=COUNT, default=Recipe.batch)
@option("--steps", type=COUNT, default=Recipe.steps)
@option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@option("--seeds", type=COUNT, default=3, help="How many.")
@option("--at-once", type=COUNT, default=1, help="Concurrent trainings, on all GPUs.")
@option("--formats", "names", type=command.Names(FORMATS), default=",".join(FORMATS))
@option("--text-megabytes", type=click.FloatRange(min=0.1), default=8.0)
@option("--timeout", type=float, default=3600, help="Of a training, in seconds.")
@command.output("Write OUTPUT.md and OUTPUT.json.")
def main(
    directory: Path,
    device: str,
    seeds: int,
    at_once: int,
    names: list[str],
    text_megabytes: float,
    timeout: float,
    output: Path | None,
    **shape: int,
) -> None:
    """Compare the losses of trainings with each state format, and print a report in Markdown."""
    command.stop_at_sigterm()
    if shape["width"] % shape["heads"]:
        raise click.BadParameter(
            f"{shape['width']} is not a multiple of the {shape['heads']} heads",
            param_hint="--width",
        )
    recipe = Recipe(**shape, warm_up=min(100, shape["steps"] // 5 + 1))
    described = facts(directory, "sweeps.formats") | {"recipe": repr(recipe)}
    described["accelerator"] = torch.cuda.get_device_name() if device == "cuda" else "none"
    nbytes = round(text_megabytes * 1e6)
    described["text"] = read_text(nbytes)[2]

    def run(number: int) -> dict[str, Any]:
        name, seed = names[number % len(names)], number // len(names)
        gpu = f":{number % torch.cuda.device_count()}" if device == "cuda" else ""
        job = {"recipe": dataclasses.asdict(recipe), "state_format": name, "seed": seed}
        job |= {"text_bytes": nbytes, "device": device + gpu}
        with apart.place("formats", directory) as work:
            events, error = apart.run("sweeps.formats", job, work, timeout)
        found = apart.of(events, "trained")
        say(f"{name}, seed {seed}: {error or format(found[0]['validation'], '.4f')}")
        return {"format": name, "seed": seed, "error": error, **(found[0] if found else {})}

    began = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        trained = list(pool.map(run, range(seeds * len(names))))
    described["took"] = f"{time.monotonic() - began:.0f} s"
    text = render(described, trained)
    write(output, text, {"facts": described, "trained": trained}, indent=None)
    click.echo(text)


def render(described: dict[str, str], trained: list[dict[str, Any]]) -> str:
    """The report in Markdown."""
    ended = [one for one in trained if not one["error"]]
    frame = pd.DataFrame(ended, columns=["format", "seed", "validation"])
    losses = frame.pivot(index="seed", columns="format", values="validation")
    names = [name for name in FORMATS if name in losses]
    differences = losses.sub(losses["exact"], axis=0) if "exact" in names else None

    def difference(name: str) -> str:
        if differences is None or name == "exact":
            return ""
        return f"{differences[name].mean():+.4f} ± {differences[name].sem():.4f}"

    def judged(name: str) -> str:
        least, most, mean = losses["exact"].min(), losses["exact"].max(), losses[name].mean()
        return f'- `"{name}"`: its mean loss is {"within" if least <= mean <= most else "NOT within"} the range of exact\'s seeds.'

    def bytes_of(name: str) -> str:
        states = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
        return f"{FORMATS[name].element_bytes(states, torch.bfloat16, 'AdamW'):.3f}"

    cells = {
        "format": str,
        "bytes a parameter": bytes_of,
        **{
            f"seed {seed}": lambda name, seed=seed: f"{losses.at[seed, name]:.4f}"
            for seed in losses.index
        },
        "mean": lambda name: f"{losses[name].mean():.4f}",
        "largest - least": lambda name: f"{losses[name].max() - losses[name].min():.4f}",
        "mean difference to exact": difference,
    }
    return document(
        "# State formats in training",
        "\n".join(judged(name) for name in names if "exact" in names and name != "exact"),
        "\n".join(
            f"- {one['format']}, seed {one['seed']}: {one['error']}"
            for one in trained
            if one["error"]
        ),
        listed(described),
        "Losses of held-out files at the end of a training, in nats a byte. The figure after ± is the standard error of a mean over seeds. "
        '"split" rounds only weights halfway between two bfloat16 numbers differently, one in 65536: its differences to "exact" show how '
        "far two trainings diverge that differ in last bits.",
        columns(names, cells),
    )


def _train_job(path: Path) -> None:
    job, send = json.loads(path.read_text()), apart.event_sender()
    recipe = Recipe(**job.pop("recipe"))
    (path.parent / "states").mkdir()
    send("trained", **train(path.parent / "states", recipe, **job))


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].endswith("job.json"):  # the process of a training
        _train_job(Path(sys.argv[1]))
    else:
        command.run(main, "sweeps.formats")
