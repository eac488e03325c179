"""The health that drives report, from made-up logs, and the warnings about it."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from pathlib import Path

import pytest

from nvme_offload.hardware import nvme_log
from nvme_offload.hardware.drive import describe
from nvme_offload.hardware.profile import Health
from nvme_offload.tune import health


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (Health("sysfs", 40), Health("sysfs", 70), []),
        (None, None, []),
        (
            Health("nvme-cli", throttled_seconds=5),
            Health("nvme-cli", 81.0, throttled_seconds=17),
            ["for 12 s of the sweep, because of heat at 81"],
        ),
        (None, Health("smartctl", wear=0.85), ["used 85% of its rated life"]),
        (
            None,
            Health("sysfs", 70.0, limit_celsius=80.0, highest_celsius=83.0),
            ["became 83 \N{DEGREE SIGN}C warm during the sweep, and warns from 80"],
        ),
        (None, Health("sysfs", 70.0, limit_celsius=80.0, highest_celsius=79.0), []),
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


def log_page() -> bytes:
    """A SMART log as the specification lays it out, with a different value in every field here."""
    page = bytearray(nvme_log.LOG_BYTES)
    page[0] = 0b1001
    page[1:3] = (273 + 45).to_bytes(2, "little")
    page[5] = 4
    page[32:48] = (7).to_bytes(16, "little")  # units read; written units are elsewhere
    page[48:64] = (60_000_000).to_bytes(16, "little")
    for place, value in ((192, 2), (196, 3), (216, 900), (220, 901), (224, 11), (228, 4)):
        page[place : place + 4] = value.to_bytes(4, "little")
    return bytes(page)


def test_the_drives_own_log_is_taken_apart() -> None:
    assert nvme_log.parse(log_page()) == Health(
        "SMART log",
        temperature_celsius=45,
        wear=0.04,
        written_bytes=30_720_000_000_000,
        throttled_seconds=15,
        critical="its spare area is low; it is read-only",
    )
    page = bytearray(log_page())
    page[224:232] = bytes(8)
    assert nvme_log.parse(bytes(page)).throttled_seconds == 300
    assert nvme_log.parse(bytes(nvme_log.LOG_BYTES)).temperature_celsius is None


def test_what_is_no_nvme_drive_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert nvme_log.read(str(tmp_path / "file")) is None
    assert nvme_log.read("/dev/nvme-of-nobody") is None


def test_the_kernel_is_asked_for_the_log_of_the_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command as the kernel gets it; the page is written where the command says."""

    def ioctl(descriptor: int, request: int, command: bytearray) -> int:
        assert request == 0xC0484E41
        assert len(command) == 72
        opcode, nsid = command[0], int.from_bytes(command[4:8], "little")
        address, length = (
            int.from_bytes(command[24:32], "little"),
            int.from_bytes(command[36:40], "little"),
        )
        dword_10 = int.from_bytes(command[40:44], "little")
        assert (opcode, nsid, length) == (2, 0xFFFFFFFF, 512)
        assert (dword_10 & 0xFF, (dword_10 >> 16) + 1) == (2, 512 // 4)
        ctypes.memmove(address, log_page(), length)
        return 0

    monkeypatch.setattr(nvme_log.fcntl, "ioctl", ioctl)
    opened = os.open
    monkeypatch.setattr(nvme_log.os, "open", lambda path, flags: opened("/dev/null", flags))
    assert nvme_log.read("/dev/nvme0n1") == nvme_log.parse(log_page())


def test_temperatures_are_those_of_the_warmest_disk(tmp_path: Path) -> None:
    for number, (now, limit) in enumerate(((41_850, 80_000), (52_000, 84_850))):
        disk = tmp_path / f"devices/pci/nvme/nvme{number}/nvme{number}n1"
        sensor = disk.parent / "hwmon0"
        disk.mkdir(parents=True)
        sensor.mkdir()
        (sensor / "temp1_input").write_text(f"{now}\n")
        (sensor / "temp1_max").write_text(f"{limit}\n")
        blocks = tmp_path / "class/block"
        blocks.mkdir(parents=True, exist_ok=True)
        (blocks / disk.name).symlink_to(disk)
    drive = dataclasses.replace(
        describe(tmp_path), physical_devices=("/dev/nvme0n1", "/dev/nvme1n1")
    )
    assert max(health.temperatures(drive, sys=tmp_path)) == 52.0
    assert min(health.temperatures(drive, "max", tmp_path)) == 80.0
    nobody = dataclasses.replace(drive, physical_devices=("/dev/vda",))
    assert health.temperatures(nobody, sys=tmp_path) == []
