"""`Profile`: a drive's tuned settings, with the evidence for them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from .config import AioConfig
from .errors import UsageError

SCHEMA_VERSION = 1
PHASES = ("read", "write", "mixed")


@dataclasses.dataclass(frozen=True)
class Setting:
    """The part of an `AioConfig` that a sweep chooses; as hashable as it is small, so that trials group by it."""

    block_size: int
    queue_depth: int
    thread_count: int
    single_submit: bool = False
    overlap_events: bool = True
    backend: str = "libaio"

    @property
    def bytes_in_flight(self) -> int:
        """Bytes that the kernel holds at once when every queue is full."""
        return self.block_size * self.queue_depth * self.thread_count

    def config(self, **others: Any) -> AioConfig:
        """The `AioConfig` with this setting and *others*. Raises: UsageError."""
        return AioConfig(**dataclasses.asdict(self), **others)


# What a DeepSpeed user has who sets nothing (deepspeed/runtime/swap_tensor/constants.py): the control of every sweep.
DEEPSPEED_DEFAULTS = Setting(block_size=1 << 20, queue_depth=8, thread_count=1)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One timed run of one setting in one phase.

    bytes, seconds, gb_per_s: what moved in the timed window, both directions together; GB is 10**9 bytes.
    read_gb_per_s, write_gb_per_s: the same by direction.
    stage: the round of the search, such as "screen" or "final"; control: whether this was the control setting, run to see the drive drift.
    relative: gb_per_s over the control's at the same time and phase (1.0 is DeepSpeed's defaults).
    started_seconds: since the sweep began. samples: (seconds since the window began, bytes so far) pairs for the throughput over time.
    """

    phase: str
    block_size: int
    queue_depth: int
    thread_count: int
    single_submit: bool
    overlap_events: bool
    backend: str
    bytes: int
    seconds: float
    gb_per_s: float
    read_gb_per_s: float
    write_gb_per_s: float
    stage: str
    control: bool
    relative: float
    started_seconds: float
    samples: tuple[tuple[float, int], ...] = ()

    @property
    def setting(self) -> Setting:
        """The setting that was tried."""
        return Setting(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Setting)})


@dataclasses.dataclass(frozen=True)
class Best:
    """A setting with what it reached: the median of its trials, and the middle 90 % of the ratio to the control.

    relative_low and relative_high bound relative; gb_per_s is the median as measured, drift and all.
    """

    block_size: int
    queue_depth: int
    thread_count: int
    single_submit: bool
    overlap_events: bool
    backend: str
    gb_per_s: float
    relative: float
    relative_low: float
    relative_high: float

    @property
    def setting(self) -> Setting:
        """The setting alone."""
        return Setting(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Setting)})


@dataclasses.dataclass(frozen=True)
class Profile:
    """Everything that a sweep learned of a drive.

    drive, workload, engine: plain values as JSON holds them; `drive["path"]`, `["model"]`, `["filesystem"]` and `["device"]` are always there,
    each a string. best: by phase. chosen: the one setting for all of training. performance: the chosen setting by phase, as `Best`.
    reasons: sentences that say why chosen was chosen. steady: whether the drive held its speed while it was judged. warnings: sentences.
    """

    tool_version: str
    created: str
    command: str
    drive: dict[str, Any]
    workload: dict[str, Any]
    engine: dict[str, Any]
    trials: tuple[Trial, ...]
    best: dict[str, Best]
    chosen: Setting
    performance: dict[str, Best]
    reasons: tuple[str, ...]
    steady: bool
    warnings: tuple[str, ...]
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """The text of `profile.json`: UTF-8, two spaces of indentation, a newline at the end."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "profile") -> Profile:
        """Read what `to_json` wrote; *source* names it in messages.

        Raises: UsageError when it is not a profile, or is of a schema that this version does not know.
        """
        try:
            data = json.loads(text)
            version = data["schema_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{source} is not a drive profile: {error!r}") from None
        if version != SCHEMA_VERSION:
            raise UsageError(f"{source} has schema version {version!r}; this version of nvme_offload reads {SCHEMA_VERSION}; run nvme-sweep again")
        try:
            data["trials"] = tuple(Trial(**{**trial, "samples": tuple((seconds, count) for seconds, count in trial["samples"])}) for trial in data["trials"])
            for group in ("best", "performance"):
                data[group] = {phase: Best(**data[group][phase]) for phase in PHASES}
            data["chosen"] = Setting(**data["chosen"])
            for name in ("reasons", "warnings"):
                data[name] = tuple(data[name])
            return cls(**data)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{source} is not a complete drive profile: {error!r}") from None

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile file. Raises: OSError when it cannot be read; UsageError when it is not a profile."""
        return cls.from_json(Path(path).read_text(encoding="utf-8", errors="replace"), str(path))
