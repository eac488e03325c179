"""Command line: train a transformer with long sequences in several ways, interleaved, and tell
times and memory.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
from pathlib import Path
from typing import NamedTuple, cast

import torch

from nvme_offload import __version__
from nvme_offload.errors import UnsupportedError
from nvme_offload.hardware.machine import gpus
from nvme_offload.swap.tier import engine_config
from nvme_offload.units import parse_bytes
from sweeps.machine import commit, facts
from sweeps.training.drive import Floor
from sweeps.training.plan import Plan

from .report import Results, render
from .transformer import Shape, make
from .ways import NAMES, Way, give_back_at_once, measure, ways


class _FioPlan(NamedTuple):
    """What `Floor` looks at of a plan."""

    aio: dict[str, int]
    fio_bytes: int


def main() -> int:
    """Measure, print, and write the files that were asked for."""
    arguments = _parse()
    device = torch.device(arguments.device)
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    shape = Shape(
        arguments.blocks,
        arguments.width,
        arguments.heads or max(arguments.width // 128, 1),
        arguments.sequence,
        arguments.batch,
    )
    about = facts(arguments.directory, "sweeps.activations")
    about["computing"] = (
        f"{gpus()[0].name if device.type == 'cuda' and gpus() else device.type}, {str(dtype).removeprefix('torch.')}"
    )
    about["software"] = (
        f"nvme-offload {__version__} ({commit()}), torch {torch.__version__}, Python {sys.version.split()[0]}"
    )
    results = Results(about, shape, [], [], {})
    give_back_at_once()
    if arguments.add:
        results.add(json.loads(Path(f"{arguments.output}.json").read_text()))
    blocks, x = make(shape, device, dtype)
    for parameter in blocks.parameters():
        parameter.grad = torch.zeros_like(parameter)
    memory = {
        "nvme": arguments.host_memory or ["16GB"],
        "nvme-checkpoint": arguments.checkpoint_host_memory or ["1GB"],
    }
    with contextlib.ExitStack() as stack:
        floor = _floor(arguments.directory, parse_bytes(arguments.fio_size), stack)
        found = stack.enter_context(
            ways(
                arguments.ways,
                arguments.directory,
                memory,
                arguments.share or [1.0],
                arguments.min_bytes,
            )
        )
        for number in range(results.rounds, results.rounds + arguments.rounds):
            _round(results, number, found, floor, blocks, x, arguments.steps)
            _write(results, found, arguments.output)
    print(render(results, found), end="")
    return 0


def _floor(directory: Path, fio_bytes: int, stack: contextlib.ExitStack) -> Floor | None:
    aio = engine_config(str(directory))
    settings = {
        "block_size": aio.block_size,
        "queue_depth": aio.queue_depth,
        "intra_op_parallelism": aio.thread_count,
    }
    try:
        return (
            stack.enter_context(Floor(cast(Plan, _FioPlan(settings, fio_bytes)), directory))
            if fio_bytes
            else None
        )
    except UnsupportedError as error:
        print(error, file=sys.stderr)
        return None


def _round(
    results: Results,
    number: int,
    found: list[Way],
    floor: Floor | None,
    blocks: torch.nn.ModuleList,
    x: torch.Tensor,
    steps: int,
) -> None:
    """Every way once."""
    if floor is not None:
        results.speeds.append(floor.measure())
    first = number % len(found)
    for way in found[first:] + found[:first]:
        if way.name in results.refused:
            continue
        try:
            for counted in [*[False] * way.fresh, *[True] * steps]:
                step = measure(way, blocks, x, number)
                print(
                    f"round {number + 1}, {way.title}: {step.forward_seconds:.3f} + {step.backward_seconds:.3f} s",
                    file=sys.stderr,
                    flush=True,
                )
                if counted:
                    results.steps.append(step)
        except torch.OutOfMemoryError:
            results.refused[way.name] = "out of memory"
        way.fresh = False
        gc.collect()
        if x.is_cuda:
            torch.cuda.empty_cache()  # so that no way finds the pieces that another has left


def _write(results: Results, found: list[Way], output: Path | None) -> None:
    if output is not None:
        Path(f"{output}.md").write_text(render(results, found), encoding="utf-8")
        Path(f"{output}.json").write_text(json.dumps(results.as_json(), indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sweeps.activations", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("directory", type=Path, help="on the drive")
    parser.add_argument(
        "--output",
        type=Path,
        help="write the report to OUTPUT.md and OUTPUT.json as well, after every round",
    )
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep the rounds that OUTPUT.json has already, of the same blocks",
    )
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, help="default: one for each 128 of the width")
    parser.add_argument("--sequence", type=int, default=1 << 17, help="tokens")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument(
        "--share",
        type=float,
        action="append",
        help="of the blocks, evenly spread, for save_on_nvme; may be given several times",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps",
        type=int,
        default=1,
        help="of each way in each round; in the first it has one more, which does not count",
    )
    parser.add_argument(
        "--host-memory",
        action="append",
        help='of save_on_nvme, such as "16GB" (the default); may be given several times',
    )
    parser.add_argument(
        "--checkpoint-host-memory",
        action="append",
        help='the same where blocks are checkpointed, and save their inputs only (default "1GB")',
    )
    parser.add_argument("--min-bytes", default="1MiB", help="of save_on_nvme")
    parser.add_argument("--ways", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument(
        "--fio-size",
        default="1GB",
        help="of each of fio's two files, which tell the drive's speed before each round; 0 runs no fio",
    )
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], help="default: float32 on the CPU"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
