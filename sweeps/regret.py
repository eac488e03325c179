"""`python -m sweeps.regret DIR`: how far what nvme-sweep chooses is from the best of an exhaustive grid, and how far its choices are from each other.

The sweep runs several times. Then fio measures every setting of the sweep's own space under the mixed load, with the control after every few, since
a drive drifts; then the best of the grid, what the sweeps chose and the control run by turns, and only this last part is judged: the best of a
hundred noisy runs is flattered by being picked.
"""

from __future__ import annotations

import datetime
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

from nvme_offload.drive import describe as describe_drive
from nvme_offload.profile import DEEPSPEED_DEFAULTS, Profile, Setting
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
@click.option("--window", default=0.5, show_default=True, help="Seconds of each run of fio.")
@click.option("--rounds", default=8, show_default=True, help="Of the last part.")
@click.option("--size", default=FILE_BYTES, show_default=True, help="Bytes of each of the two files.")
def main(directory: Path, name: str, sweeps: int, seconds: float, window: float, rounds: int, size: int) -> None:
    """Measure the drive of DIRECTORY; prints Markdown."""
    found = [_sweep(directory, seconds) for _ in range(sweeps)]
    chosen = [profile.chosen for profile, _ in found]
    cpu_count = len(os.sched_getaffinity(0))
    with Rig(directory, size) as rig:
        speed = rig.fill(Setting(1 << 20, 16, 1), None, lambda done: None)
        paths = {direction: rig.paths(direction) for direction in ("read", "write")}

        def run(setting: Setting) -> float:
            return fio.bytes_per_second(paths, rig.file_bytes, setting, window, True)

        began = time.monotonic()
        settings = space.grid("libaio", cpu_count, speed)
        relative = grid(settings, run)
        grid_seconds = time.monotonic() - began
        best = sorted(relative, key=lambda setting: -relative[setting])[:BEST]
        turns = by_turns(list(dict.fromkeys([*chosen, *best, DEEPSPEED_DEFAULTS])), run, rounds)
    print(report(name, directory, found, len(settings), grid_seconds, best, turns, rounds))


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


def by_turns(settings: Sequence[Setting], run: Callable[[Setting], float], rounds: int) -> dict[Setting, list[float]]:
    """Each setting's speed in each round, relative to the mean of its round; every other round goes the other way about."""
    found: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for number in range(rounds):
        speeds = {setting: run(setting) for setting in (settings if number % 2 == 0 else reversed(settings))}
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
    turns: dict[Setting, list[float]],
    rounds: int,
) -> str:
    """The Markdown."""
    medians = {setting: statistics.median(values) for setting, values in turns.items()}
    fastest = max(medians, key=lambda setting: medians[setting])
    drive = describe_drive(directory)
    command = shlex.join(["python", "-m", "sweeps.regret", *sys.argv[1:]])
    when = datetime.datetime.now().astimezone().isoformat(timespec="minutes")
    machine = f"Linux {platform.release()}, {len(os.sched_getaffinity(0))} cores, {fio.version()}"
    lines = [
        f"## {name}",
        "",
        f"`{command}`, {when}, {machine}.",
        f"{drive.model or drive.device}, {drive.filesystem}, layers: {', '.join(drive.layers) or 'none'}.",
        "",
    ]
    lines += ["| sweep | seconds, report included | steady | chosen | in flight | of the best by turns | regret |", "|---|---|---|---|---|---|---|"]
    for number, (profile, seconds) in enumerate(found, 1):
        setting = profile.chosen
        share = [one / other for one, other in zip(turns[setting], turns[fastest], strict=True)]
        low, high = quartiles(share)
        regret = 1 - medians[setting] / medians[fastest]
        lines.append(
            f"| {number} | {seconds:.0f} | {'yes' if profile.steady else 'no'} | {describe(setting)} | {setting.bytes_in_flight >> 20} MiB | "
            f"{statistics.median(share):.3f} [{low:.3f}, {high:.3f}] | {regret:.1%} |"
        )
    chosen = [medians[profile.chosen] for profile, _ in found]
    lines += ["", f"The chosen settings' speeds differ by {max(chosen) / min(chosen) - 1:.1%} at the most, re-measured by turns.", ""]
    lines.append(
        f"The best by turns was {describe(fastest)}. The grid had {tried} settings and took {grid_seconds:.0f} s; its best were "
        f"{'; '.join(map(describe, best))}. DeepSpeed's defaults reach {medians[DEEPSPEED_DEFAULTS] / medians[fastest]:.3f} of the best."
    )
    same = 1 - statistics.median(sorted(turns[fastest])[: rounds // 2]) / medians[fastest]
    lines += [f"The best itself varies from round to round, relative to its round's mean, by about {same:.1%} (its lower quartile).", ""]
    return "\n".join(lines)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper one."""
    cuts = statistics.quantiles(values, n=4)
    return cuts[0], cuts[2]


def _sweep(directory: Path, seconds: float) -> tuple[Profile, float]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as reports:
        command = [sys.executable, "-m", "nvme_offload.sweep", str(directory), "--seconds", str(seconds), "--report-dir", reports, "--json"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        sys.exit(ran.stderr.splitlines()[-1])
    return Profile.from_json(ran.stdout), time.monotonic() - began


if __name__ == "__main__":
    main()
