"""What sysfs tells of disks, of the links that they hang from, and of the NUMA nodes around them.
None where the kernel at hand does not tell.

A *lineage* is a disk and the devices that it hangs from, nearest first.
Source: the kernel's Documentation/ABI, stable/sysfs-block and testing/sysfs-bus-pci.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# a PCI vendor, and the class of what shows or computes pictures
_NVIDIA, _DISPLAY = "0x10de", "0x03"

# PCI vendors whose devices are software (virtio, QEMU): the link that they report is made up and
# limits nothing.
_EMULATED_PCI_VENDORS = {"0x1af4", "0x1b36"}

# Share of a PCIe lane's transfers that carries data, after line coding (8b/10b, 128b/130b) or, at
# 64 GT/s, framing (236 of a flit's 256 bytes).
_LANE_EFFICIENCY = {
    2.5: 8 / 10,
    5.0: 8 / 10,
    8.0: 128 / 130,
    16.0: 128 / 130,
    32.0: 128 / 130,
    64.0: 236 / 256,
}


class Link(NamedTuple):
    """A PCIe link as people write it, "16.0 GT/s x4", and what it carries in each direction."""

    text: str
    bytes_per_second: int


def lineage_of(disk: Path, sys: Path) -> list[Path]:
    """*disk* and the devices that it hangs from, nearest first."""
    lineage = [disk, *disk.parents]
    # With native NVMe multipath a disk hangs from a virtual subsystem, and the controllers with
    # their PCI slots beside it.
    if disk.parent.name.startswith("nvme-subsys"):
        controllers = sorted(
            entry.resolve() for entry in disk.parent.glob("nvme*") if (entry / "transport").exists()
        )
        lineage += [
            ancestor
            for controller in controllers[:1]
            for ancestor in (controller, *controller.parents)
        ]
    return [ancestor for ancestor in lineage if ancestor.is_relative_to(sys / "devices")]


def model(lineage: list[Path]) -> str:
    """The vendor, where it is no part of the name, and the model; "" where there is none."""
    for device in lineage:
        if name := read(device / "model"):
            vendor = read(device / "vendor") or ""
            # SATA disks carry the bus instead of a vendor there, and PCI devices a number.
            return name if vendor in ("", "ATA") or vendor.startswith("0x") else f"{vendor} {name}"
    return ""


def serial(lineage: list[Path]) -> str | None:
    """What tells the disk from all others."""
    if lineage[0].name.startswith(("vd", "xvd")) or any(
        read(device / "vendor") in _EMULATED_PCI_VENDORS for device in lineage
    ):
        return None  # what a host names its virtual disks is no serial number
    return first(lineage[:3], "wwid", "serial")  # of the disk, its controller or its target


def temperature(lineage: list[Path]) -> float | None:
    """In degrees Celsius."""
    return _of_sensor(lineage, "temp1_input")


def temperature_limit(lineage: list[Path]) -> float | None:
    """The temperature in degrees Celsius from which on the disk warns, and may slow down."""
    return _of_sensor(lineage, "temp1_max")


def _of_sensor(lineage: list[Path], name: str) -> float | None:
    for device in lineage:
        for pattern in (f"hwmon*/{name}", f"hwmon/hwmon*/{name}"):
            for sensor in sorted(device.glob(pattern)):
                if (millidegrees := number(read(sensor))) is not None:
                    return millidegrees / 1000
    return None


def lineages_of(devices: Iterable[str], sys: Path = Path("/sys")) -> list[list[Path]]:
    """The lineage of each of *devices*, such as "/dev/nvme0n1", that this kernel shows."""
    blocks = [
        sys.resolve() / "class/block" / device.removeprefix("/dev/").replace("/", "!")
        for device in devices
    ]
    return [lineage_of(block.resolve(), sys.resolve()) for block in blocks if block.exists()]


def scheduler(queue: Path) -> str | None:
    """What sorts the requests in *queue*, the directory of that name."""
    text = read(queue / "scheduler")
    match = re.search(r"\[([^]]+)\]", text or "")
    return match[1] if match else text


def pcie_link(lineage: list[Path]) -> Link | None:
    """The link of an NVMe drive, as negotiated now."""
    if not (lineage and lineage[0].name.startswith("nvme")):
        return None  # Other disks share their controller's link.
    for device in lineage:
        speed_text, width = (
            read(device / "current_link_speed"),
            number(read(device / "current_link_width")),
        )
        if speed_text is None or width is None:
            continue
        match = re.match(r"(\d+(?:\.\d+)?) GT/s", speed_text)
        speed = float(match[1]) if match else 0.0
        if (
            speed not in _LANE_EFFICIENCY
            or not 1 <= width <= 32
            or read(device / "vendor") in _EMULATED_PCI_VENDORS
        ):
            return None
        return Link(
            f"{speed} GT/s x{width}", int(speed * 1e9 * width * _LANE_EFFICIENCY[speed] / 8)
        )
    return None


def most_of_link(lineage: list[Path]) -> str | None:
    """The fastest link that both ends are made for; None where this one is not shown (see
    `pcie_link`).
    """
    slots = [device for device in lineage if (device / "current_link_speed").exists()]
    if pcie_link(lineage) is None or not slots:
        return None
    # the drive, and the port above it
    ends = [
        device for device in (slots[0], slots[0].parent) if (device / "max_link_speed").exists()
    ]
    speeds = [
        float(match[1])
        for device in ends
        if (match := re.match(r"(\d+(?:\.\d+)?) GT/s", read(device / "max_link_speed") or ""))
    ]
    widths = [width for device in ends if (width := number(read(device / "max_link_width")))]
    return f"{min(speeds)} GT/s x{min(widths)}" if speeds and widths else None


def cpu_nodes(sys: Path) -> tuple[int, ...]:
    """The NUMA nodes of the processors that this process may use; none where there is but one node
    to tell of.
    """
    nodes = {
        int(place.name[4:]): _cpus(read(place / "cpulist") or "")
        for place in (sys / "devices/system/node").glob("node[0-9]*")
    }
    usable = os.sched_getaffinity(0)
    return (
        tuple(sorted(node for node, cpus in nodes.items() if cpus & usable))
        if len(nodes) > 1
        else ()
    )


def gpu_nodes(sys: Path) -> tuple[int, ...]:
    """The NUMA nodes of the NVIDIA GPUs of the machine."""
    devices = list((sys / "bus/pci/devices").glob("*"))
    gpus = [
        device
        for device in devices
        if read(device / "vendor") == _NVIDIA
        and (read(device / "class") or "").startswith(_DISPLAY)
    ]
    return tuple(
        sorted(
            {
                node
                for gpu in gpus
                if (node := number(read(gpu / "numa_node"))) is not None and node >= 0
            }
        )
    )


def _cpus(text: str) -> set[int]:
    """The numbers in a list as the kernel writes it: "0-3,8"."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def first(lineage: list[Path], *names: str) -> str | None:
    """What the first file of one of *names* says, on the way up *lineage*."""
    return next(
        (text for device in lineage for name in names if (text := read(device / name))), None
    )


def number(text: str | None) -> int | None:
    """*text* as a whole number; None where it is none."""
    try:
        return int(text or "")
    except ValueError:
        return None


def read(path: Path) -> str | None:
    """What the file says, or None where there is no such file, as on any kernel but the one at
    hand.
    """
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return None
