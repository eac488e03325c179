"""The health of a drive: from its SMART log, which only root can read; from nvme-cli or smartctl if one
is installed and permitted; and its temperature from sysfs, which every user can read.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvme_offload.hardware import nvme_log, sysfs
from nvme_offload.hardware.drive import Drive
from nvme_offload.hardware.nvme_log import UNIT_BYTES, SmartLog
from nvme_offload.hardware.profile import Health
from nvme_offload.planning.traffic import STEP_BYTES_7B

WORN = 0.8
LEAST_WEAR = 0.03  # drives count whole per cents: below, the rated life cannot be estimated

_CRITICAL = (
    "its spare area is low",
    "its temperature is out of range",
    "it is no longer reliable",
    "it is read-only",
    "its backup of memory failed",
)


def ask(drive: Drive) -> Health | None:
    """The worst values of the drive's disks; None without any source."""
    found = [
        health for device in drive.physical_devices if (health := _of_disk(device)) is not None
    ]
    warmest, limit = temperature(drive), _limit(drive)
    if warmest is None:
        warmest = drive.temperature_celsius
    if not found:
        if warmest is None:
            return None
        return Health("sysfs", warmest, limit_celsius=limit)
    return Health(
        source=found[0].source,
        temperature_celsius=max(
            (each.temperature_celsius for each in found if each.temperature_celsius is not None),
            default=warmest,
        ),
        wear=max((each.wear for each in found if each.wear is not None), default=None),
        written_bytes=max(
            (each.written_bytes for each in found if each.written_bytes is not None), default=None
        ),
        throttled_seconds=max(
            (each.throttled_seconds for each in found if each.throttled_seconds is not None),
            default=None,
        ),
        critical="; ".join(dict.fromkeys(each.critical for each in found if each.critical)),
        limit_celsius=limit,
    )


def temperature(drive: Drive, sys: Path = Path("/sys")) -> float | None:
    """Of the warmest of the drive's disks now, by sysfs; None where it has no sensor there."""
    found = map(sysfs.temperature, sysfs.lineages_of(drive.physical_devices, sys))
    return max((each for each in found if each is not None), default=None)


def _limit(drive: Drive, sys: Path = Path("/sys")) -> float | None:
    found = map(sysfs.temperature_limit, sysfs.lineages_of(drive.physical_devices, sys))
    return min((each for each in found if each is not None), default=None)


class Thermometer:
    """The highest temperature that was seen of *drive*, in degrees Celsius."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self.highest: float | None = None

    def look(self) -> None:
        """Read the temperature now."""
        now = temperature(self._drive)
        if now is not None:
            self.highest = now if self.highest is None else max(self.highest, now)

    def noted(self, health: Health | None) -> Health | None:
        """*health* with the highest temperature."""
        seen = [self.highest, health.temperature_celsius] if health else []
        highest = max((each for each in seen if each is not None), default=None)
        return health and dataclasses.replace(health, highest_celsius=highest)


def warnings(before: Health | None, after: Health | None) -> list[str]:
    """Sentences on the consequences for training."""
    said = []
    if after and after.critical:
        said.append(f"The drive warns that {after.critical}: move what matters off it.")
    if before and after and (after.throttled_seconds or 0) > (before.throttled_seconds or 0):
        seconds = (after.throttled_seconds or 0) - (before.throttled_seconds or 0)
        at = (
            f" at {after.temperature_celsius:.0f} \N{DEGREE SIGN}C"
            if after.temperature_celsius is not None
            else ""
        )
        said.append(
            f"The drive slowed itself down for {seconds} s of the sweep, because of heat{at}: improve its cooling, and sweep again."
        )
    if (
        after
        and after.highest_celsius is not None
        and after.limit_celsius is not None
        and after.highest_celsius >= after.limit_celsius
    ):
        said.append(
            f"The drive became {after.highest_celsius:.0f} \N{DEGREE SIGN}C warm during the sweep, and warns from "
            f"{after.limit_celsius:.0f} \N{DEGREE SIGN}C on: it may have slowed down; improve its cooling, and sweep again."
        )
    if after and after.wear is not None and after.wear >= WORN:
        said.append(
            f"The drive has used {after.wear:.0%} of its rated life: training would soon use the rest."
        )
    if after and after.wear is not None and after.written_bytes and LEAST_WEAR <= after.wear < 1:
        left = after.written_bytes * (1 / after.wear - 1)
        said.append(
            f"The drive has worn {after.wear:.0%} by {after.written_bytes / 1e12:.3g} TB: the rest lasts for about {left / 1e12:.3g} TB, "
            f"{left / STEP_BYTES_7B:,.0f} optimizer steps of a 7B model, which write {STEP_BYTES_7B / 1e9:.0f} GB each."
        )
    return said


def link_warnings(before: str | None, after: str | None) -> list[str]:
    """A warning if the PCIe link (`Drive.pcie_link`) changed during the sweep."""
    if not before or not after or before == after:
        return []
    return [
        f"The drive's PCIe link ran at {before} when the sweep began, and at {after} when it ended: heat or power saving slowed its clock. "
        "Look at the power settings of the firmware, and sweep again."
    ]


def _of_disk(device: str) -> Health | None:
    if (smart := nvme_log.read(device)) is not None:
        return smart_log(smart)
    if device.startswith("/dev/nvme") and (
        log := _json(["nvme", "smart-log", device, "--output-format=json"])
    ):
        return nvme_cli(log)
    if log := _json(["smartctl", "--json", "--all", device]):
        return smartctl(log)
    return None


def smart_log(log: SmartLog) -> Health:
    """The values of the drive's log."""
    return Health(
        source="SMART log",
        temperature_celsius=log.temperature_celsius,
        wear=log.wear,
        written_bytes=log.written_bytes,
        throttled_seconds=log.throttled_seconds or log.warm_seconds,
        critical=_critical(log.critical_warning),
    )


def nvme_cli(log: dict[str, Any]) -> Health | None:
    """The values of `nvme smart-log`, which reports kelvin."""
    kelvin = _number(log, "temperature")
    throttled = [_number(log, f"thm_temp{level}_total_time") for level in (1, 2)]
    return _worth(
        Health(
            source="nvme-cli",
            temperature_celsius=None if kelvin is None else kelvin - 273,
            wear=_share(_number(log, "percent_used", "percentage_used")),
            written_bytes=_units(_number(log, "data_units_written")),
            throttled_seconds=_seconds(throttled) or _seconds(_hot(log)),
            critical=_critical(_number(log, "critical_warning")),
        )
    )


def smartctl(log: dict[str, Any]) -> Health | None:
    """The values of `smartctl --json`; fewer for drives other than NVMe."""
    nvme = log.get("nvme_smart_health_information_log") or {}
    passed = (log.get("smart_status") or {}).get("passed")
    critical = _critical(_number(nvme, "critical_warning"))
    return _worth(
        Health(
            source="smartctl",
            temperature_celsius=_number(log.get("temperature") or {}, "current"),
            wear=_share(_number(nvme, "percentage_used")),
            written_bytes=_units(_number(nvme, "data_units_written")),
            throttled_seconds=_seconds(_hot(nvme)),
            critical=critical or ("its own test has failed" if passed is False else ""),
        )
    )


def _worth(health: Health) -> Health | None:
    return health if health != Health(health.source) else None


def _json(command: Sequence[str]) -> dict[str, Any] | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        # smartctl's exit status is a set of bits, some of which say that the drive is ill.
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL
        )
        data = json.loads(ran.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return data if isinstance(data, dict) else None


def _number(log: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = log.get(name)
        # newer nvme-cli lists the bits of critical_warning in addition to "value"
        if isinstance(value, dict):
            value = value.get("value")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return int(value)
        if isinstance(value, str) and value.isdecimal():  # numbers that no double holds
            return int(value)
    return None


def _hot(log: dict[str, Any]) -> list[int | None]:
    """Seconds above the temperatures that the drive calls too warm; drives slow down there."""
    minutes = [_number(log, name) for name in ("warning_temp_time", "critical_comp_time")]
    return [None if value is None else 60 * value for value in minutes]


def _seconds(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _share(percent: int | None) -> float | None:
    return None if percent is None else percent / 100


def _units(count: int | None) -> int | None:
    return None if count is None else count * UNIT_BYTES


def _critical(bits: int | None) -> str:
    return "; ".join(text for place, text in enumerate(_CRITICAL) if (bits or 0) & 1 << place)
