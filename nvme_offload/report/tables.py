"""The tables of a report; every cell is text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from nvme_offload.hardware.profile import (
    DEEPSPEED_DEFAULTS,
    PHASES,
    Health,
    Profile,
    Setting,
)
from nvme_offload.planning import traffic

from . import summary, wording
from .wording import NONE, PHASE_NAMES, SPACE, TIMES

MODELS = (7e9, 13e9, 70e9)
LIFE_BYTES = 100e12  # for drives that do not report their rated life
NOT_REPORTED = "not reported by this drive"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells, the first of each its name.

    columns: a line break in a name is where it may be broken. strong: rows to stand out. words:
    columns that hold text rather than numbers.
    """

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: frozenset[int] = frozenset()
    words: frozenset[int] = frozenset({0})


def of(profile: Profile) -> dict[str, Table]:
    """The tables that *profile* has numbers for, by name."""
    every = (training, limits, latency, finalists, stripe, health)
    found = (make(profile) for make in every)
    return {table.name: table for table in found if table.rows}


def training(profile: Profile) -> Table:
    """The drive's time in an optimizer step by model, and the number of steps in the drive's life."""
    chosen, together = traffic.chosen_speeds(profile), traffic.stripe_speeds(profile)
    defaults = summary.control_speeds(profile)
    life_bytes = traffic.rated_bytes(profile) or LIFE_BYTES
    rows = []
    for parameters in MODELS if chosen and defaults else ():
        seconds = [
            traffic.floor(traffic.STATES, parameters, speeds).seconds
            for speeds in filter(None, (chosen, defaults, together))
        ]
        seconds.append(seconds[0] / 8)
        written_bytes = traffic.STATES.step_write * parameters
        rows.append(
            (
                wording.model(parameters),
                wording.decimal_bytes(traffic.STATES.step_read * parameters + written_bytes),
                *map(wording.duration, seconds),
                wording.decimal_bytes(written_bytes),
                f"{life_bytes / written_bytes:,.0f}",
            )
        )
    columns = (
        "Parameters",
        "Read and written\na step",
        "With this\nsetting",
        "With the\ndefaults",
        *([f"On these\n{len(profile.stripe)} paths"] if together else []),
        "On 8 such\ndrives",
        "Written\na step",
        f"Steps in\n{wording.decimal_bytes(life_bytes)}",
    )
    return Table("training", "The drive's time in one optimizer step", columns, tuple(rows))


def limits(profile: Profile) -> Table:
    """The chosen setting compared with fio and with the link."""
    fio = summary.beside(profile, "fio")
    link = profile.drive.get("link_bytes_per_second")
    directions = summary.both_directions(profile).get(profile.chosen)
    rows = []
    for phase in PHASES if fio or link else ():
        reached = profile.performance.get(phase)
        if reached is None:
            continue
        row = [PHASE_NAMES[phase]]
        if fio:
            other = fio.get(phase)
            row += (
                [
                    *map(wording.speed, (reached.gb_per_s, profile.beside_gb_per_s(other))),
                    wording.percent(1 / other.relative),
                    wording.inverse_interval(other),
                ]
                if other
                else [NONE] * 4
            )
        else:
            row.append(wording.speed(reached.gb_per_s))
        if link:
            # the lanes of the two directions are separate
            busiest = 1.0
            if phase == "mixed":
                busiest = (
                    max(directions) / sum(directions) if directions and sum(directions) else 0.5
                )
            row.append(wording.percent(reached.gb_per_s * 1e9 * busiest / link))
        rows.append(tuple(row))
    columns = ["Load", "This setting,\nGB/s"]
    columns = (
        ["Load", "This setting,\nGB/s", "fio,\nGB/s", "Of fio,\ninterleaved", "Range"]
        if fio
        else columns
    )
    columns += [f"Of the link,\n{wording.speed(link / 1e9)}{SPACE}GB/s each way"] if link else []
    return Table("limits", "How close to the drive's limit", tuple(columns), tuple(rows))


def latency(profile: Profile) -> Table:
    """The latency of a block with the chosen setting, and blocks per second."""
    rows = []
    for phase, found in summary.latency(profile, profile.chosen).items():
        best = profile.performance.get(phase)
        rate = 1e9 * best.gb_per_s / profile.chosen.block_size if best else 0.0
        times = (found.p50_ms, found.p95_ms, found.p99_ms, found.p999_ms, found.max_ms)
        cells = [wording.milliseconds(each) if each is not None else NONE for each in times]
        rows.append((PHASE_NAMES[phase], f"{rate:,.0f}", *cells, f"{found.blocks:,}"))
    size = wording.size(profile.chosen.block_size)
    return Table(
        "latency",
        f"IOPS, and the latency of a block of {size} with full queues",
        ("Load", "IOPS", "p50", "p95", "p99", "p99.9", "Longest", "Blocks\ntimed"),
        tuple(rows),
    )


_SETTING_COLUMNS = ("Block\nsize", "Queue\ndepth", "Threads", "In\nflight")


def _setting_cells(setting: Setting) -> tuple[str, ...]:
    return (
        wording.size(setting.block_size),
        str(setting.queue_depth),
        str(setting.thread_count),
        wording.size(setting.bytes_in_flight),
    )


def finalists(profile: Profile) -> Table:
    """The settings of the deciding stage with their medians."""
    controls = {trial.setting for trial in profile.trials if trial.control} or {DEEPSPEED_DEFAULTS}
    found = summary.finalists(profile)
    rows, strong = [], set()
    for index, finalist in enumerate(found):
        roles = [
            name
            for name, holds in (
                ("chosen", finalist.setting == profile.chosen),
                ("defaults", finalist.setting in controls),
            )
            if holds
        ]
        cells = [
            f"{wording.speed(reached.gb_per_s)} ({wording.ratio(reached.relative)})"
            if (reached := finalist.phases.get(phase))
            else NONE
            for phase in PHASES
        ]
        rows.append(
            (
                *_setting_cells(finalist.setting),
                *cells,
                str(sum(reached.trials for reached in finalist.phases.values())),
                ", ".join(roles),
            )
        )
        if "chosen" in roles:
            strong.add(index)
    stage = summary.last_stage(profile.trials)
    columns = (
        *_SETTING_COLUMNS,
        *(PHASE_NAMES[phase].capitalize() for phase in PHASES),
        "Trials",
        "Role",
    )
    caption = (
        f"The last stage ({stage}): GB/s, and the ratio to the defaults; the fastest at both first"
    )
    return Table("finalists", caption, columns, tuple(rows), frozenset(strong), frozenset({0, 8}))


def stripe(profile: Profile) -> Table:
    """Several paths: each alone, all together, and the share of the bytes for each."""
    rows: list[tuple[str, ...]] = []
    for path in profile.stripe:
        share = f"{100 * path.weight:.1f}{SPACE}%"
        rows.append(
            (
                path.path,
                path.model or path.device,
                wording.setting(path.setting),
                share,
                *_by_phase(path.alone),
                *_by_phase(path.together),
            )
        )
    strong = frozenset[int]()
    if together := traffic.stripe_speeds(profile):
        rows.append(
            ("All together", "", "", f"100{SPACE}%", NONE, NONE, NONE, *_by_phase(together))
        )
        strong = frozenset({len(rows) - 1})
    names = [f"{PHASE_NAMES[phase].capitalize()}" for phase in PHASES]
    columns = (
        "Path",
        "Drive",
        f"Block {TIMES} depth\n{TIMES} threads",
        "Weight",
        *(f"{n},\nalone" for n in names),
        *(f"{n},\ntogether" for n in names),
    )
    return Table(
        "stripe",
        "Each path alone and with all paths together, GB/s",
        columns,
        tuple(rows),
        strong,
        frozenset({0, 1, 2}),
    )


def _by_phase(speeds: dict[str, float]) -> Iterable[str]:
    return (wording.speed(speeds[phase]) if phase in speeds else NONE for phase in PHASES)


def health(profile: Profile) -> Table:
    """The health that the drive reports before and after the sweep."""
    both = [profile.health_before, profile.health_after]

    def celsius(value: float | None) -> str | None:
        return None if value is None else wording.shown(value, "temperature_celsius")

    def facts(one: Health) -> dict[str, str | None]:
        return {
            "Temperature": celsius(one.temperature_celsius),
            "Highest seen in the sweep": celsius(one.highest_celsius),
            "Warns from": celsius(one.limit_celsius),
            "Slowed by heat in its life": None
            if one.throttled_seconds is None
            else wording.duration(one.throttled_seconds),
            "Rated life used": None if one.wear is None else wording.percent(one.wear),
            "Written in its life": None
            if one.written_bytes is None
            else wording.decimal_bytes(one.written_bytes),
        }

    found = [facts(one) if one else {} for one in both]
    names = tuple(facts(Health("")))
    rows: list[tuple[str, ...]] = []
    for name in names if any(map(any, (each.values() for each in found))) else ():
        values = [each.get(name) or NONE for each in found]
        rows.append((name, *(values if set(values) != {NONE} else (NOT_REPORTED, ""))))
    if not rows:
        rows.append(("Temperature, wear, slowdowns", NOT_REPORTED, ""))
    if any(one and one.critical for one in both):
        rows.append(("Its warnings", *((one and one.critical) or NONE for one in both)))
    sources = ", ".join(dict.fromkeys(one.source for one in both if one))
    return Table(
        "health",
        "Health reported by the drive" + (f" ({sources})" if sources else ""),
        ("", "Before", "After"),
        tuple(rows),
        words=frozenset({0, 1, 2}),
    )
