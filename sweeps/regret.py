"""`python -m sweeps.regret DIR`: how far what nvme-sweep chooses is from the best of an exhaustive
grid, and how far its choices are from each other.

The sweep runs several times. Then fio measures every setting of the sweep's own space under the
mixed load, with the control after every few, since a drive drifts; then the best of the grid, what
the sweeps chose and the control run, interleaved, and only this last part is judged. Whatever is
picked as the best of noisy runs is flattered by them, so the best is picked by one half of the
rounds and judged by the other, both ways about.

The last part is run twice: by fio, which moves the same few blocks of memory again and again, and
by the engine, which moves requests of 16 MiB through more memory than a cache holds, as training
does. Where they disagree about a setting, memory is what they disagree about.
"""

from __future__ import annotations

import datetime
import itertools
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from nvme_offload.hardware.drive import describe as describe_drive
from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS, Profile, Setting
from nvme_offload.sweep import fio, space
from nvme_offload.sweep.progress import describe
from nvme_offload.sweep.trial import Rig

FILE_BYTES = 1 << 30
GROUP = 5  # settings between two runs of the control
BEST = 4  # of the grid that go into the last part


@click.command()
@click.argument("directory", type=Path)
@click.option("--name", required=True, help="What kind of drive it is, for the heading.")
@click.option("--sweeps", default=3, show_default=True, help="How often the sweep runs.")
@click.option("--seconds", default=60.0, show_default=True, help="Of each sweep.")
@click.option("--window", default=0.5, show_default=True, help="Seconds of each run of the grid.")
@click.option(
    "--turn", default=1.0, show_default=True, help="Seconds of each run of the last part."
)
@click.option("--rounds", default=12, show_default=True, help="Of the last part; 4 at the least.")
@click.option(
    "--size", default=FILE_BYTES, show_default=True, help="Bytes of each of the two files."
)
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
    found: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for number in range(rounds):
        speeds = {
            setting: run(setting)
            for setting in (settings if number % 2 == 0 else reversed(settings))
        }
        mean = statistics.fmean(speeds.values())
        for setting, speed in speeds.items():
            found[setting].append(speed / mean)
    return found


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
    drive = describe_drive(directory)
    chosen = [profile.chosen for profile, _ in found]
    command = shlex.join(["python", "-m", "sweeps.regret", *sys.argv[1:]])
    when = datetime.datetime.now().astimezone().isoformat(timespec="minutes")
    machine = f"Linux {platform.release()}, {len(os.sched_getaffinity(0))} cores, {fio.version()}, load average {os.getloadavg()[2]:.1f} over 15 minutes"
    lines = [
        f"## {name}",
        "",
        f"`{command}`, {when}, {machine}. {drive.model or drive.device}, {drive.filesystem}.",
        "",
    ]
    lines += [
        "| sweep | seconds, report included | steady | chosen | in flight |",
        "|---|---|---|---|---|",
    ]
    for number, (profile, seconds) in enumerate(found, 1):
        setting, steady = profile.chosen, "yes" if profile.steady else "no"
        lines.append(
            f"| {number} | {seconds:.0f} | {steady} | {describe(setting)} | {setting.bytes_in_flight / (1 << 20):g} MiB |"
        )
    lines += [
        "",
        f"The grid had {tried} settings and took {grid_seconds:.0f} s; its best were {'; '.join(map(describe, best))}.",
        "",
    ]
    lines += [
        "| interleaved, by | the best | "
        + " | ".join(f"sweep {number}" for number in range(1, len(found) + 1))
        + " | DeepSpeed's defaults | chosen differ by |"
    ]
    lines += ["|---|---|" + "---|" * (len(found) + 2)]
    for by, values in turns.items():
        medians = {setting: statistics.median(each) for setting, each in values.items()}
        fastest = max(medians, key=lambda setting: medians[setting])
        shares = [
            summary(of_the_best(values, setting)) for setting in [*chosen, DEEPSPEED_DEFAULTS]
        ]
        lines.append(
            f"| {by} | {describe(fastest)} | {' | '.join(shares)} | {apart(values, chosen):.1%} |"
        )
    return "\n".join([*lines, ""])


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
        command = [
            sys.executable,
            "-m",
            "nvme_offload.sweep",
            str(directory),
            "--seconds",
            str(seconds),
            "--report-dir",
            reports,
            "--json",
        ]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        sys.exit(ran.stderr.splitlines()[-1])
    return Profile.from_json(ran.stdout), time.monotonic() - began


if __name__ == "__main__":
    main()
