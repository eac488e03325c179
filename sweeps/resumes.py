"""`python -m sweeps.resumes DIR`: resume runs of ZeRO-3 and FSDP2 that 1 to 4 ranks saved on 1 to 4
ranks, and write `reports/resumes.md`. It trains small models in processes of the CPU.
"""

from __future__ import annotations

import datetime
import functools
import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from nvme_offload.optim import NVMeOptimizer

ROOT = Path(__file__).parents[1]
RANKS = (1, 2, 3, 4)
FORMATS = {"exact": torch.float32, "split": torch.bfloat16}
STEPS = 2


def together(ranks: int, work: Callable[[int], None]) -> None:
    """Call *work* with the rank in *ranks* processes that are forked off this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            try:
                torch.set_num_threads(1)
                dist.init_process_group("gloo", rank=rank, world_size=ranks)
                work(rank)
                dist.barrier()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        raise RuntimeError(f"{ranks} ranks: one failed")


def model(dtype: torch.dtype) -> Any:
    """A model sharded over all ranks. Its last layer has no rows for some of four ranks."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(33, 150), nn.ReLU(), nn.Linear(150, 2)).to(dtype)
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    return net


def optimizer_of(net: nn.Module, state_format: str, directory: Path) -> NVMeOptimizer:
    """An optimizer with states on the drive of *directory*."""
    return NVMeOptimizer(
        net.parameters(),
        torch.optim.AdamW,
        paths=directory,
        host_memory="1MB",
        lr=0.01,
        state_format=state_format,
    )


def train(net: Any, optimizer: NVMeOptimizer, first: int, dtype: torch.dtype) -> None:
    """Make steps from step *first* on."""
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        net(torch.randn(8, 33, generator=generator).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(net: Any, optimizer: NVMeOptimizer) -> list[dict[str, torch.Tensor]]:
    """The whole weight and the whole states of each parameter."""
    states = optimizer.state_dict()["state"]
    mine: list[dict[str, Any]] = []
    for index, parameter in enumerate(net.parameters()):
        found = {"weight": parameter.detach(), **states.get(index, {})}
        mine.append(
            {key: getattr(v, "to_local", lambda v=v: v)().clone() for key, v in found.items()}
        )
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    whole = []
    for parts in zip(*every, strict=True):
        filled = [part for part in parts if part["weight"].numel()]
        whole.append(
            {
                key: torch.cat([part[key] for part in filled]) if value.dim() else value
                for key, value in filled[0].items()
            }
        )
    return whole


def save_fsdp2(directory: Path, ranks: int, rank: int) -> None:
    """Train and save in each state format, with the values then and at the end."""
    for name, dtype in FORMATS.items():
        net = model(dtype)
        with optimizer_of(net, name, directory) as optimizer:
            train(net, optimizer, 0, dtype)
            optimizer.save(directory / f"{name}-{ranks}")
            saved = values(net, optimizer)
            train(net, optimizer, STEPS, dtype)
            ended = values(net, optimizer)
        if rank == 0:
            torch.save([saved, ended], directory / f"{name}-{ranks}.values")


def load_fsdp2(directory: Path, ranks: int, rank: int) -> None:
    """Load each save, and note whether its values are right."""
    for name, dtype in FORMATS.items():
        for by in RANKS:
            saved, ended = torch.load(directory / f"{name}-{by}.values")
            net = model(dtype)
            with torch.no_grad():
                for parameter, value in zip(net.parameters(), saved, strict=True):
                    chunks = value["weight"].chunk(ranks)
                    if rank < len(chunks):
                        parameter.to_local().copy_(chunks[rank])
            with optimizer_of(net, name, directory) as optimizer:
                optimizer.load(directory / f"{name}-{by}")
                words = ["exact" if same(values(net, optimizer), saved) else "DIFFERENT"]
                train(net, optimizer, STEPS, dtype)
                if by == ranks:
                    goes_on = same(values(net, optimizer), ended)
                    words.append("goes on" if goes_on else "GOES ON OTHERWISE")
            if rank == 0:
                (directory / f"{name}-{by}-{ranks}.told").write_text(", ".join(words))


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    """Whether all values are equal, bit for bit."""
    return all(
        a.keys() == b.keys()
        and all(a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in a)
        for a, b in zip(one, other, strict=True)
    )


def fsdp2(directory: Path) -> list[str]:
    """The tables of FSDP2."""
    directory.mkdir()
    for work in (save_fsdp2, load_fsdp2):
        for ranks in RANKS:
            together(ranks, functools.partial(work, directory, ranks))
    lines = []
    for name, dtype in FORMATS.items():
        lines += table(
            f"FSDP2, `NVMeOptimizer` {name!r}, {str(dtype).removeprefix('torch.')}",
            lambda by, ranks, name=name: (directory / f"{name}-{by}-{ranks}.told").read_text(),
        )
    return lines


def table(title: str, cell: Callable[[int, int], str]) -> list[str]:
    """The lines of a table; *cell* is called with the numbers of ranks that saved and loaded."""
    lines = [
        f"## {title}",
        "",
        "| saved by | " + " | ".join(f"loaded by {ranks}" for ranks in RANKS) + " |",
        "|---|" + "---|" * len(RANKS),
    ]
    lines += [f"| {by} | " + " | ".join(cell(by, ranks) for ranks in RANKS) + " |" for by in RANKS]
    return [*lines, ""]


def main(directory: Path) -> None:
    """Run everything below *directory* and write the report."""
    parts = fsdp2(directory / "fsdp2")  # before DeepSpeed starts threads
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "zero3")]
    from checkpointing import Life
    from launch import Case
    from test_checkpoint import run

    base = Case(
        name="resumed",
        model="frozen",
        states="nvme",
        parameters="nvme",
        zero_init=True,
        groups=2,
        sub_group_size=1000,
        persistence=50,
    )
    cases = {"on nvme": base, "in memory": base.but(parameters="none")}

    def place(kind: str, ranks: int) -> str:
        return str(directory / f"{kind} {ranks}".replace(" ", "-"))

    saved = {
        ranks: run(
            [
                Life(kind, case, last=4, saves=[[2, place(kind, ranks)]], looks=False)
                for kind, case in cases.items()
            ],
            directory,
            ranks=ranks,
        )
        for ranks in RANKS
    }
    loaded = {
        ranks: run(
            [
                Life(f"{kind} {by}", case, first=2, last=4, load=place(kind, by))
                for kind, case in cases.items()
                for by in RANKS
            ],
            directory,
            ranks=ranks,
        )
        for ranks in RANKS
    }
    lines = [
        "# Resumes on other numbers of ranks",
        "",
        f"`python -m sweeps.resumes DIR`, {datetime.datetime.now(tz=datetime.timezone.utc):%Y-%m-%d}. Two parameter groups and",
        "a frozen weight, of sizes that no number of ranks divides; sub-groups of 1,000 elements; ZeRO-3 on",
        "the CPU with gloo, bf16, states on a drive. Each run makes two steps, saves, and makes two more.",
        "",
        "- **exact**: after the load, weights, states and counters equal bit for bit those that were saved",
        "  (ZeRO-3: those that as many ranks load).",
        "- **goes on**: on as many ranks, the end of the resumed run equals the uninterrupted one.",
        "- The number is the largest growth of the resident memory of rank 0 during the load, in MB.",
        "",
    ]

    def cell(kind: str, by: int, ranks: int) -> str:
        found, reference = loaded[ranks][f"{kind} {by}"], loaded[by][f"{kind} {by}"]
        words = ["exact" if found["begin"] == reference["begin"] else "DIFFERENT"]
        if ranks == by:
            goes_on = found["end"] == saved[by][kind]["end"]
            words.append("goes on" if goes_on else "GOES ON OTHERWISE")
        return f"{', '.join(words)}; {found['loading'] / 1e6:.1f}"

    for kind in cases:
        lines += table(f"ZeRO-3, parameters {kind}", functools.partial(cell, kind))
    lines += parts
    (ROOT / "reports" / "resumes.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
