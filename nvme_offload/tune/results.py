"""The results of a sweep: report, configs, kept profile and printed text."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from nvme_offload.ds_config import edit as ds_config
from nvme_offload.errors import OffloadError
from nvme_offload.files import commit
from nvme_offload.hardware import profile_shelf
from nvme_offload.hardware.profile import PHASES, Latency, Profile, StripePath
from nvme_offload.hardware.profile_grade import grade
from nvme_offload.units import format_bytes, format_speed

from .progress import Progress, change

LONGER = "Sweep longer for more (--seconds), while no other process uses the drive."


def write_report(profile: Profile, name: str, directory: Path, progress: Progress) -> Path:
    """Write the report, complete or not at all; returns its directory."""
    from nvme_offload.report import render

    progress.show("report", "drawing")
    with contextlib.suppress(OSError):
        # of sweeps that were killed
        commit.remove_abandoned(directory, r".+-\d{4}-\d\d-\d\d")
    wanted = directory / f"{name}-{profile.created[:10]}"
    with commit.partial_directory(wanted) as aside:
        (aside / "report.html").write_text(render.html(profile), encoding="utf-8")
        (aside / "profile.json").write_text(profile.to_json(), encoding="utf-8")
        (aside / "ds_config.json").write_text(
            ds_config.zero_infinity(profile, profile.drive["path"]), encoding="utf-8"
        )
        commit.sync_tree(aside)
        return _named(aside, wanted)


def _named(aside: Path, wanted: Path) -> Path:
    """Rename *aside* to *wanted*, or to the first free name with a number after it."""
    for number in range(1, 1000):
        target = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with contextlib.suppress(FileExistsError):
            commit.publish_directory(aside, target)
            return target
    raise OffloadError(f"there are too many reports named {wanted}: move some away")


class Kept(NamedTuple):
    """note: why a profile was not kept, or that its grade is low. refused: a better profile stays."""

    note: str
    refused: bool = False


def keep(profile: Profile, force: bool) -> Kept:
    """Keep *profile* for `AioConfig.for_path`, over one with more evidence only with *force*."""
    if not profile.engine["direct"]:
        return Kept("Not kept as the profile of this drive: these are speeds of the page cache.")
    found = grade(profile)
    try:
        better = None if force else profile_shelf.better(profile)
        if better is None:
            profile_shelf.keep(profile)
    except (OffloadError, OSError) as error:
        return Kept(f"Not kept as the profile of this drive: {error}.")
    if better is not None:
        note = (
            f"Not kept as the profile of this drive: the evidence of this sweep is {found}, and the profile of {better.created[:10]} has "
            f"{grade(better).name} evidence. Sweep longer (--seconds), or replace it nevertheless (--force)."
        )
        return Kept(note, refused=True)
    if found.name != "good":
        return Kept(f"Kept as the profile of this drive, with {found.name} evidence. {LONGER}")
    return Kept("")


def notes(profiles: Sequence[Profile], kept: Sequence[Kept]) -> list[str]:
    """What to print of *kept*, each note once, with its paths where there are several."""
    paths: dict[str, list[str]] = {}
    for profile, each in zip(profiles, kept, strict=True):
        paths.setdefault(each.note, []).append(profile.drive["path"])
    paths.pop("", None)
    many = len(profiles) > 1
    return [f"{', '.join(of)}: {note}" if many else note for note, of in paths.items()]


def apply(config: Path, profile: Profile) -> str:
    """Set the chosen setting in *config*; returns a line on the changes."""
    with _uninterrupted():  # a file that is written in place must be written completely
        applied = ds_config.apply(config, profile)
    if not applied.changed:
        return f"{config}: has these settings already"
    was = {key: f" (was {json.dumps(value)})" for key, value in applied.before.items()}
    new = [
        f"{key} {json.dumps(value)}{was.get(key, '')}"
        for key, value in applied.settings.items()
        if applied.before.get(key) is not value
    ]
    ignored = f"; DeepSpeed does not read {', '.join(applied.ignored)}" if applied.ignored else ""
    return f"{config}: set {', '.join(new)}{ignored}"


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defer the signals that end the command to the end of this context."""
    heard: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: heard.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in heard:
            os.kill(os.getpid(), late)


def summary(profile: Profile) -> list[str]:
    """The printed summary of *profile*."""
    chosen, ranks, drive = profile.chosen, profile.workload["ranks"], profile.drive
    together = f"; {ranks} ranks at the same time; speeds are sums" if ranks > 1 else ""
    by = "; DeepSpeed's own op" if profile.engine.get("name") == "deepspeed" else ""
    size = format_bytes(chosen.block_size)
    lines = [
        f"{drive['path']}: {drive['model'] or drive['device']}, {drive['filesystem']}{by}{together}",
        "",
        f"  block_size {chosen.block_size} ({size}), queue_depth {chosen.queue_depth}, thread_count {chosen.thread_count}",
        "",
        "           GB/s   over DeepSpeed's defaults (90 % interval)   the best of the finals",
    ]
    for phase in PHASES:
        reached, best = profile.performance[phase], profile.best[phase]
        gain = change(reached.relative, reached.relative_low, reached.relative_high)
        other = f"{format_speed(best.gb_per_s)} with {best.setting}"
        other = "the same" if best.setting == chosen else other
        lines.append(f"  {phase:6}  {format_speed(reached.gb_per_s):>5}   {gain:40}   {other}")
    lines += ["", f"Evidence: {grade(profile)}."]
    timed = [_latency(one) for one in profile.latencies if one.setting == chosen]
    if timed:
        lines.append(f"Block latency, ms (p50, p99, p99.9): {'; '.join(timed)}")
    rates = (
        f"{phase} {1e9 * profile.performance[phase].gb_per_s / chosen.block_size:,.0f}"
        for phase in PHASES
    )
    lines.append(f"IOPS, blocks of {size}: {', '.join(rates)}")
    lines += ["", *profile.reasons]
    return lines + [f"Warning: {warning}" for warning in profile.warnings]


def _latency(one: Latency) -> str:
    rare = "too few blocks" if one.p999_ms is None else format_speed(one.p999_ms)
    return f"{one.phase} {format_speed(one.p50_ms)}, {format_speed(one.p99_ms)}, {rare}"


def shelf_lines() -> list[str]:
    """A line for each kept profile. Raises: UnsupportedError when this user has no home directory."""
    lines = []
    for path in sorted(profile_shelf.directory().glob("*.json")):
        try:
            profile = Profile.load(path)
        except (OffloadError, OSError) as error:
            lines.append(str(error))
            continue
        drive, mixed = profile.drive, profile.performance["mixed"]
        by = ", DeepSpeed's own op" if profile.engine.get("name") == "deepspeed" else ""
        lines.append(
            f"{drive['path']}: {drive['model'] or drive['device']}, {drive['filesystem']}, {profile.created[:10]}: {profile.chosen}, "
            f"mixed {format_speed(mixed.gb_per_s)} GB/s{by}, evidence {grade(profile).name}"
        )
    return lines


def as_json(profiles: Sequence[Profile]) -> str:
    """The profiles for other programs, and for each whether its evidence is enough."""
    drives = []
    for profile in profiles:
        evidence = grade(profile)
        drives.append(
            {
                "path": profile.drive["path"],
                "host": profile.engine.get("host"),
                "passed": evidence.name != "poor",
                "grade": dataclasses.asdict(evidence),
                "profile": json.loads(profile.to_json()),
            }
        )
    found = {"passed": all(each["passed"] for each in drives), "drives": drives}
    return json.dumps(found, indent=2) + "\n"


def stripe_lines(stripe: Sequence[StripePath]) -> list[str]:
    """The printed summary of several paths together."""
    paths, weights = [one.path for one in stripe], [round(one.weight, 3) for one in stripe]
    lines = ["All paths together, GB/s of each; in brackets alone:", ""]
    for one in stripe:
        speeds = ", ".join(
            f"{phase} {format_speed(one.together[phase])} ({format_speed(one.alone[phase])})"
            for phase in PHASES
        )
        lines.append(f"  {one.path}: {speeds}; weight {one.weight:.3f}")
    sums = {phase: sum(one.together[phase] for one in stripe) for phase in PHASES}
    total = ", ".join(f"{phase} {format_speed(speed)}" for phase, speed in sums.items())
    return [
        *lines,
        f"  together: {total}",
        "",
        "The weight of a path is the share of the bytes with which all paths finish at the same time. In the config:",
        f'  "nvme_offload": {json.dumps({"paths": paths, "weights": weights})}',
    ]


def print_out(text: str) -> None:
    """Write to standard output, which may be closed."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`; all files are written by now
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
