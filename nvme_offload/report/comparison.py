"""Two profiles side by side: two drives, two kernels, before and after."""

from __future__ import annotations

import dataclasses
from typing import Any

from nvme_offload.hardware.profile import PHASES, Profile

from . import summary, training, wording
from .tables import Table
from .wording import NONE, PHASE_NAMES

# Facts of a profile that say what else differed, by where they are kept; what changes from run to
# run is left out.
_FACTS = {
    "drive": (
        "model",
        "device",
        "firmware",
        "filesystem",
        "mount_options",
        "layers",
        "pcie_link",
        "scheduler",
        "max_block_kib",
        "numa_node",
    ),
    "workload": ("ranks", "seconds", "file_bytes", "request_bytes"),
    "engine": ("name", "version", "deepspeed", "direct", "kernel", "python", "cpu_count"),
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Profile *a* and profile *b* as sentences and tables. verdict: what to take from it, in a
    sentence.
    """

    names: tuple[str, str]
    verdict: str
    tables: tuple[Table, ...]

    def markdown(self) -> str:
        """For a pull request."""
        a, b = (wording.markdown_cell(name) for name in self.names)
        parts = [f"# {a} and {b}", wording.markdown_cell(self.verdict)]
        for table in self.tables:
            parts += [f"## {table.caption}", table.markdown()]
        return "\n\n".join(parts) + "\n"

    def text(self) -> str:
        """For a terminal: columns under each other."""
        return "\n\n".join([self.verdict, *(_text(table) for table in self.tables)]) + "\n"

    def html(self) -> str:
        """As a page that asks for nothing else."""
        from .render import environment_of_pages, page_parts

        environment = environment_of_pages()
        return environment.get_template("comparison.html.j2").render(
            comparison=self, **page_parts(environment)
        )


def compare(a: Profile, b: Profile, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compare *b* with *a*; *names* stand for them in headings.

    The two were measured at different times, so their speeds differ also by what the drive did
    meanwhile. DeepSpeed's defaults ran in both sweeps and tell how much that is.
    """
    tables = (
        _speeds(a, b, names),
        _settings(a, b, names),
        _steps(a, b, names),
        _facts(a, b, names),
    )
    return Comparison(names, _verdict(a, b, names), tuple(table for table in tables if table.rows))


def _verdict(a: Profile, b: Profile, names: tuple[str, str]) -> str:
    first, second = a.performance.get("mixed"), b.performance.get("mixed")
    if first is None or second is None or not first.gb_per_s:
        return f"There is no speed at reading and writing at once in {names[0] if first is None else names[1]}, so the two cannot be told apart."
    ratio = second.gb_per_s / first.gb_per_s
    said = f"{names[1]} moves {wording.ratio(ratio)} what {names[0]} does at reading and writing at once, each with its own setting"
    before, after = _ranges(a), _ranges(b)
    if before and after:
        said += f"; the defaults alone ranged over {wording.speed(before[0])} to {wording.speed(before[1])} GB/s in {names[0]}"
        said += f" and {wording.speed(after[0])} to {wording.speed(after[1])} in {names[1]}"
        if before[0] <= after[1] and after[0] <= before[1]:
            said += ", which overlap: the difference may be the drive's own drift"
    return said + "."


def _ranges(profile: Profile) -> tuple[float, float] | None:
    speeds = [speed for _, speed in summary.control_runs(profile, "mixed")]
    return (min(speeds), max(speeds)) if speeds else None


def _speeds(a: Profile, b: Profile, names: tuple[str, str]) -> Table:
    rows: list[tuple[str, ...]] = []
    for phase in PHASES:
        before, after = a.performance.get(phase), b.performance.get(phase)
        if before is None or after is None:
            continue
        speeds = before.gb_per_s, after.gb_per_s
        controls = (
            summary.control_gb_per_s(a, phase) or 0.0,
            summary.control_gb_per_s(b, phase) or 0.0,
        )
        gains = wording.interval(before), wording.interval(after)
        rows.append(
            (
                PHASE_NAMES[phase],
                "chosen",
                *map(wording.speed, speeds),
                _over(speeds[1], speeds[0]),
                *gains,
            )
        )
        rows.append(
            (
                PHASE_NAMES[phase],
                "defaults",
                *map(wording.speed, controls),
                _over(controls[1], controls[0]),
                NONE,
                NONE,
            )
        )
    columns = [
        "Load",
        "Setting",
        *(f"{name},\nGB/s" for name in names),
        f"{names[1]} over\n{names[0]}",
        *(f"{name} over\nits defaults" for name in names),
    ]
    return Table("speeds", "Speeds", tuple(columns), tuple(rows), words=frozenset({0, 1}))


def _over(one: float, other: float) -> str:
    return wording.ratio(one / other) if other else NONE


def _settings(a: Profile, b: Profile, names: tuple[str, str]) -> Table:
    pair = (a.chosen, b.chosen)
    rows = [("Block size", *(wording.size(setting.block_size) for setting in pair))]
    for name in ("queue_depth", "thread_count", "single_submit", "overlap_events", "backend"):
        rows.append(
            (
                wording.label(name),
                *(wording.shown(getattr(setting, name), name) for setting in pair),
            )
        )
    rows.append(
        (
            "In flight",
            wording.size(a.chosen.bytes_in_flight),
            wording.size(b.chosen.bytes_in_flight),
        )
    )
    rows.append(("Steady", wording.shown(a.steady, ""), wording.shown(b.steady, "")))
    return Table("settings", "Chosen settings", ("", *names), tuple(rows))


def _steps(a: Profile, b: Profile, names: tuple[str, str]) -> Table:
    rows = []
    for before, after in zip(training.steps(a), training.steps(b), strict=False):
        if before.gpus == 1:
            seconds = (before.seconds, after.seconds)
            rows.append(
                (
                    wording.model(before.parameters),
                    *map(wording.duration, seconds),
                    wording.ratio(seconds[0] / seconds[1]),
                )
            )
    return Table(
        "steps",
        "The drive's time in one optimizer step",
        ("Parameters", *names, f"{names[1]} is\nfaster by"),
        tuple(rows),
    )


def _facts(a: Profile, b: Profile, names: tuple[str, str]) -> Table:
    rows = []
    for part, keys in _FACTS.items():
        for key in keys:
            values: list[Any] = [getattr(profile, part).get(key) for profile in (a, b)]
            if values[0] != values[1]:
                rows.append((wording.label(key), *(wording.shown(value, key) for value in values)))
    rows.append(("Measured", a.created, b.created))
    return Table(
        "facts", "What else differs", ("", *names), tuple(rows), words=frozenset({0, 1, 2})
    )


def _text(table: Table) -> str:
    grid = [
        [column.replace("\n", " ") for column in table.columns],
        *(list(row) for row in table.rows),
    ]
    grid = [[cell.replace(wording.SPACE, " ") for cell in row] for row in grid]
    widths = [max(len(row[index]) for row in grid) for index in range(len(grid[0]))]
    lines = []
    for row in grid:
        cells = (
            cell.ljust(width) if index in table.words else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join([f"{table.caption}:", *(f"  {line}" for line in lines)])
