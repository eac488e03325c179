"""What a sweep leaves: the report, the configs, the profile on its shelf, and what it prints."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from nvme_offload.ds_config import edit as ds_config
from nvme_offload.errors import OffloadError
from nvme_offload.files import commit
from nvme_offload.hardware import profile_shelf
from nvme_offload.hardware.profile import PHASES, Beside, Best, Profile, StripePath
from nvme_offload.units import format_bytes

from .preflight import Failure
from .progress import Progress, describe
from .proof import prove


def write_report(profile: Profile, name: str, directory: Path, progress: Progress) -> Path:
    """Write everything aside, then give it its name, so that there is a whole report or none.
    Returns where it is.
    """
    from nvme_offload.report import render

    progress.show("report", "drawing")
    commit.make_directory(directory)
    with contextlib.suppress(OSError):
        # of sweeps that were killed, on other days and of other drives
        commit.remove_abandoned(directory, r".+-\d{4}-\d\d-\d\d")
    wanted = directory / f"{name}-{profile.created[:10]}"
    with commit.partial_directory(wanted) as aside:
        (aside / "profile.json").write_text(profile.to_json(), encoding="utf-8")
        (aside / "ds_config.json").write_text(
            ds_config.zero_infinity(profile, profile.drive["path"]), encoding="utf-8"
        )
        render.write(profile, aside)
        commit.sync_tree(aside)
        return _named(aside, wanted)


def _named(aside: Path, wanted: Path) -> Path:
    """Rename *aside* to *wanted*, or to the first free name after it: an earlier report stays."""
    for number in range(1, 1000):
        target = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with contextlib.suppress(FileExistsError):
            commit.publish_directory(aside, target)
            return target
    raise Failure(f"there are too many reports named {wanted}: move some away")


def keep(profile: Profile) -> str:
    """Put *profile* on its user's shelf, where `AioConfig.for_path` finds it; returns a line on why
    not, "" when it is there.
    """
    if not profile.engine["direct"]:
        return "Not kept for AioConfig.for_path: these are speeds of the page cache."
    try:
        profile_shelf.keep(profile)
    except (OffloadError, OSError) as error:
        return f"Not kept for AioConfig.for_path: {error}."
    return ""


def apply(config: Path, profile: Profile) -> str:
    """Set the chosen setting in *config* and read it back; returns what that changed, and who read
    it.
    """
    with _uninterrupted():  # a file that is written in place must not be left at half
        applied = ds_config.apply(config, profile)
    read_back, proven = prove(config, profile.chosen)
    if not applied.changed:
        return f"{config}: says so already; {read_back}"
    new = [
        (key, value)
        for key, value in applied.settings.items()
        if applied.before.get(key) is not value
    ]
    old = {key: f" (was {json.dumps(value)})" for key, value in applied.before.items()}
    line = f"{config}: set " + ", ".join(
        f"{key} {json.dumps(value)}{old.get(key, '')}" for key, value in new
    )
    line += f"; {read_back}" if proven else f"; BUT {read_back}"
    return line + (
        f"; DeepSpeed does not read {', '.join(applied.ignored)}" if applied.ignored else ""
    )


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals that end the command are heard when this is over, whichever thread they come to."""
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
            os.kill(os.getpid(), late)  # whichever thread hears it


def summary(profile: Profile) -> list[str]:
    """The lines that say what was found."""
    chosen, ranks = profile.chosen, profile.workload["ranks"]
    together = f"; {ranks} ranks at once, speeds of all together" if ranks > 1 else ""
    by = "; DeepSpeed's own op" if profile.engine.get("name") == "deepspeed" else ""
    lines = [
        f"{profile.drive['path']}: {profile.drive['model'] or profile.drive['device']}, {profile.drive['filesystem']}{by}{together}",
        "",
        f"  block_size {chosen.block_size} ({format_bytes(chosen.block_size)}), queue_depth {chosen.queue_depth}, thread_count {chosen.thread_count}",
        "",
        "           GB/s   over DeepSpeed's defaults (90 % interval)   the best found",
    ]
    for phase in PHASES:
        reached, best = profile.performance[phase], profile.best[phase]
        other = (
            "the same"
            if best.setting == chosen
            else f"{best.gb_per_s:.2f} with {describe(best.setting)}"
        )
        lines.append(f"  {phase:6}  {reached.gb_per_s:5.2f}   {_gain(reached):40}   {other}")
    fio = {one.phase: one for one in profile.beside if one.name == "fio"}
    if fio:
        speeds = ", ".join(f"{phase} {one.gb_per_s:.2f}" for phase, one in fio.items())
        lines += [
            "",
            f"fio ({next(iter(fio.values())).version}) at the same setting, GB/s: {speeds}; the engine beside it "
            + _shares(fio),
        ]
    if profile.latencies:
        timed = [one for one in profile.latencies if one.setting == chosen]
        lines.append(
            "A block takes, in ms (p50, p99): "
            + ", ".join(f"{one.phase} {one.p50_ms:.2f}, {one.p99_ms:.2f}" for one in timed)
        )
    lines += ["", *profile.reasons]
    lines += [f"Warning: {warning}" for warning in profile.warnings]
    return lines


def shelf_lines() -> list[str]:
    """A line on each profile that is kept. Raises: UnsupportedError when this user has no home."""
    lines = []
    for path in sorted(profile_shelf.directory().glob("*.json")):
        try:
            profile = Profile.load(path)
        except (OffloadError, OSError) as error:
            lines.append(f"{path}: {error}")
            continue
        drive, mixed = profile.drive, profile.performance["mixed"]
        by = ", DeepSpeed's own op" if profile.engine.get("name") == "deepspeed" else ""
        lines.append(
            f"{drive['path']}: {drive['model'] or drive['device']}, {drive['filesystem']}, {profile.created[:10]}: {describe(profile.chosen)}, "
            f"mixed {mixed.gb_per_s:.2f} GB/s{by}"
        )
    return lines


def stripe_lines(stripe: Sequence[StripePath]) -> list[str]:
    """The lines on several paths at once."""
    lines = ["All paths at once, GB/s of each; in brackets alone:", ""]
    for one in stripe:
        speeds = ", ".join(
            f"{phase} {one.together[phase]:.2f} ({one.alone[phase]:.2f})" for phase in PHASES
        )
        lines.append(f"  {one.path}: {speeds}; weight {one.weight:.3f}")
    total = ", ".join(
        f"{phase} {sum(one.together[phase] for one in stripe):.2f}" for phase in PHASES
    )
    return [
        *lines,
        f"  together: {total}",
        "",
        "The weight is the share of the bytes that belongs on a path, so that all are done at the same time.",
    ]


def _shares(fio: Mapping[str, Beside]) -> str:
    return ", ".join(f"{phase} {1 / one.relative:.0%}" for phase, one in fio.items())


def print_out(text: str) -> None:
    """Write to standard output, which may be closed or read no further."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; everything that lasts is written by now
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _gain(best: Best) -> str:
    middle, low, high = (
        f"{round(100 * (ratio - 1)):+d}"
        for ratio in (best.relative, best.relative_low, best.relative_high)
    )
    return f"{middle} %" + (f" ({low} to {high} %)" if low != high else "")
