"""`Profile`: a drive's tuned settings, with the evidence for them."""

from __future__ import annotations

import dataclasses
import math
import types
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import UsageError
from ..files import sealed
from .profile_grade import PHASES as PHASES
from .profile_grade import grade

SCHEMA_VERSION = 4


@dataclasses.dataclass(frozen=True)
class Setting:
    """The part of an `AioConfig` that a sweep chooses. Hashable, so that trials group by it.

    Attributes
    ----------
    block_size, queue_depth, thread_count : int
        As of `AioConfig`.
    single_submit, overlap_events : bool
        As of `AioConfig`.
    backend : str
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
        """Bytes that the kernel holds at once when every queue is full."""
        return self.block_size * self.queue_depth * self.thread_count


# What a DeepSpeed user has who sets nothing (deepspeed/runtime/swap_tensor/constants.py): the
# control of every sweep.
DEEPSPEED_DEFAULTS = Setting(block_size=1 << 20, queue_depth=8, thread_count=1)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One timed run of one setting in one phase. GB is 10**9 bytes.

    Attributes
    ----------
    phase : str
        "read", "write" or "mixed".
    block_size, queue_depth, thread_count : int
        Of the setting.
    single_submit, overlap_events : bool
        Of the setting.
    backend : str
        Of the setting.
    bytes : int
        Moved in the timed window, both directions together.
    seconds : float
        Length of the window.
    gb_per_s : float
        Speed in the window, both directions together.
    read_gb_per_s, write_gb_per_s : float
        The same by direction.
    stage : str
        The round of the search, such as "screen" or "final".
    control : bool
        Whether this was the control setting, run to see the drive drift.
    relative : float
        *gb_per_s* over the control's at the same time and phase: 1.0 is DeepSpeed's defaults.
    started_seconds : float
        Since the sweep began.
    samples : tuple of (float, int)
        (seconds since the window began, bytes so far) pairs, for the throughput over time.
    flaw : str
        Why the trial does not count: "drifted" (the drive jumped around it) or "impossible" (a
        cache answered). "" when it counts.
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
    """A setting with what it reached in the finals.

    Attributes
    ----------
    block_size, queue_depth, thread_count : int
        Of the setting.
    single_submit, overlap_events : bool
        Of the setting.
    backend : str
        Of the setting.
    gb_per_s : float
        The median speed of the control in the finals times *relative*.
    relative : float
        Ratio of the setting's speed to the control's.
    relative_low, relative_high : float
        The middle 90 % of *relative*.

    Notes
    -----
    *gb_per_s* gives all settings at the same level of a drive that drifts: the quotient of two
    speeds is that of their ratios. Profiles of schema 3 and older have the median of the setting's
    own trials there.
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
    """How long requests of one block took, from submitting to done, while the queues were full.

    Attributes
    ----------
    phase : str
        The load: "read", "write" or "mixed".
    setting : Setting
        Whose queues were kept full.
    blocks : int
        How many were timed, by all ranks.
    p50_ms, p95_ms, p99_ms : float
        Percentiles, in milliseconds.
    max_ms : float
        Of the slowest block, in milliseconds.
    p999_ms : float or None
        The 99.9th percentile, in milliseconds; None where fewer than 1000 blocks were timed.

    Notes
    -----
    One thread looks for finished requests every 0.1 ms.
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

    Attributes
    ----------
    name : str
        "fio", or the other backend ("io_uring", "libaio").
    version : str
        Of what is not ours.
    phase : str
        "read", "write" or "mixed".
    gb_per_s : float
        Median of its runs.
    chosen_gb_per_s : float
        Median of the engine's runs between.
    relative : float
        Median ratio of its runs to the engine's.
    relative_low, relative_high : float
        The middle 90 % of the ratios; all of them where there are fewer than 20.
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

    Attributes
    ----------
    bytes : int
        Written, over one file again and again.
    seconds : float
        Time that this took.
    samples : tuple of (float, int)
        (seconds, bytes so far) pairs, one per round.
    first_gb_per_s : float
        Median of the rounds before the speed fell; of the first five where it did not fall.
    steady_gb_per_s : float
        Mean of the last five rounds.
    steady : bool
        Whether the last five rounds were steady (SNIA: a range of at most 20 % of the mean, a slope
        of at most 10 %).
    cache_ends_bytes : int or None
        Bytes after which the speed fell for good; None where it did not.
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
    path : str
        The directory.
    device, model : str
        Of its drive.
    setting : Setting
        The one that was chosen for it.
    alone : dict of str to float
        GB/s by phase while only this path was used.
    together : dict of str to float
        GB/s by phase while all paths were used at once.
    weight : float
        Share of the bytes that belongs on it, so that all paths are done at the same time. The
        weights of all paths sum to 1.
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

    Attributes
    ----------
    source : str
        What was asked: "SMART log" (the kernel), "nvme-cli", "smartctl" or "sysfs".
    temperature_celsius : float or None
        Now.
    wear : float or None
        Share of its rated life that is used, 1.0 at its end.
    written_bytes : int or None
        In its life.
    throttled_seconds : int or None
        In its life, above a temperature at which it slows itself down.
    critical : str
        What it warns of, in words; "" where it warns of nothing.
    limit_celsius : float or None
        Temperature from which on it warns.
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
    """Everything that a sweep learned of a drive.

    Attributes
    ----------
    tool_version : str
        Of this package.
    created : str
        When the sweep began: date, time and offset from UTC, as ISO 8601.
    command : str
        The command line of the sweep.
    drive : dict
        Plain values as JSON holds them, from `Drive.as_dict`. "path", "model", "filesystem" and
        "device" are always there, each a string.
    workload : dict
        What was moved. Plain values as JSON holds them.
    engine : dict
        What moved it. Plain values as JSON holds them; "name" is "native" or "deepspeed".
    trials : tuple of Trial
        Every run.
    best : dict of str to Best
        By phase.
    chosen : Setting
        The one setting for all of training.
    performance : dict of str to Best
        The chosen setting by phase.
    reasons : tuple of str
        Sentences that say why *chosen* was chosen.
    steady : bool
        Whether the drive held its speed while it was judged.
    warnings : tuple of str
        Sentences.
    latencies : tuple of Latency
        Of the chosen setting, the fastest and the control.
    beside : tuple of Beside
        Others at the chosen setting.
    sustained : Sustained or None
        Where it was measured.
    stripe : tuple of StripePath
        All paths of a sweep of several, this one among them.
    health_before, health_after : Health or None
        Before and after the sweep, where the drive told.
    finals : dict of str to tuple of Best
        By phase, every setting that *best* and *chosen* were taken from.
    schema_version : int
        Of the file format.

    Notes
    -----
    *latencies*, *beside*, *stripe* and *finals* are empty where nothing was measured.
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
        """Make the text of `profile.json`.

        Returns
        -------
        str
            JSON with two spaces of indentation and a newline at the end; UTF-8 in a file.

        Notes
        -----
        "sha256" is of the rest. "grade" says what `profile_grade.grade` finds; it is for other
        programs, and found anew from the trials when the profile is read.
        """
        found = {"grade": dataclasses.asdict(grade(self))}
        return sealed.dumps({**dataclasses.asdict(self), **found}, indent=2) + "\n"

    def beside_gb_per_s(self, other: Beside) -> float:
        """Speed of something else, comparable to the chosen setting's.

        Parameters
        ----------
        other : Beside
            One of *beside*.

        Returns
        -------
        float
            GB/s at the level of *performance*: the quotient of the two is their measured ratio.
        """
        return self.performance[other.phase].gb_per_s * other.relative

    @classmethod
    def from_json(cls, text: str, source: str = "profile") -> Profile:
        """Read what `to_json` wrote.

        Parameters
        ----------
        text : str
            The JSON.
        source : str
            What to call it in messages.

        Returns
        -------
        Profile
            As it was written; of an older schema converted to this one.

        Raises
        ------
        UsageError
            *text* is not a profile, was altered, or is of a schema that this version does not know.
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
        """Read a profile file.

        Parameters
        ----------
        path : str or Path
            The file.

        Returns
        -------
        Profile
            As of `from_json`.

        Raises
        ------
        OSError
            The file cannot be read.
        UsageError
            It is not a profile: see `from_json`.
        """
        return cls.from_json(Path(path).read_text(encoding="utf-8", errors="replace"), str(path))


_T = TypeVar("_T")


def require_schema(value: _T) -> _T:
    """Check that every field of a dataclass has its declared type, at every depth.

    A whole number must be 0 or more, any other finite.

    Parameters
    ----------
    value : dataclass
        An instance.

    Returns
    -------
    dataclass
        *value*.

    Raises
    ------
    TypeError
        A field is wrong; the message names it.
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
