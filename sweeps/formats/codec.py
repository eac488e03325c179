"""`python -m sweeps.formats.codec`: bytes and nanoseconds a parameter of packing and unpacking,
interleaved, beside AdamW and a copy on the same device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click
import torch

from nvme_offload.optimizer_states import FORMATS

from .__main__ import device_facts


@click.command()
@click.option(
    "--parameters",
    type=click.IntRange(min=1),
    default=1 << 24,
    show_default=True,
    help="Of one bundle.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Of torch, on the CPU.",
)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
def main(parameters: int, rounds: int, threads: int, device: str) -> None:
    """Time the state formats on DEVICE, and print a table in Markdown."""
    torch.set_num_threads(threads)
    work = dict(_work(parameters, torch.device(device)))
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, (act, _) in work.items():
            _finish(device)
            began = time.perf_counter()
            act()
            _finish(device)
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    for name, value in device_facts(device, "sweeps.formats.codec").items():
        click.echo(f"- {name}: {value}")
    click.echo(
        f"- {parameters / 1e6:.1f} million parameters, {rounds} interleaved rounds, {threads} thread(s) of torch\n"
    )
    click.echo(
        "| what | ns a parameter, median [least to most] | bytes a parameter on the drive |\n| --- | --- | --- |"
    )
    for name, (_, nbytes) in work.items():
        each = sorted(second / parameters * 1e9 for second in seconds[name])
        stored = f"{nbytes / parameters:.4f}" if nbytes else ""
        click.echo(
            f"| {name} | {statistics.median(each):.3g} [{each[0]:.3g} to {each[-1]:.3g}] | {stored} |"
        )


def _work(
    parameters: int, device: torch.device
) -> list[tuple[str, tuple[Callable[[], object], int]]]:
    """What to time, by name, with the bytes of a bundle where it is a format's."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(parameters, generator=generator).to(device)
    states = {
        "exp_avg": torch.randn(parameters, generator=generator).to(device),
        "exp_avg_sq": torch.rand(parameters, generator=generator).to(device),
    }
    work: list[tuple[str, tuple[Callable[[], object], int]]] = []
    for name, format in FORMATS.items():
        layout = format.layout(
            parameters, {key: state.dtype for key, state in states.items()}, torch.bfloat16
        )
        buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        working = [torch.empty(parameters, dtype=torch.bfloat16, device=device)]
        memory = torch.zeros(format.unpacked_elements(layout), device=device)
        format.pack(layout, buffer, working, master, states)
        unpacked = format.unpack(layout, buffer, working, memory)

        def pack(
            format=format, layout=layout, buffer=buffer, working=working, unpacked=unpacked
        ) -> None:
            format.pack(layout, buffer, working, *unpacked, seed=1)

        def unpack(
            format=format, layout=layout, buffer=buffer, working=working, memory=memory
        ) -> None:
            format.unpack(layout, buffer, working, memory)

        work += [
            (f"{name}: pack", (pack, layout.nbytes)),
            (f"{name}: unpack", (unpack, layout.nbytes)),
        ]
    weight = torch.nn.Parameter(master.clone())
    weight.grad = torch.randn(parameters, generator=generator).to(device)
    adam = torch.optim.AdamW([weight], fused=True)
    return [
        *work,
        ("AdamW, fused", (adam.step, 0)),
        ("copy of 4 bytes", (lambda: weight.data.copy_(master), 0)),
    ]


def _finish(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
