"""Several paths: the speed of each while all are used together, and the share of the bytes for each."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nvme_offload.errors import UsageError
from nvme_offload.hardware.drive import Drive
from nvme_offload.hardware.profile import PHASES, Profile, StripePath
from nvme_offload.units import format_bytes

from .progress import Progress
from .ranks import Ranks
from .sweep import Options, fill

ROUNDS = 3
SHARE = 0.15  # of the seconds of one path's sweep
MOST_BYTES = 256 << 20  # of each file


def require_apart(drives: Sequence[Drive]) -> None:
    """Raises: UsageError when two of the paths are on one disk, where striping gains nothing."""
    for index, drive in enumerate(drives):
        for other in drives[:index]:
            shared = (
                set(drive.physical_devices) & set(other.physical_devices)
                if "loop" not in (*drive.layers, *other.layers)
                else set()
            )
            if drive.mount_point == other.mount_point or shared:
                what = ", ".join(sorted(shared)) or drive.device
                raise UsageError(
                    f"{other.path} and {drive.path} are on the same drive ({what}), so using both gains nothing: give one path"
                )


def stripe(
    profiles: Sequence[Profile],
    drives: Sequence[Drive],
    options: Options,
    file_bytes: int,
    progress: Progress,
) -> tuple[StripePath, ...]:
    """Measure all paths together, each at its own setting and with its own processes, interleaved
    with each alone. Raises: as `Ranks`.
    """
    seconds = max(0.2, SHARE * options.seconds / (ROUNDS * len(PHASES) * 2))
    alone: dict[tuple[int, str], list[float]] = {}
    together: dict[tuple[int, str], list[float]] = {}
    with contextlib.ExitStack() as stack:
        # which only wait for their ranks, which are processes
        threads = stack.enter_context(ThreadPoolExecutor(len(drives)))
        rigs = []
        for drive in drives:
            given = Path(drive.path), min(file_bytes, MOST_BYTES), options.direct, options.engine
            rigs.append(stack.enter_context(Ranks(options.ranks, *given)))
            fill(rigs[-1], drive, None, options.backend, progress)
        each = f"{format_bytes(rigs[0].file_bytes)} each"
        for number, phase in itertools.product(range(1, ROUNDS + 1), PHASES):
            what = f"{phase} on {len(rigs)} paths, round {number} of {ROUNDS}, {each}"
            progress.show("together", what)
            each_alone = phase, seconds / len(rigs)
            for index, (rig, profile) in enumerate(zip(rigs, profiles, strict=True)):
                alone.setdefault((index, phase), []).append(_speed(rig, profile, *each_alone))
            # in a common window, up to some milliseconds
            common = itertools.repeat(phase), itertools.repeat(seconds)
            for index, speed in enumerate(threads.map(_speed, rigs, profiles, *common)):
                together.setdefault((index, phase), []).append(speed)
    return judged(profiles, alone, together)


def judged(
    profiles: Sequence[Profile],
    alone: dict[tuple[int, str], list[float]],
    together: dict[tuple[int, str], list[float]],
) -> tuple[StripePath, ...]:
    """The result: medians by path and phase; weights by the mixed speeds of all paths together."""
    mixed = [statistics.median(together[index, "mixed"]) for index in range(len(profiles))]
    return tuple(
        StripePath(
            path=profile.drive["path"],
            device=profile.drive["device"],
            model=profile.drive["model"],
            setting=profile.chosen,
            alone={phase: statistics.median(alone[index, phase]) / 1e9 for phase in PHASES},
            together={phase: statistics.median(together[index, phase]) / 1e9 for phase in PHASES},
            weight=mixed[index] / sum(mixed),
        )
        for index, profile in enumerate(profiles)
    )


def _speed(rig: Ranks, profile: Profile, phase: str, seconds: float) -> float:
    return rig.run(profile.chosen, phase, seconds).bytes_per_second
