"""Many combinations of the settings that `test_parity.py` tests: `python tests/zero3/parity.py
--combinations 300`, or `make parity`.

Combinations are drawn so that every pair of values of two dimensions comes up, then at random until
there are enough; the same ones for the same seed. Each is trained on this package and on stock
DeepSpeed with `device: "cpu"`. Prints a table of the values of each dimension with how many
combinations had it and how many of them differed, and then what differed; the exit status is 1 when
anything did.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launch import Case, differences, train

AT_ONCE = 15  # combinations in one process

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "ranks": (1, 2),
    "model": (
        "odd",
        "blocks",
        "embedding",
        "tied",
        "frozen",
        "checkpointed",
        "reentrant",
        "misaligned",
    ),
    "dtype": ("bf16", "fp16", "fp32"),
    "optimizer": (
        "adamw",
        "cpu_adam",
        "amsgrad",
        "momentum",
        "sgd",
        "adagrad",
        "nadam",
        "radam",
        "rmsprop",
        "sign",
    ),
    "parameters, states": (("none", "nvme"), ("cpu", "nvme"), ("nvme", "nvme"), ("nvme", "cpu")),
    "host_memory": ("smallest", "double", "auto"),
    "sub_group_size": (1, 500, 5000, 1_000_000_000),
    "accumulation": (1, 3),
    "clipping": (0.0, 0.5),
    "groups": (1, 2),
    "overflow_step": (None, 1),
    "persistence": (0, 1000),
    "zero_init": (False, True),
    "evaluate": (False, True),
    "fragments": (False, True),
}
Combination = dict[str, Any]


def possible(combination: Combination) -> bool:
    """Whether it can be done, and DeepSpeed itself can do it."""
    if combination["optimizer"] == "adagrad" and combination["groups"] == 2:
        return False  # DeepSpeed makes it anew with one group
    if combination["overflow_step"] is not None and combination["dtype"] != "fp16":
        return False  # nothing overflows
    if (
        combination["optimizer"] == "sgd"
        and combination["states"] == "cpu"
        and combination["fragments"]
    ):
        return False
    if combination["optimizer"] == "sign" and combination["host_memory"] == "smallest":
        return False  # keeps more later on than a budget can be planned by
    if combination["model"] == "odd" and combination["fragments"] and combination["ranks"] == 2:
        return False  # safe_set_full_grad wants sizes that divide
    return not (combination["model"] == "misaligned" and combination["fragments"])  # only slow


def draw(count: int, seed: int) -> list[Combination]:
    """*count* combinations or more: every possible pair first."""
    generator = random.Random(seed)
    missing: set[Any] = set()
    for _ in range(20_000):
        missing |= set(pairs(one(generator)))
    chosen = []
    while missing or len(chosen) < count:
        best = max(
            (one(generator) for _ in range(60 if missing else 1)),
            key=lambda candidate: len(missing.intersection(pairs(candidate))),
        )
        missing.difference_update(pairs(best))
        chosen.append(best)
    return chosen


def one(generator: random.Random) -> Combination:
    while True:
        drawn = {name: generator.choice(values) for name, values in DIMENSIONS.items()}
        drawn["parameters"], drawn["states"] = drawn["parameters, states"]
        if possible(drawn):
            return drawn


def pairs(combination: Combination) -> Iterator[Any]:
    return itertools.combinations([(name, combination[name]) for name in DIMENSIONS], 2)


def case_of(combination: Combination) -> Case:
    fields = {key: value for key, value in combination.items() if key in Case.__dataclass_fields__}
    return Case(**fields, steps=4, section={"host_memory": combination["host_memory"]})


def compare(combinations: list[Combination], ranks: int) -> list[list[str]]:
    """What differs for each of *combinations*."""
    cases = [case_of(combination) for combination in combinations]
    with tempfile.TemporaryDirectory(prefix="parity-") as place, ThreadPoolExecutor(2) as pool:
        mine = pool.submit(train, cases, Path(place), ranks=ranks, timeout=3000)
        reference = pool.submit(train, cases, Path(place), ranks=ranks, ours=False, timeout=3000)
        return [differences(*both) for both in zip(mine.result(), reference.result(), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--combinations", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    chosen = draw(arguments.combinations, arguments.seed)
    began = time.monotonic()
    failed: list[tuple[Combination, list[str]]] = []
    counts = {(name, value): [0, 0] for name, values in DIMENSIONS.items() for value in values}
    done = 0
    for ranks in DIMENSIONS["ranks"]:
        mine = [combination for combination in chosen if combination["ranks"] == ranks]
        for start in range(0, len(mine), AT_ONCE):
            part = mine[start : start + AT_ONCE]
            for combination, found in zip(part, compare(part, ranks), strict=True):
                done += 1
                for name in DIMENSIONS:
                    counts[name, combination[name]][0] += 1
                    counts[name, combination[name]][1] += bool(found)
                if found:
                    failed.append((combination, found))
                    print(case_of(combination), *found[:3], sep="\n  ", file=sys.stderr, flush=True)
            print(
                f"{done} of {len(chosen)} after {time.monotonic() - began:.0f} s, {len(failed)} differ",
                file=sys.stderr,
                flush=True,
            )
    print(table(chosen, counts, failed, arguments.seed, time.monotonic() - began))
    sys.exit(bool(failed))


def table(
    chosen: list[Combination],
    counts: dict[Any, list[int]],
    failed: list[Any],
    seed: int,
    seconds: float,
) -> str:
    import deepspeed
    import torch

    lines = [
        f"{len(chosen)} combinations (seed {seed}, every pair of values among them), {len(failed)} differ; {seconds:.0f} s",
        f"on {platform.node()}, {os.cpu_count()} CPUs, Linux {platform.release()}; Python {platform.python_version()}, torch {torch.__version__}, "
        f"DeepSpeed {deepspeed.__version__}",
        "",
        "| dimension | value | combinations | differ |",
        "|---|---|---:|---:|",
    ]
    for (name, value), (count, bad) in counts.items():
        lines.append(
            f"| {name} | {' / '.join(value) if isinstance(value, tuple) else value} | {count} | {bad} |"
        )
    for combination, found in failed:
        lines += ["", repr(case_of(combination)), *(f"    {line[:400]}" for line in found[:6])]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
