"""Programs of others on this package and on stock DeepSpeed: `python tests/zero3/parity_models.py
[--only "llama;lora"]`, or `make parity-models`.

Each is trained with parameters and states on a drive, in less host memory than they have, and with
`device: "cpu"`. Prints a table of the comparisons and differences; the exit status is 1 when
anything did, or could not be trained.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launch import COMPARED, Case, differences, train

SMALL = {"host_memory": "smallest"}
ALL = Case(parameters="nvme", sub_group_size=9000, clipping=1.0, section=SMALL)
HOSTED = ALL.but(
    clipping=0.0, section={"host_memory": 1_000_000}, top={"gradient_clipping": "auto"}
)

CASES = {
    "llama": ALL.but(model="llama"),
    "gpt2": ALL.but(model="gpt2"),
    "t5": ALL.but(model="t5"),
    "bert": ALL.but(model="bert", accumulation=2),
    "mixtral": ALL.but(model="mixtral"),
    "qwen2-moe": ALL.but(model="qwen2-moe"),
    "mamba": ALL.but(model="mamba"),
    "vit": ALL.but(model="vit", optimizer="momentum"),
    "llava": ALL.but(model="llava"),
    "lora": ALL.but(model="lora"),
    "distilled": ALL.but(model="distilled"),
    "llama, fp16, accumulated": ALL.but(
        model="llama", dtype="fp16", accumulation=2, overflow_step=1, steps=4
    ),
    "llama, two groups, evaluated": ALL.but(model="llama", evaluate=True, groups=2),
    "llama, generation in mid-training": ALL.but(model="llama", loop="generate"),
    "llama, moving average": ALL.but(model="llama", loop="average"),
    "llama, fragment functions": ALL.but(model="llama", fragments=True),
    "llama, the Trainer, resumed": HOSTED.but(program="trainer"),
    "llama, activations on the drive, overlap_step": ALL.but(
        program="activations", section={"host_memory": 1_000_000, "overlap_step": True}
    ),
    "llama, Accelerate": HOSTED.but(program="accelerate", top={"gradient_clipping": 1.0}),
}
ON_TWO_RANKS = {"llama": CASES["llama"], "mixtral": CASES["mixtral"], "lora": CASES["lora"]}


def pairs(
    cases: dict[str, Case], directory: Path, ranks: int = 1
) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """The results of *cases* on this package and on stock DeepSpeed."""
    places = [directory / "ours", directory / "stock"]
    for place in places:
        place.mkdir()
    with ThreadPoolExecutor(2) as pool:
        every = [
            pool.submit(train, list(cases.values()), place, ranks=ranks, ours=ours)
            for place, ours in zip(places, (True, False), strict=True)
        ]
        return dict(
            zip(cases, zip(*(results.result() for results in every), strict=True), strict=True)
        )


def row(name: str, ranks: int, mine: dict[str, Any], reference: dict[str, Any]) -> str:
    """A line of the table."""
    found = differences(mine, reference)
    counted = sum(len(reference.get(key, ())) for key in COMPARED)
    moved = mine.get("traffic", {})
    read, written = (moved.get(key, 0) / 1e6 for key in ("bytes_read", "bytes_written"))
    return f"| {name} | {ranks} | {counted} | {len(found)} | {read:.1f} / {written:.1f} | {mine.get('seconds', 0):.0f} / {reference.get('seconds', 0):.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", help="names, with ; between them")
    parser.add_argument("--output", type=Path, help="write the table there, too")
    arguments = parser.parse_args()
    began, failed = time.monotonic(), []
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", "deepspeed", "transformers", "accelerate", "peft")
    )
    rows = []
    for ranks, cases in ((1, CASES), (2, ON_TWO_RANKS)):
        chosen = {
            name: case
            for name, case in cases.items()
            if not arguments.only or name in arguments.only.split(";")
        }
        with tempfile.TemporaryDirectory(prefix="parity-") as place:
            for name, (mine, reference) in pairs(chosen, Path(place), ranks).items():
                rows.append(row(name, ranks, mine, reference))
                if found := differences(mine, reference):
                    failed += [f"{name}, {ranks} ranks: {line}" for line in found[:4]]
    lines = [
        '# Third-party programs, compared with DeepSpeed with its device "cpu"',
        "",
        f"`make parity-models`: {len(rows)} programs, {len({line.partition(':')[0] for line in failed})} with a difference; {time.monotonic() - began:.0f} s.",
        f"{os.cpu_count()} CPUs, Linux {platform.release()}, Python {platform.python_version()}, {versions}.",
        "Models are tiny, from their configurations, at random. Parameters and states are on the drive here, but for what fits in the budget (all, where",
        "a program sets none), and in memory there. Compared to the bit: losses, norms, weights, masters, states, and what a program looks at.",
        "",
        "| program | ranks | compared | differ | MB read / written here | seconds here / there |",
        "|---|---:|---:|---:|---:|---:|",
        *rows,
        *([""] if failed else []),
        *(f"    {line[:300]}" for line in failed),
    ]
    print("\n".join(lines))
    if arguments.output is not None:
        arguments.output.write_text("\n".join(lines) + "\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
