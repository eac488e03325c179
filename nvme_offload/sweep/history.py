"""A drive's sweeps one after the other: what each found, and what changed since. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from nvme_offload.hardware.profile import PHASES, Profile
from nvme_offload.hardware.profile_grade import grade
from nvme_offload.units import format_bytes, format_speed

from . import compare
from .progress import describe

# what a user may have changed between two sweeps, by where it is kept
_FACTS = {
    "drive": ("model", "firmware", "filesystem", "pcie_link", "scheduler", "mount_options"),
    "engine": ("version", "backend", "kernel"),
    "workload": ("ranks", "file_bytes"),
}


def lines(profiles: Sequence[Profile], in_use: Profile | None) -> list[str]:
    """What to print of *profiles*, the oldest first; *in_use* is the one that is kept for its drive."""
    rows: list[tuple[str, ...]] = [("swept", "grade", "setting", *PHASES, "")]
    for profile in profiles:
        speeds = (format_speed(profile.performance[phase].gb_per_s) for phase in PHASES)
        used = "in use" if in_use is not None and profile.created == in_use.created else ""
        rows.append(
            (
                profile.created[:16].replace("T", " "),
                grade(profile).name,
                describe(profile.chosen),
                *speeds,
                used,
            )
        )
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    said = []
    for number, row in enumerate(rows):
        cells = [
            cell.rjust(width) if 3 <= place < 6 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        said.append("  ".join(cells).rstrip())
        if number > 1:
            said += [f"    {line}" for line in since(profiles[number - 2], profiles[number - 1])]
    return [*said, "", "Speeds in GB/s; below each sweep what changed since the one before."]


def since(before: Profile, after: Profile) -> list[str]:
    """What *after* has over *before*: speeds with their spread, and what else differs."""
    said = [compare.line(change) for change in compare.changes(before, after)]
    other = []
    for part, keys in _FACTS.items():
        for key in keys:
            old, new = (getattr(profile, part).get(key) for profile in (before, after))
            if old != new:
                other.append(f"{key} {_shown(old)} -> {_shown(new)}")
    return said + (["; ".join(other)] if other else [])


def _shown(value: object) -> str:
    if isinstance(value, dict):  # the bytes of the files
        return ", ".join(f"{name} {format_bytes(count)}" for name, count in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return "not known" if value in (None, "") else str(value)
