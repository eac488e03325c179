"""Disks, their PCIe links and NUMA nodes from sysfs. None where the running kernel lacks a file.

The *lineage* of a disk is the disk and its parent devices, nearest first. Source: the kernel's
Documentation/ABI, stable/sysfs-block and testing/sysfs-bus-pci.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .machine import usable_cpus

# PCI vendor id, and the class of display controllers
_NVIDIA, _DISPLAY = "0x10de", "0x03"

# PCI vendors of emulated devices (virtio, QEMU): the link that they report is not real.
_EMULATED_PCI_VENDORS = {"0x1af4", "0x1b36"}

# Payload share of a PCIe lane after line coding (8b/10b, 128b/130b) or, at 64 GT/s, framing (236 of
# a flit's 256 bytes).
_LANE_EFFICIENCY = {
    **dict.fromkeys((2.5, 5.0), 8 / 10),
    **dict.fromkeys((8.0, 16.0, 32.0), 128 / 130),
    64.0: 236 / 256,
}


class Link(NamedTuple):
    """A PCIe link as text, "16.0 GT/s x4", and its payload rate in each direction."""

    text: str
    bytes_per_second: int


def lineage_of(disk: Path, sys: Path) -> list[Path]:
    """*disk* and its parent devices, nearest first."""
    lineage = [disk, *disk.parents]
    # With native NVMe multipath the parent of a disk is a virtual subsystem; the controllers, with
    # their PCI slots, are siblings.
    if disk.parent.name.startswith("nvme-subsys"):
        entries = (entry.resolve() for entry in disk.parent.glob("nvme*"))
        for controller in sorted(entry for entry in entries if (entry / "transport").exists())[:1]:
            lineage += [controller, *controller.parents]
    return [ancestor for ancestor in lineage if ancestor.is_relative_to(sys / "devices")]


def model(lineage: list[Path]) -> str:
    """Vendor, unless it is part of the name, and model; "" where there is none."""
    for device in lineage:
        if name := read(device / "model"):
            vendor = read(device / "vendor") or ""
            # For SATA disks the vendor is the bus, for PCI devices a number.
            return name if vendor in ("", "ATA") or vendor.startswith("0x") else f"{vendor} {name}"
    return ""


def serial(lineage: list[Path]) -> str | None:
    """The unique id of the disk; None where it has none."""
    if lineage[0].name.startswith(("vd", "xvd")) or any(
        read(device / "vendor") in _EMULATED_PCI_VENDORS for device in lineage
    ):
        return None  # the name that a host gives a virtual disk is not unique
    return first(lineage[:3], "wwid", "serial")  # of the disk, its controller or its target


def temperature(lineage: list[Path], name: str = "input") -> float | None:
    """The temperature in degrees Celsius, or with the *name* "max" the one above which the disk
    warns, and may throttle.
    """
    for device in lineage:
        for pattern in (f"hwmon*/temp1_{name}", f"hwmon/hwmon*/temp1_{name}"):
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
    """The I/O scheduler of *queue*, the directory of that name."""
    text = read(queue / "scheduler")
    match = re.search(r"\[([^]]+)\]", text or "")
    return match[1] if match else text


def pcie_link(lineage: list[Path]) -> Link | None:
    """The negotiated link of an NVMe drive."""
    if not (lineage and lineage[0].name.startswith("nvme")):
        return None  # Other disks share their controller's link.
    for device in lineage:
        speed, width = (
            _speed(device / "current_link_speed"),
            number(read(device / "current_link_width")),
        )
        if speed is None or width is None:
            continue
        emulated = read(device / "vendor") in _EMULATED_PCI_VENDORS
        if emulated or speed not in _LANE_EFFICIENCY or not 1 <= width <= 32:
            return None
        rate = int(speed * 1e9 * width * _LANE_EFFICIENCY[speed] / 8)
        return Link(f"{speed} GT/s x{width}", rate)
    return None


def most_of_link(lineage: list[Path]) -> str | None:
    """The fastest link that both ends support; None where `pcie_link` is."""
    slots = [device for device in lineage if (device / "current_link_speed").exists()]
    if pcie_link(lineage) is None or not slots:
        return None
    # the drive, and the port above it
    ends = [place for place in (slots[0], slots[0].parent) if (place / "max_link_speed").exists()]
    speeds = list(filter(None, (_speed(place / "max_link_speed") for place in ends)))
    widths = list(filter(None, (number(read(place / "max_link_width")) for place in ends)))
    return f"{min(speeds)} GT/s x{min(widths)}" if speeds and widths else None


def _speed(file: Path) -> float | None:
    """GT/s of a PCIe link; 0 where the kernel does not know it, None without the file."""
    text = read(file)
    match = re.match(r"(\d+(?:\.\d+)?) GT/s", text or "")
    return float(match[1]) if match else None if text is None else 0.0


def blocks_for_ext4_itself(device: int, sys: Path = Path("/sys")) -> int:
    """Free blocks that ext4 on *device*, a `st_dev`, reserves even from root; 0 for other filesystems.
    Source: the kernel's Documentation/admin-guide/ext4, reserved_clusters.
    """
    try:
        block = (sys / f"dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    except OSError:  # a container refuses to follow it
        return 0
    return number(read(sys / "fs/ext4" / block.name / "reserved_clusters")) or 0


def cpu_nodes(sys: Path) -> tuple[int, ...]:
    """The NUMA nodes of the CPUs that this process may use; () where there is one node only."""
    nodes = {
        int(place.name[4:]): _cpus(read(place / "cpulist") or "")
        for place in _below(sys / "devices/system/node", "node[0-9]*")
    }
    usable = usable_cpus()
    own = sorted(node for node, cpus in nodes.items() if cpus & usable)
    return tuple(own) if len(nodes) > 1 else ()


def gpu_nodes(sys: Path) -> tuple[int, ...]:
    """The NUMA nodes of the machine's NVIDIA GPUs."""
    gpus = [
        device
        for device in _below(sys / "bus/pci/devices", "*")
        if read(device / "vendor") == _NVIDIA
        and (read(device / "class") or "").startswith(_DISPLAY)
    ]
    nodes = {number(read(gpu / "numa_node")) for gpu in gpus}
    return tuple(sorted(node for node in nodes if node is not None and node >= 0))


def _below(directory: Path, pattern: str) -> list[Path]:
    """The entries of *directory*; none where it is missing, or a container hides it."""
    try:
        return list(directory.glob(pattern))
    except OSError:
        return []


def _cpus(text: str) -> set[int]:
    """Parse a CPU list of the kernel: "0-3,8"."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def first(lineage: list[Path], *names: str) -> str | None:
    """The first existing file of *names*, on the way up *lineage*; its text."""
    return next(
        (text for device in lineage for name in names if (text := read(device / name))), None
    )


def number(text: str | None) -> int | None:
    """*text* as an int; None where it is not one."""
    try:
        return int(text or "")
    except ValueError:
        return None


def read(path: Path) -> str | None:
    """The text of a file; None where it does not exist, as on another kernel."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return None
