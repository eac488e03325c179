"""What pool memory is worth on a machine with a GPU: copies, resident bytes, time to create, and
reading a drive while copying.

    python sweeps/pool_copies.py --directory /local_nvme --output reports/pool-copies.md

Everything is compared in one run, interleaved (A B C, B C A, ...), and told as the median of the
rounds' ratios with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import platform
import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

if not __package__:  # run by its path, not as a module
    sys.path[0] = str(Path(__file__).parents[1])

from nvme_offload import __version__
from nvme_offload.hardware.config import BACKENDS, AioConfig
from nvme_offload.io.engine import Engine, File, Ticket
from nvme_offload.io.pool import PinnedPool
from nvme_offload.units import format_bytes, parse_bytes
from sweeps.machine import facts
from sweeps.meter import memory_of
from sweeps.report import document, listed, table
from sweeps.turns import rotated

GPU = "cuda"
PIECE_BYTES = 64 << 20
PIECES_READING = 4
PIECES_HELD = 8  # reading, or being copied

Row = list[str]


def main() -> int:
    """Measure, print, and write the file that was asked for."""
    arguments = parsed_arguments()
    if not torch.cuda.is_available():
        print("pool_copies: needs a GPU that CUDA knows", file=sys.stderr)
        return 1
    torch.ones(1, device=GPU)  # CUDA's own memory is there before anything is measured
    torch.empty(1, pin_memory=True)
    parts = [
        (
            "Resident bytes of one allocation",
            resident_table(arguments.resident_size, arguments.resident_rounds),
        ),
        ("Time to create", creation_table(arguments.create_size, arguments.create_rounds)),
        ("Copies", copies_table(arguments.copy_size, arguments.copy_rounds)),
    ]
    if arguments.directory is not None:
        parts.append(("Reading a drive while copying to the GPU", overlap_table(arguments)))
    text = report(arguments, parts)
    print(text, end="")
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")
    return 0


def parsed_arguments() -> argparse.Namespace:
    """The command line; the defaults are what a committed report is made with."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--directory", type=Path, help="on the drive to read from; without it the drive is left out"
    )
    parser.add_argument("--output", type=Path, help="write the tables to this file as well")
    parser.add_argument("--date", help="to put on the report (default: now)")
    parser.add_argument("--copy-size", type=parse_bytes, default=1 << 30)
    parser.add_argument("--copy-rounds", type=int, default=15)
    parser.add_argument("--create-size", type=parse_bytes, default=4 << 30)
    parser.add_argument("--create-rounds", type=int, default=3)
    parser.add_argument("--resident-size", type=parse_bytes, default=int(1.1 * (1 << 30)))
    parser.add_argument("--resident-rounds", type=int, default=5)
    parser.add_argument("--drive-size", type=parse_bytes, default=4 << 30)
    parser.add_argument("--drive-rounds", type=int, default=5)
    parser.add_argument("--backend", choices=BACKENDS, default=AioConfig.backend)
    parser.add_argument("--block-size", type=parse_bytes, default=AioConfig.block_size)
    parser.add_argument("--queue-depth", type=int, default=AioConfig.queue_depth)
    parser.add_argument("--thread-count", type=int, default=AioConfig.thread_count)
    return parser.parse_args()


# Resident bytes


def resident_table(nbytes: int, rounds: int) -> list[Row]:
    """The machine is asked as well as the process: what the driver allocates is not counted among
    the process's resident bytes.
    """
    used: dict[str, list[tuple[int, int]]] = {name: [] for name in PINNED}
    for name in turns(list(PINNED), rounds):
        empty_torch_cache()
        machine, process = machine_used_bytes(), process_resident_bytes()
        tensor = PINNED[name](nbytes).fill_(1)
        used[name].append((machine_used_bytes() - machine, process_resident_bytes() - process))
        del tensor
    over = ("used of the machine", "resident in the process")
    rows = [[f"{format_bytes(nbytes)} of", *(f"{what} over asked for" for what in over)]]
    return rows + [
        [name, *(spread([one / nbytes for one in column]) for column in zip(*pairs, strict=True))]
        for name, pairs in used.items()
    ]


def machine_used_bytes() -> int:
    """Bytes of the whole machine in use, but for the page cache and for free pages that each
    processor keeps at hand, which MemFree leaves out.
    """
    lines = (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    kibibytes = {name: int(rest.split()[0]) for name, rest in lines}
    free = sum(kibibytes.get(name, 0) for name in ("MemFree", "Buffers", "Cached", "SReclaimable"))
    counts = re.findall(r"\bcount: +(\d+)", Path("/proc/zoneinfo").read_text())
    pages_at_hand = sum(map(int, counts))
    return (kibibytes["MemTotal"] - free) * 1024 - pages_at_hand * mmap.PAGESIZE


def process_resident_bytes() -> int:
    """Bytes that are counted as resident in this process."""
    memory = memory_of("self")
    assert memory is not None
    return memory.resident


# Time to create


def creation_table(nbytes: int, rounds: int) -> list[Row]:
    """Both fault in and pin all of their memory before they return."""
    seconds: dict[str, list[float]] = {name: [] for name in PINNED}
    for name in turns(list(PINNED), rounds):
        empty_torch_cache()
        start = time.perf_counter()
        tensor = PINNED[name](nbytes)
        seconds[name].append(time.perf_counter() - start)
        del tensor
    empty_torch_cache()
    reference = seconds[TORCH]
    rows = [[f"{format_bytes(nbytes)} of", "seconds", "torch's seconds over these"]]
    return rows + [
        [name, spread(taken), spread(ratios(reference, taken))] for name, taken in seconds.items()
    ]


# Copies


def copies_table(nbytes: int, rounds: int) -> list[Row]:
    """Copies of the whole of each memory, both ways."""
    memories = {
        name: make(nbytes)
        for name, make in (PINNED | {"pool that is only mlocked": locked_pool_tensor}).items()
    }
    on_gpu = torch.empty(nbytes, dtype=torch.uint8, device=GPU)
    seconds: dict[tuple[str, str], list[float]] = {
        (direction, name): [] for direction in ("host to GPU", "GPU to host") for name in memories
    }

    def copy_both_ways(name: str, number: int) -> tuple[float, float]:
        memories[name].fill_(number)
        there = timed_copy(on_gpu, memories[name])
        arrived = bool((on_gpu == number).all())
        on_gpu.fill_(number + 1)
        back = timed_copy(memories[name], on_gpu)
        if not arrived or not bool((memories[name] == number + 1).all()):
            raise AssertionError(f"a copy from or to {name} brought other bytes than were sent")
        return there, back

    for name in memories:
        copy_both_ways(name, 0)  # the first of a kind takes longer
    for number, name in enumerate(turns(list(memories), rounds)):
        there, back = copy_both_ways(name, number % 250)
        seconds["host to GPU", name].append(there)
        seconds["GPU to host", name].append(back)
    rows = [[f"{format_bytes(nbytes)}, {rounds} rounds", "memory", "GB/s", "speed over torch's"]]
    for (direction, name), taken in seconds.items():
        speeds = [nbytes / one / 1e9 for one in taken]
        faster = ratios(seconds[direction, TORCH], taken)
        rows.append([direction, name, spread(speeds), spread(faster)])
    return rows


def timed_copy(target: torch.Tensor, source: torch.Tensor) -> float:
    """Seconds until every byte is there."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - start


# Reading a drive while copying


def overlap_table(arguments: argparse.Namespace) -> list[Row]:
    """The three ways, interleaved: the drive's speed drifts, so that each round is held against its
    own.
    """
    size = max(1, arguments.drive_size // PIECE_BYTES) * PIECE_BYTES
    config = AioConfig(
        block_size=arguments.block_size,
        queue_depth=arguments.queue_depth,
        thread_count=arguments.thread_count,
        backend=arguments.backend,
        direct="auto",
    )
    seconds: dict[str, list[float]] = {"reading alone": [], "copying alone": [], "both": []}
    with (
        PinnedPool(PIECES_HELD * PIECE_BYTES) as pool,
        Engine(config) as engine,
        engine.open_anonymous(arguments.directory, size) as file,
    ):
        pattern = write_pattern(engine, file, pool, size)
        target = torch.zeros(size, dtype=torch.uint8, device=GPU)
        ways = {
            "reading alone": lambda: pass_through(engine, file, pool, size, None),
            "copying alone": lambda: copy_pieces(pool, target),
            "both": lambda: pass_through(engine, file, pool, size, target),
        }
        for name in turns(list(ways), arguments.drive_rounds):
            torch.cuda.synchronize()
            start = time.perf_counter()
            ways[name]()
            torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
            if name == "both":
                check_pattern(target, pattern)
        direct = file.direct
    slower = [
        max(pair) for pair in zip(seconds["reading alone"], seconds["copying alone"], strict=True)
    ]
    way = "O_DIRECT" if direct else "through the page cache"
    how = f"{format_bytes(size)} in pieces of {format_bytes(PIECE_BYTES)}, {arguments.drive_rounds} rounds, {way}"
    rows = [[how, "seconds", "GB/s"]]
    rows += [
        [name, spread(taken), spread([size / one / 1e9 for one in taken])]
        for name, taken in seconds.items()
    ]
    rows.append(["both over the slower of the two", spread(ratios(seconds["both"], slower)), ""])
    return rows


def write_pattern(engine: Engine, file: File, pool: PinnedPool, size: int) -> torch.Tensor:
    """Fill *file*: piece number n is the pattern, which this returns on the GPU, with n added to
    each of its words.
    """
    pattern = pieces_of(pool)[0].view(torch.int64)
    pattern.random_(generator=torch.Generator().manual_seed(1))
    for number in range(size // PIECE_BYTES):
        engine.write(pattern + number, file, number * PIECE_BYTES).wait()
    file.sync()
    return pattern.to(GPU)


def check_pattern(target: torch.Tensor, pattern: torch.Tensor) -> None:
    """See that every piece arrived in its place, and clear them all for the next round."""
    for number, piece in enumerate(target.view(torch.int64).view(-1, pattern.numel())):
        if not torch.equal(piece, pattern + number):
            raise AssertionError(f"piece {number} came other than it was written")
    target.zero_()


def pass_through(
    engine: Engine, file: File, pool: PinnedPool, size: int, target: torch.Tensor | None
) -> None:
    """Read all of *file* through the pool, and copy each piece to *target* as soon as it is
    there.
    """
    reading: deque[tuple[Ticket, torch.Tensor, int]] = deque()
    copying: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
    free = pieces_of(pool)
    cuda: Any = torch.cuda  # its Event is untyped

    def finish_read() -> None:
        ticket, piece, offset = reading.popleft()
        ticket.wait()
        if target is not None:
            target[offset : offset + PIECE_BYTES].copy_(piece, non_blocking=True)
            copied = cuda.Event()
            copied.record()
            copying.append((copied, piece))
        else:
            free.append(piece)

    for offset in range(0, size, PIECE_BYTES):
        if len(reading) == PIECES_READING:
            finish_read()
        if len(reading) + len(copying) == PIECES_HELD:
            copied, piece = copying.popleft()
            copied.synchronize()
            free.append(piece)
        piece = free.pop()
        reading.append((engine.read(piece, file, offset), piece, offset))
    while reading:
        finish_read()
    torch.cuda.synchronize()


def copy_pieces(pool: PinnedPool, target: torch.Tensor) -> None:
    """Copy as many pieces as `pass_through` does, from as many places of the pool."""
    pieces = pieces_of(pool)
    for number, place in enumerate(target.view(-1, PIECE_BYTES)):
        place.copy_(pieces[number % PIECES_HELD], non_blocking=True)
    torch.cuda.synchronize()


def pieces_of(pool: PinnedPool) -> list[torch.Tensor]:
    """All memory of the pool, cut into pieces."""
    return list(torch.frombuffer(pool.memory, dtype=torch.uint8).split(PIECE_BYTES))


# Memories


def cuda_pool_tensor(nbytes: int) -> torch.Tensor:
    """All of a pool that is registered with CUDA; the pool's memory goes with the tensor."""
    with PinnedPool(nbytes, pin=True) as pool:
        return torch.frombuffer(pool.memory, dtype=torch.uint8)[:nbytes]


def locked_pool_tensor(nbytes: int) -> torch.Tensor:
    """All of a pool as it would be without a GPU."""
    with (
        mock.patch("torch.cuda.is_available", return_value=False),
        PinnedPool(nbytes, pin=True) as pool,
    ):
        return torch.frombuffer(pool.memory, dtype=torch.uint8)[:nbytes]


def torch_pinned(nbytes: int) -> torch.Tensor:
    """What people use today."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


TORCH = "torch.empty(pin_memory=True)"
PINNED: dict[str, Callable[[int], torch.Tensor]] = {"pool": cuda_pool_tensor, TORCH: torch_pinned}


def empty_torch_cache() -> None:
    """Make torch give its pinned memory back, so that the next allocation is one."""
    gc.collect()
    torch.cuda.synchronize()
    accelerator = getattr(torch, "accelerator", None)
    empty = getattr(accelerator, "empty_host_cache", None) or getattr(
        torch._C, "_host_emptyCache", None
    )
    if empty is None:
        sys.exit(
            f"pool_copies: torch {torch.__version__} cannot be made to give pinned memory back; use a newer one"
        )
    empty()


# Numbers and text


def turns(names: list[str], rounds: int) -> Iterator[str]:
    """Every name once in each round, and each of them first in its turn."""
    for number in range(rounds):
        yield from rotated(names, number)


def ratios(above: list[float], below: list[float]) -> list[float]:
    """One ratio for each round."""
    return [one / other for one, other in zip(above, below, strict=True)]


def spread(values: list[float]) -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def report(arguments: argparse.Namespace, parts: list[tuple[str, list[Row]]]) -> str:
    """Everything as Markdown, with what it takes to do it again."""
    about = facts(arguments.directory or Path(), "sweeps.pool_copies")
    if arguments.date:
        about["date"] = arguments.date
    about["GPU"] = torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    about["software"] = f"nvme-offload {__version__}, {versions}"
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if huge_pages.exists():
        about["transparent huge pages"] = huge_pages.read_text().strip()
    if arguments.directory is not None:
        settings = ("backend", "block_size", "queue_depth", "thread_count")
        about["engine"] = ", ".join(f"{name} {getattr(arguments, name)}" for name in settings)
    return document(
        "# Pool memory and the GPU",
        listed(about),
        "Numbers are medians over the rounds, with the lowest and the highest in brackets.",
        *(text for title, (head, *rows) in parts for text in (f"## {title}", table(head, rows))),
    )


if __name__ == "__main__":
    sys.exit(main())
