"""The sweep of one path: fill the files, search, decide, then measure latencies and comparisons."""

from __future__ import annotations

import dataclasses
import datetime
import errno
import math
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nvme_offload import __version__
from nvme_offload.errors import IOFailure, NoSpaceError, UnsupportedError, UsageError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.hardware.drive import Drive, filesystem_space
from nvme_offload.hardware.drive_warnings import warnings as drive_warnings
from nvme_offload.hardware.machine import usable_cpus
from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS, PHASES, Beside, Profile, Setting
from nvme_offload.units import format_bytes

from . import health, space
from .progress import Progress, change
from .search import Search
from .verdict import PlannedTrial, Result, decide

if TYPE_CHECKING:
    from nvme_offload.hardware.profile import Latency, Sustained

    from .ranks import Ranks
    from .trial import Rig

FILL_SETTING = Setting(block_size=1 << 20, queue_depth=16, thread_count=1)
FILL_SHARE = 0.1  # of the seconds, for writing the files that are measured
LINK_TOLERANCE = 1.03  # of its nominal speed, for clocks
LATENCY_SHARE, LATENCY_SECONDS = 0.07, 5  # share of the seconds; if there are this many
COMPARISON_SHARE, COMPARISON_SECONDS = 0.25, 40  # as above, for the other backend
COMPARISON_WINDOW_SECONDS = 0.5
LEAST_COMPARISON_ROUNDS, MOST_COMPARISON_ROUNDS = 2, 8
_RUN_SECONDS = COMPARISON_WINDOW_SECONDS + 0.1  # with the time to start and drain a run
WORTH = 1.03  # from this ratio another backend is recommended


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a sweep, as of the command."""

    seconds: float = 60
    size: int | None = None
    engine: str = "native"
    backend: str = "libaio"
    ranks: int = 1
    force: bool = False
    sustained_bytes: int = 0

    @property
    def direct(self) -> bool | Literal["auto"]:
        """`AioConfig.direct` of the sweep."""
        return "auto" if self.force else True


def tune(found: Drive, options: Options, file_bytes: int, progress: Progress) -> Profile:
    """Sweep the drive of *found* with files of *file_bytes* for each rank. Raises: UsageError; as
    `Rig.run`; ChildProcessError when a rank died.
    """
    from .ranks import request_bytes
    from .sustained import warnings as sustained_warnings

    created = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    began = time.monotonic()
    warnings = drive_warnings(found)
    if options.backend == "posix":
        warnings.append(
            "Measured with the posix backend, which ignores queue_depth: for DeepSpeed, whose op is built on libaio, measure with --backend libaio."
        )
    thermometer = health.Thermometer(found)
    with open_rig(found, file_bytes, options) as rig:
        if not rig.direct:
            warnings.append(
                "Transfers went through the page cache, as the filesystem has no direct I/O: these are speeds of memory as much as of a drive."
            )
        share = FILL_SHARE * options.seconds if options.size is None else None
        speed = fill(rig, found, share, options.backend, progress)
        settings = space.grid(
            options.backend, len(usable_cpus()), speed, rig.file_bytes // 2, options.ranks
        )
        ceiling = LINK_TOLERANCE * (found.link_bytes_per_second or 0)
        control = dataclasses.replace(DEEPSPEED_DEFAULTS, backend=options.backend)
        left = options.seconds - _seconds_after(options) - (time.monotonic() - began)
        search = Search(settings, control, left, time.monotonic, ceiling if rig.direct else None)
        _run_search(rig, search, options, progress, thermometer)
        verdict = decide(search.evidence, options.ranks)
        latencies = _latencies(rig, verdict.chosen, options, progress)
        beside = _compare_backends(rig, verdict.chosen, options, progress)
        measured = _engine_facts(rig, options)
        workload = {
            "file_bytes": {"read": rig.file_bytes, "write": rig.file_bytes},
            "request_bytes": request_bytes(options.ranks),
            "ranks": options.ranks,
            "seconds": options.seconds,
            "verified": True,
        }
    sustained = _sustained(found, verdict.chosen, options, progress)
    if sustained:
        warnings += sustained_warnings(sustained)
    health_after = thermometer.after()
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
        finals=verdict.finals,
        reasons=(*verdict.reasons, *_backend_reasons(beside, options)),
        steady=verdict.steady,
        warnings=(*warnings, *health.warnings(thermometer.before, health_after), *verdict.warnings),
        latencies=tuple(latencies),
        beside=tuple(beside),
        sustained=sustained,
        health_before=thermometer.before,
        health_after=health_after,
    )


def open_rig(found: Drive, file_bytes: int, options: Options) -> Rig | Ranks:
    """The files and processes that measure. Raises: UsageError when they cannot be made."""
    from .ranks import Ranks
    from .trial import Rig

    place = Path(found.path), file_bytes, options.direct
    try:
        if options.ranks > 1:
            return Ranks(options.ranks, *place, options.engine)
        return Rig(*place, engine=options.engine)
    except UnsupportedError as error:
        raise UsageError(
            f"{found.path} cannot be measured: {error} (--force measures through the page cache)"
        ) from None
    except IOFailure as error:
        if isinstance(error, NoSpaceError) or error.errno == errno.EFBIG:
            needed = format_bytes(2 * options.ranks * file_bytes)
            raise UsageError(
                f"{found.path} is too small: {needed} cannot be allocated there (a quota, a limit?); --size takes less"
            ) from None
        known = {errno.EROFS: "it is mounted read-only", errno.EACCES: "it is not writable"}
        hint = known.get(error.errno or 0, str(error))
        raise UsageError(
            f"{found.path} cannot be used: {hint}; give a directory on the drive that you can write to"
        ) from None


def fill(
    rig: Rig | Ranks, found: Drive, seconds: float | None, backend: str, progress: Progress
) -> float:
    """Write the rig's files; returns bytes per second."""
    most = format_bytes(2 * rig.file_bytes)

    def filled(done: int) -> None:
        place = f"in files without a name in {found.path}"
        progress.show("filling", f"{format_bytes(done)} of at most {most}, {place}")

    filled(0)
    return rig.fill(dataclasses.replace(FILL_SETTING, backend=backend), seconds, filled)


def _run_search(
    rig: Rig | Ranks,
    search: Search,
    options: Options,
    progress: Progress,
    thermometer: health.Thermometer,
) -> None:
    by = f" by {options.ranks} ranks" if options.ranks > 1 else ""

    def measure(planned: PlannedTrial) -> Result:
        best, left = search.best_so_far(), search.seconds_left()
        so_far = f", best so far {best[0]} ({best[1]:+.0%})" if best else ""
        what = f"{planned.phase}{by} with {planned.setting}{so_far}, {left:.0f} s left"
        progress.show(planned.stage, what)
        result = rig.run(planned.setting, planned.phase, planned.seconds)
        thermometer.sample()
        return result

    search.run(measure)


def _latencies(
    rig: Rig | Ranks, chosen: Setting, options: Options, progress: Progress
) -> list[Latency]:
    from .latency import percentiles

    found = []
    for phase in PHASES if _measures_latency(options) else ():
        progress.show("latency", f"{phase} with {chosen}")
        window = LATENCY_SHARE * options.seconds / len(PHASES)
        found.append(percentiles(chosen, phase, rig.block_seconds(chosen, phase, window)))
    return found


def _measures_latency(options: Options) -> bool:
    return options.seconds >= LATENCY_SECONDS and options.engine == "native"


def _seconds_after(options: Options) -> float:
    """The time of latencies and of the comparison after the search."""
    latencies = LATENCY_SHARE * options.seconds if _measures_latency(options) else 0.0
    _, rounds = _comparison(options)
    return latencies + (len(PHASES) * _RUN_SECONDS * (2 * rounds + 1) if rounds else 0.0)


def _comparison(options: Options) -> tuple[str, int]:
    """The other backend, and the rounds of it under each load for which there is time: two at least, to
    show a spread, or none.
    """
    other = _other_backend(options) if options.seconds >= COMPARISON_SECONDS else None
    if other is None:
        return "", 0
    each = COMPARISON_SHARE * options.seconds / len(PHASES)
    fitting = int((each - _RUN_SECONDS) / (2 * _RUN_SECONDS))
    return other, min(max(fitting, LEAST_COMPARISON_ROUNDS), MOST_COMPARISON_ROUNDS)


def _compare_backends(
    rig: Rig | Ranks, chosen: Setting, options: Options, progress: Progress
) -> list[Beside]:
    """The other backend at the chosen setting, interleaved with the chosen one."""
    other, rounds = _comparison(options)

    def run(backend: str, phase: str) -> float:
        setting = dataclasses.replace(chosen, backend=backend)
        return rig.run(setting, phase, COMPARISON_WINDOW_SECONDS).bytes_per_second

    found = []
    for phase in PHASES if other else ():
        progress.show("comparing", f"{phase} with {other}, {rounds} rounds")
        ones, others = [run(chosen.backend, phase)], []
        for _ in range(rounds):
            others.append(run(other, phase))
            ones.append(run(chosen.backend, phase))
        found.append(judged(other, phase, ones, others))
    return found


def judged(name: str, phase: str, ones: Sequence[float], others: Sequence[float]) -> Beside:
    """The comparison of *others* with *ones*, in bytes per second: each is judged by the two around it."""
    around = zip(others, ones[:-1], ones[1:], strict=True)
    ratios = sorted(value / math.sqrt(before * after) for value, before, after in around)
    cut = len(ratios) // 20  # of each end: the middle 90 %
    speeds = statistics.median(others) / 1e9, statistics.median(ones) / 1e9
    interval = statistics.median(ratios), ratios[cut], ratios[-1 - cut]
    return Beside(name, "", phase, *speeds, *interval)


def _other_backend(options: Options) -> str | None:
    """io_uring for libaio, and libaio for io_uring, if both work."""
    from nvme_offload.io.engine import Engine

    other = {"libaio": "io_uring", "io_uring": "libaio"}.get(options.backend)
    if other is None or options.engine != "native":
        return None
    try:
        Engine(AioConfig.of(DEEPSPEED_DEFAULTS, backend=other)).close()
    except UnsupportedError:
        return None
    return other


def _backend_reasons(beside: list[Beside], options: Options) -> list[str]:
    if not beside:
        return []
    found = {one.phase: one for one in beside}
    mixed = found["mixed"]
    speeds = ", ".join(
        f"{phase} {change(one.relative, one.relative_low, one.relative_high)}"
        for phase, one in found.items()
    )
    said = f"The speed of {mixed.name} with the same settings, compared with {options.backend}: {speeds}. "
    if mixed.relative_low < WORTH:
        return [
            said
            + f"{options.backend} stays: the gain of the mixed load is not certain to reach {WORTH - 1:.0%}."
        ]
    if mixed.name == "libaio":
        return [said + "DeepSpeed's own op is built on libaio."]
    uses = 'AioConfig(backend="io_uring"); DeepSpeed\'s aio section has no such key.'
    return [f"{said}This package's engine uses it with {uses}"]


def _sustained(
    found: Drive, chosen: Setting, options: Options, progress: Progress
) -> Sustained | None:
    if not options.sustained_bytes:
        return None
    from .sustained import write_on

    most = options.sustained_bytes

    def report(done: int, speed: float) -> None:
        what = (
            f"{format_bytes(done)} of {format_bytes(most)} written, now at {speed / 1e9:.2f} GB/s"
        )
        progress.show("sustained", what)

    free = filesystem_space(found.path)
    file_bytes = min(most, free.f_bavail * free.f_frsize // 2)
    return write_on(Path(found.path), chosen, most, file_bytes, options.direct, report)


def _engine_facts(rig: Rig | Ranks, options: Options) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": options.engine,
        "version": __version__,
        "backend": options.backend,
        "direct": rig.direct,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpu_count": len(usable_cpus()),
    }
    if options.engine == "deepspeed":
        from .deepspeed_op import load

        facts["deepspeed"] = load().version
    return facts
