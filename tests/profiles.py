"""Profiles as sweeps leave them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvme_offload.hardware.drive import describe
from nvme_offload.hardware.profile import PHASES, Best, Profile, Setting, Trial

CHOSEN = Setting(1 << 20, 16, 2)
MADE_UP = {
    "path": "/local_nvme",
    "model": "Made-Up Drive",
    "filesystem": "ext4",
    "device": "/dev/nvme0n1",
    "identity": "0" * 32,
}


def trial(
    phase: str, setting: Setting = CHOSEN, speed: float = 2.0, seconds: float = 1.0, **changes: Any
) -> Trial:
    """A final run of *setting* at *speed* GB/s."""
    whole = Trial(
        phase=phase,
        **dataclasses.asdict(setting),
        bytes=int(speed * seconds * 1e9),
        seconds=seconds,
        gb_per_s=speed,
        read_gb_per_s=speed * {"read": 1.0, "write": 0.0, "mixed": 0.5}[phase],
        write_gb_per_s=speed * {"read": 0.0, "write": 1.0, "mixed": 0.5}[phase],
        stage="final",
        control=False,
        relative=1.5,
        started_seconds=0.0,
    )
    return dataclasses.replace(whole, **changes)


def best(speed: float, setting: Setting = CHOSEN, low: float = 1.4, high: float = 1.6) -> Best:
    """*setting* at *speed* GB/s, one and a half times the defaults."""
    return Best(**dataclasses.asdict(setting), gb_per_s=speed, relative=1.5, relative_low=low, relative_high=high)  # fmt: skip


def profile(
    speeds: float | Mapping[str, float] = 2.0,
    setting: Setting = CHOSEN,
    *,
    at: Path | None = None,
    runs: int = 0,
    seconds: float = 1.0,
    drive: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Profile:
    """The profile of the drive of the directory *at*, or of a made-up drive, with keys of *drive*.

    *speeds*: GB/s, for all phases or by phase. *runs*: final runs of each phase, of *seconds* each.
    """
    given = speeds if isinstance(speeds, Mapping) else dict.fromkeys(PHASES, speeds)
    reached = {phase: best(speed, setting) for phase, speed in given.items()}
    whole = Profile(
        tool_version="0.1.0",
        created="2025-01-02T03:04:05+00:00",
        command="nvme-sweep /local_nvme",
        drive={**(describe(at).as_dict() if at else MADE_UP), **(drive or {})},
        workload={"ranks": 1},
        engine={
            "name": "native",
            "version": "0.1.0",
            "backend": "libaio",
            "kernel": "6.1.0",
            "direct": True,
        },
        trials=tuple(
            trial(phase, setting, speed, seconds)
            for _ in range(runs)
            for phase, speed in given.items()
        ),
        best=reached,
        chosen=setting,
        performance=reached,
        finals={phase: (one,) for phase, one in reached.items()},
        reasons=("a reason",),
        steady=True,
        warnings=(),
    )
    return dataclasses.replace(whole, **changes)


def swept(
    speed: float = 2.0,
    scatter: float = 0.02,
    setting: Setting = CHOSEN,
    runs: int = 8,
    **drive: str,
) -> Profile:
    """A profile with *runs* final runs of each phase, whose speeds scatter."""
    chance = random.Random(4)
    trials = tuple(
        trial(phase, setting, speed * chance.gauss(1, scatter))
        for _ in range(runs)
        for phase in PHASES
    )
    return profile(speed, setting, trials=trials, drive=drive)
