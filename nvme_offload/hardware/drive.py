"""What a path sits on: filesystem, device and disks, as the kernel tells them."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from . import sysfs

_MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
# With or without "fuse." in front.
_NETWORK_FILESYSTEMS = {
    *(
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "virtiofs",
        "vboxsf",
        "afs",
        "ceph",
        "lustre",
        "glusterfs",
        "beegfs",
        "gpfs",
        "orangefs",
        "wekafs",
    ),
    *(
        "sshfs",
        "s3fs",
        "mountpoint-s3",
        "gcsfuse",
        "blobfuse2",
        "juicefs",
        "rclone",
        "davfs",
        "ceph-fuse",
    ),
}
# _IOR(0x15, 0, struct fsuuid2) of linux/fs.h, since Linux 6.9: a length and 16 bytes
_FS_IOC_GETFSUUID = 0x80111500


@dataclasses.dataclass(frozen=True)
class Drive:
    """What a path sits on. None and "" stand for what the kernel did not tell.

    path: as given, made absolute. device: "/dev/nvme0n1p1", "/dev/mapper/data", or the source of a
    filesystem without a block device. layers: what lies between filesystem and disks, from the top:
    "partition", "dm-crypt", "lvm", "raid0", "loop". physical_devices: the disks below. size_bytes,
    free_bytes: of the filesystem; free is what this user may still write. max_block_kib: the
    largest request that the kernel does not split. pcie_link, link_bytes_per_second: as negotiated
    now, in each direction; the sum over all disks. pcie_link_most: what drive and slot are made
    for. rotational, scheduler, queue_requests, temperature_celsius: of the worst disk. numa_node:
    where all disks share one. cpu_numa_nodes, gpu_numa_nodes: of the processors that this process
    may use, and of the NVIDIA GPUs of the machine. identity: a hash of what tells this drive, with
    its layers and filesystem, from others; the same after a reboot.
    """

    path: str
    mount_point: str
    device: str
    filesystem: str
    mount_options: tuple[str, ...]
    layers: tuple[str, ...]
    physical_devices: tuple[str, ...]
    model: str
    firmware: str | None
    transport: str | None
    rotational: bool | None
    logical_block_bytes: int | None
    physical_block_bytes: int | None
    max_block_kib: int | None
    scheduler: str | None
    queue_requests: int | None
    size_bytes: int
    free_bytes: int
    pcie_link: str | None
    link_bytes_per_second: int | None
    numa_node: int | None
    temperature_celsius: float | None
    pcie_link_most: str | None = None
    cpu_numa_nodes: tuple[int, ...] = ()
    gpu_numa_nodes: tuple[int, ...] = ()
    identity: str = ""

    @property
    def name(self) -> str:
        """A short name for directories: the model or else the device, of letters, digits and
        hyphens.
        """
        return short_name(self.model, self.device)

    @property
    def is_memory(self) -> bool:
        """Whether there is no drive at all: the files live in memory."""
        in_memory = [
            re.match(r"/dev/(ram|zram)\d", device) is not None for device in self.physical_devices
        ]
        return self.filesystem in _MEMORY_FILESYSTEMS or (bool(in_memory) and all(in_memory))

    @property
    def is_network(self) -> bool:
        """Whether the files live on another machine."""
        return self.filesystem.removeprefix("fuse.") in _NETWORK_FILESYSTEMS

    def as_dict(self) -> dict[str, Any]:
        """The plain values of a profile's `drive`, with lists as JSON has them."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self).items()
        }


def short_name(model: str, device: str) -> str:
    """What `Drive.name` is for a drive with that model and device."""
    slug = re.sub(r"[^a-z0-9]+", "-", (model or device.removeprefix("/dev/")).lower()).strip("-")
    return slug[:48].strip("-") or "drive"


def describe(path: str | Path, *, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Drive:
    """Say what *path* sits on.

    proc, sys: where procfs and sysfs are mounted. Whatever they lack (a container, a filesystem
    without a device) is left out of the answer. Raises: OSError when *path* itself cannot be looked
    at. Source: proc_pid_mountinfo(5); the kernel's Documentation/ABI, stable/sysfs-block.
    """
    absolute = Path(path).absolute()
    space = os.statvfs(absolute)
    sys = sys.resolve()
    mount = _mount_of(absolute.resolve(), proc)
    blocks = _blocks_of(mount, sys)
    layers: list[str] = []
    disks = [disk for block in blocks for disk in _disks_below(block, proc, sys, layers)]
    lineages = [sysfs.lineage_of(disk, sys) for disk in disks]
    links = [sysfs.pcie_link(lineage) for lineage in lineages]
    whole = [block.parent if (block / "partition").exists() else block for block in blocks]
    disk_queues, top_queues = (
        [disk / "queue" for disk in disks],
        [block / "queue" for block in whole],
    )
    temperatures = [
        value for lineage in lineages if (value := sysfs.temperature(lineage)) is not None
    ]
    nodes = {sysfs.number(sysfs.first(lineage, "numa_node")) for lineage in lineages}
    node = nodes.pop() if len(nodes) == 1 else None
    rotational = [
        flag
        for queue in disk_queues
        if (flag := sysfs.number(sysfs.read(queue / "rotational"))) is not None
    ]
    device = _device_name(blocks[0]) if blocks else mount.source or mount.filesystem
    return Drive(
        path=str(absolute),
        mount_point=mount.point,
        device=device,
        filesystem=mount.filesystem,
        mount_options=mount.options,
        layers=tuple(dict.fromkeys(layers)),
        physical_devices=tuple(dict.fromkeys(map(_device_name, disks))),
        model=_joined([sysfs.model(lineage) for lineage in lineages]),
        firmware=_alternatives(
            [sysfs.first(lineage, "firmware_rev", "rev") for lineage in lineages]
        ),
        transport=_alternatives([sysfs.first(lineage, "transport") for lineage in lineages]),
        rotational=any(rotational) if rotational else None,
        logical_block_bytes=_largest(top_queues, "logical_block_size"),
        physical_block_bytes=_largest(top_queues, "physical_block_size"),
        max_block_kib=_smallest(top_queues, "max_sectors_kb"),
        scheduler=_alternatives([sysfs.scheduler(queue) for queue in disk_queues]),
        queue_requests=_smallest(disk_queues, "nr_requests"),
        size_bytes=space.f_blocks * space.f_frsize,
        free_bytes=space.f_bavail * space.f_frsize,
        pcie_link=_joined([link.text for link in links if link]) or None,
        link_bytes_per_second=sum(link.bytes_per_second for link in links if link)
        if links and all(links)
        else None,
        numa_node=node if node is not None and node >= 0 else None,
        temperature_celsius=max(temperatures, default=None),
        pcie_link_most=_joined(
            [most for lineage in lineages if (most := sysfs.most_of_link(lineage))]
        )
        or None,
        cpu_numa_nodes=sysfs.cpu_nodes(sys),
        gpu_numa_nodes=sysfs.gpu_nodes(sys),
        identity=_identity(absolute, device, mount, layers, lineages),
    )


class _Mount(NamedTuple):
    identity: str
    device_number: str
    point: str
    options: tuple[str, ...]
    filesystem: str
    source: str


def _mount_of(path: Path, proc: Path) -> _Mount:
    """The mount that shows at *path*, which is absolute and without symlinks."""
    mounts = list(_mounts(proc))
    identity = _mount_identity(path, proc)
    exact = [mount for mount in mounts if mount.identity == identity]
    around = [mount for mount in mounts if path.is_relative_to(mount.point)]
    if exact or around:
        # Of several mounts on one point the last one listed lies on top, and max() keeps the first
        # of equals.
        return (
            exact[-1]
            if exact
            else max(reversed(around), key=lambda mount: len(Path(mount.point).parts))
        )
    device = path.stat().st_dev if path.exists() else 0
    return _Mount("", f"{os.major(device)}:{os.minor(device)}", "", (), "unknown", "")


def _mounts(proc: Path) -> Iterator[_Mount]:
    for line in (sysfs.read(proc / "self/mountinfo") or "").split("\n"):
        # The optional fields between the options and the lone hyphen vary in number.
        before, hyphen, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if not hyphen or len(fields) < 6 or len(rest) < 3:
            continue
        options = [_unescape(option) for option in f"{fields[5]},{rest[2]}".split(",")]
        yield _Mount(
            fields[0],
            fields[2],
            _unescape(fields[4]),
            tuple(dict.fromkeys(options)),
            rest[0],
            _unescape(rest[1]),
        )


def _mount_identity(path: Path, proc: Path) -> str | None:
    """The kernel's own answer, right also where one mount hides another; None where this procfs
    does not say.
    """
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        match = re.search(
            r"^mnt_id:\s*(\d+)", sysfs.read(proc / f"self/fdinfo/{descriptor}") or "", re.MULTILINE
        )
    finally:
        os.close(descriptor)
    return match[1] if match else None


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _blocks_of(mount: _Mount, sys: Path) -> list[Path]:
    """The sysfs directories of the devices that *mount* is on: one, several for btrfs, none for a
    filesystem without a device.
    """
    block = sys / "dev/block" / mount.device_number
    if block.exists():
        return [block.resolve()]
    # btrfs gives every subvolume an anonymous device number; what it was mounted from is the way to
    # its disk.
    if not mount.source.startswith("/dev/"):
        return []
    name = Path(mount.source).resolve().name
    mapped = [
        entry
        for entry in (sys / "class/block").glob("dm-*")
        if sysfs.read(entry / "dm/name") == name
    ]
    for candidate in (sys / "class/block" / name, *mapped):
        if candidate.exists():
            members = [
                member
                for entry in (sys / "fs/btrfs").glob(f"*/devices/{candidate.name}")
                for member in sorted(entry.parent.iterdir())
            ]
            return [member.resolve() for member in members] or [candidate.resolve()]
    return []


def _disks_below(
    block: Path, proc: Path, sys: Path, layers: list[str], depth: int = 0
) -> list[Path]:
    """The disks under *block*, noting each layer passed. A loop device may sit on itself by way of
    a bind mount, hence the limit on depth.
    """
    if depth > 16:
        return []
    if (block / "partition").exists():
        layers.append("partition")
        return _disks_below(block.parent, proc, sys, layers, depth + 1)
    slaves = block / "slaves"
    below = [slave.resolve() for slave in sorted(slaves.iterdir())] if slaves.is_dir() else []
    if below:
        layers.append(_layer(block))
    elif backing_file := sysfs.read(block / "loop/backing_file"):
        layers.append("loop")
        below = _blocks_of(_mount_of(Path(backing_file), proc), sys)
    if not below:
        return [block]
    return [disk for lower in below for disk in _disks_below(lower, proc, sys, layers, depth + 1)]


def _layer(block: Path) -> str:
    kinds = {"CRYPT": "dm-crypt", "LVM": "lvm", "mpath": "multipath"}
    if identity := sysfs.read(block / "dm/uuid"):
        return kinds.get(identity.partition("-")[0], "device mapper")
    return sysfs.read(block / "md/level") or re.sub(r"\d+$", "", block.name)


def _device_name(block: Path) -> str:
    mapped = sysfs.read(block / "dm/name")
    return f"/dev/mapper/{mapped}" if mapped else "/dev/" + block.name.replace("!", "/")


def _identity(
    path: Path, device: str, mount: _Mount, layers: list[str], lineages: list[list[Path]]
) -> str:
    """A hash, since a serial number is nobody else's business.

    Disks that tell their serial number are known by it. Others, virtual disks and loop devices are
    known by their filesystem, whose number the copies of a disk image share: there the machine
    counts as well.
    """
    serials = [sysfs.serial(lineage) for lineage in lineages]
    between = [layer for layer in dict.fromkeys(layers) if layer != "partition"]
    if serials and all(serials) and "loop" not in layers:
        known = ["disks", *sorted(map(str, serials)), *between, mount.filesystem]
    else:
        machine = sysfs.read(Path("/etc/machine-id")) or ""
        known = [
            "filesystem",
            _filesystem_uuid(path) or f"{device} at {mount.point}",
            *between,
            mount.filesystem,
            machine,
        ]
    return hashlib.sha256("\0".join(known).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _filesystem_uuid(path: Path) -> str | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        answer = fcntl.ioctl(descriptor, _FS_IOC_GETFSUUID, bytes(17))
        return answer[1 : 1 + answer[0]].hex() or None
    except OSError:  # an older kernel, or a filesystem without a number
        return None
    finally:
        os.close(descriptor)


def _joined(texts: list[str]) -> str:
    """Each different text once, with its count: "2x 16.0 GT/s x4"."""
    counts = {text: texts.count(text) for text in texts if text}
    return " + ".join(text if count == 1 else f"{count}x {text}" for text, count in counts.items())


def _alternatives(texts: list[str | None]) -> str | None:
    return ", ".join(dict.fromkeys(text for text in texts if text)) or None


def _largest(queues: list[Path], name: str) -> int | None:
    return max(
        (
            value
            for queue in queues
            if (value := sysfs.number(sysfs.read(queue / name))) is not None
        ),
        default=None,
    )


def _smallest(queues: list[Path], name: str) -> int | None:
    return min(
        (
            value
            for queue in queues
            if (value := sysfs.number(sysfs.read(queue / name))) is not None
        ),
        default=None,
    )
