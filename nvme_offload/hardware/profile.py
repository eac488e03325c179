"""`Profile`: a drive's tuned settings, with the evidence for them."""

from __future__ import annotations

import dataclasses
import math
import types
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import UsageError
from ..files import sealed
from .config import AioConfig

SCHEMA_VERSION = 4
PHASES = ("read", "write", "mixed")


@dataclasses.dataclass(frozen=True)
class Setting:
    """The part of an `AioConfig` that a sweep chooses; as hashable as it is small, so that trials
    group by it.
    """

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


# What a DeepSpeed user has who sets nothing (deepspeed/runtime/swap_tensor/constants.py): the
# control of every sweep.
DEEPSPEED_DEFAULTS = Setting(block_size=1 << 20, queue_depth=8, thread_count=1)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One timed run of one setting in one phase.

    bytes, seconds, gb_per_s: what moved in the timed window, both directions together; GB is 10**9
    bytes. read_gb_per_s, write_gb_per_s: the same by direction. stage: the round of the search,
    such as "screen" or "final"; control: whether this was the control setting, run to see the drive
    drift. relative: gb_per_s over the control's at the same time and phase (1.0 is DeepSpeed's
    defaults). started_seconds: since the sweep began. samples: (seconds since the window began,
    bytes so far) pairs for the throughput over time. flaw: why the trial does not count, "drifted"
    (the drive jumped around it) or "impossible" (a cache answered); "" when it does.
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
    flaw: str = ""

    @property
    def setting(self) -> Setting:
        """The setting that was tried."""
        return Setting(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(Setting)}
        )


@dataclasses.dataclass(frozen=True)
class Best:
    """A setting with what it reached in the finals, and the middle 90 % of its ratio to the control.

    relative_low and relative_high bound relative. gb_per_s is the median speed of the control in
    the finals times relative: all settings are given at the same level of a drive that drifts, and
    the quotient of two speeds is that of their ratios. Profiles of schema 3 and older have the
    median of the setting's own trials there.
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
        return Setting(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(Setting)}
        )


@dataclasses.dataclass(frozen=True)
class Latency:
    """How long requests of one block took, from submitting to done, while the queues of *setting*
    were kept full under *phase*.

    blocks: how many were timed, by all ranks; the rest in milliseconds. p999_ms, the 99.9th
    percentile, is None where fewer than 1000 blocks were timed. One thread looks for finished
    requests every 0.1 ms.
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
    """What something else reached with the chosen setting, interleaved with the engine.

    name: "fio", or the other backend ("io_uring", "libaio"); version: of what is not ours.
    gb_per_s: the median; chosen_gb_per_s: of the engine's runs between. relative: the median ratio
    of the first to the second, relative_low and relative_high its middle 90 %, or all where there
    are few.
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
    """Writing on and on with the chosen setting, to find where a drive's cache ends.

    bytes, seconds: what was written, over one file again and again. samples: (seconds, bytes so
    far) pairs. first_gb_per_s: of the first round; steady_gb_per_s: of the last five rounds.
    steady: whether those were steady (SNIA: a range of at most 20 % of the mean, a slope of at most
    10 %). cache_ends_bytes: after how many bytes the speed fell for good; None when it did not.
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
    """One of several paths: its speeds by phase, *alone* and while all were used at once
    (*together*), in GB/s, each at its own setting.

    weight: the share of the bytes that belongs on it, so that all are done at the same time; the
    weights of all paths make 1.
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
    """What a drive says of itself; of several disks the worst. None for what it did not say.

    source: who asked, "nvme-cli", "smartctl" or "sysfs". wear: the share of its rated life that is
    used, 1.0 at its end; written_bytes: in its life. throttled_seconds: in its life, above a
    temperature at which it slows itself down. critical: what it warns of, in its own words.
    limit_celsius: the temperature from which on it warns; highest_celsius: the highest that was
    seen during the sweep.
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
    """Everything that a sweep learned of a drive.

    drive, workload, engine: plain values as JSON holds them; `drive["path"]`, `["model"]`,
    `["filesystem"]` and `["device"]` are always there, each a string; `engine["name"]` is "native"
    or "deepspeed". best: by phase. chosen: the one setting for all of training. performance: the
    chosen setting by phase, as `Best`. reasons: sentences that say why chosen was chosen. steady:
    whether the drive held its speed while it was judged. warnings: sentences. The rest is there
    where it was measured: latencies of the finalists and the control; beside: others at the chosen
    setting; sustained; stripe: all paths of a sweep of several, this one among them; health_before,
    health_after; finals: by phase, every setting that best and chosen were taken from.
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
        """The text of `profile.json`: UTF-8, two spaces of indentation, a newline at the end;
        "sha256" is of the rest. "grade" says what `profile_grade.grade` finds; it is for other
        programs, and found anew from the trials when the profile is read.
        """
        from .profile_grade import grade  # which knows this module

        found = {"grade": dataclasses.asdict(grade(self))}
        return sealed.dumps({**dataclasses.asdict(self), **found}, indent=2) + "\n"

    def beside_gb_per_s(self, other: Beside) -> float:
        """What *other* reached in GB/s, at the level of the chosen setting's speed in
        `performance`, so that the quotient of the two is their measured ratio.
        """
        return self.performance[other.phase].gb_per_s * other.relative

    @classmethod
    def from_json(cls, text: str, source: str = "profile") -> Profile:
        """Read what `to_json` wrote; *source* names it in messages.

        Raises: UsageError when it is not a profile, was altered, or is of a schema that this
        version does not know.
        """
        try:
            data = sealed.loads(text)
            version = data["schema_version"]
        except (ValueError, KeyError) as error:
            raise UsageError(f"{source} is not a drive profile: {error!r}") from None
        if isinstance(version, bool) or version not in _READABLE:
            raise UsageError(
                f"{source} has schema version {version!r}; this version of nvme_offload reads {SCHEMA_VERSION}; run nvme-sweep again"
            )
        if version >= _SEALED_SINCE and not sealed.unseal(data):
            raise UsageError(
                f"{source} is not as it was written, but damaged or edited; run nvme-sweep again"
            )
        try:
            return require_schema(cls(**_decoded(data)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{source} is not a complete drive profile: {error!r}") from None

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile file. Raises: OSError when it cannot be read; UsageError when it is not a
        profile.
        """
        return cls.from_json(Path(path).read_text(encoding="utf-8", errors="replace"), str(path))


_T = TypeVar("_T")


def require_schema(value: _T) -> _T:
    """*value*, a dataclass, of which every field has the type that it says, down to the last, and
    no number is infinite.

    A whole number is 0 or more. Raises: TypeError, which names the field.
    """
    _require(type(value), value, "")
    return value


def _require(kind: Any, value: Any, place: str) -> None:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return
    if origin in (Union, types.UnionType):
        if value is not None or type(None) not in arguments:
            _require(next(one for one in arguments if one is not type(None)), value, place)
    elif dataclasses.is_dataclass(kind) and isinstance(kind, type):
        _require_instance(kind, value, place)
        for name, inner in get_type_hints(kind).items():
            _require(inner, getattr(value, name), f"{place}.{name}".lstrip("."))
    elif origin is tuple:
        _require_instance(tuple, value, place)
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) != len(value):
            raise TypeError(f"{place} has {len(value)} values rather than {len(kinds)}")
        for number, (inner, each) in enumerate(zip(kinds, value, strict=True)):
            _require(inner, each, f"{place}[{number}]")
    elif origin is dict:
        _require_instance(dict, value, place)
        for key, each in value.items():
            _require(arguments[1], each, f"{place}.{key}")
    elif kind is bool or not isinstance(value, bool):
        _require_instance((int, float) if kind is float else kind, value, place)
        if (kind is int and value < 0) or (kind is float and not math.isfinite(value)):
            raise TypeError(f"{place} cannot be {value}")
    else:
        raise TypeError(f"{place} cannot be {value}")


def _require_instance(kind: Any, value: Any, place: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{place} cannot be {value!r:.80}")


# the first filed trials that do not count under a stage with the name of the flaw; the third has a
# checksum; the fourth has all finalists, and speeds at one level (see `Best`)
_READABLE = (1, 2, 3, SCHEMA_VERSION)
_SEALED_SINCE = 3
_FLAWS = ("drifted", "impossible")


def _decoded(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `Profile` from what JSON gives, which knows neither tuples nor dataclasses.
    Raises: KeyError, TypeError, ValueError, AttributeError.
    """
    if data["schema_version"] == 1:
        data["trials"] = [
            {**trial, "flaw": trial["stage"] if trial["stage"] in _FLAWS else ""}
            for trial in data["trials"]
        ]
    data["schema_version"] = SCHEMA_VERSION
    data.pop("grade", None)
    data["finals"] = {
        phase: tuple(Best(**each) for each in data["finals"][phase])
        for phase in data.get("finals", ())
    }
    data["trials"] = tuple(
        Trial(**{**trial, "samples": _pairs(trial["samples"])}) for trial in data["trials"]
    )
    for group in ("best", "performance"):
        data[group] = {phase: Best(**data[group][phase]) for phase in PHASES}
    data["chosen"] = Setting(**data["chosen"])
    for key in ("path", "model", "filesystem", "device"):
        _require(str, data["drive"][key], f"drive.{key}")
    for name in ("reasons", "warnings"):
        _require_instance(list, data[name], name)
        data[name] = tuple(data[name])
    for name, kind in (("latencies", Latency), ("stripe", StripePath)):
        data[name] = tuple(
            kind(**{**each, "setting": Setting(**each["setting"])}) for each in data.get(name, ())
        )
    data["beside"] = tuple(Beside(**each) for each in data.get("beside", ()))
    if sustained := data.get("sustained"):
        data["sustained"] = Sustained(**{**sustained, "samples": _pairs(sustained["samples"])})
    for name in ("health_before", "health_after"):
        data[name] = Health(**data[name]) if data.get(name) else None
    return data


def _pairs(samples: list[list[Any]]) -> tuple[tuple[float, int], ...]:
    return tuple((seconds, count) for seconds, count in samples)
