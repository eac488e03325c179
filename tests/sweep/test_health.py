"""What drives say of their health, in the JSON of nvme-cli and smartctl, and what follows from it.
No drive at hand says anything.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from nvme_offload.hardware.drive import describe
from nvme_offload.hardware.profile import Health
from nvme_offload.sweep import health

NVME_CLI = {
    "critical_warning": 0,
    "temperature": 318,
    "avail_spare": 100,
    "percent_used": 4,
    "data_units_written": 60_000_000,
    "warning_temp_time": 2,
    "critical_comp_time": 0,
    "thm_temp1_total_time": 11,
    "thm_temp2_total_time": 4,
}
SMARTCTL = {
    "temperature": {"current": 51},
    "smart_status": {"passed": True},
    "nvme_smart_health_information_log": {
        "critical_warning": 2,
        "percentage_used": 90,
        "data_units_written": 1000,
        "warning_temp_time": 3,
        "critical_comp_time": 1,
    },
}


def test_nvme_cli_is_understood() -> None:
    expected = Health(
        "nvme-cli",
        temperature_celsius=45,
        wear=0.04,
        written_bytes=30_720_000_000_000,
        throttled_seconds=15,
    )
    assert health.nvme_cli(NVME_CLI) == expected
    newer = {
        **NVME_CLI,
        "critical_warning": {"value": 9, "available_spare": 1},
        "data_units_written": "60000000",
    }
    assert health.nvme_cli(newer) == dataclasses.replace(
        expected, critical="its spare area is low; it is read-only"
    )


def test_smartctl_is_understood_of_nvme_and_of_others() -> None:
    assert health.smartctl(SMARTCTL) == Health(
        "smartctl", 51, 0.9, 512_000_000, 240, "its temperature is out of range"
    )
    assert health.smartctl(
        {"temperature": {"current": 33}, "smart_status": {"passed": False}}
    ) == Health("smartctl", 33, critical="its own test has failed")
    assert health.smartctl({"smartctl": {"exit_status": 2}}) is None


def tool(directory: Path, name: str, output: Any, status: int = 0) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(output)}\nEND\nexit {status}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("tools", "source"),
    [(("nvme", "smartctl"), "nvme-cli"), (("smartctl",), "smartctl"), ((), "sysfs")],
)
def test_the_tool_that_is_there_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tools: tuple[str, ...], source: str
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin" if tools else str(tmp_path))
    for name in tools:
        tool(
            tmp_path,
            name,
            NVME_CLI if name == "nvme" else SMARTCTL,
            status=4 if name == "smartctl" else 0,
        )
    drive = dataclasses.replace(
        describe(tmp_path),
        physical_devices=("/dev/nvme0n1", "/dev/nvme1n1"),
        temperature_celsius=30.0,
    )
    found = health.ask(drive)
    assert found is not None
    assert (found.source, found.temperature_celsius) == (
        source,
        {"nvme-cli": 45, "smartctl": 51, "sysfs": 30}[source],
    )


def test_a_tool_that_may_not_ask_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    (tmp_path / "nvme").write_text("#!/bin/sh\necho Permission denied >&2\nexit 1\n")
    (tmp_path / "nvme").chmod(0o755)
    tool(
        tmp_path,
        "smartctl",
        {"smartctl": {"messages": [{"string": "Permission denied"}]}},
        status=2,
    )
    drive = dataclasses.replace(
        describe(tmp_path), physical_devices=("/dev/nvme0n1",), temperature_celsius=None
    )
    assert health.ask(drive) is None


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (Health("sysfs", 40), Health("sysfs", 70), []),
        (None, None, []),
        (
            Health("nvme-cli", throttled_seconds=5),
            Health("nvme-cli", 81.0, throttled_seconds=17),
            ["for 12 s of the sweep, for its heat at 81"],
        ),
        (None, Health("smartctl", wear=0.85), ["used 85% of its rated life"]),
        (
            None,
            Health("smartctl", wear=0.04, written_bytes=24 * 10**12),
            ["576 TB, 5,143 optimizer steps of a 7B model, which write 112 GB each"],
        ),
        (None, Health("smartctl", wear=0.01, written_bytes=24 * 10**12), []),
        (None, Health("smartctl", critical="it is read-only"), ["warns that it is read-only"]),
    ],
)
def test_warnings_are_of_heat_and_wear(
    before: Health | None, after: Health | None, said: list[str]
) -> None:
    found = health.warnings(before, after)
    assert len(found) == len(said)
    assert all(part in sentence for part, sentence in zip(said, found, strict=True))
