"""The tables of a report; every cell is text."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

from nvme_offload.hardware.profile import PHASES, Health, Profile
from nvme_offload.hardware.profile_grade import final_trials
from nvme_offload.planning import traffic

from . import wording
from .wording import NONE, SPACE

MODELS = (7e9, 13e9, 70e9)
NOT_REPORTED = "not reported by this drive"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells, the first of each its name. *columns*: a name may be broken at a line break.
    *strong*: rows to stand out. *words*: columns of text.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: frozenset[int] = frozenset()
    words: frozenset[int] = frozenset({0})


def of(profile: Profile) -> dict[str, Table]:
    """The tables by name; those without rows have no numbers in *profile*."""
    every = (training, latency, finalists, stripe, health)
    return {make.__name__: make(profile) for make in every}


def control_gb_per_s(profile: Profile, phase: str) -> float:
    """The speed of DeepSpeed's defaults in the finals."""
    chosen = profile.performance[phase]
    return chosen.gb_per_s / chosen.relative


def training(profile: Profile) -> Table:
    """The drive's time in an optimizer step by model."""
    together = traffic.stripe_speeds(profile)
    speeds = [traffic.chosen_speeds(profile), {p: control_gb_per_s(profile, p) for p in PHASES}]
    speeds += [together] if together else []
    rows = []
    for parameters in MODELS:
        seconds = (traffic.floor(traffic.STATES, parameters, each).seconds for each in speeds)
        written_bytes = traffic.STATES.written * parameters
        moved_bytes = traffic.STATES.read * parameters + written_bytes
        cells = wording.decimal_bytes(moved_bytes), wording.decimal_bytes(written_bytes)
        name = f"{parameters / 1e9:.3g}{SPACE}B"
        rows.append((name, *cells, *map(wording.duration, seconds)))
    columns = (
        *("Parameters", "Read and written\na step", "Written\na step"),
        *("With this\nsetting", "With the\ndefaults"),
        *([f"On these\n{len(profile.stripe)} paths"] if together else []),
    )
    return Table("The drive's time in one optimizer step", columns, tuple(rows))


def latency(profile: Profile) -> Table:
    """The latency of a block with the chosen setting, and blocks per second."""
    rows = []
    for found in profile.latencies:
        if found.setting == profile.chosen:
            rate = 1e9 * profile.performance[found.phase].gb_per_s / profile.chosen.block_size
            times = (found.p50_ms, found.p95_ms, found.p99_ms, found.p999_ms, found.max_ms)
            cells = (NONE if one is None else f"{wording.speed(one)}{SPACE}ms" for one in times)
            rows.append((found.phase, f"{rate:,.0f}", *cells, f"{found.blocks:,}"))
    size = wording.size(profile.chosen.block_size)
    return Table(
        f"IOPS, and the latency of a block of {size} with full queues",
        ("Load", "IOPS", "p50", "p95", "p99", "p99.9", "Longest", "Blocks\ntimed"),
        tuple(rows),
    )


def finalists(profile: Profile) -> Table:
    """The settings of the last stage, the fastest under the mixed load first."""
    found = {phase: {one.setting: one for one in profile.finals[phase]} for phase in PHASES}
    controls = {trial.setting for trial in profile.trials if trial.control}
    mixed = found["mixed"]
    settings = sorted(mixed, key=lambda setting: mixed[setting].relative, reverse=True)
    rows = []
    for setting in settings:
        speeds = [found[phase][setting] for phase in PHASES]
        cells = (f"{wording.speed(one.gb_per_s)} ({wording.ratio(one.relative)})" for one in speeds)
        trials = sum(len(final_trials(profile, phase, setting)) for phase in PHASES)
        roles = ["chosen"] * (setting == profile.chosen) + ["defaults"] * (setting in controls)
        size, in_flight = map(wording.size, (setting.block_size, setting.bytes_in_flight))
        of = (size, str(setting.queue_depth), str(setting.thread_count), in_flight)
        rows.append((*of, *cells, str(trials), ", ".join(roles)))
    columns = ("Block\nsize", "Queue\ndepth", "Threads", "In\nflight")
    return Table(
        "The last stage: GB/s, and the ratio to the defaults; the fastest at both first",
        (*columns, "Read", "Write", "Mixed", "Trials", "Role"),
        tuple(rows),
        frozenset({settings.index(profile.chosen)}),
        frozenset({0, 8}),
    )


def stripe(profile: Profile) -> Table:
    """Several paths: each alone, all together, and the share of the bytes for each."""
    rows: list[tuple[str, ...]] = []
    for path in profile.stripe:
        named = path.path, path.model or path.device, str(path.setting)
        share = f"{100 * path.weight:.1f}{SPACE}%"
        rows.append((*named, share, *_by_phase(path.alone), *_by_phase(path.together)))
    if together := traffic.stripe_speeds(profile):
        named = "All together", "", ""
        rows.append((*named, f"100{SPACE}%", *[NONE] * 3, *_by_phase(together)))
    columns = (
        *("Path", "Drive", "Setting", "Weight"),
        *(f"{phase.capitalize()},\n{how}" for how in ("alone", "together") for phase in PHASES),
    )
    caption = "Each path alone and with all paths together, GB/s"
    return Table(caption, columns, tuple(rows), frozenset({len(rows) - 1}), frozenset({0, 1, 2}))


def _by_phase(speeds: dict[str, float]) -> Iterable[str]:
    return (wording.speed(speeds[phase]) for phase in PHASES)


def health(profile: Profile) -> Table:
    """The health that the drive reports before and after the sweep."""
    both = [profile.health_before, profile.health_after]
    before, after = (_health_facts(one or Health("")) for one in both)
    rows: list[tuple[str, ...]] = []
    for name in before if any(both) else ():
        values = before[name] or NONE, after[name] or NONE
        rows.append((name, *(values if set(values) != {NONE} else (NOT_REPORTED, ""))))
    if not rows:
        rows.append(("Temperature, wear, slowdowns", NOT_REPORTED, ""))
    sources = ", ".join(dict.fromkeys(one.source for one in both if one))
    caption = "Health reported by the drive" + (f" ({sources})" if sources else "")
    return Table(caption, ("", "Before", "After"), tuple(rows), words=frozenset({0, 1, 2}))


def _health_facts(one: Health) -> dict[str, str | None]:
    def said(value: float | None, how: Callable[[float], str]) -> str | None:
        return None if value is None else how(value)

    celsius = functools.partial(wording.shown, key="temperature_celsius")
    return {
        "Temperature": said(one.temperature_celsius, celsius),
        "Highest seen in the sweep": said(one.highest_celsius, celsius),
        "Warns from": said(one.limit_celsius, celsius),
        "Slowed by heat in its life": said(one.throttled_seconds, wording.duration),
        "Rated life used": said(one.wear, wording.percent),
        "Written in its life": said(one.written_bytes, wording.decimal_bytes),
        "Its warnings": one.critical or ("none" if one.source == "SMART log" else None),
    }
