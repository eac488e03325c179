"""Profiles as sweeps leave them, with as many final runs and as much scatter as a test wants."""

from __future__ import annotations

import dataclasses
import random

from nvme_offload.hardware.profile import PHASES, Best, Profile, Setting, Trial

CHOSEN = Setting(1 << 20, 16, 2)


def made_up(
    speed: float = 2.0, scatter: float = 0.02, chosen: Setting = CHOSEN, runs: int = 8, **drive: str
) -> Profile:
    chance = random.Random(4)
    best = {
        phase: Best(
            **dataclasses.asdict(chosen),
            gb_per_s=speed,
            relative=1.5,
            relative_low=1.4,
            relative_high=1.6,
        )
        for phase in PHASES
    }
    trials = []
    for index in range(runs):
        for phase in PHASES:
            now = speed * chance.gauss(1, scatter)
            fields = {
                "phase": phase,
                **dataclasses.asdict(chosen),
                "bytes": int(now * 1e9),
                "seconds": 1.0,
                "gb_per_s": now,
                "stage": "final",
            }
            moved = {
                "read_gb_per_s": now,
                "write_gb_per_s": 0.0,
                "control": False,
                "relative": 1.5,
                "started_seconds": float(index),
            }
            trials.append(Trial(**fields, **moved))  # type: ignore[arg-type]
    return Profile(
        tool_version="0.1.0",
        created="2025-01-02T03:04:05+00:00",
        command="nvme-sweep /local_nvme",
        drive={
            "path": "/local_nvme",
            "model": "Made-Up Drive",
            "filesystem": "ext4",
            "device": "/dev/nvme0n1",
            "identity": "0" * 32,
            **drive,
        },
        workload={"ranks": 1},
        engine={
            "name": "native",
            "version": "0.1.0",
            "backend": "libaio",
            "kernel": "6.1.0",
            "direct": True,
        },
        trials=tuple(trials),
        best=best,
        chosen=chosen,
        performance=best,
        reasons=("a reason",),
        steady=True,
        warnings=(),
    )
