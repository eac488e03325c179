"""The charts of a report; None for a chart without data in the profile."""

from __future__ import annotations

from nvme_offload.hardware.profile import Profile

from . import grid, over_time
from .canvas import Chart

_ALL = (
    grid.heat_map,
    over_time.trials,
    over_time.sustained,
)


def of(profile: Profile) -> dict[str, Chart]:
    """The charts that *profile* has numbers for, by name."""
    return {chart.name: chart for draw in _ALL if (chart := draw(profile)) is not None}
