"""`nvme-sweep`: the command. It checks what can be checked first, runs the sweep, and writes what came out."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import json
import math
import os
import platform
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal, NoReturn

import click

from nvme_offload import __version__, ds_config
from nvme_offload.config import BACKENDS
from nvme_offload.drive import Drive
from nvme_offload.drive import describe as describe_drive
from nvme_offload.drive import warnings as drive_warnings
from nvme_offload.errors import IOFailure, NoSpaceError, OffloadError, UnsupportedError
from nvme_offload.profile import DEEPSPEED_DEFAULTS, PHASES, Best, Profile, Setting
from nvme_offload.units import format_bytes, parse_bytes

from . import space
from .progress import Progress, describe
from .search import Search, drive
from .verdict import Ask, Result, decide

if TYPE_CHECKING:
    from .ranks import Ranks
    from .trial import Rig

FILL_SETTING = Setting(block_size=1 << 20, queue_depth=16, thread_count=1)
FILL_SHARE = 0.1  # of the seconds, for writing the files that are measured
MOST_FILE_BYTES = 1 << 30
MOST_SECONDS = 86400
LINK_TOLERANCE = 1.03  # of its nominal speed, for clocks

_progress = Progress(sys.stderr)
_unfinished: list[Path] = []  # directories to remove when a signal ends the process


class Refusal(click.ClickException):
    """Something is wrong with what was asked for; nothing was started."""

    exit_code = 2


class Failure(click.ClickException):
    """The sweep could not be brought to its end."""

    exit_code = 1


def main() -> int:
    """Run the command; returns 0 when the drive is tuned, 1 after a failure, 2 for what was asked wrongly. A signal exits with 128 + its number."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _stop)
    try:
        command.main(prog_name="nvme-sweep", standalone_mode=False)
    except click.ClickException as error:
        _progress.say(f"nvme-sweep: {_one_line(error.format_message())}")
        return error.exit_code
    except (OffloadError, OSError, MemoryError) as error:
        _progress.say(f"nvme-sweep: {_one_line(str(error) or type(error).__name__)}")
        return 1
    return 0


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """End at once: the files on the drive have no names and go with the process, whatever is still under way to them."""
    _progress.say(f"nvme-sweep: stopped by {signal.Signals(number).name}; nothing was left on the drive")
    for directory in _unfinished:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(128 + number)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.argument("paths", metavar="PATH", nargs=-1, required=True)
@click.option("--config", "configs", metavar="FILE", multiple=True, type=Path, help="A DeepSpeed config (JSON or hjson) whose aio section is set. Repeatable.")
@click.option("--report-dir", metavar="DIR", type=Path, default="reports", show_default=True, help="Where the report gets a directory of its own.")
@click.option("--seconds", metavar="N", type=float, default=60, show_default=True, help="Time to measure.")
@click.option("--size", metavar="BYTES", help="Space to use on the drive, such as 1GiB.  [default: at most 2GiB, half of what is free]")
@click.option("--engine", type=click.Choice(["native"]), default="native", show_default=True, help="Engine to measure: this package's own.")
@click.option("--backend", type=click.Choice(BACKENDS), default="libaio", show_default=True, help="Kernel interface to measure.")
@click.option("--ranks", metavar="N", type=click.IntRange(1, space.MOST_RANKS), help="Processes that contend for the drive.  [default: GPUs present, else 1]")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON, without its samples over time.")
@click.option("--force", is_flag=True, help="Measure also memory, a network filesystem, or one without direct I/O.")
@click.version_option(__version__, prog_name="nvme-sweep")
def command(
    paths: Sequence[str],
    configs: Sequence[Path],
    report_dir: Path,
    seconds: float,
    size: str | None,
    engine: str,
    backend: str,
    ranks: int | None,
    as_json: bool,
    force: bool,
) -> None:
    """Find the I/O settings with which training from the drive of PATH, a directory, is fastest.

    Measures reads, writes and both at once on files without a name, which leave nothing behind, and verifies what it wrote. Prints the settings,
    writes a report, and sets them in the given DeepSpeed configs.

    Exit status: 0 tuned, 1 failed, 2 wrong usage; 130 after Ctrl-C, 143 after SIGTERM.
    """
    if len(paths) > 1:
        raise Refusal(f"one PATH at a time, not {len(paths)}: run nvme-sweep for each of them")
    if not 1 <= seconds <= MOST_SECONDS:
        raise Refusal(f"--seconds must be from 1 to {MOST_SECONDS}, not {seconds:g}")
    directory = Path(paths[0])
    found = _look_at(directory, force)
    for config in configs:
        _check_config(config)
    _check_report_directory(report_dir)
    _check_backend(backend)

    ranks = ranks or _default_ranks()

    with _locked(directory, found):
        file_bytes = _file_bytes(size, found, ranks)
        profile = _sweep(found, seconds, file_bytes, size is not None, engine, backend, ranks, "auto" if force else True)
    report = _write_report(profile, found, report_dir)
    changes = [_apply(config, profile) for config in configs]
    _progress.clear()
    if as_json:
        data = dataclasses.replace(profile, trials=tuple(dataclasses.replace(trial, samples=()) for trial in profile.trials))
        _print(data.to_json())
        for line in (f"report: {report}", *changes):
            _progress.say(line)
    else:
        _print("\n".join([*_summary(profile), "", f"Report: {report / 'report.html'}", *changes]) + "\n")


# Before the sweep


def _look_at(directory: Path, force: bool) -> Drive:
    try:
        if not directory.is_dir():
            what = "is not a directory" if directory.exists() else "does not exist"
            raise Refusal(f"{directory} {what}: give a directory on the drive to tune")
        found = describe_drive(directory)
    except OSError as error:
        raise Refusal(f"{directory} cannot be looked at: {error.strerror}") from None
    if (found.is_memory or found.is_network) and not force:
        raise Refusal(f"{drive_warnings(found)[0]} (--force measures it all the same.)")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise Refusal(f"{directory} is not writable: make a directory there that you own, and give that")
    return found


def _check_config(config: Path) -> None:
    try:
        ds_config.read_aio(config)
        target = config.resolve()
        if not target.stat().st_mode & 0o222 or not os.access(target, os.W_OK) or not os.access(target.parent, os.W_OK | os.X_OK):
            raise Refusal(f"{config} is read-only: make it and its directory writable, or leave out --config and copy the settings by hand")
    except OffloadError as error:
        raise Refusal(str(error)) from None
    except OSError as error:
        raise Refusal(f"{config} cannot be read: {error.strerror}") from None


def _check_report_directory(directory: Path) -> None:
    missing = [place for place in (directory, *directory.parents) if not place.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(prefix=".nvme-sweep-", dir=directory)).rmdir()
    except OSError as error:
        raise Refusal(f"no report can be written to {directory}: {error.strerror}; choose another directory with --report-dir") from None
    finally:
        for place in missing:
            with contextlib.suppress(OSError):
                place.rmdir()


def _check_backend(backend: str) -> None:
    from nvme_offload.engine import Engine

    try:
        Engine(dataclasses.replace(DEEPSPEED_DEFAULTS, backend=backend).config()).close()
    except UnsupportedError as error:
        raise Refusal(str(error)) from None


def _default_ranks() -> int:
    from .ranks import gpu_count

    return min(max(1, gpu_count()), space.MOST_RANKS)


def _file_bytes(size: str | None, found: Drive, ranks: int) -> int:
    """Bytes of each of the two files of each rank."""
    from .ranks import request_bytes
    from .trial import LEAST_REQUESTS

    least = 2 * LEAST_REQUESTS * request_bytes(ranks) * ranks
    of_ranks, less = (f" with {ranks} ranks", "; fewer --ranks need less") if ranks > 1 else ("", "")
    try:
        wanted = parse_bytes(size) if size is not None else min(2 * MOST_FILE_BYTES, found.free_bytes // 2)
    except ValueError as error:
        raise Refusal(f"--size: {error}") from None
    if size is not None and wanted < least:
        raise Refusal(f"--size must be at least {format_bytes(least)}{of_ranks}, not {format_bytes(wanted)}: less does not leave the caches of a drive")
    if wanted < least or wanted > found.free_bytes:
        needed = max(wanted, 2 * least) if size is None else wanted
        raise Refusal(f"{found.path} is too small: the sweep needs {format_bytes(needed)}{of_ranks}, and {format_bytes(found.free_bytes)} are free{less}")
    return wanted // (2 * ranks)


@contextlib.contextmanager
def _locked(directory: Path, found: Drive) -> Iterator[None]:
    """Keep a second sweep off the drive: by a lock on where it is mounted, which leaves no file and ends with the process.

    Raises: Failure when another one runs.
    """
    descriptor = -1
    for place in (found.mount_point, directory):
        with contextlib.suppress(OSError):
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            break
    try:
        if descriptor >= 0:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise Failure(f"another nvme-sweep is measuring the drive of {directory}, and two at once would measure each other: wait for it") from None
    except OSError:
        pass  # a network filesystem without locks
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


# The sweep


def _sweep(found: Drive, seconds: float, file_bytes: int, whole: bool, engine: str, backend: str, ranks: int, direct: bool | Literal["auto"]) -> Profile:
    from .ranks import request_bytes

    created = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    began = time.monotonic()
    control = dataclasses.replace(DEEPSPEED_DEFAULTS, backend=backend)
    warnings = drive_warnings(found)
    if backend == "posix":
        warnings.append(
            "Measured with the posix backend, which ignores queue_depth: for DeepSpeed, whose op is built on libaio, measure with --backend libaio."
        )
    with _open_rig(found, file_bytes, direct, ranks) as rig:
        if not rig.direct:
            warnings.append("Transfers went through the page cache, as the filesystem has no direct I/O: these are speeds of memory as much as of a drive.")

        def filled(done: int) -> None:
            _progress.show("filling", f"{format_bytes(done)} of at most {format_bytes(2 * ranks * file_bytes)}, in files without a name in {found.path}")

        filled(0)
        speed = rig.fill(dataclasses.replace(FILL_SETTING, backend=backend), None if whole else FILL_SHARE * seconds, filled)
        copy_speed = rig.memory_bytes_per_second()
        cpu_count = len(os.sched_getaffinity(0))
        ceiling = LINK_TOLERANCE * found.link_bytes_per_second if found.link_bytes_per_second else copy_speed * cpu_count
        settings = space.grid(backend, cpu_count, speed, rig.file_bytes // 2, ranks)
        search = Search(settings, control, seconds - (time.monotonic() - began), time.monotonic, ceiling if rig.direct else math.inf)

        def measure(ask: Ask) -> Result:
            _show(search, ask, ranks)
            return rig.run(ask.setting, ask.phase, ask.seconds)

        drive(search.asks(), measure)
        workload = {
            "file_bytes": {"read": rig.file_bytes, "write": rig.file_bytes},
            "request_bytes": request_bytes(ranks),
            "ranks": ranks,
            "seconds": seconds,
            "verified": True,
        }
        measured = {
            "name": engine,
            "version": __version__,
            "backend": backend,
            "direct": rig.direct,
            "kernel": platform.release(),
            "python": platform.python_version(),
            "cpu_count": cpu_count,
            "memory_copy_bytes_per_second": round(copy_speed),
        }
    verdict = decide(search.evidence, ranks)
    return Profile(
        tool_version=__version__,
        created=created,
        command=shlex.join(["nvme-sweep", *sys.argv[1:]]),
        drive=found.as_dict(),
        workload=workload,
        engine=measured,
        trials=search.evidence.trials(),
        best=verdict.best,
        chosen=verdict.chosen,
        performance=verdict.performance,
        reasons=verdict.reasons,
        steady=verdict.steady,
        warnings=(*warnings, *verdict.warnings),
    )


def _open_rig(found: Drive, file_bytes: int, direct: bool | Literal["auto"], ranks: int) -> Rig | Ranks:
    from .ranks import Ranks
    from .trial import Rig

    try:
        return Rig(Path(found.path), file_bytes, direct) if ranks == 1 else Ranks(ranks, Path(found.path), file_bytes, direct)
    except UnsupportedError as error:
        raise Refusal(f"{found.path} cannot be measured: {error} (--force measures through the page cache)") from None
    except NoSpaceError:
        raise Refusal(f"{found.path} is too small: {format_bytes(2 * ranks * file_bytes)} cannot be allocated there (a quota?); --size takes less") from None
    except IOFailure as error:
        hint = {errno.EROFS: "it is mounted read-only", errno.EACCES: "it is not writable"}.get(error.errno or 0, str(error))
        raise Refusal(f"{found.path} cannot be used: {hint}; give a directory on the drive that you can write to") from None


def _show(search: Search, ask: Ask, ranks: int) -> None:
    best = search.best_so_far()
    so_far = f", best so far {describe(best[0])} ({best[1]:+.0%})" if best else ""
    by = f" by {ranks} ranks" if ranks > 1 else ""
    _progress.show(ask.stage, f"{ask.phase}{by} with {describe(ask.setting)}{so_far}, {search.seconds_left():.0f} s left")


# After the sweep


def _write_report(profile: Profile, found: Drive, directory: Path) -> Path:
    """Write everything aside, then give it its name, so that there is a whole report or none. Returns where it is."""
    from nvme_offload.report import render

    _progress.show("report", "drawing")
    directory.mkdir(parents=True, exist_ok=True)
    aside = directory / f".nvme-sweep-{secrets.token_hex(8)}"
    _unfinished.append(aside)  # before it is there: a signal may come at any moment
    try:
        aside.mkdir()
        (aside / "profile.json").write_text(profile.to_json(), encoding="utf-8")
        (aside / "ds_config.json").write_text(ds_config.zero_infinity(profile, profile.drive["path"]), encoding="utf-8")
        render.write(profile, aside)
        return _named(aside, directory / f"{found.name}-{profile.created[:10]}")
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    finally:
        _unfinished.remove(aside)


def _named(aside: Path, wanted: Path) -> Path:
    """Rename *aside* to *wanted*, or to the first free name after it: an earlier report stays."""
    for number in range(1, 1000):
        target = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with contextlib.suppress(FileExistsError):
            target.mkdir()  # takes the name; a rename then replaces only an empty directory
            aside.rename(target)
            return target
    raise Failure(f"there are too many reports named {wanted}: move some away")


def _apply(config: Path, profile: Profile) -> str:
    """Set the chosen setting in *config*; returns what that changed."""
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # between writing aside and renaming, an end would leave the file aside
    try:
        applied = ds_config.apply(config, profile)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    if not applied.changed:
        return f"{config}: says so already"
    new = [(key, value) for key, value in applied.settings.items() if applied.before.get(key) is not value]
    old = {key: f" (was {json.dumps(value)})" for key, value in applied.before.items()}
    line = f"{config}: set " + ", ".join(f"{key} {json.dumps(value)}{old.get(key, '')}" for key, value in new)
    return line + (f"; DeepSpeed does not read {', '.join(applied.ignored)}" if applied.ignored else "")


def _summary(profile: Profile) -> list[str]:
    chosen, ranks = profile.chosen, profile.workload["ranks"]
    together = f"; {ranks} ranks at once, speeds of all together" if ranks > 1 else ""
    lines = [
        f"{profile.drive['path']}: {profile.drive['model'] or profile.drive['device']}, {profile.drive['filesystem']}{together}",
        "",
        f"  block_size {chosen.block_size} ({format_bytes(chosen.block_size)}), queue_depth {chosen.queue_depth}, thread_count {chosen.thread_count}",
        "",
        "           GB/s   over DeepSpeed's defaults (90 % interval)   the best found",
    ]
    for phase in PHASES:
        reached, best = profile.performance[phase], profile.best[phase]
        beside = "the same" if best.setting == chosen else f"{best.gb_per_s:.2f} with {describe(best.setting)}"
        lines.append(f"  {phase:6}  {reached.gb_per_s:5.2f}   {_gain(reached):40}   {beside}")
    lines += ["", *profile.reasons]
    lines += [f"Warning: {warning}" for warning in profile.warnings]
    return lines


def _print(text: str) -> None:
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; everything that lasts is written by now
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _gain(best: Best) -> str:
    middle, low, high = (f"{round(100 * (ratio - 1)):+d}" for ratio in (best.relative, best.relative_low, best.relative_high))
    return f"{middle} %" + (f" ({low} to {high} %)" if low != high else "")


def _one_line(message: str) -> str:
    return " ".join(message.split())


if __name__ == "__main__":
    sys.exit(main())
