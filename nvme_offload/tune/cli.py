"""`nvme-sweep`: the command. It checks its arguments, runs the sweep, and writes the results."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from nvme_offload import __version__
from nvme_offload.ds_config import edit as ds_config
from nvme_offload.errors import OffloadError, UnsupportedError, UsageError
from nvme_offload.files import commit
from nvme_offload.hardware.config import BACKENDS, AioConfig
from nvme_offload.hardware.drive import Drive, short_name
from nvme_offload.hardware.machine import gpu_count
from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS, Profile, Setting
from nvme_offload.units import format_bytes, parse_bytes

from . import launcher, preflight, results, space
from .progress import Progress
from .sweep import Options, fill, open_rig, tune

MOST_SECONDS = 86400
LEAST_SUSTAINED_BYTES = 1 << 30
EXIT_NEGATIVE = 3

_progress = Progress(sys.stderr)


def main() -> int:
    """Run the command; returns the exit status. A signal exits with 128 + its number."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _stop)
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        if first in _SUBCOMMANDS:  # a directory with this name is given as ./show
            status = _SUBCOMMANDS[first].main(
                args=sys.argv[2:], prog_name=f"nvme-sweep {first}", standalone_mode=False
            )
        else:
            status = command.main(prog_name="nvme-sweep", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.ClickException as error:
        said, status = error.format_message(), error.exit_code
    except (OffloadError, OSError, MemoryError) as error:
        said, status = str(error) or type(error).__name__, 2 if isinstance(error, UsageError) else 1
    _progress.say(f"nvme-sweep: {' '.join(said.split())}")
    return status


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """Exit immediately: the files on the drive have no names, so the kernel removes them with the
    process.
    """
    _progress.say_in_handler(
        f"nvme-sweep: stopped by {signal.Signals(number).name}; nothing was left on the drive"
    )
    commit.remove_unfinished()
    os._exit(128 + number)


def _bytes(context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """The value of an option that is a size. Raises: UsageError."""
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{option.opts[0]}: {error}") from None


def _require_seconds(seconds: float) -> None:
    if not 1 <= seconds <= MOST_SECONDS:
        raise UsageError(f"--seconds must be from 1 to {MOST_SECONDS}, not {seconds:g}")


def _named(text: str) -> Path:
    """The type of options that name a file or a directory. Raises: UsageError for an empty one."""
    preflight.require_named(text)
    return Path(text)


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
_engine_option = click.option(
    "--engine",
    type=click.Choice(["native", "deepspeed"]),
    default="native",
    show_default=True,
    help="Engine to measure: this package's own, or DeepSpeed's op.",
)
_ranks_option = click.option(
    "--ranks",
    metavar="N",
    type=click.IntRange(1, space.MOST_RANKS),
    help="Processes that contend for the drive.  [default: GPUs present, else 1]",
)
_force_option = click.option(
    "--force",
    is_flag=True,
    help="Also measure memory, a network filesystem, or one without direct I/O; also replace a profile with more evidence.",
)


@click.command(context_settings=_SETTINGS)
@click.argument("paths", metavar="PATH...", nargs=-1)
@click.option(
    "--config",
    "configs",
    metavar="FILE",
    multiple=True,
    type=_named,
    help="A DeepSpeed config (JSON, possibly with comments) whose aio section is set, or Accelerate's YAML that names one. Repeatable.",
)
@click.option(
    "--report-dir",
    metavar="DIR",
    type=_named,
    default="reports",
    show_default=True,
    help="The report is written to a new directory in DIR.",
)
@click.option(
    "--seconds",
    metavar="N",
    type=float,
    default=60,
    show_default=True,
    help="Time to measure each path.",
)
@click.option(
    "--size",
    metavar="BYTES",
    callback=_bytes,
    help="Space to use on the drive, such as 1GiB.  [default: at most 2GiB, half of the free space]",
)
@_engine_option
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="libaio",
    show_default=True,
    help="Kernel interface to measure.",
)
@_ranks_option
@click.option(
    "--sustained",
    metavar="BYTES",
    callback=_bytes,
    help="Then write this much, such as 64GiB, to find the size of the drive's cache.",
)
@click.option(
    "--json",
    "json_to",
    metavar="[FILE]",
    is_flag=False,
    flag_value="-",
    help="Write grades and profiles as JSON to FILE; without FILE to standard output, and all else to standard error.",
)
@_force_option
# DeepSpeed's launcher adds it; the variables say the same
@click.option("--local_rank", "--local-rank", type=int, hidden=True, expose_value=False)
@click.version_option(__version__, prog_name="nvme-sweep")
def command(
    paths: Sequence[str],
    configs: Sequence[Path],
    report_dir: Path,
    seconds: float,
    size: int | None,
    engine: str,
    backend: str,
    ranks: int | None,
    sustained: int | None,
    json_to: str | None,
    force: bool,
) -> int:
    """Find the I/O settings with which training from the drive of PATH, a directory, is fastest.

    Measures reads, writes and both together on unnamed files, which leave nothing on the drive, and
    verifies the data. Prints the settings, writes a report, keeps the profile for
    AioConfig.for_path, and sets the settings in the given DeepSpeed configs. Several paths are
    measured one by one, then together. Under torchrun or DeepSpeed's launcher the ranks of each
    node contend, and rank 0 reports for all nodes.

    \b
    nvme-sweep show [PATH]                 print the last result
    nvme-sweep compare A B                 two profiles or reports side by side
    nvme-sweep check PATH                  whether the chosen settings still hold
    deepspeed --hostfile=FILE --module nvme_offload.tune PATH    every node's drive

    Exit status: 0 tuned; 3 a config was not set because a profile with more evidence is kept; 1
    failed, 2 wrong usage; 130 after Ctrl-C, 143 after SIGTERM.
    """
    # in "--json PATH" the directory PATH was parsed as FILE
    if json_to not in (None, "-") and Path(json_to).is_dir():
        paths, json_to = (json_to, *paths), "-"
    if not paths:
        raise click.UsageError("Missing argument 'PATH...'")
    preflight.require_named(*paths, json_to)
    _require_seconds(seconds)
    where = launcher.place()
    if where and where.local_rank:
        return 0  # the first process of each node sweeps for the node
    drives = [preflight.require_drive(path, force) for path in paths]
    if len(drives) > 1:
        from .several import require_apart

        require_apart(drives)
    places: list[Path] = []
    if where is None or where.rank == 0:  # only rank 0 writes: nodes may share these files
        places = [preflight.config_file(config) for config in configs]
        preflight.check_report_directory(report_dir)
        if json_to not in (None, "-"):
            preflight.check_file(Path(json_to), "--json")
    if engine == "deepspeed" and backend == "libaio":
        _progress.show("engine", "loading DeepSpeed's op: a minute or more at its first use")
    preflight.check_engine(engine, backend)
    if sustained is not None and sustained < LEAST_SUSTAINED_BYTES:
        least, given = format_bytes(LEAST_SUSTAINED_BYTES), format_bytes(sustained)
        raise UsageError(
            f"--sustained must be at least {least}, not {given}: no drive's cache is smaller"
        )
    ranks = ranks or (where.local_ranks if where else min(max(1, gpu_count()), space.MOST_RANKS))
    options = Options(seconds, size, engine, backend, ranks, force, sustained or 0)
    profiles = _sweep(drives, options)
    kept = [results.keep(profile, force) for profile in profiles]
    notes = results.notes(profiles, kept)
    if where and where.nodes > 1:
        _progress.show("nodes", f"waiting for {where.nodes} of them")
        profiles = launcher.gather(where, profiles, len(paths) * options.seconds)
        if not profiles:
            return 0
    said = _write_reports(profiles, report_dir)
    unset = places if any(each.refused for each in kept) else []
    notes += [f"{config}: not set, for the same reason." for config in unset]
    if not unset:
        notes += _apply(places, profiles)
    _progress.clear()
    if json_to == "-":
        for line in [*said, *notes]:
            _progress.say(line)
        results.print_out(results.as_json(profiles))
    else:
        _print_lines([*said[:-1], *notes])
        if json_to is not None:
            commit.write_file(Path(json_to), results.as_json(profiles))
    return EXIT_NEGATIVE if unset else 0


def _sweep(drives: Sequence[Drive], options: Options) -> list[Profile]:
    """The profile of each path. With several paths it includes their speeds together."""
    with contextlib.ExitStack() as locks:
        for found in drives:
            locks.enter_context(preflight.locked(Path(found.path), found))
        sizes = [preflight.file_bytes(options.size, found, options.ranks) for found in drives]
        profiles = [
            tune(found, options, size, _progress) for found, size in zip(drives, sizes, strict=True)
        ]
        if len(drives) > 1:
            from .several import stripe

            together = stripe(profiles, drives, options, min(sizes), _progress)
            profiles = [dataclasses.replace(profile, stripe=together) for profile in profiles]
    return profiles


def _write_reports(profiles: Sequence[Profile], report_dir: Path) -> list[str]:
    """Write the report of each profile; the lines to print."""
    said: list[str] = []
    for profile in profiles:
        host = profile.engine.get("host", "")
        name = short_name(profile.drive["model"], profile.drive["device"])
        if host:
            said += [f"{host}:", ""]
            name = f"{host.lower()}-{name}"
        report = results.write_report(profile, name, report_dir, _progress)
        said += [*results.summary(profile), "", f"Report: {report / 'report.html'}", ""]
        if profile.stripe and profile.stripe[-1].path == profile.drive["path"]:
            said += [*results.stripe_lines(profile.stripe), ""]
    return said


def _apply(configs: Sequence[Path], profiles: Sequence[Profile]) -> list[str]:
    """Set the setting of the slowest path in *configs*; the lines to print."""
    slowest = min(profiles, key=lambda profile: profile.performance["mixed"].gb_per_s)
    said = [results.apply(config, slowest) for config in configs]
    if configs and len({profile.chosen for profile in profiles}) > 1:
        path = slowest.drive["path"]
        said.insert(0, f"The configs get the setting of the slowest path, {path}.")
    return said


def _print_lines(lines: Sequence[str]) -> None:
    results.print_out("\n".join(lines) + "\n")


@click.command(context_settings=_SETTINGS)
@click.argument("path", metavar="[PATH]", required=False)
def show(path: str | None) -> None:
    """Print the result for the drive of PATH, which may also be a profile.json or a report's
    directory; without PATH, a line for each drive that was swept.
    """
    from .compare import load

    preflight.require_named(path)
    if path is None:
        nothing = "No drive was swept by this user: run nvme-sweep with a directory on one."
        return _print_lines(results.shelf_lines() or [nothing])
    profile = load(Path(path))
    kernel = profile.engine.get("kernel", "not known")
    said = [f"Swept {profile.created}, kernel {kernel}, {profile.command}", ""]
    stripe = ["", *results.stripe_lines(profile.stripe)] if profile.stripe else []
    return _print_lines([*said, *results.summary(profile), *stripe])


@click.command(context_settings=_SETTINGS)
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
def compare(first: str, second: str) -> None:
    """Compare two profiles: drives, kernels, settings and speeds. Each is given as a profile.json, a
    report's directory, or a directory on a drive that was swept.
    """
    from .compare import lines, load

    preflight.require_named(first, second)
    one, other = load(Path(first)), load(Path(second))
    _print_lines(lines(one, other, (first, second)))


@click.command(context_settings=_SETTINGS)
@click.argument("path", metavar="PATH")
@click.option(
    "--config",
    metavar="FILE",
    type=_named,
    help="Check the settings of a DeepSpeed config, or of Accelerate's YAML that names one. [default: the settings that the sweep chose]",
)
@click.option(
    "--seconds", metavar="N", type=float, default=15, show_default=True, help="Time to measure."
)
@_ranks_option
@_force_option
def check(path: str, config: Path | None, seconds: float, ranks: int | None, force: bool) -> int:
    """Measure briefly whether the settings that the sweep chose for the drive of PATH, or the settings in
    FILE, are still good, compared with each other and with DeepSpeed's defaults.

    Exit status: 0 they are, or the drive is too unsteady for a result; 3 they are not; 1 failed, 2
    wrong usage.
    """
    from nvme_offload.hardware import profile_shelf

    from . import check as checking

    _require_seconds(seconds)
    found = preflight.require_drive(path, force)
    try:
        profile = profile_shelf.find(path)
        setting = profile.chosen
        if config is not None:
            config = ds_config.locate(config)
            section = ds_config.read_aio(config)
            setting = checking.setting_of(section, profile.chosen.backend)
            if ignored := ds_config.unread(section):
                click.echo(f"{config}: DeepSpeed does not read {', '.join(ignored)}", err=True)
        AioConfig.of(setting)
    except UnsupportedError as error:  # there is no profile
        raise UsageError(str(error)) from None
    ranks = ranks or profile.workload.get("ranks") or 1
    options = Options(seconds, None, "native", setting.backend, ranks, force)
    control = dataclasses.replace(DEEPSPEED_DEFAULTS, backend=setting.backend)
    settings = list(dict.fromkeys([setting, profile.chosen, control]))
    deepest = max(each.bytes_in_flight for each in settings)
    if deepest * options.ranks > 8 * space.MAX_BYTES_IN_FLIGHT:
        raise UsageError(
            f"{config or 'the profile'} has {format_bytes(deepest)} in flight, more than can be measured: run nvme-sweep with --config"
        )
    with (
        preflight.locked(Path(found.path), found),
        open_rig(found, preflight.file_bytes(None, found, options.ranks), options) as rig,
    ):
        fill(rig, found, 0.2 * seconds, options.backend, _progress)

        def run(one: Setting, phase: str, window: float) -> float:
            _progress.show("checking", f"{phase} with {one}")
            return rig.run(one, phase, window).bytes_per_second

        checked = checking.judged(setting, checking.rounds(settings, run, 0.8 * seconds))
    _progress.clear()
    _print_lines(checking.lines(checked, setting if config else None, profile))
    return EXIT_NEGATIVE if checked.better else 0


_SUBCOMMANDS = {"show": show, "compare": compare, "check": check}
