"""Command line: train a transformer with long sequences in several ways by turns, and tell times and memory."""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import torch

from nvme_offload import __version__
from nvme_offload.machine import gpus
from sweeps.machine import commit, facts

from . import report
from .transformer import Shape, make
from .ways import NAMES, Step, Way, measure, ways


def main() -> int:
    """Measure, print, and write the file that was asked for."""
    arguments = _parse()
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = Shape(arguments.blocks, arguments.width, arguments.heads or max(arguments.width // 128, 1), arguments.sequence, arguments.batch)
    count = round(arguments.share * shape.blocks)
    about = facts(arguments.directory, "sweeps.activations")
    about["computing"] = f"{gpus()[0].name if device.type == 'cuda' and gpus() else device.type}, {str(dtype).removeprefix('torch.')}"
    about["software"] = f"nvme-offload {__version__} ({commit()}), torch {torch.__version__}, Python {sys.version.split()[0]}"
    blocks, x = make(shape, device, dtype)
    for parameter in blocks.parameters():
        parameter.grad = torch.zeros_like(parameter)
    memory = {"nvme": arguments.host_memory or ["16GB"], "nvme-checkpoint": arguments.checkpoint_host_memory or ["1GB"]}
    with ways(arguments.ways, arguments.directory, memory, arguments.min_bytes) as found:
        steps, refused = _run(found, blocks, x, count, arguments.rounds, arguments.steps)
    text = report.render(about, shape, count, found, steps, refused)
    print(text, end="")
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")
    return 0


def _run(found: list[Way], blocks: torch.nn.ModuleList, x: torch.Tensor, count: int, rounds: int, steps: int) -> tuple[list[Step], dict[str, str]]:
    measured: list[Step] = []
    refused: dict[str, str] = {}
    for number in range(rounds):
        first = number % len(found)
        for way in found[first:] + found[:first]:
            if way.name in refused:
                continue
            try:
                for index in range(steps + (number == 0)):
                    step = measure(way, blocks, x, count, number)
                    print(f"round {number + 1}, {way.title}: {step.forward_seconds:.3f} + {step.backward_seconds:.3f} s", file=sys.stderr, flush=True)
                    if number > 0 or index > 0:  # in the first, memory is taken and an order is learned
                        measured.append(step)
            except torch.OutOfMemoryError:
                refused[way.name] = "out of memory"
            gc.collect()
            if x.is_cuda:
                torch.cuda.empty_cache()  # so that no way finds the pieces that another has left
    return [step for step in measured if step.way not in refused], refused


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sweeps.activations", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="on the drive")
    parser.add_argument("--output", type=Path, help="write the report to this file as well")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, help="default: one for each 128 of the width")
    parser.add_argument("--sequence", type=int, default=1 << 17, help="tokens")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--share", type=float, default=1.0, help="of the blocks, from the first, whose activations are not kept; the others keep theirs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="of each way in each round; the first round has one more, which does not count")
    parser.add_argument("--host-memory", action="append", help='of save_on_nvme, such as "16GB" (the default); may be given several times')
    parser.add_argument("--checkpoint-host-memory", action="append", help='the same where blocks are checkpointed, and save their inputs only (default "1GB")')
    parser.add_argument("--min-bytes", default="1MiB", help="of save_on_nvme")
    parser.add_argument("--ways", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
