"""`python -m sweeps.regret DIR`: the loss of nvme-sweep's choices compared with the best of an
exhaustive grid, and their spread.

The sweep runs several times. Then fio measures every setting of the sweep's space under the mixed
load, with a control run after every few settings, since a drive drifts. Finally the best of the
grid, the sweeps' choices and the control run interleaved, and only these runs are judged. Choosing
the best of noisy runs is biased, so one half of the rounds chooses it and the other half judges it,
and vice versa.

The last part runs twice: with fio, which reuses a few blocks of memory, and with the engine, which
moves requests of 16 MiB through more memory than a cache holds, as training does. The two differ
only in their use of memory.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import pandas as pd

from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS, Profile, Setting
from nvme_offload.tune import fio, space
from nvme_offload.tune.progress import describe
from nvme_offload.tune.trial import Rig

from .command import option
from .machine import facts
from .report import columns, document, listed
from .turns import there_and_back

FILE_BYTES = 1 << 30
GROUP = 5  # settings between two runs of the control
BEST = 4  # of the grid that go into the last part


@click.command()
@click.argument("directory", type=Path)
@option("--name", required=True, help="What kind of drive it is, for the heading.")
@option("--sweeps", default=3, help="How often the sweep runs.")
@option("--seconds", default=60.0, help="Of each sweep.")
@option("--window", default=0.5, help="Seconds of each run of the grid.")
@option("--turn", default=1.0, help="Seconds of each run of the last part.")
@option("--rounds", default=12, help="Of the last part; 4 at the least.")
@option("--size", default=FILE_BYTES, help="Bytes of each of the two files.")
def main(
    directory: Path,
    name: str,
    sweeps: int,
    seconds: float,
    window: float,
    turn: float,
    rounds: int,
    size: int,
) -> None:
    """Measure the drive of DIRECTORY; prints Markdown."""
    found = [_sweep(directory, seconds) for _ in range(sweeps)]
    chosen = [profile.chosen for profile, _ in found]
    cpu_count = len(os.sched_getaffinity(0))
    with Rig(directory, size) as rig:
        speed = rig.fill(Setting(1 << 20, 16, 1), None, lambda done: None)
        paths = {direction: rig.paths(direction) for direction in ("read", "write")}

        def run(setting: Setting, seconds: float = window) -> float:
            return fio.bytes_per_second(paths, rig.file_bytes, setting, seconds, True)

        began = time.monotonic()
        settings = space.grid("libaio", cpu_count, speed)
        relative = grid(settings, run)
        grid_seconds = time.monotonic() - began
        best = sorted(relative, key=lambda setting: -relative[setting])[:BEST]
        candidates = list(dict.fromkeys([*chosen, *best, DEEPSPEED_DEFAULTS]))
        turns = {
            "fio": by_turns(candidates, lambda setting: run(setting, turn), rounds),
            "the engine": by_turns(
                candidates, lambda setting: rig.run(setting, "mixed", turn).bytes_per_second, rounds
            ),
        }
    print(report(name, directory, found, len(settings), grid_seconds, best, turns))


def grid(settings: Sequence[Setting], run: Callable[[Setting], float]) -> dict[Setting, float]:
    """Each setting's speed over the mean of the control's runs around it."""
    relative: dict[Setting, float] = {}
    before = run(DEEPSPEED_DEFAULTS)
    for start in range(0, len(settings), GROUP):
        group = {setting: run(setting) for setting in settings[start : start + GROUP]}
        after = run(DEEPSPEED_DEFAULTS)
        relative.update({setting: 2 * speed / (before + after) for setting, speed in group.items()})
        before = after
    return relative


def by_turns(
    settings: Sequence[Setting], run: Callable[[Setting], float], rounds: int
) -> dict[Setting, list[float]]:
    """Each setting's speed in each round, relative to the mean of its round; every other round goes
    in reverse order.
    """
    found = pd.DataFrame(
        {setting: run(setting) for setting in there_and_back(settings, number)}
        for number in range(rounds)
    )
    relative = found.div(found.mean(axis=1), axis=0)
    return {setting: relative[setting].tolist() for setting in settings}


def report(
    name: str,
    directory: Path,
    found: Sequence[tuple[Profile, float]],
    tried: int,
    grid_seconds: float,
    best: Sequence[Setting],
    turns: dict[str, dict[Setting, list[float]]],
) -> str:
    """The Markdown."""
    chosen = [profile.chosen for profile, _ in found]
    tested = facts(directory, "sweeps.regret") | {"fio": fio.version()}
    sweeps: dict[str, Callable[[int], str]] = {
        "sweep": lambda number: f"{number + 1}",
        "seconds, report included": lambda number: f"{found[number][1]:.0f}",
        "steady": lambda number: "yes" if found[number][0].steady else "no",
        "chosen": lambda number: describe(chosen[number]),
        "in flight": lambda number: f"{chosen[number].bytes_in_flight / (1 << 20):g} MiB",
    }

    def fastest(by: str) -> str:
        medians = {setting: statistics.median(each) for setting, each in turns[by].items()}
        return describe(max(medians, key=lambda setting: medians[setting]))

    def of_the_best_by(setting: Setting) -> Callable[[str], str]:
        return lambda by: summary(of_the_best(turns[by], setting))

    compared = {
        "interleaved, by": str,
        "the best": fastest,
        **{f"sweep {number}": of_the_best_by(one) for number, one in enumerate(chosen, 1)},
        "DeepSpeed's defaults": of_the_best_by(DEEPSPEED_DEFAULTS),
        "chosen differ by": lambda by: f"{apart(turns[by], chosen):.1%}",
    }
    return document(
        f"## {name}",
        listed(tested),
        columns(range(len(found)), sweeps),
        f"The grid had {tried} settings and took {grid_seconds:.0f} s; its best were {'; '.join(map(describe, best))}.",
        columns(turns, compared),
    )


def of_the_best(values: dict[Setting, list[float]], setting: Setting) -> list[float]:
    """By round: *setting* over the best, which is the best of the rounds that are odd where this
    one is even, and vice versa.
    """
    ratios = []
    for parity in (0, 1):
        best = max(values, key=lambda other: statistics.median(values[other][1 - parity :: 2]))
        ratios += [
            one / other
            for one, other in zip(values[setting][parity::2], values[best][parity::2], strict=True)
        ]
    return ratios


def apart(values: dict[Setting, list[float]], chosen: Sequence[Setting]) -> float:
    """How far the two of *chosen* that are farthest apart are: by the median ratio of the
    rounds.
    """
    ratios = [
        statistics.median(
            one / other for one, other in zip(values[first], values[second], strict=True)
        )
        for first, second in itertools.permutations(chosen, 2)
    ]
    return max(ratios, default=1.0) - 1


def summary(ratios: Sequence[float]) -> str:
    """The median, and the quartiles."""
    low, high = quartiles(ratios)
    return f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper one."""
    cuts = statistics.quantiles(values, n=4)
    return cuts[0], cuts[2]


def _sweep(directory: Path, seconds: float) -> tuple[Profile, float]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as reports:
        options = ["--seconds", str(seconds), "--report-dir", reports, "--json"]
        command = [sys.executable, "-m", "nvme_offload.tune", str(directory), *options]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        sys.exit(ran.stderr.splitlines()[-1])
    return Profile.from_json(ran.stdout), time.monotonic() - began


if __name__ == "__main__":
    main()
