"""`python -m sweeps.activations DIR`: train a transformer on long sequences in several ways,
interleaved, and report time and memory of each.
"""

from __future__ import annotations

import gc
from pathlib import Path

import click
import torch

from .. import command
from ..command import COUNT, Names, option, say
from ..machine import facts
from ..report import write
from ..turns import interruptible, rounds, there_and_back
from .report import Results, render
from .transformer import Shape, make
from .ways import NAMES, Way, give_back_at_once, measure, ways


def many(name: str, default: object, text: str) -> object:
    """An option that may be given several times."""
    return option(name, type=type(default), multiple=True, default=[default], help=text)


@click.command()
@command.directory
@option("--blocks", type=COUNT, default=4)
@option("--width", type=COUNT, default=2048)
@option("--heads", type=COUNT, help="Default: one for each 128 of the width.")
@option("--sequence", type=COUNT, default=1 << 17, help="Tokens.")
@option("--batch", type=COUNT, default=1, help="Sequences.")
@many("--share", 1.0, "Of the blocks, evenly spread, for save_on_nvme.")
@many("--host-memory", "16GB", "Of save_on_nvme.")
@many(
    "--checkpoint-host-memory", "1GB", "The same with checkpointed blocks, which save inputs only."
)
@option("--min-bytes", default="1MiB", help="Of save_on_nvme.")
@option("--ways", "names", type=Names(NAMES), default=",".join(NAMES), help="With commas between.")
@option("--rounds", "count", type=COUNT, default=3)
@option("--steps", type=COUNT, default=1, help="Of each way in a round, without its first one.")
@option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="Default: float32 on the CPU.")
@option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@command.seconds()
@command.output("Write OUTPUT.md and OUTPUT.json after every round.")
def main(
    directory: Path,
    share: tuple[float, ...],
    host_memory: tuple[str, ...],
    checkpoint_host_memory: tuple[str, ...],
    min_bytes: str,
    names: list[str],
    count: int,
    steps: int,
    dtype: str | None,
    device: str,
    seconds: float | None,
    output: Path | None,
    **sizes: int,
) -> None:
    """Compare ways to keep activations, with the drive of DIRECTORY, and print a report in
    Markdown.
    """
    command.stop_at_sigterm()
    sizes["heads"] = sizes["heads"] or max(sizes["width"] // 128, 1)
    on_gpu = device.startswith("cuda")
    dtype = dtype or ("bfloat16" if on_gpu else "float32")
    about = facts(directory, "sweeps.activations")
    about["computing"] = f"{torch.cuda.get_device_name(device) if on_gpu else device}, {dtype}"
    results = Results(about, Shape(**sizes), [], {})
    give_back_at_once()
    blocks, x = make(results.shape, torch.device(device), getattr(torch, dtype))
    for parameter in blocks.parameters():
        parameter.grad = torch.zeros_like(parameter)
    memory = {"nvme": host_memory, "nvme-checkpoint": checkpoint_host_memory}
    notes: list[str] = []
    with (
        ways(names, directory, memory, share, min_bytes) as found,
        interruptible(about, notes),
    ):
        for number in rounds(count, seconds, notes):
            for way in there_and_back(found, number):
                _measure(results, way, blocks, x, number, steps)
            write(output, render(results, found, notes), results.as_json())
    write(output, text := render(results, found, notes), results.as_json())
    click.echo(text)


def _measure(
    results: Results,
    way: Way,
    blocks: torch.nn.ModuleList,
    x: torch.Tensor,
    number: int,
    steps: int,
) -> None:
    """Run *way* in round *number*; its first step does not count."""
    if way.name in results.refused:
        return
    try:
        for counted in [*[False] * way.fresh, *[True] * steps]:
            step = measure(way, blocks, x, number)
            took = f"{step.forward_seconds:.3f} + {step.backward_seconds:.3f} s"
            say(f"round {number + 1}, {way.title}: {took}")
            if counted:
                results.steps.append(step)
    except torch.OutOfMemoryError:
        results.refused[way.name] = "out of memory"
    way.fresh = False
    gc.collect()
    if x.is_cuda:
        torch.cuda.empty_cache()  # so that no way finds the pieces that another has left


if __name__ == "__main__":
    command.run(main, "sweeps.activations")
