"""Command line: train a transformer on long sequences in several ways, interleaved, and report time
and memory of each.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path

import torch

from nvme_offload import __version__
from nvme_offload.hardware.machine import gpus
from nvme_offload.swap.tier import engine_config
from nvme_offload.units import parse_bytes

from ..command import say
from ..floor import Floor, floor
from ..machine import commit, facts
from ..report import write
from ..turns import rotated
from .report import Results, render
from .transformer import Shape, make
from .ways import NAMES, Way, give_back_at_once, measure, ways


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
    shares, least, directory = arguments.share or [1.0], arguments.min_bytes, arguments.directory
    aio, size, notes = engine_config(str(directory)), parse_bytes(arguments.fio_size), list[str]()
    with (
        floor(directory, aio, size, {}, notes) as drive,
        ways(arguments.ways, directory, memory, shares, least) as found,
    ):
        for text in notes:
            say(text)
        for number in range(results.rounds, results.rounds + arguments.rounds):
            _round(results, number, found, drive, blocks, x, arguments.steps)
            write(arguments.output, render(results, found), results.as_json())
    print(render(results, found), end="")
    return 0


def _round(
    results: Results,
    number: int,
    found: list[Way],
    drive: Floor | None,
    blocks: torch.nn.ModuleList,
    x: torch.Tensor,
    steps: int,
) -> None:
    """Every way once."""
    if drive is not None:
        results.speeds.append(drive.measure())
    for way in rotated(found, number):
        if way.name in results.refused:
            continue
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
        help="of each of fio's two files, for the drive's speed before each round; 0 runs no fio",
    )
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], help="default: float32 on the CPU"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
