"""`python -m sweeps.saving DIR`: time and bytes of a checkpoint of `NVMeOptimizer` states, by a
state dict and by `save()`, interleaved.

A side writes a file to the drive of DIR and syncs it, and another optimizer loads it after the file
was dropped from the page cache. Bytes are the drive's counters, which include other processes.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pandas as pd
import torch

from nvme_offload.optim import NVMeOptimizer

from . import command
from .command import option
from .machine import facts
from .meter import Disk
from .peers.page_cache import evict, sync
from .report import columns, document, listed, ratios, shown, write
from .turns import there_and_back

_WIDTH, _INNER, _WORDS = 2048, 8192, 128_256  # of Llama 3.2 1B
_EXPERT = (768, 2048)  # of Qwen3 30B-A3B
_STEPS = 2


def llama(count: int) -> list[tuple[int, ...]]:
    """The shapes of Llama 3.2 1B with *count* layers."""
    square, few, up = (_WIDTH, _WIDTH), (_WIDTH // 4, _WIDTH), (_INNER, _WIDTH)
    layer = [square, few, few, square, up, up, up[::-1], (_WIDTH,), (_WIDTH,)]
    return [(_WORDS, _WIDTH), *layer * count, (_WIDTH,)]


def experts(count: int) -> list[tuple[int, ...]]:
    """The shapes of *count* matrices of experts."""
    return [_EXPERT] * count


MODELS = {"llama": llama, "experts": experts}


def by_state_dict(optimizer: NVMeOptimizer, path: Path) -> None:
    """Save a state dict with torch.save."""
    torch.save(optimizer.state_dict(), path)
    sync(path)


SIDES: dict[str, Callable[[NVMeOptimizer, Path], None]] = {
    "torch.save(state_dict())": by_state_dict,
    "save()": lambda optimizer, path: optimizer.save(path),
}


@click.command()
@command.directory
@option("--model", type=click.Choice(sorted(MODELS)), default="llama", help="Whose shapes.")
@option("--count", type=command.COUNT, default=8, help="Layers, or matrices of experts.")
@option("--state-format", default="compact", help="Of the optimizer.")
@option("--host-memory", default="1GB", help="Of the optimizer.")
@option("--rounds", type=command.COUNT, default=4, help="In each of which both sides run.")
@command.note
@command.output("Write the report to TEXT.md.")
def main(
    directory: Path,
    model: str,
    count: int,
    state_format: str,
    host_memory: str,
    rounds: int,
    notes: tuple[str, ...],
    output: Path | None,
) -> None:
    """Measure on the drive of DIRECTORY; prints Markdown."""
    began = facts(directory, "sweeps.saving")
    options = {"paths": directory, "host_memory": host_memory, "state_format": state_format}
    params = [
        torch.nn.Parameter(torch.randn(s).mul_(0.02).bfloat16()) for s in MODELS[model](count)
    ]
    elements = sum(parameter.numel() for parameter in params)
    rows: list[dict[str, Any]] = []
    with (
        NVMeOptimizer(params, **options) as optimizer,
        NVMeOptimizer(params, **options) as other,
        tempfile.TemporaryDirectory(dir=directory) as place,
    ):
        for _ in range(_STEPS):
            for parameter in params:
                parameter.grad = torch.full_like(parameter, 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        path, disk = Path(place, "saved"), Disk(directory)

        def load() -> None:
            other.load_state_dict(torch.load(path, mmap=True))

        for number in range(rounds):
            for side in there_and_back(list(SIDES), number):
                path.unlink(missing_ok=True)
                save = functools.partial(SIDES[side], optimizer, path)
                os.sync()  # write back dirty pages of the previous side
                before = disk.read()
                seconds, after = _timed(save), disk.read()
                evict(path)
                loading = _timed(load)
                row = {
                    "round": number,
                    "side": side,
                    "seconds": seconds,
                    "loading": loading,
                    "file": path.stat().st_size / 1e9,
                    "read": (after.read - before.read) / 1e9,
                    "written": (after.written - before.written) / 1e9,
                }
                rows.append(row)
                click.echo(f"{side}: {seconds:.1f} s, loaded in {loading:.1f} s", err=True)
    text = report(began, model, count, elements, len(params), options, pd.DataFrame(rows), notes)
    write(output, text)
    click.echo(text)


def _timed(act: Callable[[], None]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def report(
    began: dict[str, str],
    model: str,
    count: int,
    elements: int,
    tensors: int,
    options: dict[str, Any],
    rows: pd.DataFrame,
    notes: tuple[str, ...],
) -> str:
    """The report."""
    by_side = dict(list(rows.set_index("round").groupby("side")))
    theirs, ours = (by_side[side] for side in SIDES)
    return document(
        f'# Checkpoints of {elements / 1e9:.2f} billion parameters, "{options["state_format"]}"',
        f"{tensors} bfloat16 parameters with the shapes of {model}, {count} of its "
        f"{'layers' if model == 'llama' else 'matrices'}; `host_memory` {options['host_memory']}. Median of "
        f"{len(ours)} rounds, with the range.",
        columns(
            SIDES,
            {
                "way": lambda side: f"`{side}`",
                "seconds": lambda side: shown(by_side[side].seconds, 1),
                "GB of the file": lambda side: shown(by_side[side].file),
                "bytes a parameter": lambda side: (
                    f"{by_side[side].file.iloc[0] * 1e9 / elements:.2f}"
                ),
                "GB read": lambda side: shown(by_side[side].read, 1),
                "GB written": lambda side: shown(by_side[side].written, 1),
                "seconds to load": lambda side: shown(by_side[side].loading, 1),
            },
        ),
        f"`save()` took {shown(ratios(ours.seconds, theirs.seconds))} of the time of the state dict, "
        f"and its file was loaded in {shown(ratios(ours.loading, theirs.loading))} of the time.",
        *notes,
        listed(began),
    )


if __name__ == "__main__":
    command.run(main, "sweeps.saving")
