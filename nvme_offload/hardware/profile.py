"""`Profile`: a drive's tuned settings, with the evidence for them."""

from __future__ import annotations

import dataclasses
import functools
import types
from pathlib import Path
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from ..errors import UsageError
from ..files import sealed
from ..units import format_bytes

SCHEMA_VERSION = 4
PHASES = ("read", "write", "mixed")


@dataclasses.dataclass(frozen=True)
class Setting:
    """The part of an `AioConfig` that a sweep chooses. Hashable, so that trials group by it.

    Attributes
    ----------
    block_size, queue_depth, thread_count, single_submit, overlap_events, backend
        As of `AioConfig`.
    """

    block_size: int
    queue_depth: int
    thread_count: int
    single_submit: bool = False
    overlap_events: bool = True
    backend: str = "libaio"

    @property
    def bytes_in_flight(self) -> int:
        """Bytes in flight with all queues full."""
        return self.block_size * self.queue_depth * self.thread_count

    def __str__(self) -> str:
        threads = f", {self.thread_count} threads" if self.thread_count > 1 else ""
        return f"{format_bytes(self.block_size)} x {self.queue_depth}{threads}"

    @property
    def setting(self) -> Setting:
        """The setting of a trial, without the rest."""
        return Setting(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(Setting)}
        )


# DeepSpeed's defaults (deepspeed/runtime/swap_tensor/constants.py), the control of every sweep.
DEEPSPEED_DEFAULTS = Setting(block_size=1 << 20, queue_depth=8, thread_count=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial(Setting):
    """One timed run of one setting under one load. GB is 10**9 bytes.

    Attributes
    ----------
    phase : {"read", "write", "mixed"}
        The load.
    bytes, seconds, gb_per_s
        Transferred in the window, in both directions.
    read_gb_per_s, write_gb_per_s : float
        Speed by direction.
    stage : str
        The round of the search, such as "screen" or "final".
    control : bool
        Whether this was the control setting, which shows how the drive drifts.
    relative : float
        *gb_per_s* over the control's at the same time and phase: 1.0 is DeepSpeed's defaults.
    started_seconds : float
        Since the sweep began.
    flaw : str
        Why the trial does not count: "drifted" (the drive's speed jumped) or "impossible" (faster
        than the drive: a cache answered). "" if it counts.
    """

    phase: str
    bytes: int
    seconds: float
    gb_per_s: float
    read_gb_per_s: float
    write_gb_per_s: float
    stage: str
    control: bool
    relative: float
    started_seconds: float
    flaw: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best(Setting):
    """A setting and its speed in the finals.

    Attributes
    ----------
    gb_per_s : float
        The median speed of the control in the finals times *relative*, so that on a drive that drifts
        all settings refer to the same level of it.
    relative, relative_low, relative_high : float
        Ratio of the setting's speed to the control's, and its middle 90 %.
    """

    gb_per_s: float
    relative: float
    relative_low: float
    relative_high: float


@dataclasses.dataclass(frozen=True)
class Latency:
    """The latency of requests of one block, from submission to completion, with full queues. One thread
    polls for finished requests every 0.1 ms.

    Attributes
    ----------
    phase, setting
        The load, and the setting whose queues were kept full.
    blocks : int
        Number of timed blocks, of all ranks.
    p50_ms, p95_ms, p99_ms, max_ms, p999_ms : float
        Percentiles and the slowest block. *p999_ms* is None for fewer than 1000 blocks.
    """

    phase: str
    setting: Setting
    blocks: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    p999_ms: float | None = None


@dataclasses.dataclass(frozen=True)
class Beside:
    """The speed of another backend with the chosen setting, interleaved with the engine.

    Attributes
    ----------
    name, version, phase : str
        The backend, "", and the load.
    gb_per_s, chosen_gb_per_s : float
        Medians of its runs, and of the engine's runs in between.
    relative, relative_low, relative_high : float
        Median ratio of its runs to the engine's; the middle 90 %, or all if there are fewer than 20.
    """

    name: str
    version: str
    phase: str
    gb_per_s: float
    chosen_gb_per_s: float
    relative: float
    relative_low: float
    relative_high: float


@dataclasses.dataclass(frozen=True)
class Sustained:
    """Writing to one file without a pause, to find the size of the drive's write cache.

    Attributes
    ----------
    bytes, seconds
        Written, and the duration.
    samples : tuple of (float, int)
        (seconds, bytes so far) pairs, one per round, from (0, 0) on.
    first_gb_per_s : float
        Median of the rounds before the speed fell, or of the first five if it did not fall.
    steady_gb_per_s : float
        Mean of the last five rounds.
    steady : bool
        Whether the last five rounds were steady (SNIA: a range of at most 20 % of the mean, a slope
        of at most 10 %).
    cache_ends_bytes : int or None
        Bytes after which the speed fell for good; None if it did not.
    """

    bytes: int
    seconds: float
    samples: tuple[tuple[float, int], ...]
    first_gb_per_s: float
    steady_gb_per_s: float
    steady: bool
    cache_ends_bytes: int | None


@dataclasses.dataclass(frozen=True)
class StripePath:
    """One of several paths, with its speeds at its own setting.

    Attributes
    ----------
    path, device, model, setting
        The directory, its drive, and the setting chosen for it.
    alone, together : dict of str to float
        GB/s by phase, without the other paths and at the same time.
    weight : float
        Share of the bytes to put on this path, so that all paths finish at the same time.
    """

    path: str
    device: str
    model: str
    setting: Setting
    alone: dict[str, float]
    together: dict[str, float]
    weight: float


@dataclasses.dataclass(frozen=True)
class Health:
    """The health that a drive reports; of several disks the worst. None for a value that is missing.

    Attributes
    ----------
    source : str
        "SMART log" or "sysfs".
    temperature_celsius : float or None
        At the time of the report.
    wear : float or None
        Used share of its rated life.
    written_bytes, throttled_seconds : int or None
        Written, and slowed down by heat, in its life.
    critical : str
        Its critical warnings, in words; "" for none.
    limit_celsius : float or None
        Temperature from which it warns.
    highest_celsius : float or None
        The highest temperature seen during the sweep.
    """

    source: str
    temperature_celsius: float | None = None
    wear: float | None = None
    written_bytes: int | None = None
    throttled_seconds: int | None = None
    critical: str = ""
    limit_celsius: float | None = None
    highest_celsius: float | None = None


@dataclasses.dataclass(frozen=True)
class Profile:
    """The result of a sweep of a drive.

    Attributes
    ----------
    tool_version, schema_version
        Of this package, and of the file format.
    created, command : str
        When the sweep began (date, time and offset from UTC, as ISO 8601), and its command line.
    trials : tuple of Trial
        All trials.
    drive : dict
        From `Drive.as_dict`. "path", "model", "filesystem" and "device" are always there, each a
        string.
    workload, engine : dict
        What was measured, and with which engine ("name" is "native" or "deepspeed"), as JSON types.
    chosen, performance, reasons
        The setting to train with, its speeds by phase, and sentences on the choice.
    best, finals
        By phase: the fastest setting, and all settings of the finals.
    warnings : tuple of str
        Sentences.
    steady : bool
        Whether the drive held its speed while it was judged.
    latencies : tuple of Latency
        Of the chosen setting.
    beside : tuple of Beside
        Comparisons at the chosen setting.
    sustained : Sustained or None
        If it was measured.
    stripe : tuple of StripePath
        All paths of a sweep of several paths.
    health_before, health_after : Health or None
        Before and after the sweep, if the drive reports it.
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
    latencies: tuple[Latency, ...] = ()
    beside: tuple[Beside, ...] = ()
    sustained: Sustained | None = None
    stripe: tuple[StripePath, ...] = ()
    health_before: Health | None = None
    health_after: Health | None = None
    finals: dict[str, tuple[Best, ...]] = dataclasses.field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """The text of `profile.json`, with a checksum of the other keys under "sha256"."""
        return sealed.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "profile") -> Profile:
        """Parse *text*, of a `profile.json`, which is called *source* in messages. Raises:
        UsageError when it is not a profile, was altered, or is of another schema.
        """
        try:
            data = sealed.loads(text)
            version = data["schema_version"]
        except (ValueError, KeyError) as error:
            raise UsageError(f"{source} is not a drive profile: {error!r}") from None
        if version != SCHEMA_VERSION:
            raise UsageError(
                f"{source} has schema version {version!r}; this version of nvme_offload reads {SCHEMA_VERSION}; run nvme-sweep again"
            )
        if not sealed.unseal(data):
            raise UsageError(
                f"{source} was damaged or edited after it was written; run nvme-sweep again"
            )
        try:
            return cast("Profile", _decoded(cls, data))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{source} is not a complete drive profile: {error!r}; nvme_offload {data.get('tool_version')} wrote it; run nvme-sweep again"
            ) from None

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read the profile file *path*. Raises: OSError; UsageError as `from_json`."""
        return cls.from_json(Path(path).read_text(encoding="utf-8", errors="replace"), str(path))


def _decoded(kind: Any, value: Any) -> Any:
    """Parsed JSON, which has neither tuples nor dataclasses, as the type *kind*. Raises: KeyError,
    TypeError, ValueError, AttributeError, for another file.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if value is None:
        return None
    if origin in (Union, types.UnionType):
        return _decoded(arguments[0], value)
    if dataclasses.is_dataclass(kind):
        made: Any = kind
        hints = _types_of(made)
        return made(**{name: _decoded(hints[name], each) for name, each in value.items()})
    if origin is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_decoded(of, each) for of, each in zip(kinds, value, strict=True))
    if origin is dict:
        return {key: _decoded(arguments[1], each) for key, each in value.items()}
    return value


_types_of = functools.cache(get_type_hints)
