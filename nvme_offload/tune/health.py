"""The health of a drive: from its SMART log, which only root can read, and its temperature from
sysfs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nvme_offload.hardware import nvme_log, sysfs
from nvme_offload.hardware.drive import Drive
from nvme_offload.hardware.profile import Health

WORN = 0.8


def measure(drive: Drive) -> Health | None:
    """The worst values of the drive's disks; None without any source."""
    found = [log for device in drive.physical_devices if (log := nvme_log.read(device)) is not None]
    warmest = max(temperatures(drive), default=drive.temperature_celsius)
    limit = min(temperatures(drive, "max"), default=None)
    if not found:
        return None if warmest is None else Health("sysfs", warmest, limit_celsius=limit)
    reported = [each.temperature_celsius for each in found if each.temperature_celsius is not None]
    return Health(
        source=found[0].source,
        temperature_celsius=max(reported, default=warmest),
        wear=max(each.wear or 0.0 for each in found),
        written_bytes=max(each.written_bytes or 0 for each in found),
        throttled_seconds=max(each.throttled_seconds or 0 for each in found),
        critical="; ".join(dict.fromkeys(each.critical for each in found if each.critical)),
        limit_celsius=limit,
    )


def temperatures(drive: Drive, name: str = "input", sys: Path = Path("/sys")) -> list[float]:
    """`sysfs.temperature` of each of the drive's disks that has a sensor."""
    lineages = sysfs.lineages_of(drive.physical_devices, sys)
    found = (sysfs.temperature(lineage, name) for lineage in lineages)
    return [each for each in found if each is not None]


class Thermometer:
    """The health of *drive* before and after a sweep, with the highest temperature seen."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self.before = measure(drive)
        self._seen: list[float] = []

    def sample(self) -> None:
        """Read the temperatures now."""
        self._seen += temperatures(self._drive)

    def after(self) -> Health | None:
        """The health now."""
        health = measure(self._drive)
        seen = [*self._seen, health.temperature_celsius] if health else []
        highest = max((each for each in seen if each is not None), default=None)
        return health and dataclasses.replace(health, highest_celsius=highest)


def warnings(before: Health | None, after: Health | None) -> list[str]:
    """Sentences on the consequences for training."""
    said: list[str] = []
    if after is None:
        return said
    if after.critical:
        said.append(f"The drive warns that {after.critical}: move what matters off it.")
    seconds = (after.throttled_seconds or 0) - ((before and before.throttled_seconds) or 0)
    now, highest, limit = after.temperature_celsius, after.highest_celsius, after.limit_celsius
    if before and seconds > 0:
        at = "" if now is None else f" at {now:.0f} \N{DEGREE SIGN}C"
        said.append(
            f"The drive slowed itself down for {seconds} s of the sweep, because of heat{at}: improve its cooling, and sweep again."
        )
    if highest is not None and limit is not None and highest >= limit:
        said.append(
            f"The drive became {highest:.0f} \N{DEGREE SIGN}C warm during the sweep, and warns from "
            f"{limit:.0f} \N{DEGREE SIGN}C on: it may have slowed down; improve its cooling, and sweep again."
        )
    if after.wear is not None and after.wear >= WORN:
        said.append(
            f"The drive has used {after.wear:.0%} of its rated life: training would soon use the rest."
        )
    return said
