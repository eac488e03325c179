"""The tables of a report; every cell is text."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS, PHASES, Health, Profile, Setting
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
        speeds = filter(None, (chosen, defaults, together))
        seconds = [traffic.floor(traffic.STATES, parameters, each).seconds for each in speeds]
        written_bytes = traffic.STATES.step_write * parameters
        moved_bytes = traffic.STATES.step_read * parameters + written_bytes
        cells = [wording.model(parameters), wording.decimal_bytes(moved_bytes)]
        cells += map(wording.duration, (*seconds, seconds[0] / 8))
        cells += [wording.decimal_bytes(written_bytes), f"{life_bytes / written_bytes:,.0f}"]
        rows.append(tuple(cells))
    columns = (
        *("Parameters", "Read and written\na step", "With this\nsetting", "With the\ndefaults"),
        *([f"On these\n{len(profile.stripe)} paths"] if together else []),
        *("On 8 such\ndrives", "Written\na step"),
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
        row = [PHASE_NAMES[phase], wording.speed(reached.gb_per_s)]
        if fio and (other := fio.get(phase)):
            share = wording.percent(1 / other.relative)
            row += [wording.speed(profile.beside_gb_per_s(other)), share]
            row.append(wording.inverse_interval(other))
        elif fio:
            row = [PHASE_NAMES[phase], *[NONE] * 4]
        if link:
            # the lanes of the two directions are separate
            busiest = 1.0
            if phase == "mixed":
                both = directions if directions and sum(directions) else (1, 1)
                busiest = max(both) / sum(both)
            row.append(wording.percent(reached.gb_per_s * 1e9 * busiest / link))
        rows.append(tuple(row))
    columns = ["Load", "This setting,\nGB/s"]
    columns += ["fio,\nGB/s", "Of fio,\ninterleaved", "Range"] if fio else []
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
    rows, strong = [], set()
    for index, finalist in enumerate(summary.finalists(profile)):
        setting, phases = finalist
        roles = ["chosen"] * (setting == profile.chosen) + ["defaults"] * (setting in controls)
        cells = [
            f"{wording.speed(phases[phase].gb_per_s)} ({wording.ratio(phases[phase].relative)})"
            if phase in phases
            else NONE
            for phase in PHASES
        ]
        trials = sum(reached.trials for reached in phases.values())
        rows.append((*_setting_cells(setting), *cells, str(trials), ", ".join(roles)))
        if "chosen" in roles:
            strong.add(index)
    stage = summary.last_stage(profile.trials)
    names = (PHASE_NAMES[phase].capitalize() for phase in PHASES)
    columns = (*_SETTING_COLUMNS, *names, "Trials", "Role")
    caption = (
        f"The last stage ({stage}): GB/s, and the ratio to the defaults; the fastest at both first"
    )
    return Table("finalists", caption, columns, tuple(rows), frozenset(strong), frozenset({0, 8}))


def stripe(profile: Profile) -> Table:
    """Several paths: each alone, all together, and the share of the bytes for each."""
    rows: list[tuple[str, ...]] = []
    for path in profile.stripe:
        named = path.path, path.model or path.device, wording.setting(path.setting)
        share = f"{100 * path.weight:.1f}{SPACE}%"
        rows.append((*named, share, *_by_phase(path.alone), *_by_phase(path.together)))
    strong = frozenset[int]()
    if together := traffic.stripe_speeds(profile):
        named = "All together", "", ""
        rows.append((*named, f"100{SPACE}%", *[NONE] * 3, *_by_phase(together)))
        strong = frozenset({len(rows) - 1})
    names = [PHASE_NAMES[phase].capitalize() for phase in PHASES]
    columns = (
        *("Path", "Drive", f"Block {TIMES} depth\n{TIMES} threads", "Weight"),
        *(f"{name},\nalone" for name in names),
        *(f"{name},\ntogether" for name in names),
    )
    caption = "Each path alone and with all paths together, GB/s"
    return Table("stripe", caption, columns, tuple(rows), strong, frozenset({0, 1, 2}))


def _by_phase(speeds: dict[str, float]) -> Iterable[str]:
    return (wording.speed(speeds[phase]) if phase in speeds else NONE for phase in PHASES)


def health(profile: Profile) -> Table:
    """The health that the drive reports before and after the sweep."""
    both = [profile.health_before, profile.health_after]
    found = [_health_facts(one) if one else {} for one in both]
    rows: list[tuple[str, ...]] = []
    for name in _health_facts(Health("")) if any(map(any, map(dict.values, found))) else ():
        values = [each.get(name) or NONE for each in found]
        rows.append((name, *(values if set(values) != {NONE} else (NOT_REPORTED, ""))))
    if not rows:
        rows.append(("Temperature, wear, slowdowns", NOT_REPORTED, ""))
    if any(one and one.critical for one in both):
        rows.append(("Its warnings", *((one and one.critical) or NONE for one in both)))
    sources = ", ".join(dict.fromkeys(one.source for one in both if one))
    caption = "Health reported by the drive" + (f" ({sources})" if sources else "")
    columns = ("", "Before", "After")
    return Table("health", caption, columns, tuple(rows), words=frozenset({0, 1, 2}))


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
    }
